"""Each advice of BatchSizeTuner, followed in a run where it is printed: then the search ends, and says it no more."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.batch_size.test_resized_loaders import Fixed, Pairs
from tests.tuner_runs import WIDTH, Constant, Data, Small, Tuner, fit


class Batches(Data):
    """Makes the batches itself."""

    def __getitem__(self, index):
        return torch.zeros(4, WIDTH)


class Endless(IterableDataset[Any]):
    def __iter__(self):
        return (torch.zeros(WIDTH) for _ in range(10_000))


class Deaf(Small):
    """Its hook reads no batch size."""

    def train_dataloader(self):
        return DataLoader(Data(), 4)


class Named(Small):
    def __init__(self):
        super().__init__()
        self.per_step = 4

    def train_dataloader(self):
        return DataLoader(Data(), self.per_step)


DEAF_VAL = type("DeafVal", (Small,), {"val_dataloader": lambda _: DataLoader(Data(), 8)})
PLAIN = {"loaders": DataLoader(Data(), 4)}
Run = tuple[dict[str, Any], Any, dict[str, Any]]
"""Arguments of the tuner, the model's class, and arguments of the fit."""
CASES: dict[str, tuple[Run, Run]] = {
    "is not a torch.utils.data.DataLoader. Pass a DataLoader": (
        ({}, Small, {"loaders": [torch.zeros(4, WIDTH)] * 9}), ({}, Small, PLAIN)),
    "it has batch_size=None, so its data set makes the batches. Let the DataLoader make them": (
        ({}, Small, {"loaders": DataLoader(Batches(), batch_size=None)}), ({}, Small, PLAIN)),
    "has no batch_size. Give it an int attribute batch_size": (
        ({}, Small, {"loaders": DataLoader(Data(), batch_sampler=[[0, 1], [2, 3]])}),
        ({}, Small, {"loaders": DataLoader(Data(), batch_sampler=Pairs(range(200), 4))})),
    "Let it read self.batch_size when it is iterated over": (
        ({}, Constant, {"loaders": DataLoader(Data(), batch_sampler=Fixed(200, 4))}),
        ({}, Constant, {"loaders": DataLoader(Data(), batch_sampler=Pairs(range(200), 4))})),
    "Let the hook read it": (({}, Deaf, {}), ({}, Small, {})),
    "Set batch_arg_name": (({"batch_arg_name": "step"}, Named, {}), ({"batch_arg_name": "per_step"}, Named, {})),
    'Or tune training alone: BatchSizeTuner(stages=("train",))': (
        ({"stages": ("train", "val")}, DEAF_VAL, {}), ({"stages": ("train",)}, DEAF_VAL, {})),
    "or a device with more memory": (({}, Small, {"capacity": "3MiB"}), ({}, Small, {"capacity": "64MiB"})),
    "Set max_val, or effective_batch_size": (
        ({}, lambda: Small(n=20), {}), ({"max_val": 5}, lambda: Small(n=20), {})),
    "max_val is None. Set max_val": (
        ({}, Constant, {"capacity": None, "loaders": DataLoader(Endless(), 4), "limit_train_batches": 2}),
        ({"max_val": 16}, Constant, {"capacity": None, "loaders": DataLoader(Endless(), 4), "limit_train_batches": 2})),
    "ended with max_trials; a larger size may fit": (
        ({"max_trials": 1, "init_val": 4}, Small, {}), ({"max_trials": 12, "init_val": 4}, Small, {})),
    "effective_batch_size=80 keeps the old number": (
        ({"init_val": 40}, lambda: Small(batch_size=80), {}),
        ({"effective_batch_size": 80}, lambda: Small(batch_size=80), {})),
}  # fmt: skip


def said_in(root: Any, run: Run) -> tuple[str, Any]:
    """What the tuner says in a fit, and its result."""
    arguments, model, options = run
    tuner = Tuner(**({"stages": ("train",)} | arguments))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fit(root, tuner, model(), **options)
        except (ValueError, RuntimeError) as error:
            return str(error), tuner.result
    notes = [] if tuner.result is None else tuner.result.notes
    return " ".join([*map(str, (warning.message for warning in caught)), *notes]), tuner.result


@pytest.mark.parametrize("advice", CASES)
def test_it_is_given_and_leads_to_a_search_that_ends(advice, tmp_path):
    broken, mended = CASES[advice]
    assert advice in said_in(tmp_path, broken)[0]
    said, result = said_in(tmp_path, mended)
    assert advice not in said
    assert result is not None
    assert result.sizes["train"] >= 1
