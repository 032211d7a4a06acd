"""Batches that are plain objects, or that the step fetches itself; random generators of its own.

Each is found, restored and replayed to the bit; objects, which no capsule holds, by a function that returns the batch.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memtools import CapsuleError, replay
from lightning_memtools.memory.nested_tensors import map_tensors, named_tensors, tensors_in
from lightning_memtools.nonfinite.diagnosis import NonFiniteCause
from lightning_memtools.nonfinite.halt_report import NonFiniteError
from tests.nonfinite.observe import error_at_halt

# Lightning warns of such steps.
pytestmark = pytest.mark.filterwarnings("ignore:.*`dataloader_iter`.*")
BAD = 3


class Store(MutableMapping[str, Any]):
    """As PyTorch Geometric's: a mapping that knows the graph around it."""

    def __init__(self, parent: Graph, values: dict[str, Any]) -> None:
        self._mapping = values
        self._parent = weakref.ref(parent)

    def __getitem__(self, key: str) -> Any:
        return self._mapping[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._mapping[key] = value

    def __delitem__(self, key: str) -> None:
        del self._mapping[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._mapping)

    def __len__(self) -> int:
        return len(self._mapping)

    def __copy__(self) -> Store:
        new = object.__new__(Store)
        vars(new).update(vars(self), _mapping=dict(self._mapping))
        return new


class Graph:
    """As PyTorch Geometric's Data: attributes in a private store, can be called, knows how to move."""

    def __init__(self, **values: Any) -> None:
        vars(self)["_store"] = Store(self, values)
        vars(self)["_kind"] = Store

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._store[name]

    def __call__(self, *names: str) -> Iterator[tuple[str, Any]]:
        return ((name, self._store[name]) for name in names)

    def __copy__(self) -> Graph:
        new = object.__new__(Graph)
        vars(new).update(vars(self))
        store = vars(self)["_store"].__copy__()
        store._parent = weakref.ref(new)
        vars(new)["_store"] = store
        return new

    def to(self, device: Any, **_: Any) -> Any:
        return map_tensors(self, lambda tensor: tensor.to(device))

    @property
    def n_nodes(self) -> int:
        assert self._store._parent() is self
        return len(self.x)


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("__hidden", "x")

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.__hidden = x.mean()

    def to(self, device: Any, **_: Any) -> Slotted:
        return Slotted(self.x.to(device))


class Net(L.LightningModule):
    """Takes x out of a batch of any kind; log of 0 where a sample is all 0."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def x_of(self, batch):
        return batch.x

    def training_step(self, batch):
        x = self.x_of(batch)
        return self.body(x).square().mean() - x.square().sum(1).log().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class GraphNet(Net):
    def x_of(self, batch):
        assert batch.n_nodes == 8
        return batch.x


class Fetches(Net):
    """Takes two batches in each step, from the iterator."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> Any:
        (one, _, _), (two, _, _) = next(dataloader_iter), next(dataloader_iter)
        return super().training_step(SimpleNamespace(x=torch.cat([one, two])))


class OwnNumbers(Net):
    """Draws from generators of its own; only what it drew tells which step is bad."""

    def __init__(self) -> None:
        super().__init__()
        self.torch_numbers = torch.Generator().manual_seed(0)
        self.python_numbers = random.Random(0)  # noqa: S311, noise
        self.numpy_numbers = np.random.default_rng(0)

    def x_of(self, batch: Tensor) -> Tensor:
        noise = torch.randn(batch.shape, generator=self.torch_numbers)
        one = float(self.numpy_numbers.uniform()) + self.python_numbers.random()
        return (batch.abs() + noise.abs() + one) * (batch != 0)


def rows(n: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(8, 4, generator=generator) for _ in range(n)]
    made[BAD][2] = 0
    return made


def graphs() -> list[Graph]:
    edges = torch.zeros(2, 5, dtype=torch.long)
    return [Graph(x=x, edge_index=edges, name="g") for x in rows()]


def loader(batches: Any) -> Any:
    return DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)


CASES: dict[str, tuple[type[Net], Any]] = {
    "graph": (GraphNet, lambda: loader(graphs())),
    "slots": (Net, lambda: loader([Slotted(x) for x in rows()])),
    "namespace": (Net, lambda: loader([SimpleNamespace(x=x) for x in rows()])),
    "generators": (OwnNumbers, lambda: loader(rows())),
}


def halted(make: type[Net], batches: Any, root: Path) -> NonFiniteError:
    L.seed_everything(0, verbose=False)
    return error_at_halt(make(), batches, root)


