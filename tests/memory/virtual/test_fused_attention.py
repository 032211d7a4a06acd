"""Attention on a device like CUDA: the memory is that of CUDA's fused kernels, and the numbers are the CPU's."""

from __future__ import annotations

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from lightning_memtools import GradientCheckpointing, VirtualDevice
from lightning_memtools._torch import EFFICIENT_ATTENTION_MAKES_SEEDS, FakeTensorMode
from tests.lightning_models import trainer

LENGTH = 128
MASKS = {
    "no mask": lambda: None,
    "bool": lambda: torch.rand(2, 1, LENGTH, LENGTH) > 0.3,
    "float": lambda: torch.randn(LENGTH, LENGTH),
}


def attended(dropout, mask):
    """The output and the gradients of one attention over views of one tensor, as models compute them."""
    torch.manual_seed(0)
    given = MASKS[mask]()
    both = torch.randn(2, LENGTH, 3, 4, 16, requires_grad=True)
    query, key, value = (both + 0).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=given, dropout_p=dropout)
    merged = out.transpose(1, 2).reshape(2, LENGTH, 64)
    (gradient,) = torch.autograd.grad(merged.square().sum(), both)
    return merged.detach(), gradient, torch.rand(3)


def peak(dropout, mask="no mask"):
    with VirtualDevice(cuda_like=True) as device:
        attended(dropout, mask)
        return device.stats().peak_allocated


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_numbers_and_random_numbers_are_those_without_the_device(dropout, mask):
    plain = attended(dropout, mask)
    with VirtualDevice(cuda_like=True):
        like_cuda = attended(dropout, mask)
    assert all(torch.equal(one, other) for one, other in zip(plain, like_cuda, strict=True))


def test_dropout_keeps_no_scores():
    scores = 2 * 4 * LENGTH * LENGTH * 4
    with VirtualDevice() as as_on_a_cpu:
        attended(0.2, "no mask")
    assert as_on_a_cpu.stats().peak_allocated >= peak(0.2) + scores
    # From torch 2.14 on, the kernel keeps a seed and an offset where there is no dropout.
    assert peak(0.0) - peak(0.2) == (2 * 512 if EFFICIENT_ATTENTION_MAKES_SEEDS else 0)


def test_a_mask_with_a_gradient_is_left_to_the_cpu():
    query = torch.randn(1, 2, 8, 8, requires_grad=True)
    mask = torch.zeros(8, 8, requires_grad=True)
    gradients = []
    for device in (VirtualDevice(), VirtualDevice(cuda_like=True)):
        with device:
            F.scaled_dot_product_attention(query, query, query, mask).square().sum().backward()
        gradients.append((query.grad, mask.grad))
        query.grad = mask.grad = None
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_the_function_is_torchs_own_again_afterwards():
    before = F.scaled_dot_product_attention
    with VirtualDevice(cuda_like=True):
        assert F.scaled_dot_product_attention is not before
    assert F.scaled_dot_product_attention is before


class Block(nn.Module):
    """Attention with a residual connection."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(64, 192)

    def forward(self, x):
        query, key, value = self.project(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def stack():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)))


def test_hooks_for_saved_tensors_see_what_a_kernel_saves_and_layers_can_be_checkpointed():
    x, gradients, saved = torch.randn(2, LENGTH, 64), [], []
    with VirtualDevice(cuda_like=True):
        with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one.shape) or one, lambda one: one):
            stack()[0](x)
        for run in (lambda net: net(x), lambda net: checkpoint(net, x, use_reentrant=False)):
            net = stack()
            run(net).square().sum().backward()
            gradients.append([parameter.grad for parameter in net.parameters()])
    assert (2, 4, LENGTH, LENGTH) not in saved  # no scores
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


class Stacked(L.LightningModule):
    """Layers with attention, trained on noise."""

    def __init__(self):
        super().__init__()
        self.net = stack()

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(0)
        return torch.utils.data.DataLoader(torch.randn(8, LENGTH, 64, generator=generator), batch_size=4)


def test_layers_with_attention_are_recomputed(tmp_path):
    weights, peaks = [], []
    for callbacks in ([], [GradientCheckpointing()]):
        model = Stacked()
        with VirtualDevice(cuda_like=True) as device:
            trainer(tmp_path, *callbacks, logger=False, max_epochs=1).fit(model)
            peaks.append(device.stats().peak_allocated)
        weights.append(list(model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
    assert peaks[1] < 0.8 * peaks[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_tensors_of_a_kernel_called_by_name_have_the_results_of_its_schema(dtype):
    with FakeTensorMode(), VirtualDevice("1GiB", cuda_like=True):
        query = torch.randn(2, 4, 16, 8, dtype=dtype, requires_grad=True)
        scaled_dot_product_attention(query, query, query).sum().backward()
        assert query.grad.shape == query.shape


def test_autocast_leaves_float64_alone():
    query = torch.randn(1, 2, 8, 8, dtype=torch.float64)
    with VirtualDevice(cuda_like=True), torch.autocast("cpu"):
        assert F.scaled_dot_product_attention(query, query, query).dtype == torch.float64


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented")
def test_functions_that_torch_func_transforms_are_left_to_the_cpu():
    query = torch.randn(3, 2, 4, 8, 16)

    def attend(one):
        return F.scaled_dot_product_attention(one, one, one)

    def slope(one):
        return torch.func.grad(lambda given: attend(given).square().sum())(one)

    expected = torch.func.vmap(attend)(query), torch.func.vmap(slope)(query)
    with VirtualDevice(cuda_like=True):
        found = torch.func.vmap(attend)(query), torch.func.vmap(slope)(query)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
