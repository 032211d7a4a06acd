"""Samples a GPU's utilization, power and temperature by NVML, in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

EVERY_S = 0.5
"""Seconds between two samples. NVML's own utilization is that of the last second or less."""
_FIGURES = ("utilization_pct", "power_w", "temperature_c")
GPU_LOAD_TAGS = tuple(tag for name in _FIGURES for tag in (f"device/{name}", f"device/{name}_max"))
"""The tags of what `GpuLoad.scalars` returns."""


class GpuLoad:
    """Samples one GPU from `begin` to `stop`. No call of the training thread asks the driver.

    Attributes:
        problem: The reason why there are no figures; "" where there are some, or none was read yet.
    """

    def __init__(self, uuid: str, *, every_s: float) -> None:
        self.problem = ""
        self._uuid = uuid
        self._every_s = every_s
        self._lock = threading.Lock()
        self._samples: dict[str, list[float]] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True, name="memtools-gpu-load")

    @classmethod
    def begin(cls, uuid: str, *, every_s: float = EVERY_S) -> GpuLoad:
        """Begin to sample.

        Args:
            uuid: The GPU's, as NVML has it: "GPU-...".
            every_s: Seconds between two samples.
        """
        load = cls(uuid, every_s=every_s)
        load._thread.start()
        return load

    def scalars(self) -> dict[str, float]:
        """Return the mean and the maximum of each figure since the last call, by tag; without figures it has none."""
        with self._lock:
            samples, self._samples = self._samples, {}
        found: dict[str, float] = {}
        for name, values in samples.items():
            found[f"device/{name}"] = sum(values) / len(values)
            found[f"device/{name}_max"] = max(values)
        return found

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _sample(self) -> None:
        try:
            import pynvml  # noqa: PLC0415, an extra
        except ImportError:
            self.problem = "NVML's package is missing (pip install 'lightning_memtools[nvml]')"
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.problem = f"NVML: {error}"
            return
        try:
            figures = _readers(pynvml, pynvml.nvmlDeviceGetHandleByUUID(self._uuid))
            if not figures:
                self.problem = "NVML does not tell the load of this GPU"
            while figures and not self._is_over.is_set():
                read = {name: figure() for name, figure in figures.items()}
                with self._lock:
                    for name, value in read.items():
                        self._samples.setdefault(name, []).append(value)
                self._is_over.wait(self._every_s)
        except pynvml.NVMLError as error:  # the driver was reset, or the GPU has gone
            self.problem = f"NVML: {error}"
        finally:
            pynvml.nvmlShutdown()


def _readers(nvml: Any, handle: Any) -> Mapping[str, Callable[[], float]]:
    """Return a function for each figure that this GPU tells."""
    every: dict[str, Callable[[], float]] = {
        "utilization_pct": lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temperature_c": lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
    }
    known = {}
    for name, figure in every.items():
        try:
            figure()
        except nvml.NVMLError:  # not supported by this GPU, such as power on some laptops
            continue
        known[name] = figure
    return known
