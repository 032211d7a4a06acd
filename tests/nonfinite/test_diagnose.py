"""From evidence to cause: numbers are NaN or Inf exactly if something is; each rule, and the order of the rules."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memtools.nonfinite.bad_step import BadStep, NonFiniteCause, NonFiniteError, culprit_of, infer
from lightning_memtools.nonfinite.finite_checks import BadInput, BadTensor, measure, norms_of
from lightning_memtools.nonfinite.step_guard import PastStep


def test_norms_are_those_of_torch_for_every_type_in_one_call():
    torch.manual_seed(0)
    tensors = [
        torch.randn(3, 4),
        torch.randn(5).to(torch.float16) * 30000,
        torch.randn(5, dtype=torch.float64),
        torch.randn(2, 2).to(torch.bfloat16),
        torch.randn(7),
    ]
    for tensor, norm in zip(tensors, norms_of(tensors), strict=True):
        assert norm.shape == ()
        assert float(norm) == pytest.approx(float(torch.linalg.vector_norm(tensor.double())), rel=1e-2)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("exact", [False, True])
def test_one_bad_element_among_many_makes_the_measure_bad(bad, dtype, exact):
    gradients = [torch.zeros(1000, dtype=dtype), torch.zeros(3, dtype=dtype)]
    assert measure(gradients, [], exact=exact).tolist() == [0, 0]
    gradients[0][617] = bad
    first, second = measure(gradients, [], exact=exact).tolist()
    assert not math.isfinite(first)
    assert second == 0


def test_finite_values_whose_squares_overflow_are_finite_where_it_is_asked():
    gradients = [torch.full((100,), 1e20)]
    assert measure(gradients, []).tolist() == [math.inf]
    assert measure(gradients, [], exact=True).tolist() == pytest.approx([1e21], rel=1e-6)
    half = [torch.full((100,), 6e4, dtype=torch.float16)]
    assert measure(half, [])[0].item() == pytest.approx(6e5, rel=1e-3)


CALM = [1.0, 1.1, 0.9, 1.0, math.nan]
GROWN = [1.0, 1.1, 4.0, 30.0, math.inf]
DIRTY = BadInput("batch", 4, 1, 0, 8, (2,), is_mask=False)
MASK = BadInput("batch", 4, 0, 4, 8, (2,), is_mask=True)
WEIGHT = BadTensor("weight", 1, 0, 4)


def evidence(rank: int = 0, *, loss: float = math.nan, **other: Any) -> BadStep:
    values: dict[str, Any] = {"step": 4, "batches": (4,), "losses": ((4, loss),), "learning_rates": (0.1,)}
    return BadStep(rank=rank, **(values | other))


def past(norms: list[float]) -> tuple[PastStep, ...]:
    return tuple(PastStep(step, 1.0, norm) for step, norm in enumerate(norms))


@pytest.mark.parametrize(
    ("seen", "norms", "cause"),
    [
        (evidence(), CALM, NonFiniteCause.UNKNOWN),
        (evidence(), [math.nan], NonFiniteCause.UNKNOWN),
        (evidence(loss=1.0, inputs=(DIRTY,)), CALM, NonFiniteCause.LATE_MASK),
        (evidence(inputs=(DIRTY,)), CALM, NonFiniteCause.DIRTY_DATA),
        (evidence(inputs=(DIRTY,), before=(WEIGHT,)), GROWN, NonFiniteCause.DIRTY_DATA),
        (evidence(inputs=(MASK,)), CALM, NonFiniteCause.UNKNOWN),
        (evidence(before=(WEIGHT,)), CALM, NonFiniteCause.BAD_PARAMETER),
        (evidence(before=(WEIGHT,)), GROWN, NonFiniteCause.EXPLODING),
        (evidence(), GROWN, NonFiniteCause.EXPLODING),
        (evidence(scaler="20 skips"), GROWN, NonFiniteCause.EXPLODING),
        (evidence(scaler="20 skips"), CALM, NonFiniteCause.LOW_PRECISION),
    ],
)
def test_every_class_of_cause_is_recognised(seen, norms, cause):
    seen.history = past(norms)
    infer(seen)
    assert seen.cause == cause


def test_a_loss_that_grows_is_an_explosion_too():
    losses = [1.0, 1.0, 20.0, 300.0, math.inf]
    bad = evidence(history=tuple(PastStep(step, loss, 1.0) for step, loss in enumerate(losses)))
    infer(bad)
    assert bad.cause == NonFiniteCause.EXPLODING
    assert "the loss had grown 300-fold over the 4 steps before" in bad.because
    assert "learning rate (now 0.1)" in bad.advice


def test_the_rank_with_the_bad_loss_and_batch_is_the_culprit():
    good, bad, dirty = evidence(0, loss=1.0), evidence(1), evidence(2, inputs=(DIRTY,))
    assert culprit_of([good, bad]) is bad
    assert culprit_of([good, bad, dirty]) is dirty
    quiet = evidence(1, loss=1.0, inputs=(DIRTY,))
    assert culprit_of([good, quiet]) is quiet
    assert culprit_of([good, evidence(1, loss=1.0, inputs=(MASK,))]) is None
    assert culprit_of([good, alone := evidence(1, loss=1.0, is_bad_alone=True)]) is alone
    assert culprit_of([good]) is good


def test_pickle_keeps_message_and_fields():
    error = NonFiniteError(
        "loss is nan",
        step=3,
        batch_idx=1,
        rank=2,
        stage="val",
        cause="dirty data",
        losses=[1.0, 2.0],
        parameters=[BadTensor("w", 1, 0, 4, math.inf)],
        norms=[3.0],
        path=Path("report.md"),
        checkpoint_path=Path("good.ckpt"),
    )
    error.add_note("from the launcher")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301, our own
    assert isinstance(copy, RuntimeError)
    assert str(copy) == "loss is nan"
    assert vars(copy) == vars(error)
