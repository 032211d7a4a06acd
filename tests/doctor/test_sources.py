"""The articles' mistakes (SOURCES.md), as the articles make them; each test is named after its row.

The rows on broadcasting, constant weights, loss reduction, no_grad() in evaluation, detach() between two models,
total_loss += loss, an unseeded run, shared memory, num_batches_tracked and a last batch of one sample are in
test_fixes.py, which makes the same mistakes.
The row on `module.cuda()` and `tensor.cuda()` needs CUDA's code: it is in test_checks_on_cuda.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.doctor.specimens import ZeroesGradients, found, only
from tests.zoo import torchvision_models


class WithoutLayer4(nn.Module):
    """torchvision's ResNet-50, whose last stage is there and not used."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = torchvision_models().resnet50(), nn.Linear(1024, 4)
        self.net.fc = nn.Identity()

    def forward(self, x: Tensor) -> Any:
        net = self.net
        x = net.maxpool(net.relu(net.bn1(net.conv1(x))))
        return self.head(net.layer3(net.layer2(net.layer1(x))).mean((2, 3)))


def test_weight_decay_shrinks_parameters_that_get_no_gradient_an_unused_layer4_of_a_resnet50():
    def step(model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1])

    torch.manual_seed(0)
    model = WithoutLayer4()
    batches = [(torch.randn(4, 3, 32, 32), torch.arange(4))]
    finding = only(found(model, batches, step, steps=5), "missing_gradients")
    assert finding.place == "net.layer4"
    assert "30 parameters in the optimizer" in finding.evidence

    for parameter in model.net.layer4.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = ZeroesGradients(model.parameters(), lr=0.1, weight_decay=0.01)
    findings = found(model, batches, step, optimizer=optimizer, steps=5)
    (shrunk,) = [one for one in findings if one.check == "missing_gradients" and one.severity != "info"]
    assert shrunk.place == "net.layer4"
    assert "shrank net.layer4." in shrunk.evidence
    assert "0.001 of its norm" in shrunk.evidence  # lr x weight_decay
