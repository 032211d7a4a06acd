"""Whole Lightning runs on fake tensors: they take the memory that real ones take, and compute nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import lightning as L
from lightning.pytorch.plugins.io import CheckpointIO
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils.data import DataLoader

from lightning_memtools import VirtualDevice
from lightning_memtools.state.random_state import RandomState


class FakeLoader(DataLoader[Any]):
    """Batches in the order of the batch sampler; the plain one draws a seed, which needs a value.

    A data set that tells the shape of a batch with `fake_batch` saves making it of thousands of fake samples.
    """

    def __iter__(self) -> Any:
        device = VirtualDevice.current()
        assert device is not None
        assert self.batch_sampler is not None
        for indices in self.batch_sampler:
            with device.host():
                batch = self._batch(indices)
            device.count_batch(batch)
            yield batch

    def _batch(self, indices: list[int]) -> Any:
        if hasattr(self.dataset, "fake_batch"):
            return self.dataset.fake_batch(indices)
        return self.collate_fn([self.dataset[i] for i in indices])


def fakes_of(kind: type[L.LightningModule]) -> type[L.LightningModule]:
    """The same model, with loaders that work on fake tensors; it stays where it is."""

    def as_fake(loader: Any) -> Any:
        if isinstance(loader, dict):
            return {name: as_fake(one) for name, one in loader.items()}
        return FakeLoader(loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn)

    class Fake(kind):  # type: ignore[misc, valid-type]
        def train_dataloader(self) -> Any:
            return as_fake(super().train_dataloader())

        def val_dataloader(self) -> Any:
            return as_fake(super().val_dataloader())

        def log(self, *args: Any, **kwargs: Any) -> None:
            """Lightning copies what is logged, which fake tensors do not survive."""

        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            return self

    return Fake


class InMemory(CheckpointIO):
    """Keeps checkpoints, as fake tensors cannot be written to files."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.kept[str(path)] = checkpoint

    def load_checkpoint(self, path, map_location=None, weights_only=None):
        return self.kept[str(path)]

    def remove_checkpoint(self, path: Any) -> None:
        self.kept.pop(str(path), None)


@contextmanager
def fake_tensors(device: VirtualDevice) -> Iterator[VirtualDevice]:
    """Everything made within is fake, and accounted for on the device. Random streams keep their values."""

    def real(method: Any) -> Any:
        @functools.wraps(method)
        def wrapped(*args: Any) -> Any:
            with unset_fake_temporarily():
                return method(*args)

        return wrapped

    methods = {name: real(vars(RandomState)[name]) for name in ("restore", "__eq__")}
    methods["now"] = classmethod(real(vars(RandomState)["now"].__func__))
    # Counters of optimizers and metrics stay real.
    with FakeTensorMode(allow_non_fake_inputs=True), device, patch.multiple(RandomState, **methods):
        yield device
