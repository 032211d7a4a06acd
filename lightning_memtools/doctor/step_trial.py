"""Trials of the training step on fake tensors: shapes without values; the user's objects are not changed."""

from __future__ import annotations

import ast
import inspect
import linecache
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_memtools._torch import (
    AnyDropout,
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from lightning_memtools.doctor.training_case import TrainingCase
from lightning_memtools.memory.nested_tensors import map_tensors, named_tensors, tensors_in, tensors_in_attributes
from lightning_memtools.memory.reachable_variables import variables_named_by
from lightning_memtools.memory.user_code import CodeLine, line_on_stack, owner_of, user_line_of
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.simulation.fakes import RealExchange, TensorExchange
from lightning_memtools.simulation.simulated import simulated
from lightning_memtools.simulation.step_runner import batch_size_of, copy_of_batch

# Losses whose two inputs are elementwise and broadcast. Those that refuse other shapes need no check.
_ELEMENTWISE_LOSSES: dict[Any, str] = {
    F.mse_loss: "mse_loss",
    F.l1_loss: "l1_loss",
    F.smooth_l1_loss: "smooth_l1_loss",
    F.huber_loss: "huber_loss",
    F.kl_div: "kl_div",
    F.poisson_nll_loss: "poisson_nll_loss",
    F.soft_margin_loss: "soft_margin_loss",
}
_DIFFERENCES: frozenset[Any] = frozenset({Tensor.sub, Tensor.__sub__, torch.sub, torch.subtract, Tensor.__rsub__})
_MOVES: frozenset[Any] = frozenset({Tensor.cuda, Tensor.cpu, Tensor.to})
_MOVE_NAMES = frozenset({"cuda", "cpu", "to"})
_NEED_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
_MAX_COPIED_BYTES = 2**29
_CUT = "None of the inputs have requires_grad=True"  # torch.utils.checkpoint warns so
_FACTORS = frozenset({"MulBackward0", "DivBackward0", "NegBackward0", "AddBackward0", "SubBackward0"})


@dataclass(frozen=True, slots=True)
class BroadcastInputs:
    """Two inputs of a loss whose shapes broadcast to a larger one.

    Attributes:
        operator: The loss's name, or "the difference".
        first: The shape of one.
        second: The shape of the other.
        result: The shape that they broadcast to.
        line: The line of code.
    """

    operator: str
    first: tuple[int, ...]
    second: tuple[int, ...]
    result: tuple[int, ...]
    line: CodeLine | None


@dataclass(slots=True)
class TrialFacts:
    """The result of a trial of the training step.

    Attributes:
        error: The exception that ended it; None if it ran through.
        broadcasts: The losses whose inputs broadcast.
        discarded_moves: Lines where a tensor was moved and the moved copy thrown away.
        sum_lines: Lines of losses that add up over the batch.
        sums_last: True where the loss itself is the result of a sum, or of one times a factor.
        has_cutting_checkpoint: True if torch.utils.checkpoint with use_reentrant=True ran on inputs without gradient.
    """

    error: Exception | None = None
    broadcasts: list[BroadcastInputs] = field(default_factory=list)
    discarded_moves: list[CodeLine] = field(default_factory=list)
    sum_lines: list[CodeLine] = field(default_factory=list)
    sums_last: bool = False
    has_cutting_checkpoint: bool = False


def try_step(case: TrainingCase, batch: Any, *, size: int | None = None) -> TrialFacts:
    """Run the forward pass of a training batch on fake tensors and return what it showed.

    A step that fake tensors cannot serve, because it reads values or because there are no fakes of its kinds of
    tensors, runs on copies with values instead, unless the model is large or on an accelerator.

    Args:
        case: The training.
        batch: The batch. It is not changed.
        size: The number of samples to take; None for all.
    """
    if case.forward is None:
        return TrialFacts()
    if size is not None:
        batch = first_samples(batch, size)
    facts = _try(case, batch, TensorExchange())
    if facts.error is not None and _is_cheap_to_copy(case):
        facts = _try(case, batch, RealExchange())
    return facts


def why_no_trial(case: TrainingCase, batch: Any, error: Exception) -> str:
    """Say in a sentence what a trial that raised means."""
    tensors = [*case.model.named_parameters(), *case.model.named_buffers(), *tensors_in_attributes(case.model)]
    odd = [(name, one) for name, one in [*tensors, *named_tensors(batch, "batch")] if _has_no_fake(one)]
    if odd:
        name, tensor = odd[0]
        layout = str(tensor.layout).removeprefix("torch.").strip("_")
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else layout
        return f"Nothing: there are no fake tensors of {name}'s kind ({kind}); training is not affected."
    if isinstance(error, _NEED_VALUES):
        return "Nothing: the step reads values, which fake tensors do not have; training is not affected."
    return "Nothing, if the step runs on real data; else mend what the error names."


def _has_no_fake(tensor: Tensor) -> bool:
    return tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested


def trial_of(case: TrainingCase, batch: Any) -> TrialFacts:
    """Return the result of `try_step` on the first batch, which several checks share."""
    if case.trial is None:
        case.trial = try_step(case, batch)
    return case.trial


def first_samples(batch: Any, n: int, *, times: int = 1) -> Any:
    """Return a batch's first samples, repeated; tensors that are not as long as the batch stay as they are."""
    whole = batch_size_of(batch)

    def cut(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != whole:
            return tensor
        return tensor[:n] if times == 1 else torch.cat([tensor[:n]] * times)

    return map_tensors(batch, cut)


def gradient_growth(case: TrainingCase, batch: Any) -> float | None:
    """Return the gradient's growth between a half batch and a full one that holds the same samples twice.

    A mean over the batch gives exactly 1, a sum exactly 2, whatever the data. The step runs on copies on the host, with
    dropout switched off. None where the step returns no loss, or the batch cannot be cut.
    """
    n = batch_size_of(batch)
    if case.forward is None or not n:
        return None
    # Two samples, so that BatchNorm has something to normalize.
    taken = min(n, 2)
    norms = [_gradient_norm(case, first_samples(batch, taken, times=times)) for times in (1, 2)]
    half, full = norms
    return None if half is None or full is None or half == 0 else full / half


def _gradient_norm(case: TrainingCase, batch: Any) -> float | None:
    assert case.forward is not None
    with (
        _variables_restored(_step_of(case)),
        simulated(case.model, VirtualDevice(), RealExchange(), cuda=False),
    ):
        for module in case.model.modules():
            if isinstance(module, AnyDropout):
                vars(module)["training"] = False
        try:
            loss = case.forward(case.model, copy_of_batch(batch, None, values=True))
            if not isinstance(loss, Tensor) or not loss.requires_grad:
                return None
            trained = [parameter for parameter in case.model.parameters() if parameter.requires_grad]
            gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        except Exception:  # noqa: BLE001, the samples cannot be cut or repeated: nothing is known then
            return None
        squares = [float(gradient.double().pow(2).sum()) for gradient in gradients if gradient is not None]
    return math.sqrt(sum(squares))


def _try(case: TrainingCase, batch: Any, exchange: TensorExchange) -> TrialFacts:
    assert case.forward is not None
    facts = TrialFacts()
    cuda = case.device.type == "cuda"
    try:
        with (
            _variables_restored(_step_of(case)),
            simulated(case.model, VirtualDevice(cuda_like=cuda), exchange, cuda=cuda),
        ):
            copied = copy_of_batch(batch, None, values=isinstance(exchange, RealExchange))
            with _StepWatch(facts, tensors_in(copied)), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loss = case.forward(case.model, copied)
            facts.has_cutting_checkpoint = any(_CUT in str(one.message) for one in caught)
            if isinstance(loss, Tensor):
                facts.sums_last = _is_sum(loss.grad_fn)
    except Exception as error:  # noqa: BLE001, whatever the user's step raises is a result
        facts.error = error
    return facts


def _is_sum(node: Any) -> bool:
    """Return True if a loss is a sum, or the sum or multiple of one; whether over the batch, its gradient tells."""
    while node is not None and node.name() in _FACTORS:
        node = next((one for one, _ in node.next_functions if one is not None), None)
    return node is not None and node.name() == "SumBackward0"


def _step_of(case: TrainingCase) -> Any:
    """Return the function of the user's code that a trial runs."""
    return getattr(getattr(case.model, "training_step", case.forward), "__func__", case.forward)


@contextmanager
def _variables_restored(function: Any) -> Iterator[None]:
    """Restore on exit the closure variables and globals that a function names, so that a trial leaves no fakes in them.

    The contents of lists, dicts and sets among them are restored too.
    """
    function = getattr(function, "__func__", function)
    variables = variables_named_by(function) if isinstance(function, FunctionType) else ()
    before = [(variable, variable.value) for variable in variables]
    containers = [(value, value.copy()) for _, value in before if type(value) in {list, dict, set, deque}]
    try:
        yield
    finally:
        for variable, value in before:
            if variable.value is not value:
                variable.put(value)
        for container, content in containers:
            container.clear()
            container.extend(content) if isinstance(container, (list, deque)) else container.update(content)


def _is_cheap_to_copy(case: TrainingCase) -> bool:
    n_bytes = sum(parameter.numel() * parameter.element_size() for parameter in case.model.parameters())
    return case.device.type == "cpu" and n_bytes <= _MAX_COPIED_BYTES


class _StepWatch(TorchFunctionMode):
    """Notes losses whose inputs broadcast, sums, and moved copies that are thrown away.

    Args:
        facts: Takes the notes.
        batch: The tensors of the batch.
    """

    def __init__(self, facts: TrialFacts, batch: Iterable[Tensor]) -> None:
        super().__init__()
        self._facts = facts
        self._batch = {id(tensor): tensor for tensor in batch}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _MOVES:
            self._note_move()
        result = func(*args, **kwargs)
        tensors = list(tensors_in((args, kwargs)))
        if tensors and all(id(one) in self._batch for one in tensors):
            self._batch |= {id(one): one for one in tensors_in(result)}  # a target of another shape or type
        if func in _ELEMENTWISE_LOSSES:
            inputs = [*args, *(kwargs[name] for name in ("input", "target") if name in kwargs)][:2]
            self._note_broadcast(_ELEMENTWISE_LOSSES[func], inputs)
        elif func in _DIFFERENCES and self._is_prediction_and_target(args):
            self._note_broadcast("the difference", args[:2])
        if kwargs.get("reduction") == "sum" and (line := line_on_stack()) is not None:
            self._facts.sum_lines.append(line)
        return result

    def _is_prediction_and_target(self, args: tuple[Any, ...]) -> bool:
        # Two views of one tensor, as in `x[:, None] - x`, are meant to broadcast.
        pair = [one for one in args[:2] if isinstance(one, Tensor)]
        if len(pair) != 2 or pair[0].dim() == pair[1].dim():  # noqa: PLR2004, a pair
            return False
        return any(id(one) in self._batch and other.requires_grad for one, other in (pair, pair[::-1]))

    def _note_broadcast(self, operator: str, inputs: Iterable[Any]) -> None:
        tensors = [one for one in inputs if isinstance(one, Tensor)]
        if len(tensors) != 2:  # noqa: PLR2004, input and target
            return
        first, second = (tuple(tensor.shape) for tensor in tensors)
        result = tuple(torch.broadcast_shapes(first, second))  # type: ignore[no-untyped-call]
        if result not in {first, second}:
            self._facts.broadcasts.append(BroadcastInputs(operator, first, second, result, line_on_stack()))

    def _note_move(self) -> None:
        # The frames of this method and of __torch_function__ come first. Module.to, which moves in place, calls
        # Tensor.to from a frame of torch's own. The variable must not go on holding this method's own frame: that cycle
        # would keep the batch alive until Python's collector runs.
        caller: Any = inspect.currentframe()
        for _ in range(2):
            caller = caller.f_back
        if owner_of(caller.f_code.co_filename) != "user":
            return
        line = CodeLine(caller.f_code.co_filename, caller.f_lineno, caller.f_code.co_name)
        if _throws_result_away(line):
            self._facts.discarded_moves.append(line)


def _throws_result_away(line: CodeLine) -> bool:
    """Return whether a line consists of a call such as `x.cuda()` whose result is not used."""
    source = linecache.getline(line.file, line.line).strip()
    try:
        (statement,) = ast.parse(source).body
    except (SyntaxError, ValueError):  # a part of a longer statement
        return False
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _MOVE_NAMES


def place_of_error(error: BaseException, model: nn.Module) -> str:
    """Return the innermost module that an error was raised in; without one, the user's line."""
    names = {id(module): name for name, module in model.named_modules() if name}
    found = ""
    entry = error.__traceback__
    while entry is not None:
        found = names.get(id(entry.tb_frame.f_locals.get("self")), found)
        entry = entry.tb_next
    return found or str(user_line_of(error) or "the training step")
