"""This repository's own budgets: estimates, a dry run and the examples take what memory-budgets.json says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import default_collate
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_memtools import assert_peak_memory, dry_run
from lightning_memtools.budgets.judgement import judge

ROOT = Path(__file__).parents[2]


def example(name):
    """Return an example's module; its lines are named from the root wherever the tests run."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_estimates_of_gpt2(precision):
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
        batch = torch.zeros(4, 512, dtype=torch.long)
    assert_peak_memory(
        model, batch, precision=precision, optimizer=torch.optim.AdamW, gpu="RTX 4090", at_most="8GiB",
        step=lambda model, batch: model(batch, labels=batch).loss,
    )  # fmt: skip


@pytest.mark.peak_memory
def test_the_example_of_budgets():
    example("memory_budget").test_training_takes_no_more_than_recorded()


def test_the_example_with_digits():
    module = example("digits")
    batch = default_collate([(torch.zeros(1, 8, 8), 0)] * 256)
    assert_peak_memory(module.Digits(), batch)


@pytest.mark.cuda_memory
def test_a_dry_run_of_the_example_with_digits(tmp_path):
    judge(dry_run(ROOT / "examples" / "digits.py", ["--logs", str(tmp_path)], gpu="RTX 3060").peak, None)
