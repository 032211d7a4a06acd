"""Which batches are odd ones, told by their shapes; the gallery has runs that they end."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_memtools.oom.failure_facts import BatchesBefore
from tests.callbacks.test_oom_report import attempt
from tests.oom.gallery import WIDTH, Net, loader


class Graph(NamedTuple):
    nodes: Tensor
    edges: Tensor


def graph(n_nodes: int, n_edges: int) -> Graph:
    return Graph(torch.empty(n_nodes, 8), torch.empty(2, n_edges))


def texts(n: int, length: int) -> dict[str, Tensor]:
    return {"ids": torch.empty(n, length), "labels": torch.empty(n)}


def images(*heights: int) -> list[Any]:
    return [[torch.empty(3, height, 32) for height in heights], torch.empty(len(heights))]


def before(*batches: Any) -> BatchesBefore:
    seen = BatchesBefore()
    for batch in batches:
        seen.add(batch)
    return seen


@pytest.mark.parametrize(
    ("usual", "batch", "odd"),
    [
        ([texts(8, n) for n in (20, 30, 25)], texts(8, 90), [('batch["ids"]', (8, 90), (8, 30))]),
        ([graph(30, 60), graph(20, 90), graph(25, 50)], graph(31, 400), [("batch.edges", (2, 400), (2, 90))]),
        ([images(32, 40), images(40, 32), images(36, 36)], images(90, 32), [("batch[0][0]", (3, 90, 32), (3, 40, 32))]),
        ([torch.empty(4, 5)] * 3, torch.empty(8, 5), [("batch", (8, 5), (4, 5))]),
        # Longer and fewer, a little longer, and too few before it to tell.
        ([texts(16, n) for n in (20, 30, 25)], texts(5, 90), []),
        ([texts(8, n) for n in (20, 30, 25)], texts(8, 40), []),
        ([texts(8, 20)] * 2, texts(8, 90), []),
        ([], texts(8, 90), []),
    ],
)
def test_a_batch_is_odd_by_a_dimension_of_a_tensor(usual, batch, odd):
    assert before(*usual).odd(batch) == odd


class OddInValidation(Net):
    def __init__(self, largest: int) -> None:
        super().__init__(2)
        self.largest = largest

    def val_dataloader(self) -> Any:
        return loader([8, 9, 10, 8, self.largest, 8])


def test_in_evaluation_no_recovery_is_advised_because_it_leaves_evaluation_alone(tmp_path):
    report = attempt(tmp_path, "40MiB", "val", model=OddInValidation(240)).report
    assert f"`batch` is [240, {WIDTH}], usually at most [10, {WIDTH}]" in report.splitlines()[0]
    assert re.search(r"^1\. Avoid the rare large batch\. .* or cap it", report, re.MULTILINE)
    assert attempt(tmp_path, "40MiB", "val", model=OddInValidation(12)).fits
    assert "OOMRecovery" not in report
    assert "Use validation batches of" in report


def test_what_fills_the_device_is_blamed_before_a_batch_that_is_larger_by_chance(tmp_path):
    class Grows(Net):
        """What it keeps fills the device; its last batch is larger by chance."""

        def __init__(self) -> None:
            super().__init__()
            self.kept: list[Tensor] = []

        def sizes(self) -> list[int]:
            return [*[8] * 20, 14]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.kept.append(self(batch).detach())
            return super().training_step(batch, batch_idx)

    report = attempt(tmp_path, "17MiB", "fit", model=Grows()).report
    assert "Grows.kept` holds" in report.splitlines()[0]
    assert "\n1. Delete or detach `Grows.kept`" in report
