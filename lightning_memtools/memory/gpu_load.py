"""Samples a GPU's utilization, power and temperature, which torch.cuda reads through NVML, in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

EVERY_S = 0.5
"""Seconds between two samples. NVML's utilization covers the last second or less."""
_FIGURES: dict[str, Callable[[int], float]] = {
    "utilization_pct": lambda index: float(torch.cuda.utilization(index)),
    "power_w": lambda index: torch.cuda.power_draw(index) / 1000,
    "temperature_c": lambda index: float(torch.cuda.temperature(index)),
}
GPU_LOAD_TAGS = tuple(tag for name in _FIGURES for tag in (f"device/{name}", f"device/{name}_max"))
"""The tags of the scalars that `GpuLoad.scalars` returns."""


class GpuLoad:
    """Samples the load of one GPU (such as its utilization) in a thread, so that training never waits for the driver.

    Attributes:
        problem: The reason why reading the load failed; "" if it has not failed.
    """

    def __init__(self, index: int, *, every_s: float) -> None:
        self.problem = ""
        self._index = index
        self._every_s = every_s
        self._lock = threading.Lock()
        self._samples: dict[str, list[float]] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True, name="memtools-gpu-load")

    @classmethod
    def begin(cls, index: int, *, every_s: float = EVERY_S) -> GpuLoad:
        """Start sampling a GPU.

        Args:
            index: The GPU's index in torch.
            every_s: Seconds between two samples.
        """
        load = cls(index, every_s=every_s)
        load._thread.start()
        return load

    def scalars(self) -> dict[str, float]:
        """Return the mean and maximum of each measurement since the last call, by log tag; empty if there are none."""
        with self._lock:
            samples, self._samples = self._samples, {}
        found: dict[str, float] = {}
        for name, values in samples.items():
            found[f"device/{name}"] = sum(values) / len(values)
            found[f"device/{name}_max"] = max(values)
        return found

    def stop(self) -> None:
        """End the sampling thread. Idempotent."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _sample(self) -> None:
        figures = dict(_FIGURES)
        while figures and not self._is_over.is_set():
            for name, figure in list(figures.items()):
                try:
                    value = figure(self._index)
                except Exception as error:  # noqa: BLE001, a driver's library may raise anything
                    # Not every GPU tells every figure: some laptops' tell no power.
                    del figures[name]
                    self.problem = "" if figures else f"{type(error).__name__}: {error}"
                    continue
                with self._lock:
                    self._samples.setdefault(name, []).append(value)
            self._is_over.wait(self._every_s)
