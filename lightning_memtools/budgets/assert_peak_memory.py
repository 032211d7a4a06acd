"""`assert_peak_memory`: a budget for the memory of a training step, or of any code, that holds without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, Self, get_args, overload

from torch import nn
from torch.optim import Optimizer

from lightning_memtools.budgets.current_test import current_test
from lightning_memtools.budgets.judgement import judge, named_test, parse_budget
from lightning_memtools.budgets.measuring import MeasuredCode, device_matches, peak_of_estimate
from lightning_memtools.budgets.peak_memory import PeakMemory
from lightning_memtools.estimate import estimate_memory
from lightning_memtools.memory.sizes import find_gpu
from lightning_memtools.null_cuda.launch import is_on_null_device
from lightning_memtools.simulation.one_rank import StrategyName
from lightning_memtools.simulation.step_runner import PrecisionName, Stage


@overload
def assert_peak_memory(
    *, at_most: str | None = None, gpu: str | None = None, stage: Stage = "train"
) -> PeakMemoryBudget: ...


@overload
def assert_peak_memory(
    model: nn.Module,
    batch: Any,
    *,
    at_most: str | None = None,
    gpu: str | None = None,
    stage: Stage = "train",
    step: Callable[[Any, Any], Any] | None = None,
    optimizer: Optimizer | type[Optimizer] | Callable[[list[nn.Parameter]], Optimizer] | None = None,
    precision: PrecisionName = "32-true",
    steps: int = 2,
    accumulate: int = 1,
    clip: float | None = None,
    strategy: StrategyName | None = None,
    devices: int = 1,
    shard: Callable[[nn.Module, Any], Any] | None = None,
    allocator: str = "",
) -> PeakMemory: ...


def assert_peak_memory(
    model: nn.Module | None = None,
    batch: Any = None,
    *,
    at_most: str | None = None,
    gpu: str | None = None,
    stage: Stage = "train",
    **options: Any,
) -> PeakMemory | PeakMemoryBudget:
    """Fail if a training step, or the code in a `with` statement, takes more memory than its budget. Needs no GPU.

    With a model and a batch its steps are estimated, as by `estimate_memory`, whose arguments it takes: nothing is
    computed, and a model on the meta device needs no memory. Without them it is a context manager, and the code within
    is run and measured.

    In a process on devices of a dry run (``python -m lightning_memtools.null_cuda -m pytest``) it measures PyTorch's
    own CUDA code, elsewhere the simulated allocator. Under pytest the peak is also compared with the recorded one.

    Args:
        model: The model; None for a context manager.
        batch: The batch.
        at_most: The budget for the peak of allocated memory, such as "8GiB". It can be left out in a test whose peak is
            recorded.
        gpu: The GPU that is meant, such as "A100 80GB": workspaces of kernels differ between GPUs.
        stage: "train": at least one optimizer step has to run. "val", "test" or "predict" ask for none.
        options: With a model: step, optimizer, precision, steps, accumulate, clip, strategy, devices, shard and
            allocator of `estimate_memory`.

    Returns:
        The peak with its composition by category, module and line of code; without a model the context manager.

    Raises:
        AssertionError: The peak is over the budget, or above the recorded one by more than the tolerance.
        ValueError: The budget is no size, the GPU is not known, there is neither a budget nor a recorded peak, or
            nothing is trained or allocated.
    """
    __tracebackhide__ = True
    if stage not in get_args(Stage):
        raise ValueError(f"{named_test()}stage is {stage!r}. Accepted are {', '.join(map(repr, get_args(Stage)))}.")
    budget = None if at_most is None else parse_budget(at_most)
    try:
        is_known = gpu is None or find_gpu(gpu) is not None
    except ValueError as error:
        raise ValueError(f"{named_test()}gpu: {error}") from None
    if not is_known:
        raise ValueError(f'{named_test()}gpu is {gpu!r}, which is no known GPU. Give a name such as "A100 80GB".')
    if model is None:
        if options or batch is not None:
            raise TypeError(
                f"{named_test()}{', '.join(options) or 'batch'} belongs to a model, and there is none: pass it first."
            )
        return PeakMemoryBudget(budget, gpu=gpu, stage=stage)
    return _assert_estimate(model, batch, budget, gpu=gpu, stage=stage, **options)


def _assert_estimate(
    model: nn.Module, batch: Any, budget: int | None, *, gpu: str | None, stage: Stage, **options: Any
) -> PeakMemory:
    __tracebackhide__ = True
    engine: Literal["cuda", "simulation"] = "cuda" if is_on_null_device() and device_matches(gpu) else "simulation"
    try:
        estimate = estimate_memory(model, batch, stage=stage, capacity=gpu, engine=engine, **options)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{named_test()}{error}") from error
    peak = peak_of_estimate(estimate, gpu=gpu)
    judge(peak, budget)
    return peak


class PeakMemoryBudget:
    """The context manager of `assert_peak_memory`.

    Attributes:
        peak: The peak, once the code has ended; None before.
    """

    def __init__(self, budget: int | None, *, gpu: str | None, stage: Stage) -> None:
        self.peak: PeakMemory | None = None
        self._budget = budget
        self._gpu = gpu
        self._stage = stage
        self._code: MeasuredCode | None = None
        test = current_test()
        if test is not None:
            test.unused.append(self)

    def __enter__(self) -> Self:
        __tracebackhide__ = True
        test = current_test()
        if test is not None and self in test.unused:
            test.unused.remove(self)
        try:
            self._code = MeasuredCode(gpu=self._gpu).__enter__()
        except (RuntimeError, ValueError) as error:
            raise type(error)(f"{named_test()}{error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        __tracebackhide__ = True
        assert self._code is not None
        self._code.__exit__(kind, error, traceback)
        if error is not None:
            return
        self.peak = self._code.peak
        if not self.peak.allocated:
            where = "Only what runs in this process counts."
            if self.peak.engine == "cuda":
                where = "This process has a CUDA device, and only what is put there counts: move model and batch to it."
            raise ValueError(f"{named_test()}nothing was allocated, so there is nothing to hold to the budget. {where}")
        if self._stage == "train" and not self._code.n_steps:
            raise ValueError(
                f"{named_test()}no optimizer took a step within the budget's code, so it does not say what training "
                'takes. Let it train for two steps, or say stage="predict" if it is not to train.'
            )
        judge(self.peak, self._budget)
