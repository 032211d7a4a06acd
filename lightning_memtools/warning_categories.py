"""The categories of all warnings of this package, which `warnings.filterwarnings` and pytest can name."""

from __future__ import annotations


class MemtoolsWarning(UserWarning):
    """Base class of all warnings of lightning_memtools, so that they can be filtered by class.

    ```python
    warnings.filterwarnings("ignore", category=lightning_memtools.DegradedWarning)
    ```

    In pytest's settings, `filterwarnings = ["error::lightning_memtools.FindingWarning"]` turns findings into errors.
    """


class FindingWarning(MemtoolsWarning):
    """Warns that something is wrong with training, such as a leak, a spike, NaN, or a step that ran out of memory."""


class DegradedWarning(MemtoolsWarning):
    """Warns that a part of lightning_memtools does not fully work, and says why. Training goes on."""
