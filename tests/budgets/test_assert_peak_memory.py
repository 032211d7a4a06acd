"""Budgets without pytest's plugin: what they measure, refuse and say."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_memtools import PeakMemory, assert_peak_memory, estimate_memory

MIB = 2**20


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(256, 1024)
        self.out = nn.Linear(1024, 256)

    def forward(self, x):
        return self.out(self.wide(x).relu())


def loss_of(model, x):
    return model(x).pow(2).mean()


def train(model, n_steps=2, device="cpu"):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(n_steps):
        loss = loss_of(model, torch.ones(512, 256, device=device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.fixture(autouse=True)
def _no_recorded_peaks(monkeypatch):
    """Each test stands alone: it is none whose peak is recorded."""
    monkeypatch.setattr("lightning_memtools.budgets.judgement.current_test", lambda: None)


def test_a_step_within_its_budget_gives_the_peak_of_its_estimate():
    batch = torch.ones(512, 256)
    peak = assert_peak_memory(Net(), batch, at_most="1GiB", step=loss_of, optimizer=torch.optim.AdamW)
    estimate = estimate_memory(Net(), batch, step=loss_of, optimizer=torch.optim.AdamW)
    assert isinstance(peak, PeakMemory)
    assert (peak.allocated, peak.reserved) == (estimate.peak_allocated, estimate.peak_reserved)
    for sizes in (peak.categories, peak.modules, peak.lines):
        assert sum(sizes.values()) == peak.allocated
    assert peak.engine == "simulation"
    assert peak.torch == torch.__version__.partition("+")[0]


def test_over_its_budget_the_error_names_peak_budget_moment_modules_and_lines():
    with pytest.raises(AssertionError) as caught:
        assert_peak_memory(Net(), torch.ones(512, 256), at_most="10MiB", step=loss_of, optimizer=torch.optim.AdamW)
    text = str(caught.value)
    assert "budget of 10.0 MiB" in text
    assert "step 2, backward" in text
    assert " wide" in text
    assert f"{Path(__file__).name}:{line_of(Net.forward, 'relu')}: return self.out" in text


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return first + next(at for at, line in enumerate(lines) if text in line)


def test_an_error_of_the_code_itself_is_not_hidden():
    with pytest.raises(ZeroDivisionError), assert_peak_memory(at_most="1MiB"):
        torch.ones(2**20 // 0)
    with assert_peak_memory(at_most="1GiB", stage="val") as budget:  # the device was left
        torch.ones(2**20)
    assert budget.peak.allocated == 4 * MIB


@pytest.mark.parametrize(
    ("at_most", "gpu", "said"),
    [
        (8, None, "unit"),
        ("-8GiB", None, "Not a size"),
        ("0GiB", None, "above zero"),
        (None, None, "at_most"),
        ("8GiB", "A100 81GB", "A100 81GB"),
        ("8GiB", "A100", "'A100' comes with"),
    ],
)
def test_a_budget_that_is_no_size_and_an_unknown_gpu_are_refused(at_most, gpu, said):
    with pytest.raises(ValueError, match=said):
        assert_peak_memory(Net(), torch.ones(2, 256), at_most=at_most, gpu=gpu, step=loss_of)


def test_a_model_without_parameters_and_the_precision_of_a_block_are_refused():
    with pytest.raises(ValueError, match="no parameters to train"):
        assert_peak_memory(nn.ReLU(), torch.ones(2), at_most="8GiB", step=lambda m, x: m(x).sum())
    with pytest.raises(TypeError, match="precision"):
        assert_peak_memory(at_most="8GiB", precision="bf16-mixed")


@pytest.mark.cuda_memory
def test_code_on_a_cuda_device_is_refused():
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES="), assert_peak_memory(at_most="1GiB"):
        torch.ones(3 * MIB, device="cuda")