@pytest.mark.parametrize("name", CASES)
def test_a_step_on_such_a_batch_is_explained_and_replayed_to_the_bit(name: str, tmp_path: Path) -> None:
    make, batches = CASES[name]
    error = halted(make, batches(), tmp_path)
    assert error.batch_idx == BAD
    assert error.explanation is not None, str(error)
    assert (error.explanation.operation, error.explanation.cause) == ("aten.log", NonFiniteCause.DOMAIN)
    assert "the same bit for bit" in str(error)
    path, batch_of = error.capsule_path or "", None
    if name in {"graph", "slots", "namespace"}:
        assert "lacks batch (a " in str(error)
        with pytest.raises(CapsuleError, match="left out of the capsule"):
            replay(path, model=make())
        batch_of = batches().dataset.__getitem__
    else:
        assert "memtools replay" in str(error)
    random.seed(1)
    torch.manual_seed(1)
    again = replay(path, model=make(), batch=batch_of)
    assert again.exact, again.summary()
    assert again.n_values > 10
    assert again.mismatches == ()
    assert [doubt for doubt in again.doubts if "does not hold batch (a " not in doubt] == []


def test_a_step_that_fetches_its_batches_halts_and_is_not_run_again(tmp_path: Path) -> None:
    error = halted(Fetches, DataLoader(torch.cat(rows()), batch_size=8), tmp_path)  # type: ignore[arg-type]
    assert error.step == BAD // 2
    assert error.explanation is None
    assert "not sought: the batch" in str(error)


def test_the_tensors_of_such_a_batch_are_named_as_a_person_writes_them() -> None:
    graph = graphs()[0]
    assert [name for name, _ in named_tensors(graph, "batch")] == ["batch.x", "batch.edge_index"]
    assert next(named_tensors(SimpleNamespace(a=[graph]), "batch"))[0] == "batch.a[0].x"
    assert [name for name, _ in named_tensors(Slotted(torch.ones(1)), "batch")] == ["batch._Slotted__hidden", "batch.x"]
    copied = map_tensors(graph, lambda tensor: tensor + 1)
    assert copied.n_nodes == 8, "its store belongs to the copy"
    assert torch.equal(copied.x, graph.x + 1)


def test_an_object_that_refers_to_itself_ends() -> None:
    ring = SimpleNamespace(x=torch.ones(1))
    ring.self = [ring]
    assert [name for name, _ in named_tensors(ring, "batch")] == ["batch.x"]
    assert len(list(tensors_in(ring))) == 1


def test_dirty_data_in_an_object_is_found_there(tmp_path: Path) -> None:
    made = rows()
    made[BAD][2] = torch.nan
    error = halted(GraphNet, loader([Graph(x=x) for x in made]), tmp_path)
    assert error.cause == NonFiniteCause.DIRTY_DATA
    assert f"batch.x of batch {BAD} holds 4 NaN in 32 elements, in sample 2" in str(error)


class Mapped(Net):
    def x_of(self, batch):
        return batch["x"]


def test_the_report_says_what_of_a_batch_is_in_no_file(tmp_path: Path) -> None:
    batches = loader([{"x": x, "source": open(__file__)} for x in rows()])  # noqa: PTH123, SIM115, a handle
    error = halted(Mapped, batches, tmp_path)
    for batch in batches.dataset:
        batch["source"].close()
    assert "batch['source'] (a TextIOWrapper)" in str(error)
    assert replay(error.capsule_path or "", model=Mapped()).exact


def test_a_batch_that_is_no_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="list"):
        replay(tmp_path / "capsule.pt", batch=[])  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def mapped(tmp_path_factory: pytest.TempPathFactory) -> Any:
    error = halted(Mapped, loader([{"x": x} for x in rows()]), tmp_path_factory.mktemp("mapped"))
    return torch.load(error.capsule_path or "", weights_only=True)


@pytest.mark.parametrize("kind", ["object", "dataclass", "mapping", "sequence", "class"])
@pytest.mark.parametrize(
    "named", ["subprocess:Popen", "importlib.util:_LazyModule", "torch.nn:Linear", f"{__name__}:Slotted"]
)
def test_objects_of_other_classes_are_not_made(kind: str, named: str, mapped: Any, tmp_path: Path) -> None:
    held: dict[str, Any] = {"bases": [], "attributes": {}, "fields": {}, "pairs": [], "items": []}
    mapped["micro"][0]["batch"] = {"_kind": kind, "class": named, **held}
    torch.save(mapped, tmp_path / "crafted.pt")
    with pytest.raises(CapsuleError, match="TypeError"):
        replay(tmp_path / "crafted.pt", model=Mapped())
