"""The categories of all warnings of this package, which `warnings.filterwarnings` and pytest can name."""

from __future__ import annotations


class MemtoolsWarning(UserWarning):
    """A warning of lightning_memtools.

    ```python
    warnings.filterwarnings("ignore", category=lightning_memtools.DegradedWarning)
    ```

    Pytest names it in the same way: `filterwarnings = ["error::lightning_memtools.FindingWarning"]`.
    """


class FindingWarning(MemtoolsWarning):
    """Something is wrong with the training: a leak, a spike, a mistake, a step that did not fit or was NaN."""


class DegradedWarning(MemtoolsWarning):
    """A part of lightning_memtools does less than it was asked to, and says why; training goes on."""
