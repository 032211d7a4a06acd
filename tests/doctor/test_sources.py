"""The articles' mistakes (SOURCES.md), as the articles make them; each test is named after its row.

The row on `module.cuda()` and `tensor.cuda()` needs CUDA's code: it is in test_checks_on_cuda.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memtools.doctor import loader_checks
from tests.doctor.specimens import found, network, only, rows, squared
from tests.zoo import torchvision_models


def test_broadcasting_rules_a_loss_whose_inputs_broadcast_silently():
    def step(model: nn.Module, batch: Any) -> Any:
        return nn.L1Loss()(model(batch[0]), batch[1])  # (8, 1) against (8,)

    finding = only(found(network(), rows(flat=True), step), "loss_broadcast")
    assert finding.place.startswith("l1_loss at tests/doctor/test_sources.py:")
    assert "Its inputs (8, 1) and (8,) broadcast to (8, 8)" in finding.evidence


def test_constant_weight_initialisation_fill_001():
    model = nn.Sequential(nn.Linear(4, 6), nn.Sigmoid(), nn.Linear(6, 1))
    for layer in (model[0], model[2]):
        layer.weight.data.fill_(0.01)
        layer.bias.data.fill_(0.01)
    finding = only(found(model, rows()), "symmetric_weights")
    assert "All 6 rows of 0.weight" in finding.evidence
    assert "the capacity of one" in finding.effect


def sums(model: nn.Module, batch: Any) -> Any:
    return nn.MSELoss(reduction="sum")(model(batch[0]), batch[1])


def test_mseloss_with_reduction_sum_makes_the_gradient_grow_with_the_batch():
    finding = only(found(network(), rows(), sums, steps=1), "loss_sum")
    assert "grows 2.00 times" in finding.evidence
    assert "diverge" in finding.effect


def test_total_loss_plus_loss_keeps_every_steps_autograd_graph_alive():
    total_loss: Any = 0

    def step(model: nn.Module, batch: Any) -> Any:
        nonlocal total_loss
        loss = squared(model, batch)
        total_loss += loss
        return loss

    finding = only(found(network(), rows(), step), "retained_graphs")
    assert "total_loss" in finding.place
    assert "6 of 6 earlier steps" in finding.evidence


def test_no_grad_in_evaluation():
    finding = only(found(network(), rows(), val_dataloader=rows(16), evaluate=squared, steps=3), "evaluation_graphs")
    assert "with torch.no_grad(): around evaluation" in finding.fix


def test_detach_to_train_only_one_of_two_chained_models():
    chained = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 1)})

    def step(model: Any, batch: Any) -> Any:
        return F.mse_loss(model["second"](model["first"](batch[0]).detach()), batch[1])

    finding = only(found(chained, rows(), step), "missing_gradients")
    assert finding.place == "first"
    assert "detach()" in finding.fix


def test_bus_error_insufficient_shared_memory_with_dataloader_workers(monkeypatch):
    monkeypatch.setattr(loader_checks, "free_shared_memory", lambda: 64)
    loader = DataLoader(rows().dataset, 8, num_workers=2)
    finding = only(found(network(), loader, steps=1), "shared_memory")
    # 8 x (4 + 1) numbers of 4 bytes in a batch, 2 batches ahead for each worker
    assert "160 B need 640 B of shared memory" in finding.evidence
    assert "bus error (insufficient shared memory)" in finding.effect


@pytest.mark.parametrize(("reduction", "is_found"), [("sum", True), ("mean", False)])
def test_loss_reduction_parameters(reduction, is_found):
    def step(model: nn.Module, batch: Any) -> Any:
        return nn.CrossEntropyLoss(reduction=reduction)(model(batch[0]), batch[1])

    x = torch.randn(32, 4)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 8)
    findings = found(nn.Linear(4, 2), loader, step, steps=1)
    assert [one.check for one in findings if one.is_serious] == ["loss_sum"] * is_found


def test_reproducibility_an_unseeded_run(monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    model, loader = network(), rows()
    torch.seed()
    finding = only(found(model, loader, steps=1), "reproducibility")
    assert f"No seed was set: torch drew {torch.initial_seed()} from the system." in finding.evidence
    assert "seed_everything" in finding.fix


@pytest.mark.parametrize("kind", ["Missing", "Unexpected"])
def test_num_batches_tracked_missing_or_unexpected_when_loading_a_state_dict(kind, tmp_path):
    model = network(norm=True)
    state = model.state_dict()
    if kind == "Missing":
        del state["1.num_batches_tracked"]
    else:
        model[1] = nn.BatchNorm1d(8, track_running_stats=False)
    torch.save(state, tmp_path / "weights.pt")
    finding = only(found(model, rows(), checkpoint=tmp_path / "weights.pt", steps=1), "checkpoint_keys")
    assert "1.num_batches_tracked" in finding.place
    assert f"load_state_dict raises '{kind} key(s)'" in finding.effect
    with pytest.raises(RuntimeError, match=rf"{kind} key\(s\)"):
        model.load_state_dict(state)


def test_batchnorm_fails_when_the_last_batch_holds_one_sample():
    finding = only(found(network(norm=True), rows(17), steps=2), "batch_norm_one_sample")
    assert "17 samples in batches of 8" in finding.evidence


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


class ZeroesGradients(torch.optim.SGD):
    """zero_grad() as it was by default before PyTorch 2.0."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none=False)


def test_weight_decay_shrinks_parameters_that_get_no_gradient_an_unused_layer4_of_a_resnet50():
    def step(model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1])

    torch.manual_seed(0)
    model = WithoutLayer4()
    batches = [(torch.randn(4, 3, 32, 32), torch.arange(4))]
    finding = only(found(model, batches, step, steps=3), "missing_gradients")
    assert finding.place == "net.layer4"
    assert "30 parameters in the optimizer" in finding.evidence

    for parameter in model.net.layer4.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = ZeroesGradients(model.parameters(), lr=0.1, weight_decay=0.01)
    shrunk = [
        one
        for one in found(model, batches, step, optimizer=optimizer, steps=5)
        if one.check == "missing_gradients" and one.is_serious
    ]
    assert len(shrunk) == 1
    assert shrunk[0].place.startswith("net.layer4.0.conv1.weight")
    assert "weight_decay=0.01 shrank net.layer4." in shrunk[0].evidence
    assert "0.001 of its norm" in shrunk[0].evidence  # lr x weight_decay
