"""A replay whose loss and gradients are all NaN is compared by the values up to the first NaN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memtools import replay
from lightning_memtools.nonfinite.halt_report import NonFiniteError
from tests.nonfinite.observe import error_at_halt

BAD = 2


class AllNaN(L.LightningModule):
    """The root of a negative number behind every weight: no loss and no gradient is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1, bias=False))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        unset = torch.empty(1000)  # memory that nobody has written is not compared
        out: Tensor = self.net(batch).square().mean() + unset.fill_(0).sum()
        return (out - 1e3 * (batch_idx == BAD)).sqrt() if batch_idx == BAD else out

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


@pytest.fixture(scope="module")
def error(tmp_path_factory: pytest.TempPathFactory) -> NonFiniteError:
    root = tmp_path_factory.mktemp("all_nan")
    L.seed_everything(0, verbose=False)
    batches: Any = [torch.randn(8, 4) for _ in range(4)]
    return error_at_halt(AllNaN(), batches, root, directory=str(root))


def changed(error: NonFiniteError, path: Path, change: Any) -> Path:
    saved = torch.load(error.capsule_path or "", weights_only=True)
    change(saved)
    torch.save(saved, path)
    return path


def test_the_values_up_to_the_first_nan_are_compared(error: NonFiniteError) -> None:
    assert "are NaN or Inf again" in str(error)
    again = replay(error.capsule_path or "", model=AllNaN())
    assert again.says_nothing
    assert again.exact, again.summary()
    assert again.n_values >= 8, "up to the subtraction before the root"
    assert f"the outputs of {again.n_values} operations up to the first NaN" in again.summary()


def test_another_batch_that_gives_nan_too_is_not_the_same_step(error: NonFiniteError, tmp_path: Path) -> None:
    def other(saved: dict[str, Any]) -> None:
        saved["micro"][0]["batch"][3, 2] += 1e-6

    again = replay(changed(error, tmp_path / "other.pt", other), model=AllNaN())
    assert again.says_nothing
    assert not again.exact
    assert "torch.nn.functional.linear" in str(again.mismatches) or "torch.addmm" in str(again.mismatches)
    assert "gives other values than it gave then" in again.summary()


class FirstLayer(L.LightningModule):
    """Its first operation reads the batch, and its only one besides the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


@pytest.mark.parametrize(("n_bad", "is_exact"), [(1, True), (8, False)])
def test_the_samples_beside_a_nan_in_the_batch_are_compared(n_bad: int, is_exact: bool, tmp_path: Path) -> None:
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    batch[:n_bad] = torch.nan
    data: Any = DataLoader([batch], batch_size=None)  # type: ignore[arg-type]
    error = error_at_halt(FirstLayer(), data, tmp_path, directory=str(tmp_path))
    again = replay(error.capsule_path or "", model=FirstLayer())
    assert again.says_nothing
    assert (again.exact, again.n_values) == (is_exact, int(is_exact))

    def other(saved: dict[str, Any]) -> None:
        saved["micro"][0]["batch"][7, 2] += 1e-6

    assert not replay(changed(error, tmp_path / "other.pt", other), model=FirstLayer()).exact


def test_without_such_values_nothing_is_called_exact(error: NonFiniteError, tmp_path: Path) -> None:
    again = replay(changed(error, tmp_path / "older.pt", lambda saved: saved.update(values=None)), model=AllNaN())
    assert not again.exact
    assert again.mismatches == ()
    assert "hold no finite number to compare" in again.summary()
