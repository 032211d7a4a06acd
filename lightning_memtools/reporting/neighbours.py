"""A base class for callbacks that other callbacks of the same Trainer talk to."""

from __future__ import annotations


class Neighbour:
    """Base class of callbacks that other callbacks read or control. Subclasses override what they need.

    Attributes:
        takes_part_in_trials: Whether the callback runs in the trials of BatchSizeTuner. Callbacks of other classes may
            have this attribute, too.
        is_in_trial: True during a trial of BatchSizeTuner. BatchSizeTuner sets this attribute.
        max_splits: The most parts into which the callback splits a batch that does not fit; 1 if it does not split.
    """

    takes_part_in_trials: bool = True
    is_in_trial: bool = False
    max_splits: int = 1

    @property
    def memory_remark(self) -> str:
        """A line that says what the callback did, for MemoryMonitor's summary; "" if the callback did nothing."""
        return ""
