"""A base class for callbacks that other callbacks of the same Trainer talk to."""

from __future__ import annotations


class Neighbour:
    """Base class of callbacks with which other callbacks interact. Subclasses override what they need.

    Attributes:
        takes_part_in_trials: False if BatchSizeTuner is to leave out the callback in its trials. Callbacks that are not
            Neighbours may have this attribute, too.
        is_in_trial: True during a trial of BatchSizeTuner, which sets this attribute.
        max_splits: The largest number of parts into which the callback splits a batch that does not fit; 1 for none.
    """

    takes_part_in_trials: bool = True
    is_in_trial: bool = False
    max_splits: int = 1

    @property
    def memory_remark(self) -> str:
        """A line on what the callback did, for MemoryMonitor's summary of a run; "" if it did nothing."""
        return ""
