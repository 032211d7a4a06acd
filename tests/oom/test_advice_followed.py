"""Advice of out-of-memory reports, followed in runs where it is printed: afterwards the runs fit.

Causes are followed in the gallery; batch sizes, accumulation, bfloat16 and checkpoints in
tests/callbacks/test_oom_report.py; what is held, kind by kind, in tests/memory/leaks/test_freeing.py. Here is the rest.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_memtools import GradientCheckpointing
from lightning_memtools.oom.actions import ActionKind
from tests.callbacks.test_oom_report import attempt
from tests.checkpointing.test_loss_head import Language, words_of
from tests.oom.gallery import Net

WHERE_FOLLOWED = {
    ActionKind.HOLDER: "gallery",
    ActionKind.GROWTH: "test_what_grows_from_batch_to_batch_is_the_first_thing_to_look_for",
    ActionKind.RARE_BATCH: "gallery",
    ActionKind.EXPANDABLE_SEGMENTS: "gallery",
    ActionKind.STOP_PROCESS: "gallery",
    ActionKind.LOSS: "test_the_suggested_loss_in_chunks_fits",
    ActionKind.CHECKPOINTING: "test_the_suggested_checkpointing_fits",
    ActionKind.ACCUMULATION: "test_the_suggested_accumulation_fits_and_keeps_the_effective_batch",
    ActionKind.BATCH_SIZE: "test_the_suggested_batch_size_fits_and_the_next_does_not",
    ActionKind.PRECISION: "test_bfloat16_fits_where_it_is_said_to",
    ActionKind.LARGER_GPU: "test_the_suggested_gpu_fits",
}


def test_each_kind_of_advice_is_followed_somewhere():
    texts = [path.read_text() for path in (Path(__file__), Path(__file__).parents[1] / "callbacks/test_oom_report.py")]
    assert set(WHERE_FOLLOWED) == set(ActionKind)
    tests = {where for where in WHERE_FOLLOWED.values() if where != "gallery"}
    assert [name for name in tests if not any(f"def {name}(" in text for text in texts)] == []


class Words(Language):
    def train_dataloader(self) -> Any:
        return DataLoader([words_of()] * 2, batch_size=None)  # type: ignore[arg-type]


def test_the_suggested_loss_in_chunks_fits(tmp_path):
    device = {"cuda_like": True}
    report = attempt(tmp_path, "100MiB", "fit", model=Words(), device=device).report
    given = re.search(r"without holding all logits at once \(`(GradientCheckpointing\(.*?\))`\)\..* fits", report)
    callback = eval(given[1])  # noqa: S307, our own text
    assert attempt(tmp_path, "100MiB", "fit", callback, model=Words(), device=device).fits
    assert isinstance(callback, GradientCheckpointing)


def test_the_suggested_gpu_fits(tmp_path):
    report = attempt(tmp_path, "64MiB", "fit", batch=16).report
    (gpu,) = re.findall(r"Use a larger GPU \((.*?)\)", report)
    assert attempt(tmp_path, gpu, "fit", batch=16).fits


class Case(Net):
    """Does something large outside of its modules."""

    def __init__(self) -> None:
        super().__init__(2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.outside(torch.ones(512, 32, 4, device=self.device)) + super().training_step(batch, batch_idx)

    def outside(self, boxes: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Assigns(Case):
    """As label assignment does: what is compared has no name, its result has."""

    def outside(self, boxes):
        inside = torch.cat([boxes[:, :, None] - boxes[0], boxes[0] - boxes[:, :, None]], -1)
        wide = inside.repeat(4, 1, 1, 1)
        return wide.mean()


class Slides(Case):
    @torch.no_grad()
    def outside(self, boxes):
        windows = boxes.flatten().unfold(0, 512, 8).contiguous()
        scores = {"high": windows.sort(-1).values, "low": None}
        return scores["high"].mean()


class Collects(Case):
    def outside(self, boxes):
        losses = []
        for scale in range(40):
            losses.append(boxes.repeat(1, 4, 1) * scale)  # noqa: PERF401, a list that grows
        return sum(loss.mean() for loss in losses)


@pytest.mark.parametrize(
    ("model", "variable", "shape", "line"),
    [
        (Assigns, "`inside` in outside (", "[512, 32, 32, 8]", "wide = inside.repeat(4, 1, 1, 1)"),
        (Slides, "`windows` in outside (", "[8129, 512]", 'scores = {"high": windows.sort(-1).values'),
        (Collects, "`losses` in outside (", "tensors, float32 [512, 128, 4]", "losses.append(boxes.repeat(1, 4, 1)"),
    ],
)
def test_the_steps_own_tensors_outside_of_modules_have_their_line_and_shape(model, variable, shape, line, tmp_path):
    report = attempt(tmp_path, "40MiB", "fit", model=model()).report
    section = report.partition("## Tensors outside of modules\n")[2].partition("\n## ")[0]
    assert [row for row in section.splitlines() if variable in row and shape in row]
    assert [row for row in section.splitlines() if "test_advice_followed.py:" in row and line in row]
