"""The result of a dry run as plain values, which the child process passes on as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_memtools.budgets.peak_memory import PeakMemory
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.reporting.tables import Table, markdown_table, shown_as

FITS, FAILED, OUT_OF_MEMORY, OVER_BUDGET = 0, 1, 3, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunStage:
    """The peak memory of one stage of a dry run.

    Attributes:
        stage: train, val, test or predict; "script" for a program without a Trainer.
        peak_allocated_bytes: The most memory that tensors took at one moment.
        peak_reserved_bytes: The most memory that PyTorch's allocator reserved.
        peak_at: The moment of the peak of allocated memory, such as "backward, in encoder.3". This and the attributes
            below are empty if no model was found, or if the allocation history was too long to keep.
        bytes_by_category: The bytes of parameters, buffers, gradients, optimizer state and inputs at the peak;
            "activations" is the rest: activations and temporary tensors.
        bytes_by_module: The bytes of each module at the peak: its own parameters, gradients and optimizer state, and
            what its operators allocated. Memory outside of modules has the key "".
        bytes_by_line: The bytes at the peak that each line of code allocated, such as "model.py:48: x = self.norm(x)".
    """

    stage: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_at: str = ""
    bytes_by_category: dict[str, int] = field(default_factory=dict)
    bytes_by_module: dict[str, int] = field(default_factory=dict, repr=False)
    bytes_by_line: dict[str, int] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunAdvice:
    """A change to a run that ran out of memory, and the result of trying it.

    Attributes:
        title: A few words that name the change.
        code: The code to write in the program.
        fits: Whether the run fits with this change alone; None if unknown.
        peak_bytes: The peak memory of a step with this change; None if unknown.
        price: A sentence on the extra computation that the change costs; "" for none.
        detail: The result of the trial in sentences, or the reason why the change was not tried.
    """

    title: str
    code: str
    fits: bool | None
    peak_bytes: int | None
    price: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunResult:
    """The result of a dry run.

    Attributes:
        device: The name of the simulated device.
        capacity_bytes: The memory of the device in bytes.
        status: 0 if the run fits, 3 if it ran out of memory, 1 if the program failed with another error.
        error: The message of the error that ended the run, or None.
        report: The file of the out-of-memory report, if one was written.
        stages: The peak memory of each stage.
        smallest_fitting: Two names: the largest known GPU that is too small for the run, and the smallest on which it
            fits; None if there is no such GPU. This is an estimate, because another GPU may run other kernels.
        notes: Remarks on this run, for the user.
        assumed: Each line of code that read a value from the device, with the value that was assumed. Whether the run
            fits depends on these assumptions, because the device computes nothing.
        optimizer_steps: The number of optimizer steps that ran; None if the script has no optimizer.
        rank: The rank that was run.
        devices: The number of ranks.
        directory: The folder of the run's files.
        torch: The version of torch.
        advice: If memory ran out in a Trainer, the changes that were tried in order to save memory, best first.
    """

    device: str
    capacity_bytes: int
    status: int
    error: str | None = None
    report: str | None = None
    stages: list[DryRunStage] = field(default_factory=list)
    smallest_fitting: tuple[str | None, str | None] = (None, None)
    notes: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    optimizer_steps: int | None = None
    rank: int = 0
    devices: int = 1
    directory: str = ""
    torch: str = ""
    advice: list[DryRunAdvice] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Return True if the run ended without an error. If there is an optimizer, at least one step must have run."""
        return self.status == FITS and self.optimizer_steps != 0

    @property
    def verdict(self) -> str:
        """A sentence that says whether the run fits, and which assumed values this depends on."""
        if self.status == OUT_OF_MEMORY:
            return f"It runs out of memory. {self.error}"
        if self.status == FAILED:
            return f"The script ended with an error of its own. {self.error}"
        if self.optimizer_steps == 0:
            return "No optimizer step ran, so that it is not known whether training fits."
        if not any(one.peak_allocated_bytes for one in self.stages):
            return (
                "There was nothing to measure. Nothing was put on a CUDA device: the script trains on the CPU, does not"
                " train, or starts other scripts, as torchrun does. Then give the one that trains, with --devices."
            )
        if not self.assumed:
            return "It fits."
        return "It fits if what these lines assume of values that nobody computed is true:\n" + "\n".join(
            f"- {one}" for one in self.assumed
        )

    @property
    def peak(self) -> PeakMemory:
        """The highest peak of all stages, and what it consists of."""
        none = DryRunStage(stage="", peak_allocated_bytes=0, peak_reserved_bytes=0)
        highest = max(self.stages, key=lambda one: one.peak_allocated_bytes, default=none)
        return PeakMemory(
            allocated=highest.peak_allocated_bytes,
            reserved=max((one.peak_reserved_bytes for one in self.stages), default=0),
            engine="cuda",
            torch=self.torch,
            gpu=self.device.removesuffix(" (dry run)").removeprefix("no limit"),
            peak_at=", ".join(filter(None, (highest.stage, highest.peak_at))),
            categories=highest.bytes_by_category,
            modules=highest.bytes_by_module,
            lines=highest.bytes_by_line,
        )

    def table(self) -> Table:
        """Return a table of the peaks, with one row for each stage."""
        rows = [
            (
                one.stage + (f" ({one.peak_at})" if one.peak_at else ""),
                format_size(one.peak_allocated_bytes),
                format_size(one.peak_reserved_bytes),
                ", ".join(f"{name} {format_size(size)}" for name, size in one.bytes_by_category.items() if size),
            )
            for one in self.stages
        ]
        return Table(("stage", "peak allocated", "peak reserved", "at the peak"), rows)

    def advice_table(self) -> Table:
        """Return a table with a row for the unchanged script, and a row for each change that was tried."""
        said = {True: "yes", False: "no", None: "not known"}
        rows = [("", "as it is", said[self.fits], format_size(self.peak.allocated) if self.fits else "", "")]
        for number, one in enumerate(self.advice, start=1):
            peak = "" if one.peak_bytes is None else format_size(one.peak_bytes)
            rows.append((str(number), one.title, said[one.fits], peak, one.price))
        return Table(("", "change", "fits", "peak allocated", "extra computation"), rows)

    def __str__(self) -> str:
        where = f"Dry run on {self.device}, {format_size(self.capacity_bytes)}"
        return f"{where}. {self.verdict}\n\n{markdown_table(self.table())}"

    _repr_html_ = shown_as(__str__)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> DryRunResult:
        """Recreate a result from the dict that `dataclasses.asdict` made of it."""
        made = {
            "stages": [DryRunStage(**one) for one in content["stages"]],
            "smallest_fitting": tuple(content["smallest_fitting"]),
            "advice": [DryRunAdvice(**one) for one in content["advice"]],
        }
        return cls(**{**content, **made})
