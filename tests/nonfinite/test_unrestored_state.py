"""A step that is finite when it is run again: the hardware is blamed only where all that it reads is the same."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_bytes
from time import perf_counter
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_memtools.callbacks.halt_on_nan import HaltOnNaN
from lightning_memtools.nonfinite.diagnosis import NonFiniteCause
from lightning_memtools.nonfinite.halt_report import NonFiniteError
from lightning_memtools.nonfinite.unrestored_state import OutsideState
from tests.lightning_models import Regression, loader, trainer

BAD = 2
N_CALLS = 0
SCALE = torch.ones(3)
SEEN: dict[str, Any] = {"inner": []}
CLASSES = ["cat", "dog"]
WEIGHTS = torch.tensor([1.0, 2.0])
TABLE = np.ones(4, dtype="float32")


def once(n: int) -> float:
    """NaN at the call that is to be bad."""
    return float("nan") if n == BAD + 1 else 1.0


class Schedule:
    """Counts its calls, as warm-ups of users do."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self) -> float:
        self.n += 1
        return once(self.n)


def counted_by_closure() -> Any:
    n = 0

    def count() -> float:
        nonlocal n
        n += 1
        return once(n)

    return count


def by_global_number() -> float:
    global N_CALLS  # noqa: PLW0603, as users do
    N_CALLS += 1
    return once(N_CALLS)


def numbers() -> Iterator[float]:
    yield from itertools.chain([1.0] * BAD, [float("nan")], itertools.repeat(1.0))


class Sources(Regression):
    """Multiplies its loss by a number that is NaN once, and that a rerun does not see again."""

    seen: ClassVar[list[int]] = []

    def __init__(self, source: str, path: Path) -> None:
        super().__init__()
        self.source = source
        self.file: Any = None
        self.schedule, self._cache, self.config = Schedule(), dict[int, Any](), SimpleNamespace(names=["a", "b"])
        if source == "file":
            path.write_text("1.0\n" * BAD + "nan\n" + "1.0\n" * 100)
            self.file = path.open()
        if source == "generator":
            self.values = numbers()
        if source == "closure":
            self.count = counted_by_closure()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return getattr(self, f"from_{self.source}")(self.loss(batch), batch, batch_idx)  # type: ignore[no-any-return]

    def from_object(self, loss: Tensor, *_: Any) -> Tensor:
        return loss * self.schedule()

    def from_private(self, loss: Tensor, *_: Any) -> Tensor:
        self._cache[len(self._cache)] = True
        return loss * once(len(self._cache))

    def from_class(self, loss: Tensor, *_: Any) -> Tensor:
        self.seen.append(1)
        return loss * once(len(self.seen))

    def from_number(self, loss: Tensor, *_: Any) -> Tensor:
        return loss * by_global_number()

    def from_nested(self, loss: Tensor, *_: Any) -> Tensor:
        SEEN["inner"].append(1)
        return loss * once(len(SEEN["inner"]))

    def from_tensor(self, loss: Tensor, *_: Any) -> Tensor:
        SCALE.add_(1)
        return loss * torch.where(SCALE[0] == BAD + 2, torch.nan, 1.0)

    def from_file(self, loss: Tensor, *_: Any) -> Tensor:
        return loss * float(self.file.readline())

    def from_generator(self, loss: Tensor, *_: Any) -> Tensor:
        return loss * next(self.values)

    def from_closure(self, loss: Tensor, *_: Any) -> Tensor:
        return loss * self.count()  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _fresh_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("N_CALLS", 0), ("SCALE", torch.ones(3)), ("SEEN", {"inner": []})):
        monkeypatch.setitem(globals(), name, value)
    monkeypatch.setattr(Sources, "seen", [])


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("object", "attribute schedule (an object of Schedule)"),
        ("private", "attribute _cache (a dict)"),
        ("class", "class attribute Sources.seen (a list)"),
        ("number", "global N_CALLS (a value)"),
        ("nested", "global SEEN (a dict)"),
        ("tensor", "global SCALE (a tensor)"),
        ("file", "attribute file (a file)"),
        ("generator", "attribute values (an iterator)"),
        ("closure", "attribute count (a function with variables of its own)"),
    ],
)
def test_state_that_may_have_changed_is_named_and_not_the_hardware(source: str, named: str, tmp_path: Path) -> None:
    model = Sources(source, tmp_path / "numbers.txt")
    with pytest.raises(NonFiniteError) as caught:
        trainer(tmp_path, HaltOnNaN(), logger=False).fit(model, loader(64))
    if model.file is not None:
        model.file.close()
    error = caught.value
    assert error.step == BAD
    assert error.cause == NonFiniteCause.NOT_REPRODUCIBLE, str(error)
    assert f"the rerun began with these as the step had left them: {named}" in str(error)
    assert "hardware" not in str(error)


