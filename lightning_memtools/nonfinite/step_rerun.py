"""Runs a step again, from the state that it began with, and compares what it computes; everything stays as it was."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

import torch
from torch import Tensor, distributed
from torch.nn import Module
from torch.optim import Optimizer

from lightning_memtools._torch import (
    COLLECTIVE_NAMESPACES,
    DispatchMode,
    buffers_of,
    has_readable_values,
    operator_schema,
)
from lightning_memtools.memory.fingerprints import fingerprint
from lightning_memtools.memory.nested_tensors import map_tensors, plain_name, tensors_in
from lightning_memtools.nonfinite.bad_step import MicroBatch, StepConditions, StepOutcome, undivided_loss
from lightning_memtools.nonfinite.diagnosis import public_name
from lightning_memtools.nonfinite.finite_checks import floats_of
from lightning_memtools.simulation.step_runner import replay_loop
from lightning_memtools.state.buffer_keeper import is_expanded
from lightning_memtools.state.state_snapshot import StateSnapshot


class CannotRerunError(Exception):
    """Raised when a step cannot be run again; the message says why."""


class _NoCollectives(DispatchMode):  # type: ignore[no-untyped-call]
    """Refuses collectives: the other processes do not run this step again, so that this one would wait for ever."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COLLECTIVE_NAMESPACES:
            raise CannotRerunError(f"the step talks to the other ranks ({func.name()}), which do not run it again")
        return func(*args, **(kwargs or {}))


@dataclass(eq=False)
class StepRerun:
    """Runs a step as often as asked, each time from the same state; on exit everything is as it was on entry.

    It runs in Lightning's own loop, with a Trainer that logs nothing and makes no update. What the step prints or warns
    of is not shown.
    """

    module: Module  # the LightningModule, with the weights and buffers that the step began with
    micro: Sequence[MicroBatch]
    conditions: StepConditions
    _: KW_ONLY
    optimizers: Sequence[Optimizer] = ()
    schedulers: Sequence[Any] = ()  # Lightning's configurations; those of the Trainer if there is one
    parameters: Sequence[Tensor] = ()  # those whose gradients belong to the step; all when left out
    trainer: Any = None
    host: Callable[[], AbstractContextManager[Any]] = nullcontext  # in this context copies are host memory
    prepare: Callable[[], object] = lambda: None  # called before each run

    def __post_init__(self) -> None:
        self.micro = [each for each in self.micro if each.batch is not None]
        self._bring_back()
        self._named = list(self.module.named_parameters())  # the step may replace some
        self.names = {id(p): plain_name(name) for name, p in self._named}
        self._wanted = {id(p) for p in self.parameters}
        self._snapshot: StateSnapshot | None = None
        self._buffers: dict[str, tuple[Tensor, Tensor]] = {}
        self._losses: list[Tensor] = []
        self._graph: Tensor | None = None
        self._n_steps = 0
        self._now: MicroBatch | None = None

    def _bring_back(self) -> None:
        """Move the batches that were moved to the host back to the device."""
        device = next((p.device for p in self.module.parameters()), torch.device("cpu"))
        if device.type != "cpu":
            torch.accelerator.synchronize()  # the copies were queued
        for micro in self.micro:
            if micro.changed is not None:
                micro.batch = map_tensors(micro.batch, lambda tensor: tensor.to(device))

    def __enter__(self) -> Self:
        skip = () if self.trainer is None else (type(self.trainer),)
        roots = [self.module, *self.optimizers, [each.batch for each in self.micro]]
        self._snapshot = StateSnapshot(roots, skip=skip, host=self.host)
        if any(micro.steps_before for micro in self.micro):
            self._buffers = {name: (buffer, buffer.clone()) for name, buffer in self.module.named_buffers()}
        return self

    def __exit__(self, *_: object) -> None:
        assert self._snapshot is not None
        self._snapshot.restore()
        self._snapshot = self._graph = self._now = None
        self._losses, self._buffers = [], {}

    def reset(self) -> None:
        """Restore everything to what it was on entry, then call `prepare`."""
        assert self._snapshot is not None, "Rerun is a context manager"
        self._snapshot.restore()
        self.prepare()

    def run(
        self,
        *,
        within: AbstractContextManager[Any] | None = None,
        batches: Mapping[int, Any] | None = None,
        restore: bool = True,
    ) -> StepOutcome:
        """Run the step from its start.

        Args:
            within: A context for forward and backward, such as a dispatch mode.
            batches: Batches to use instead of the step's own, by position.
            restore: Whether to restore everything first; False where the caller has set other weights.

        Raises:
            CannotRerunError: It failed for another reason than NaN or Inf.
        """
        if restore:
            self.reset()
        self._losses, self._graph, self._n_steps = [], None, 0
        for parameter in self.module.parameters():
            parameter.grad = None
        try:
            alone = _NoCollectives() if distributed.is_available() and distributed.is_initialized() else nullcontext()  # type: ignore[no-untyped-call]
            with _quiet(), torch.enable_grad():
                loop = self._loop()
            with _quiet(), torch.enable_grad(), alone, within or nullcontext():
                for position, micro in enumerate(self.micro):
                    if self._run_batch(loop, micro, (batches or {}).get(position, micro.batch)):
                        break
        except CannotRerunError:
            raise
        except Exception as error:
            raise CannotRerunError(f"the step could not be run again: {type(error).__name__}: {error}") from error
        gradients = {
            plain_name(name): p.grad
            for name, p in self._named
            if p.grad is not None and (not self._wanted or id(p) in self._wanted)
        }
        return StepOutcome(self._losses, self._graph, gradients)

    def _loop(self) -> Any:
        conditions = self.conditions
        return replay_loop(
            self.module,
            original=self.trainer,
            facts=conditions.trainer,
            optimizers=self.optimizers,
            schedulers=self.schedulers,
            accumulate=conditions.divided_by,
            scale=conditions.scale,
            forward=conditions.forward,
            on_loss=self._note_loss,
            before_update=self._before_update,
        )

    def _run_batch(self, loop: Any, micro: MicroBatch, batch: Any) -> bool:
        """Run one batch; return whether the step ends within it."""
        if micro.start is not None:
            micro.start.restore(self.module)
        self._now, self._n_steps = micro, 0
        return bool(loop.run(batch, micro.index, is_last=micro is self.micro[-1]))

    def _note_loss(self, loss: Tensor) -> None:
        scale = self.conditions.scale
        factor = None if scale is None else torch.full((), scale, dtype=torch.float32, device=loss.device)
        self._losses.append(undivided_loss(loss, self.conditions.divided_by, factor))
        self._graph = loss

    def _before_update(self) -> bool:
        """Return whether the step ends before an update; earlier ones of its batch were made before it began."""
        micro = self._now
        assert micro is not None
        self._n_steps += 1
        if self._n_steps > micro.steps_before:
            return micro is self.micro[-1]
        if self._n_steps == micro.steps_before and micro.resumed is not None:
            # The part before this ran with other weights than it had; from here on everything is as it was.
            self._losses.clear()
            micro.resumed.restore(self.module)
            self._put_buffers_back()
        return False

    def _put_buffers_back(self) -> None:
        with torch.no_grad():
            for name, (buffer, kept) in self._buffers.items():
                if not is_expanded(buffer):
                    buffer.copy_(kept)
                owner, _, key = name.rpartition(".")
                buffers_of(self.module.get_submodule(owner))[key] = buffer  # the step may have put a new tensor there


@contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def configured(module: Module, conditions: StepConditions) -> tuple[list[Optimizer], Sequence[Any]]:
    """Return the optimizers that a LightningModule configures, and Lightning's configurations of its schedulers."""
    with _quiet(), torch.enable_grad():
        loop = replay_loop(module, original=None, facts=conditions.trainer, optimizers=None)
        loop.detach()
    return loop.optimizers, loop.schedulers


# Their outputs are memory that nobody has written; of an LSTM on the CPU, one is oneDNN's workspace.
_UNWRITTEN = ("empty", "new_empty", "resize_", "set_", "mkldnn_rnn_layer")


@dataclass(frozen=True, slots=True)
class EarlierValues:
    """The operations of a step up to the one that gives its first NaN."""

    operations: tuple[str, ...]  # the names that PyTorch dispatches them by
    # a number for the bits of each one's outputs, NaN as 0; 0 where two runs gave different ones
    digests: tuple[int, ...]

    def difference(self, now: EarlierValues) -> str:
        """Say in a sentence where a rerun first differs; empty if it does not."""
        for number, (one, other) in enumerate(zip(self.operations, now.operations, strict=False)):
            if one != other:
                return f"Operation {number} of the step is {public_name(other)}, it was {public_name(one)}."
            before, after = self.digests[number], now.digests[number]
            if before and after and before != after:
                return f"Operation {number} of the step, {public_name(one)}, gives other values than it gave then."
        if len(self.operations) != len(now.operations):
            n, n_now = len(self.operations), len(now.operations)
            return f"The first NaN comes in operation {n_now}, in the training process it came in operation {n}."
        return ""

    @property
    def n_compared(self) -> int:
        """The number of operations whose outputs can be compared."""
        return sum(map(bool, self.digests))


def values_up_to_nan(rerun: StepRerun) -> EarlierValues:
    """Run the step twice, and return what it computes up to the first NaN.

    Raises:
        CannotRerunError: The step cannot be run again.
    """
    (names, one), (again, other) = _run(rerun), _run(rerun)
    if names != again:
        return EarlierValues((), ())
    return EarlierValues(names, tuple(a if a == b else 0 for a, b in zip(one, other, strict=True)))


def says_nothing(outcome: StepOutcome) -> bool:
    """Return whether no loss and no gradient holds a finite number other than 0, so that any such step is equal."""
    floats = [each for each in map(floats_of, (*outcome.losses, *outcome.gradients.values())) if each is not None]
    return not any(bool((torch.isfinite(each) & (each != 0)).any()) for each in floats)


def _run(rerun: StepRerun) -> tuple[tuple[str, ...], Sequence[int]]:
    recorder = _ValueRecorder()
    with torch.compiler.set_stance("force_eager"):
        rerun.run(within=recorder)
    return tuple(recorder.names), [int(each) for each in recorder.digests]


class _ValueRecorder(DispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.digests: list[Tensor] = []
        self._is_over = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0].replace("::", ".")
        if self._is_over or name.rpartition(".")[2].startswith(_UNWRITTEN) or not _writes(func):
            return out
        # A second backward gives zero tensors without memory; to read one ends the process.
        tensors = [each for each in tensors_in(out) if has_readable_values(each)]
        if tensors:
            self.names.append(name)
            self.digests.append(torch.stack([fingerprint(self._without_nan(each)).cpu() for each in tensors]).sum())
        return out

    def _without_nan(self, tensor: Tensor) -> Tensor:
        """Return the numbers with zeros in the place of NaN, and note a NaN: it is the last output that is read."""
        floats = floats_of(tensor)
        if floats is None or not bool((is_nan := floats.isnan()).any()):
            return tensor
        self._is_over = True
        return floats.masked_fill(is_nan, 0.0)


def _writes(func: Any) -> bool:
    """Return whether an operation computes something: it is not only a view."""
    returns = operator_schema(func).returns
    return any(each.alias_info is None or each.alias_info.is_write for each in returns)
