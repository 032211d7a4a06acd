"""The warning about tensors that pile up."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_memtools.memory.leaks.freeing import how_to_free
from lightning_memtools.memory.leaks.holder_search import Holding
from lightning_memtools.memory.sizes import format_size

_MAX_KINDS = 3


@dataclass(frozen=True, slots=True)
class LeakReport:
    """Memory that grew without a break, and the tensors that piled up meanwhile.

    Attributes:
        in_a_row: The number of readings in a row in which memory grew.
        grown_bytes: The growth of memory in that time, without what the model and its optimizers own.
        findings: The places where tensors pile up, largest first.
    """

    in_a_row: int
    grown_bytes: int
    findings: list[Holding]

    def text(self, *, device: str, readings: str) -> str:
        """Return the warning: what grows, how fast, what holds it, and what to do.

        Args:
            device: The device's name.
            readings: What was counted: "epochs" or "evaluations".
        """
        growth = (
            f"Memory in use on {device} after garbage collection has grown by {format_size(self.grown_bytes)}, not "
            f"counting parameters, gradients and optimizer state, in {self.in_a_row} {readings} in a row "
            f"({format_size(self.grown_bytes // self.in_a_row)} in each)."
        )
        lines = [growth, "What piles up:"]
        for finding in self.findings:
            lines += [f"  - {_place(finding)}: {_contents(finding)}.", f"    {how_to_free(finding)}."]
        # A container of plain tensors may be a buffer of a fixed length.
        if any(one.holder.container_path != one.holder.path and not one.with_graph for one in self.findings):
            lines.append("A container that stops growing by itself may be filling up, and is then no leak.")
        lines.append("This warning is given once.")
        return "\n".join(lines)


def _place(finding: Holding) -> str:
    holder = finding.holder
    if holder.container_path == holder.path:
        return finding.path
    container = holder.container
    size = f" of {len(container)}" if hasattr(container, "__len__") else ""
    one = f"; one is {holder.path}" if holder.place or holder.path.startswith(holder.container_path) else ""
    return f"{holder.container_path}{holder.place} (a {type(container).__name__}{size}{one})"


def _contents(finding: Holding) -> str:
    kinds = [f"{count} of shape {shape} {dtype}" for (shape, dtype), count in finding.tensors.items()]
    others = ", and other shapes" if len(kinds) > _MAX_KINDS else ""
    graph = "without autograd graphs"
    if finding.with_graph:
        graph = f"{finding.with_graph} of them with an autograd graph and all that it saved"
    return f"tensors ({', '.join(kinds[:_MAX_KINDS])}{others}), {format_size(finding.n_bytes)}, {graph}"
