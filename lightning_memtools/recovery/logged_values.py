"""The values that training has from `self.log`, which offers no way to take one back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class LoggedValues:
    """Takes back what a failed step has logged; `results` is Lightning's collection of metrics by their keys."""

    def __init__(self, results: Any) -> None:
        self._results = results

    def save(self) -> Callable[[], None]:
        """Return the function that takes back what is logged from now on."""
        results = self._results
        saved = {key: (metric, dict(vars(metric))) for key, metric in results.items()}
        batch, size = results.batch, results.batch_size

        def restore() -> None:
            for key in [key for key in results if key not in saved]:
                del results[key]
            for metric, values in saved.values():
                vars(metric).clear()
                vars(metric).update(values)
            results.batch, results.batch_size = batch, size

        return restore

    @contextmanager
    def of_part(self, part: Any) -> Iterator[None]:
        """Inside, logged values have the batch size of a part, so that the means of an epoch weight it rightly."""
        results = self._results
        whole, results.batch, results.batch_size = results.batch, part, None
        try:
            yield
        finally:
            results.batch, results.batch_size = whole, None
