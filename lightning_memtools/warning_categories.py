"""The categories of all warnings of this package, which `warnings.filterwarnings` and pytest can name."""

from __future__ import annotations


class MemtoolsWarning(UserWarning):
    """Base class of all warnings of lightning_memtools.

    ```python
    warnings.filterwarnings("ignore", category=lightning_memtools.DegradedWarning)
    ```

    In pytest: `filterwarnings = ["error::lightning_memtools.FindingWarning"]`.
    """


class FindingWarning(MemtoolsWarning):
    """Warns that something is wrong with training, such as a leak, a spike, NaN, or a step that ran out of memory."""


class DegradedWarning(MemtoolsWarning):
    """Warns that a part of lightning_memtools does less than it should, and why; training goes on."""
