"""Updates that make NaN or Inf out of finite gradients: found in their own step, named, and undone where asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memtools.callbacks.halt_on_nan import HaltOnNaN
from lightning_memtools.nonfinite.diagnosis import NonFiniteCause
from lightning_memtools.nonfinite.update_veto import WeightBounds
from tests.lightning_models import Regression, loader, trainer
from tests.nonfinite.observe import differences, error_at_halt, state_bits

BAD = 3


class Updates(Regression):
    """Good until the update of one step."""

    n = -1

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == BAD:
            self.before = state_bits(self, self.trainer.optimizers)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.n += 1
        if self.n == BAD:
            self.spoil(optimizer)

    def spoil(self, optimizer: Any) -> None:
        """Make the coming update bad."""


class HalfEps(Updates):
    """Float16 weights under AdamW: in one step its eps is 0 in float16, and its averages of squares are."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1, dtype=torch.float16)

    def loss(self, batch):
        return self.net(batch[0].half()).float().square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == BAD:
            for state in self.trainer.optimizers[0].state.values():
                state["exp_avg_sq"].zero_()
        super().on_train_batch_start(batch, batch_idx)

    def spoil(self, optimizer: Any) -> None:
        optimizer.param_groups[0]["eps"] = 1e-8
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad[..., 0] = 1e-5


class Overflows(Updates):
    """Plain SGD with a rate that is far too large in one step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def spoil(self, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 1e38
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.add_(100)


class Hooked(Overflows):
    """A hook of the optimizer's own divides weights by their norm, which is 0 in one step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
        optimizer.register_step_post_hook(self.normalise)
        return optimizer

    def normalise(self, *_: Any) -> None:
        with torch.no_grad():
            weight: Tensor = next(self.parameters())
            weight.div_(0.0 if self.n == BAD else 1.0)

    def spoil(self, optimizer: Any) -> None:
        """Leave it to the hook."""


class Divides(torch.optim.SGD):
    """An optimizer of the user's that divides by a number that is 0 in one step."""

    n = -1

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.n += 1
        with torch.no_grad():
            self.param_groups[0]["params"][0].div_(0.0 if self.n == BAD else 1.0)
        return loss


class Own(Updates):
    def configure_optimizers(self) -> Any:
        return Divides(self.parameters(), lr=1e-3)


class State(Overflows):
    """SGD whose momentum is infinite before one update."""

    fused = False

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9, fused=self.fused)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == BAD:
            next(iter(self.trainer.optimizers[0].state.values()))["momentum_buffer"].fill_(torch.inf)
        super().on_train_batch_start(batch, batch_idx)

    def spoil(self, optimizer: Any) -> None:
        """Leave it to the state."""


class FusedState(State):
    fused = True


class FusedOverflows(Overflows):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3, fused=True)


NAMES = {
    HalfEps: "eps=1e-08 of AdamW is 0",
    Overflows: "after the update of step 3 by SGD: the update itself overflowed at a learning rate of 1e+38",
    Hooked: "SGD calls Hooked.normalise after its step",
    Own: "the arithmetic of Divides.step made it (learning rate 0.001)",
    State: "its state momentum_buffer of net.0.weight (64 Inf of 64, 100%) is not finite (learning rate 0.001)",
    FusedState: "its state momentum_buffer of net.0.weight (64 Inf of 64, 100%) is not finite (learning rate 0.001)",
    FusedOverflows: "the update itself overflowed at a learning rate of 1e+38",
}


@pytest.mark.parametrize("undo", [False, True])
@pytest.mark.parametrize("kind", NAMES)
def test_an_update_that_is_bad_itself_is_found_in_its_step_and_named(kind: Any, undo: bool, tmp_path: Path) -> None:
    model = kind()
    error = error_at_halt(model, loader(64), tmp_path, undo_updates=undo)
    assert (error.step, error.batch_idx, error.cause) == (
        BAD,
        BAD,
        NonFiniteCause.EXPLODING if kind in {Overflows, FusedOverflows} else NonFiniteCause.UPDATE,
    )
    assert NAMES[kind] in str(error)
    left = differences(model.before, state_bits(model, model.trainer.optimizers))
    if undo:
        assert left in ([], ["optimizer0.lr0"]), "the rate is the user's own"
        if issubclass(kind, State):
            assert "not written: momentum_buffer of net.0.weight" in str(error)
        assert (error.checkpoint_path is None) == issubclass(kind, State), "its state was infinite before the update"
        assert "are those before the step" in str(error)
    else:
        assert left
        assert error.checkpoint_path is None
        assert "the update was made before" in str(error)
        assert "made bad by this update" in str(error)
    assert model.trainer.global_step == BAD


