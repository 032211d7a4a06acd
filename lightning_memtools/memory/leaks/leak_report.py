"""The findings of the leak detector, and the warning that reports them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_memtools.memory.leaks.holders import ReferenceKind, TensorHolder
from lightning_memtools.memory.sizes import format_size

_MAX_KINDS = 3


@dataclass(frozen=True, slots=True)
class LeakFinding:
    """Tensors that pile up in one place.

    Attributes:
        holder: The object that holds them; None if Python does not know it.
        tensors: The number of tensors of each shape and type.
        n_bytes: The memory that they occupy on the device; 0 where their graph grows.
        with_graph: The number of tensors that hold an autograd graph.
        graph_grows: Whether their graph grows and not their number.
    """

    holder: TensorHolder | None
    tensors: Mapping[tuple[tuple[int, ...], str], int]
    n_bytes: int
    with_graph: int
    graph_grows: bool = False


@dataclass(frozen=True, slots=True)
class LeakReport:
    """Memory that grew without a break, and the tensors that piled up meanwhile.

    Attributes:
        in_a_row: The number of readings in a row in which memory or a graph grew.
        grown_bytes: The growth of memory in that time, without what the model and its optimizers own.
        findings: The places where tensors pile up, largest first.
    """

    in_a_row: int
    grown_bytes: int
    findings: list[LeakFinding]

    def text(self, *, device: str, readings: str) -> str:
        """Return the warning: what grows, how fast, what holds it, and what to do.

        Args:
            device: The device's name.
            readings: What was counted: "epochs" or "evaluations".
        """
        only_graphs = all(finding.graph_grows for finding in self.findings)
        subject = (
            "An autograd graph has grown"
            if only_graphs
            else f"Memory in use on {device} after garbage collection has grown by "
            f"{format_size(self.grown_bytes)}, not counting parameters, gradients and optimizer state,"
        )
        rate = "" if only_graphs else f" ({format_size(self.grown_bytes // self.in_a_row)} in each)"
        lines = [f"{subject} in {self.in_a_row} {readings} in a row{rate}. What piles up:"]
        for finding in self.findings:
            lines += [f"  - {_place(finding)}: {_contents(finding)}.", f"    {_fix(finding)}"]
        if any(_may_be_filling_up(finding) for finding in self.findings):
            lines.append("A container that stops growing by itself may be filling up, and is then no leak.")
        lines.append("This warning is given once.")
        return "\n".join(lines)


def _place(finding: LeakFinding) -> str:
    holder = finding.holder
    if holder is None:
        return "Holder not found: something Python's garbage collector does not know (C++, or a local variable)"
    if holder.container_path == holder.path:
        return holder.path + holder.place
    container = holder.container
    size = f" of {len(container)}" if hasattr(container, "__len__") else ""
    one = f"; one is {holder.path}" if holder.place or holder.path.startswith(holder.container_path) else ""
    return f"{holder.container_path}{holder.place} (a {type(container).__name__}{size}{one})"


def _may_be_filling_up(finding: LeakFinding) -> bool:
    """Return whether a container holds plain tensors, as a buffer of a fixed length does until it is full."""
    is_element = finding.holder is not None and any(step.is_element for step in finding.holder.steps)
    return is_element and not finding.with_graph and not finding.graph_grows


def _contents(finding: LeakFinding) -> str:
    kinds = [f"{count} of shape {shape} {dtype}" for (shape, dtype), count in finding.tensors.items()]
    count = sum(finding.tensors.values())
    tensors = f"{count} tensor{'s' if count > 1 else ''}"
    if len(kinds) == 1:
        tensors += kinds[0].removeprefix(str(count))
    else:
        others = ", and other shapes" if len(kinds) > _MAX_KINDS else ""
        tensors += f" ({', '.join(kinds[:_MAX_KINDS])}{others})"
    if finding.graph_grows:
        return f"{tensors}, whose autograd graph keeps growing: it holds on to every step"
    if finding.with_graph:
        graph = f"{finding.with_graph} of them with an autograd graph and all that it saved"
    else:
        graph = "without autograd graphs"
    return f"{tensors}, {format_size(finding.n_bytes)}, {graph}"


def _fix(finding: LeakFinding) -> str:
    holder = finding.holder
    if finding.graph_grows:
        name = holder.steps[-1].key if holder is not None and holder.steps and holder.steps[-1].key else "total"
        target = f"self.{name}" if holder is not None and holder.steps[-1].kind is ReferenceKind.ATTRIBUTE else name
        return f"Add up values without their graphs: `{target} += loss.detach()`."
    if holder is not None and any(_is_metric(link) for link in holder.links):
        advice = "Reset the metric when the epoch ends (self.log does it for a metric that it is given)"
    elif holder is not None and any(step.is_element for step in holder.steps):
        advice = f"Clear {holder.container_path} when the epoch ends"
    elif holder is not None:
        advice = f"Drop {holder.path} when the epoch ends"
    else:
        advice = "Look for what keeps the outputs or batches of every step"
    instead = "`.detach().cpu()`" if finding.with_graph else "`.cpu()` or `.item()`"
    return f"{advice}, or keep only what is needed, off the device: {instead}."


def _is_metric(link: Any) -> bool:
    return all(callable(getattr(type(link), name, None)) for name in ("update", "compute", "reset"))
