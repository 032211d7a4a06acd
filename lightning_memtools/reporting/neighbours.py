"""A base class for callbacks that other callbacks of the same Trainer talk to."""

from __future__ import annotations


class Neighbour:
    """Base class of callbacks that other callbacks of the Trainer interact with. Subclasses override what they need.

    Attributes:
        takes_part_in_trials: False for a callback that BatchSizeTuner's trials leave out. A callback that is not a
            Neighbour may have this attribute too.
        is_in_trial: True during a trial of BatchSizeTuner, which sets this attribute.
        max_splits: The largest number of parts into which the callback splits a batch that does not fit; 1 for none.
        memory_remark: A line for MemoryMonitor's summary of a call of the Trainer; "" if nothing happened.
    """

    takes_part_in_trials: bool = True
    is_in_trial: bool = False
    max_splits: int = 1

    @property
    def memory_remark(self) -> str:
        """A line for MemoryMonitor's summary; "" if nothing happened."""
        return ""

    def leave_out_of_counts(self, *, alloc_retries: int, ooms: int) -> None:
        """Exclude the allocation retries and out-of-memory errors of a trial from the callback's counts."""
