"""Data loaders: what is host memory, and what is a batch on the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_memtools.memory.virtual import VirtualDevice
from tests.memory.virtual.reading import allocated, peak

MIB = 2**20
# Forking from a process with threads warns on Python 3.12.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Makes its samples, by way of something large that a device of 4 MiB could not hold."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        large = torch.ones(8 * MIB // 4)
        return large[:1000] * index, index


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_only_the_yielded_batch_is_counted(workers: int, persistent: bool) -> None:
    loader = DataLoader(Samples(), batch_size=8, num_workers=workers, persistent_workers=persistent)
    with VirtualDevice("4MiB") as device:
        for _ in range(2):
            seen = []
            for values, labels in loader:
                seen.append(int(labels.sum()))
                # 8 x 1000 floats and 8 labels of 8 bytes.
                assert allocated(device) == 32256 + 512
                assert device.composition().by_category["input"] == 32256 + 512
                del values, labels
            assert seen == [28, 92, 156, 220]
        # The next batch is made while the last one is held, but counts when it is yielded; and the sum of the labels.
        assert peak(device) == 32256 + 512 + 512
        assert allocated(device) == 0
        loader._iterator = None


class Slices(IterableDataset[torch.Tensor]):
    """Yields views of its own tensor, and the whole of it at last."""

    def __init__(self) -> None:
        self.data = torch.arange(100_000.0)

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield self.data[:1000]
        yield self.data[1000:3000]
        yield self.data


def test_view_of_a_dataset_counts_as_the_copy_a_gpu_would_get() -> None:
    with VirtualDevice() as device:
        sizes = []
        for batch in DataLoader(Slices(), batch_size=None):
            sizes.append(allocated(device))
            doubled = batch * 2
            assert allocated(device) == 2 * sizes[-1]
            del batch, doubled
        assert sizes == [4096, 8192, 400_384]
        assert allocated(device) == 0


def test_dataset_larger_than_the_device_can_be_made_on_the_host() -> None:
    with VirtualDevice("4MiB") as device:
        with device.host():
            data = torch.ones(8 * MIB)
        assert device.stats().ooms == 0
        # By hand, where no DataLoader does it.
        batch = data[:1000]
        device.count_batch({"x": batch})
        assert device.composition().by_category["input"] == 4096
        del batch
        assert allocated(device) == 0