class Settled(Regression):
    """Holds much that a step could change, and does not. The exponent of one number flips once."""

    flips = 1

    def __init__(self) -> None:
        super().__init__()
        self.classes, self.config = ["a", "b"], SimpleNamespace(width=4, names=("x", "y"), deep={"k": [1, 2]})
        self.offset, self._table = torch.zeros(1), {"a": torch.ones(2)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch) * WEIGHTS.mean() * torch.tensor(2.0) * torch.from_numpy(TABLE).mean()
        loss = loss * torch.from_numpy(np.random.uniform(0.9, 1.1, 2).astype("float32")).mean()  # noqa: NPY002
        loss = loss * self._table["a"].mean() * len(CLASSES) * len(self.config.names) + self.offset.mean()
        if batch_idx == BAD and type(self).flips:
            type(self).flips -= 1
            return loss * torch.nan
        return loss


def test_the_hardware_is_suspected_where_nothing_is_known_to_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Settled, "flips", 1)
    with pytest.raises(NonFiniteError) as caught:
        trainer(tmp_path, HaltOnNaN(), logger=False).fit(Settled(), loader(64))
    text = str(caught.value)
    assert caught.value.cause == NonFiniteCause.NOT_REPRODUCIBLE
    assert "the hardware" in text


@pytest.mark.parametrize(
    ("clock", "named"),
    [
        (lambda: time.time(), "global time (the clock)"),  # noqa: PLW0108, it names the module
        (lambda: perf_counter(), "global perf_counter (the clock)"),  # noqa: PLW0108, it names the function
        (lambda: datetime.now(UTC), "global datetime (the clock)"),
        (lambda: token_bytes(1), "global token_bytes (the system's random numbers)"),
    ],
)
def test_a_step_that_looks_at_the_clock_is_not_proved_the_same(clock: Any, named: str, tmp_path: Path) -> None:
    class Timed(Settled):
        flips = 1

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.began = clock()
            return super().training_step(batch, batch_idx)

    with pytest.raises(NonFiniteError) as caught:
        trainer(tmp_path, HaltOnNaN(), logger=False).fit(Timed(), loader(64))
    assert named in str(caught.value)
    assert "hardware" not in str(caught.value)


class Circles(Regression):
    """Holds values that contain themselves, and more than is compared."""

    def __init__(self) -> None:
        super().__init__()

        def calls_itself(n: int) -> int:
            return calls_itself(n - 1) if n else 0

        self.calls_itself, self.method = calls_itself, self.configure_optimizers
        self.ring: list[Any] = [1]
        self.ring.append(self.ring)
        self.owner = Schedule()
        vars(self.owner).update(me=self.owner, method=self.owner.__call__)
        self.many, self.more, self.most = set(range(100_000)), list(range(100_000)), [[n] for n in range(3000)]


def test_values_that_contain_themselves_and_large_ones_end() -> None:
    model = Circles()
    state = OutsideState(model)
    unsure = ["attribute many (a set)", "attribute more (a list)", "attribute most (a list)"]
    assert sorted(state.changed()) == unsure
    model.ring.append(2)
    model.owner.n = 2
    assert state.changed()[:2] == ["attribute ring (a list)", "attribute owner (an object of Schedule)"]


class Loads(Mapping[str, Tensor]):
    """A mapping that loads what it is asked for, as of a file of features; and counts that."""

    def __init__(self) -> None:
        self.n_loaded = 0

    def __getitem__(self, key: str) -> Tensor:
        self.n_loaded += 1
        return torch.ones(3)

    def __iter__(self) -> Iterator[str]:
        return (str(n) for n in range(len(self)))

    def __len__(self) -> int:
        return 1000


class Connects:
    """An object that answers for another one far away."""

    asked: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.asked.append(name)
        return lambda *_: None


@pytest.mark.parametrize("make", [Loads, Connects, lambda: [Connects()]])
def test_to_look_at_the_objects_that_a_module_holds_runs_no_code_of_theirs(make: Any, tmp_path: Path) -> None:
    model = Regression()
    model.features = make()
    trainer(tmp_path, HaltOnNaN(), logger=False).fit(model, loader(8))
    OutsideState(model).changed()
    assert not isinstance(model.features, Loads) or model.features.n_loaded == 0
    assert Connects.asked == []


@functools.lru_cache
def cached(n: int) -> float:
    return float("nan") if n == BAD else 1.0


class Caches(Regression):
    """Keeps what a function gave; in a rerun it is not computed again."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        before = cached.cache_info().misses
        factor = cached(batch_idx)
        is_new = cached.cache_info().misses > before
        return self.loss(batch) * (factor if is_new else 1.0)


def test_a_cache_that_a_step_fills_is_named_and_not_the_hardware(tmp_path: Path) -> None:
    cached.cache_clear()
    with pytest.raises(NonFiniteError) as caught:
        trainer(tmp_path, HaltOnNaN(), logger=False).fit(Caches(), loader(64))
    assert (caught.value.step, caught.value.cause) == (BAD, NonFiniteCause.NOT_REPRODUCIBLE)
    assert "global cached" in str(caught.value)
    assert "hardware" not in str(caught.value)
