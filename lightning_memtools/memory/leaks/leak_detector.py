"""Detects leaks: watches the memory that stays allocated, finds the tensors that pile up, and words the warning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightning_memtools.memory.leaks.freeing import how_to_free
from lightning_memtools.memory.leaks.holder_search import HolderSearch, Holding, is_expected
from lightning_memtools.memory.leaks.tensor_census import LivingTensor, TensorCensus, bytes_of
from lightning_memtools.memory.owned import OnDevice, Owned
from lightning_memtools.memory.sizes import format_size

_MAX_KINDS = 3


@dataclass(frozen=True, slots=True)
class LeakReport:
    """A memory leak: how much memory grew over several readings in a row, and which tensors piled up meanwhile.

    Attributes:
        in_a_row: The number of readings in a row in which memory grew.
        grown_bytes: The growth of memory in that time, excluding what the model and its optimizers own.
        findings: The places where tensors pile up, largest first.
    """

    in_a_row: int
    grown_bytes: int
    findings: list[Holding]

    def text(self, *, device: str, readings: str) -> str:
        """Return the warning: what grows, how fast, what holds it, and what to do.

        Args:
            device: The device's name.
            readings: The word for the readings: "epochs" or "evaluations".
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


class LeakDetector:
    """Reports tensors that pile up while memory grows in `warn_after` consecutive readings.

    These rules prevent false alarms:

    * Tensors of the model and its optimizers never count, nor do tensors that no Python object holds.
    * A container's tensors count only if some were added before each of these readings and are still there. So a
      tensor that is replaced, such as the last batch, does not count.
    * A tensor that keeps growing counts only after twice as many readings, if it makes up half of all growth.
    * Tensors in a container with a maximum size (`deque(maxlen=...)`, `lru_cache(maxsize=...)`) never count.

    Args:
        on_device: Returns whether a tensor is on the device.
        warn_after: The number of consecutive readings in which memory has to grow before a report.
        find_names: Returns the names of known objects by `id`; called when a holder has to be found.
    """

    def __init__(
        self,
        on_device: OnDevice,
        *,
        warn_after: int,
        find_names: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        self._warn_after = warn_after
        self._find_names = find_names
        self._census = TensorCensus(on_device)
        self._levels: list[int] = []
        self._next_look = warn_after
        self.has_reported = False

    def read(
        self, unaccounted_bytes: int, owned: Owned, *, collect: Callable[[], int] | None = None
    ) -> LeakReport | None:
        """Take one reading of the memory. Call it at the same point of every epoch; the first is the baseline.

        Args:
            unaccounted_bytes: The allocated memory that neither the model nor its optimizers own.
            owned: The memory that the model and its optimizers own.
            collect: Collects garbage and returns the unaccounted bytes; it is called before anything is reported.

        Returns:
            The report of a leak, once; otherwise None.
        """
        if self.has_reported:
            return None
        findings = self._find_growing_tensors(owned) if self._has_grown(unaccounted_bytes, collect) else []
        if not findings:
            return None
        self.has_reported = True
        self._census.restart()
        return LeakReport(len(self._levels) - 1, self._levels[-1] - self._levels[0], findings)

    def _has_grown(self, unaccounted_bytes: int, collect: Callable[[], int] | None) -> bool:
        """Return whether memory exceeds the baseline. If it does not, `unaccounted_bytes` becomes the new baseline."""
        if self._levels and unaccounted_bytes > self._levels[-1]:
            if collect is not None and len(self._levels) == self._next_look:  # a report may follow
                unaccounted_bytes = collect()
            if unaccounted_bytes > self._levels[-1]:
                self._levels.append(unaccounted_bytes)
                return True
        self._levels = [unaccounted_bytes]
        self._next_look = self._warn_after
        self._census.restart()
        return False

    def _find_growing_tensors(self, owned: Owned) -> list[Holding]:
        """Return the tensors that pile up, once memory has grown for long enough; until then, return an empty list."""
        n_growths = len(self._levels) - 1
        # If the wait for the next look is longer, only the last readings matter.
        if n_growths <= self._next_look - self._warn_after:
            return []
        survivors = self._census.take(owned.storages)
        if n_growths < self._next_look:
            return []
        self._next_look += self._next_look
        newest = [one for one in survivors if one.born == self._census.number]
        piles = HolderSearch(survivors, self._find_names()).piles(newest, self._is_growing)
        holdings = [
            Holding.of(holder, pile)
            for holder, pile in piles
            if holder is not None and not is_expected(holder, pile) and self._is_growing(pile)
        ]
        return sorted(holdings, key=lambda holding: -holding.n_bytes)

    def _is_growing(self, pile: list[LivingTensor]) -> bool:
        latest = self._census.number
        born = Counter(one.born for one in pile)
        if all(born[number] for number in range(latest - self._warn_after + 1, latest + 1)):
            return True
        grown_bytes = self._levels[-1] - self._levels[0]
        return len(self._levels) > 2 * self._warn_after and 2 * bytes_of(pile) >= grown_bytes


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
