"""A logger that keeps what it is given, in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers.logger import Logger


class ListLogger(Logger):
    """Tag to (step, value) points."""

    def __init__(self) -> None:
        super().__init__()
        self.curves: dict[str, list[tuple[int | None, float]]] = {}

    @property
    def name(self) -> str:
        return "list"

    @property
    def version(self) -> int:
        return 0

    @property
    def experiment(self) -> None:
        return None

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        for tag, value in metrics.items():
            self.curves.setdefault(tag, []).append((step, value))
