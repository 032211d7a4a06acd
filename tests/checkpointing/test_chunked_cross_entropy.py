"""A linear layer and cross-entropy in chunks give what they give at once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_memtools.checkpointing.chunked_cross_entropy import ChunkedCrossEntropy, chunk_rows

ROWS, WIDTH, CLASSES = 700, 16, 1100  # two chunks and a part of one
WEIGHTS = torch.rand(CLASSES, generator=torch.Generator().manual_seed(1)) + 0.5
CASES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "of each row": {"reduction": "none"},
    "weights": {"class_weight": WEIGHTS},
    "weights, sum": {"class_weight": WEIGHTS, "reduction": "sum"},
    "smoothed": {"label_smoothing": 0.1},
    "smoothed, weights": {"label_smoothing": 0.3, "class_weight": WEIGHTS},
    "smoothed, weights, of each row": {"label_smoothing": 0.3, "class_weight": WEIGHTS, "reduction": "none"},
    "ignored": {"ignore_index": 7},
    "capped": {"steps": (partial(torch.div, other=5.0), torch.tanh, partial(torch.mul, other=5.0))},
}


def inputs(dtype: torch.dtype = torch.float64, *, bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    torch.manual_seed(0)
    target = torch.randint(CLASSES, (ROWS,))
    target[::5] = 7
    target[3::50] = -100
    made = [torch.randn(*shape).to(dtype).requires_grad_() for shape in ((ROWS, WIDTH), (CLASSES, WIDTH), (CLASSES,))]
    return made[0], made[1], made[2] if bias else None, target


def plain(loss: ChunkedCrossEntropy, source: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = F.linear(source, weight, bias)
    for step in loss.steps:
        logits = step(logits)
    weights = None if loss.class_weight is None else loss.class_weight.to(logits.dtype)
    return F.cross_entropy(
        logits,
        loss.target,
        weight=weights,
        reduction=loss.reduction,
        ignore_index=loss.ignore_index,
        label_smoothing=loss.label_smoothing,
    )


def of(case: str, target: Tensor, dtype: torch.dtype = torch.float64) -> ChunkedCrossEntropy:
    given = {"steps": (), "ignore_index": -100, **CASES[case]}
    target = target.where(target != -100, 7) if given["ignore_index"] == 7 else target
    weights = given.pop("class_weight", None)
    return ChunkedCrossEntropy(
        target, dtype=dtype, class_weight=None if weights is None else weights.to(dtype), **given
    )


def results(run: Any, given: Any) -> list[Tensor]:
    out = run(*given)
    wanted = [one for one in given if one is not None and one.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, wanted, torch.linspace(0.5, 2, out.numel()).to(out).view_as(out))]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("bias", [True, False])
def test_loss_and_gradients_are_those_of_all_logits_at_once(case, bias):
    *given, target = inputs(bias=bias)
    loss = of(case, target)
    assert chunk_rows(WIDTH) < ROWS
    for run in (loss, loss.at_once):
        for mine, other in zip(results(run, given), results(partial(plain, loss), given), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_is_that_of_the_type(dtype):
    *given, target = inputs(dtype)
    exact = results(partial(plain, of("mean", target)), [one.double() for one in given])
    mine = results(of("mean", target, dtype), given)
    theirs = results(partial(plain, of("mean", target, dtype)), given)
    for one, other, right in zip(mine, theirs, exact, strict=True):
        off = [(each.double() - right).norm() / right.norm() for each in (one, other)]
        assert one.dtype == other.dtype
        assert off[0] <= 1.5 * off[1] + torch.finfo(dtype).eps


@pytest.mark.parametrize("chosen", range(3))
def test_only_the_gradients_that_are_needed_are_computed(chosen):
    *given, target = inputs()
    given = [one.requires_grad_(at == chosen) for at, one in enumerate(one.detach() for one in given)]
    loss = of("mean", target)
    for mine, other in zip(results(loss, given), results(partial(plain, loss), given), strict=True):
        torch.testing.assert_close(mine, other)


def test_a_second_backward_gives_the_same_gradients():
    *given, target = inputs()
    out = of("mean", target)(*given)
    first = torch.autograd.grad(out, given, torch.tensor(3.0), retain_graph=True)
    again = torch.autograd.grad(out, given, torch.tensor(3.0))
    for one, other in zip(first, again, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_gradients_of_gradients():
    found = []
    for chunked in (True, False):
        *given, target = inputs()
        loss = of("smoothed", target)
        out = loss(*given) if chunked else plain(loss, *given)
        (of_weight,) = torch.autograd.grad(out, [given[1]], create_graph=True)
        found.append(torch.autograd.grad(of_weight.square().sum(), given))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("rows", [0, ROWS])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_where_no_row_counts_loss_and_gradients_are_those_of_torch(reduction, rows):
    source, *others, target = inputs()
    given = [source[:rows].detach().requires_grad_(), *others]
    nothing = replace(of("mean", target), target=torch.full((rows,), -100), reduction=reduction)
    for mine, other in zip(results(nothing, given), results(partial(plain, nothing), given), strict=True):
        torch.testing.assert_close(mine, other, equal_nan=True)
