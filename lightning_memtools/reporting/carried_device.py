"""Lets callbacks put a model on the active VirtualDevice and carry that device into spawned ranks."""

from __future__ import annotations

import multiprocessing
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_memtools.memory.virtual import VirtualDevice


def put_on_device(trainer: Trainer, pl_module: LightningModule) -> None:
    """Count the module and its optimizers as allocated on the active VirtualDevice, as on a GPU they would be.

    Call it when fit, validation, test or predict begins, and again once optimizer state is restored. Idempotent.
    """
    device = VirtualDevice.current()
    if device is not None:
        device.track(pl_module, *trainer.optimizers)


class CarriedDevice:
    """Carries the VirtualDevice that is active where a callback is pickled into the rank where it is unpickled.

    A spawned rank (`ddp_spawn`) is a fresh process; one that is started as a script, or forked, needs no help.
    """

    def __init__(self) -> None:
        self._device: VirtualDevice | None = None
        self._entered = False

    def __getstate__(self) -> dict[str, Any]:
        return {"_device": VirtualDevice.current(), "_entered": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def enter(self) -> None:
        """Enter the carried device in a spawned rank that has no active one."""
        spawned = multiprocessing.parent_process() is not None
        if self._device is not None and spawned and VirtualDevice.current() is None:
            self._device.__enter__()
            self._entered = True

    def leave(self) -> None:
        """Leave the device if it was entered here. Idempotent."""
        if self._device is not None and self._entered:
            self._entered = False
            self._device.__exit__()