class Wraps(Regression):
    """Divides weights by their norm, which is 0 in one step, around the optimizer's step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        with torch.no_grad():
            next(self.parameters()).div_(0.0 if batch_idx == BAD else 1.0)


def test_weights_that_a_users_own_optimizer_step_makes_bad_are_found_in_the_same_step(tmp_path: Path) -> None:
    error = error_at_halt(Wraps(), loader(64), tmp_path)
    assert error.step == BAD
    assert error.cause != NonFiniteCause.BAD_PARAMETER
    assert "net.0.weight (64 Inf of 64, 100%)" in str(error)


@pytest.mark.parametrize("undo", [False, True])
def test_adamw_with_its_own_eps_in_16_true_is_named_in_the_first_step(undo: bool, tmp_path: Path) -> None:
    class Half(Regression):
        """Gradients whose squares are 0 in float16, and so is eps."""

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

        def loss(self, batch: Any) -> Tensor:
            return self.net(batch[0].half()).float().square().mean() * 1e-3  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    model = Half()
    error = error_at_halt(model, loader(64), tmp_path, undo_updates=undo, options={"precision": "16-true"})
    assert (error.step, error.cause) == (0, NonFiniteCause.UPDATE)
    assert "eps=1e-08 of AdamW is 0" in str(error)
    assert all(torch.isfinite(value).all() for value in model.state_dict().values()) == undo


@pytest.mark.parametrize("kind", [Hooked, Own])
def test_such_an_update_can_be_skipped_where_it_can_be_undone(kind: Any, tmp_path: Path) -> None:
    model = kind()
    run = trainer(tmp_path, HaltOnNaN(max_skips=1, undo_updates=True), logger=False)
    run.fit(model, loader(64))
    assert run.global_step == 8
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


def test_a_weight_whose_norm_overflows_is_no_bad_update(tmp_path: Path) -> None:
    class Large(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.large = nn.Parameter(torch.full((4,), 1e30))

        def loss(self, batch):
            return super().loss(batch) + (self.large * 1e-35).sum()

    run = trainer(tmp_path, HaltOnNaN(), logger=False)
    run.fit(Large(), loader(64))
    assert run.global_step == 8


@pytest.mark.parametrize("fused", [False, True])
def test_weights_that_were_bad_before_are_not_blamed_on_an_update(fused: bool, tmp_path: Path) -> None:
    class Masked(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.spoilt = nn.Parameter(torch.tensor([1.0, torch.nan]))

        def loss(self, batch):
            return super().loss(batch) + self.spoilt[0] ** 2

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3, fused=fused)

    run = trainer(tmp_path, HaltOnNaN(), logger=False)
    run.fit(Masked(), loader(64))
    assert run.global_step == 8


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_weights_that_an_update_cannot_make_bad_are_read_once_in_51_steps(kind: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer, bounds = kind([weight], lr=1e-2), WeightBounds()
    assert not bounds.hold(optimizer, 1.0), "nothing is known of the weights yet"
    bounds.read(optimizer, 1.7, [weight])
    assert [bounds.hold(optimizer, 1.0) for _ in range(51)] == [True] * 50 + [False]


UNSURE = {
    "a large gradient": lambda bounds, optimizer, _: bounds.hold(optimizer, 1e13),
    "a NaN norm": lambda bounds, optimizer, _: bounds.hold(optimizer, torch.nan),
    "a large rate": lambda bounds, optimizer, group: group.update(lr=1e9) or bounds.hold(optimizer, 1.0),
    "a rate in a tensor": lambda bounds, optimizer, group: group.update(lr=torch.ones(())) or bounds.hold(optimizer, 1),
    "eps 0": lambda bounds, optimizer, group: group.update(eps=0.0) or bounds.hold(optimizer, 1.0),
    "decay": lambda bounds, optimizer, group: group.update(weight_decay=1e9) or bounds.hold(optimizer, 1.0),
    "betas": lambda bounds, optimizer, group: group.update(betas=(0.9, 1.0)) or bounds.hold(optimizer, 1.0),
    "a hook": lambda bounds, optimizer, _: (
        optimizer.register_step_post_hook(lambda *_: None) and bounds.hold(optimizer, 1.0)
    ),
}


@pytest.mark.parametrize("name", UNSURE)
def test_weights_are_read_where_the_update_may_make_them_bad(name: str) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer, bounds = torch.optim.AdamW([weight], lr=1e-2), WeightBounds()
    bounds.read(optimizer, 1.7, [weight])
    assert bounds.hold(optimizer, 1.0)
    assert not UNSURE[name](bounds, optimizer, optimizer.param_groups[0])
    optimizer.param_groups[0].update(lr=1e-2, eps=1e-8, weight_decay=0.0, betas=(0.9, 0.999))
    assert not bounds.hold(optimizer, 1.0), "from then on nothing is known until they are read again"


@pytest.mark.parametrize(("norm", "dtype"), [(1e21, torch.float32), (torch.inf, torch.float32), (1.0, torch.float16)])
def test_large_or_narrow_weights_are_read_after_each_update(norm: float, dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer, bounds = torch.optim.AdamW([weight]), WeightBounds()
    bounds.read(optimizer, norm, [weight])
    assert not bounds.hold(optimizer, 1.0)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("fused", [False, True])
def test_the_largest_updates_that_are_not_read_leave_weights_finite(kind: Any, fused: bool) -> None:
    """Gradients, rate and eps at the ends of what is held to be sure, and weights that were last read at theirs."""
    weight = torch.nn.Parameter(torch.full((4,), 4e19))
    extreme: dict[str, Any] = {"lr": 1.0, "fused": fused, "weight_decay": 1.0}
    extreme |= {"momentum": 0.998} if kind is torch.optim.SGD else {"eps": 1e-12, "betas": (0.0, 0.9998)}
    optimizer, bounds = kind([weight], **extreme), WeightBounds()
    bounds.read(optimizer, 9e19, [weight])
    n = 0
    while bounds.hold(optimizer, 9e11):
        weight.grad = torch.tensor([4e11, -4e11, 1e-30, 0.0])
        optimizer.step()
        n += 1
    assert n == 50
    assert torch.isfinite(weight).all()
