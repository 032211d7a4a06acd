"""Every reader of tensors takes every kind of tensor, and finds NaN wherever it can be read."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from lightning_memtools import replay
from lightning_memtools.callbacks.halt_on_nan import HaltOnNaN
from lightning_memtools.nonfinite.causes import NonFiniteCause
from lightning_memtools.nonfinite.explain import with_other_samples
from lightning_memtools.nonfinite.finite_checks import find_bad
from lightning_memtools.nonfinite.guarded_step import MicroBatch, bad_inputs
from lightning_memtools.nonfinite.operation_trace import NAN, OperationTrace, StorageKeys, kinds_of, values_of
from lightning_memtools.nonfinite.step_rerun import digests_of
from lightning_memtools.state.starts import versions_of
from lightning_memtools.state.state_snapshot import StateSnapshot
from tests.lightning_models import Regression, loader, trainer
from tests.nonfinite.observe import differences, error_at_halt, state_bits
from tests.nonfinite.tensor_kinds import KINDS

# Sparse and nested tensors warn that they are in beta.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("name", KINDS)
def test_nan_is_found_in_every_kind_of_tensor_that_can_be_read(name):
    make, holds_nan = KINDS[name]
    tensor = make()
    assert (NAN in kinds_of(tensor)) == holds_nan
    assert bool(find_bad([("it", tensor)])) == holds_nan
    facts = values_of(tensor)
    assert (facts is not None and facts.n_bad > 0) == holds_nan
    micro = MicroBatch(0, {"it": tensor})
    assert [bad.name for bad in bad_inputs(micro)] == ['batch["it"]'] * holds_nan


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_tensor_can_be_kept_and_written(name):
    tensor = KINDS[name][0]()
    assert len(versions_of([tensor])) == 1
    StorageKeys().key(tensor)
    StateSnapshot([[tensor]]).restore()
    MicroBatch(0, [tensor], versions=(0,)).move_to_host()
    assert digests_of({"it": tensor}) == digests_of({"it": tensor})


# Computing with memory that was freed crashes torch itself.
@pytest.mark.parametrize("name", [kind for kind in KINDS if kind != "freed storage"])
def test_operations_on_every_kind_of_tensor_can_be_traced(name):
    tensor, trace = KINDS[name][0](), OperationTrace(nn.Linear(1, 1))
    with warnings.catch_warnings(), trace.watching():
        warnings.simplefilter("ignore")
        for operation in (torch.clone, torch.neg, lambda each: each.detach(), lambda each: each * torch.nan):
            try:
                operation(tensor)
            except (RuntimeError, ValueError, NotImplementedError):  # torch's own refusal
                continue


@pytest.mark.parametrize("name", [kind for kind in KINDS if kind != "float4_e2m1fn_x2"])  # torch cannot even copy it
def test_every_kind_of_tensor_can_be_in_a_batch_whose_samples_are_replaced(name: str) -> None:
    with_other_samples({"it": KINDS[name][0](), "x": torch.tensor([1.0, torch.nan])}, [1])


class Quantizes(Regression):
    """Reads a quantized table, and quantizes; one loss is NaN, which a rerun may see again or not."""

    seen: ClassVar[list[int]] = []

    def __init__(self, bad: int = -1, *, again: bool = True) -> None:
        super().__init__()
        self.bad, self.again = bad, again
        self.table = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        steps = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize() * self.table.dequantize().mean()
        is_bad = batch_idx == self.bad and (self.again or not self.seen_before())
        return self.net(steps).square().mean() * (torch.nan if is_bad else 1.0)

    def seen_before(self) -> bool:
        self.seen.append(1)
        return len(self.seen) > 1


@pytest.mark.parametrize("again", [True, False])
def test_a_step_that_quantizes_is_run_again(again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Quantizes, "seen", [])
    trainer(tmp_path, HaltOnNaN(), logger=False).fit(Quantizes(), loader(16))
    error = error_at_halt(Quantizes(1, again=again), loader(32), tmp_path)
    assert error.step == 1
    assert (error.cause == NonFiniteCause.NOT_REPRODUCIBLE) == (not again)


class ZeroGradient(Regression):
    """A parameter whose gradient has no memory: it comes from a double backward through abs alone."""

    n_zero = 0

    def __init__(self, bad: int = -1) -> None:
        super().__init__()
        self.bad = bad
        self.scale = nn.Parameter(torch.linspace(-1, 1, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (slope,) = torch.autograd.grad(self.scale.abs().sum(), self.scale, create_graph=True)
        return (self.loss(batch) + slope.sum()) * torch.log(torch.tensor(0.0 if batch_idx == self.bad else 2.0))

    def on_after_backward(self) -> None:
        assert self.scale.grad is not None
        self.n_zero += self.scale.grad._is_zerotensor()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


@pytest.mark.parametrize("options", [{}, {"max_skips": 3}])
def test_gradients_without_memory_are_left_alone(options: dict[str, Any], tmp_path: Path) -> None:
    ends = []
    for callbacks in ([], [HaltOnNaN(**options)]):
        L.seed_everything(0, verbose=False)
        model = ZeroGradient()
        run = trainer(tmp_path, *callbacks, logger=False)
        run.fit(model, loader(24))
        assert model.n_zero == 3
        ends.append(state_bits(model, run.optimizers))
    assert differences(*ends) == []


def test_a_step_whose_gradients_have_no_memory_is_explained_and_replayed(tmp_path):
    error = error_at_halt(ZeroGradient(1), loader(24), tmp_path)
    assert error.step == 1
    assert error.explanation.operation == "aten.log"
    again = replay(error.step_path, model=ZeroGradient(1))
    assert again.exact, again.mismatches


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it differentiates forward
def test_operations_under_transforms_can_be_traced():
    trace = OperationTrace(nn.Linear(1, 1))
    x = torch.tensor([[1.0, 2.0], [0.0, 3.0]])
    with trace.watching():
        vmap(lambda row: torch.log(row).sum())(x)
        grad(lambda row: torch.log(row).sum())(x[0])
        torch.func.jvp(torch.log, (x,), (torch.ones_like(x),))
    assert {event.operation for event in trace.events} >= {"aten.log"}


class Penalty(L.LightningModule):
    """A gradient penalty on an L1 loss: its double backward gives a tensor of zeros without memory."""

    def __init__(self, loss: str = "l1") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def training_step(self, batch: Any) -> Any:
        x = batch.clone().requires_grad_()
        out = self.net(x)
        loss = nn.functional.l1_loss(out, x[:, :1]) if self.hparams["loss"] == "l1" else out.abs().mean()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        penalty = (gradient.flatten(1).norm(dim=1) - 1).square().mean()
        return loss + penalty + torch.log(batch.abs().sum(1)).mean() * out.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("loss", ["l1", "abs"])
def test_a_double_backward_through_abs_is_traced_and_replayed(loss, tmp_path):
    batches: Any = list(torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(0)))
    batches[2][3] = 0.0
    L.seed_everything(0, verbose=False)
    error = error_at_halt(Penalty(loss), batches, tmp_path)
    assert error.step == 2
    assert error.explanation.operation == "aten.log"
    assert error.explanation.samples == (3,)
    assert error.step_path is not None
    again = replay(error.step_path, model=Penalty)
    assert not again.is_finite
    assert again.mismatches == ()
