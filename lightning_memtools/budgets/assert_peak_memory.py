"""`assert_peak_memory`: a budget for the memory of a training step, or of any code, that holds without a GPU."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self, get_args, overload

from torch import nn

from lightning_memtools.budgets.judgement import judge, parse_budget
from lightning_memtools.budgets.measuring import MeasuredCode, peak_of_estimate
from lightning_memtools.budgets.peak_memory import PeakMemory
from lightning_memtools.estimate import estimate_memory
from lightning_memtools.memory.sizes import find_gpu
from lightning_memtools.simulation.step_runner import Stage


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
    **options: Any,
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

    Given a model and a batch, the step is estimated with `estimate_memory`. Nothing is computed, and the model may be
    on the meta device. Without a model, return a context manager for a `with` statement. The code in it runs on the
    CPU, and memory is counted as if the code ran on a GPU.

    Under pytest the peak is also compared with the recorded peak of the test.

    Args:
        model: The model; None for a context manager.
        batch: The batch.
        at_most: The budget for the peak of allocated memory, such as "8GiB". It can be left out in a test whose peak is
            recorded.
        gpu: The GPU that the budget is for, such as "A100 80GB": workspaces of kernels differ between GPUs.
        stage: "train", "val", "test" or "predict". With "train", at least one optimizer step has to run.
        options: With a model, the other arguments of `estimate_memory`: step, optimizer, precision, steps, accumulate,
            clip and so on.

    Returns:
        The peak and its bytes by category, module and line of code; without a model, the context manager.

    Raises:
        AssertionError: The peak is over the budget, or above the recorded peak by more than the tolerance.
        ValueError: The budget is not a size, the GPU is unknown, there is neither a budget nor a recorded peak, or
            nothing was trained or allocated.
    """
    __tracebackhide__ = True
    if stage not in get_args(Stage):
        raise ValueError(f"stage is {stage!r}. Accepted are {', '.join(map(repr, get_args(Stage)))}.")
    budget = None if at_most is None else parse_budget(at_most)
    if gpu is not None and find_gpu(gpu) is None:
        raise ValueError(f'gpu is {gpu!r}, which is no known GPU. Give a name such as "A100 80GB".')
    if model is None:
        if options or batch is not None:
            raise TypeError(f"{', '.join(options) or 'batch'} belongs to a model, and there is none: pass it first.")
        return PeakMemoryBudget(budget, gpu=gpu, stage=stage)
    peak = peak_of_estimate(estimate_memory(model, batch, stage=stage, capacity=gpu, **options), gpu=gpu)
    judge(peak, budget)
    return peak


class PeakMemoryBudget:
    """The context manager of `assert_peak_memory`.

    Attributes:
        peak: The peak of the code in the `with` statement; None until that code has ended.
    """

    def __init__(self, budget: int | None, *, gpu: str | None, stage: Stage) -> None:
        self.peak: PeakMemory | None = None
        self._budget = budget
        self._stage = stage
        self._code = MeasuredCode(gpu)
        self._running = self._code.running()

    def __enter__(self) -> Self:
        self._running.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        __tracebackhide__ = True
        self._running.__exit__(kind, error, traceback)
        if error is not None:
            return
        self.peak = self._code.peak()
        if not self.peak.allocated:
            raise ValueError("nothing was allocated in this process, so there is nothing to hold to the budget.")
        if self._stage == "train" and not self._code.n_steps:
            raise ValueError(
                "no optimizer took a step within the budget's code, so it does not say what training takes. Let it "
                'train for two steps, or say stage="predict" if it is not to train.'
            )
        judge(self.peak, self._budget)
