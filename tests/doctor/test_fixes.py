"""Each fix that the doctor prints is applied as it says, and the finding is gone; no entry of MISTAKES is left out."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_memtools.doctor import loader_checks
from lightning_memtools.doctor.findings import Finding
from lightning_memtools.doctor.mistakes import MISTAKES
from tests.doctor.specimens import HalfUsed, Paced, ZeroesGradients, doctored, found, network, rows, squared
from tests.lightning_models import loader

Patch = pytest.MonkeyPatch
Examine = Callable[[Patch], list[Finding]]


@dataclass(frozen=True)
class Fix:
    """A fix that the doctor prints.

    Attributes:
        mistake: Its name in MISTAKES.
        broken: Examines code with the mistake.
        mended: Examine the same code after the fix; one for each way that the fix offers.
        place: The finding's place, as a regular expression.
        evidence: Parts of the finding's evidence or effect.
        also: Other checks that find something serious.
    """

    mistake: str
    broken: Examine
    mended: tuple[Examine, ...]
    place: str = ".*"
    evidence: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


FIXES: list[Any] = []


def fix(mistake: str, broken: Examine, *mended: Examine, needs_cuda: bool = False, **facts: Any) -> None:
    marks = [pytest.mark.cuda_memory] if needs_cuda else []
    FIXES.append(pytest.param(Fix(mistake, broken, mended, **facts), id=mistake, marks=marks))


def loaded(state: dict[str, Any], model: Callable[[], nn.Module] = lambda: network(norm=True)) -> Examine:
    """Examine a model and the checkpoint that it is to load."""

    def examine(patch: Patch) -> list[Finding]:
        path = Path(patch.tmp_path) / "weights.pt"  # type: ignore[attr-defined]
        torch.save(state, path)
        return found(model(), rows(), checkpoint=str(path), steps=1)

    return examine


def stepping(
    step: Callable[..., Any], model: Callable[[], nn.Module] = network, loader: Any = None, **options: Any
) -> Examine:
    return lambda _: found(model(), loader or rows(), step, **options)


def adam(groups: Any) -> Any:
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


def optimizing(groups: Callable[[Any], Any], model: Callable[[], Any] = network, make: Any = adam) -> Examine:
    def examine(_: Patch) -> list[Finding]:
        one = model()
        return found(one, rows(), optimizer=make(groups(one)))

    return examine


# --- the data

fix(
    "batch_norm_one_sample",
    lambda _: found(network(norm=True), rows(33), steps=5),
    lambda _: found(network(norm=True), rows(33, drop_last=True), steps=5),
    lambda _: found(network(norm=True), rows(33, 11), steps=5),
    place="1", evidence=("33 samples in batches of 8", "one sample", "Expected more than 1 value"),
    also=("step",),  # the error that is predicted comes true
)  # fmt: skip


def workers(n: int, prefetch: int, free: int) -> Examine:
    def examine(patch: Patch) -> list[Finding]:
        patch.setattr(loader_checks, "free_shared_memory", lambda: free)
        loader = DataLoader(rows().dataset, 8, num_workers=n, prefetch_factor=prefetch)
        return found(network(), loader, steps=1)

    return examine


fix(  # 8 x (4 + 1) numbers of 4 bytes in a batch, 8 batches ahead
    "shared_memory", workers(2, 4, 640),
    workers(1, 4, 640), workers(2, 2, 640), workers(2, 4, 1280),
    evidence=("160 B, on 1 rank, need 1.25 KiB", "640 B were free", "bus error (insufficient shared memory)"),
)  # fmt: skip


# --- the plan of a Trainer


def trained(model: Callable[[], Any], **options: Any) -> Examine:
    """Examine a training of two epochs with eight batches each."""
    return lambda patch: doctored(patch.tmp_path, model(), loader(64), **options)  # type: ignore[attr-defined]


def in_one_cycle(interval: str) -> Paced:
    return Paced(
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=16), interval=interval
    )


fix(
    "scheduler_interval", trained(lambda: in_one_cycle("epoch")), trained(lambda: in_one_cycle("step")),
    place="OneCycleLR", evidence=("16 steps", "once per epoch, 2 times in this training. It has 16 updates"),
)  # fmt: skip

# --- the checkpoint

STATE = network(norm=True).state_dict()
NO_COUNTERS = {key: value for key, value in STATE.items() if "num_batches" not in key}


def versioned(state: Any) -> Any:
    """As a state_dict that says that its BatchNorm counts; without it torch adds the counters itself."""
    state = type(STATE)(state)
    state._metadata = STATE._metadata  # type: ignore[attr-defined]
    return state


def no_statistics() -> nn.Module:
    model = network(norm=True)
    model[1] = nn.BatchNorm1d(8, track_running_stats=False)
    return model


fix(
    "checkpoint_keys/statistics",
    loaded(versioned(NO_COUNTERS)), loaded(versioned({**NO_COUNTERS, "1.num_batches_tracked": torch.tensor(0)})),
    place=r".*weights\.pt: 1\.num_batches_tracked", evidence=("Missing: 1.num_batches_tracked", "0.4.1"),
)  # fmt: skip
fix(
    "checkpoint_keys/statistics",
    loaded(STATE, no_statistics), loaded({key: STATE[key] for key in no_statistics().state_dict()}, no_statistics),
    evidence=("Unexpected: 1.running_mean, 1.running_var, 1.num_batches_tracked",),
)  # fmt: skip
fix(
    "checkpoint_keys/others",
    loaded(network(6, norm=True).state_dict()),
    loaded(STATE), loaded(network(6, norm=True).state_dict(), lambda: network(6, norm=True)),
    evidence=("size mismatch for 0.weight",),
)  # fmt: skip
fix(
    "checkpoint_keys/others",
    loaded({key.replace("0.weight", "0.kernel"): value for key, value in STATE.items()}), loaded(STATE),
    evidence=("Missing: 0.weight. Unexpected: 0.kernel.",),
)  # fmt: skip
# --- parameters and optimizers


def half_frozen() -> HalfUsed:
    model = HalfUsed()
    model.unused.requires_grad_(requires_grad=False)
    return model


def first_frozen() -> nn.Sequential:
    model = network()
    model[0].requires_grad_(requires_grad=False)
    return model


def dead(bias: float = -100) -> Any:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    nn.init.constant_(model[0].bias, bias)
    return model


def decayed(optimizer: Callable[..., Any]) -> Examine:
    """Examine a module whose second part had a gradient once, which zero_grad() may leave there as zeros."""

    def examine(_: Patch) -> list[Finding]:
        model = nn.ModuleDict({"one": network(), "other": nn.Linear(3, 2)})
        for parameter in model["other"].parameters():
            parameter.grad = torch.zeros_like(parameter)
        made = optimizer(model.parameters(), lr=0.01, weight_decay=0.1)
        return found(model, rows(), lambda m, batch: squared(m.get_submodule("one"), batch), optimizer=made)

    return examine


fix(
    "optimizer_parameters",
    optimizing(lambda m: m[2].parameters()), optimizing(lambda m: m.parameters()),
    optimizing(lambda m: m[2].parameters(), first_frozen),
    place=r"0\.weight, 0\.bias", evidence=("2 parameters",),
)  # fmt: skip
fix(
    "missing_gradients/none",
    lambda _: found(dead(), rows()),
    lambda _: found(dead(0.1), rows()),
    place=r"0\.weight, .*",
)


def checkpointed(*, reentrant: bool) -> Examine:
    return stepping(lambda m, b: F.mse_loss(m[1:](checkpoint(m[0], b[0], use_reentrant=reentrant)), b[1]))


def chained(*, frozen: bool = False) -> Any:
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 1)})
    model["first"].requires_grad_(requires_grad=not frozen)
    return model


def through(model: Any, batch: Any) -> Any:
    return F.mse_loss(model["second"](model["first"](batch[0])), batch[1])


def detached(model: Any, batch: Any) -> Any:
    return F.mse_loss(model["second"](model["first"](batch[0]).detach()), batch[1])


fix("missing_gradients/none", checkpointed(reentrant=True), checkpointed(reentrant=False), place="0")
fix(
    "missing_gradients/none",
    stepping(detached, chained), stepping(detached, lambda: chained(frozen=True)), stepping(through, chained),
    place="first", evidence=("2 parameters", "at all of 8 updates"),
)  # fmt: skip
fix(
    "missing_gradients/shrunk",
    optimizing(lambda m: m.parameters(), HalfUsed),
    optimizing(lambda m: [
        {"params": m.used.parameters()}, {"params": m.unused.parameters(), "weight_decay": 0.0}
    ], HalfUsed),
    optimizing(lambda m: [p for p in m.parameters() if p.requires_grad], half_frozen),
    place="unused",
    evidence=("2 parameters", "or zeros, at all of 8 updates", "shrank unused.",
              "0.001 of its norm"),  # lr x weight_decay
)  # fmt: skip
fix("missing_gradients/shrunk", decayed(ZeroesGradients), decayed(torch.optim.SGD))


def constant(*, mended: bool) -> Examine:
    def examine(_: Patch) -> list[Finding]:
        model: Any = network()
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.01)
        if mended:
            nn.init.kaiming_uniform_(model[0].weight)
        return found(model, rows())

    return examine


fix(
    "symmetric_weights", constant(mended=False), constant(mended=True),
    place=r"0\.weight", evidence=("All 8 rows of 0.weight", "first gradient", "the capacity of one"),
)  # fmt: skip

# --- modules, devices and the seed


def evaluated(evaluate: Callable[..., Any], **options: Any) -> Examine:
    return lambda _: found(network(**options), rows(), val_dataloader=rows(16), evaluate=evaluate, steps=3)


fix(
    "evaluation_graphs",
    evaluated(squared), evaluated(torch.no_grad()(squared)), evaluated(lambda m, batch: squared(m, batch).detach()),
    evidence=("1 output of an evaluation batch",),
)  # fmt: skip


def pretrained(*, in_eval: bool = False) -> nn.Sequential:
    """A frozen part with BatchNorm, and a head; the loop calls train() in each step, as older ones do."""
    model = nn.Sequential(network(4, norm=True), nn.Linear(1, 1))
    model[0].requires_grad_(requires_grad=False)
    if in_eval:
        model[0].eval()
    return model


fix(
    "frozen_batch_norm",
    *(lambda _, how=how: found(pretrained(in_eval=how), rows()) for how in (False, True)),
    place=r"0\.1", evidence=("8 steps have written the running statistics", "overwritten"),
)  # fmt: skip


def left_behind(*, mended: bool) -> Examine:
    def examine(_: Patch) -> list[Finding]:
        model = network().cuda()
        model[0].register_buffer("scale", torch.ones(3))
        if mended:
            model.to("cuda:0")
        return found(model, rows())

    return examine


class Scaled(nn.Module):
    def __init__(self, *, is_buffer: bool) -> None:
        super().__init__()
        self.net = network()
        if is_buffer:
            self.register_buffer("scale", torch.ones(4), persistent=False)
        else:
            self.scale = torch.ones(4)

    def forward(self, x: Tensor) -> Any:
        return self.net(x * self.scale)


fix(
    "devices", left_behind(mended=False), left_behind(mended=True), needs_cuda=True,
    place=r"0\.scale", evidence=("0.scale is on cpu", "not on cuda:0"),
)  # fmt: skip
fix(
    "devices/plain",
    *(lambda _, how=how: found(Scaled(is_buffer=how).cuda(), rows()) for how in (False, True)), needs_cuda=True,
    place="scale", also=("step",),
)  # fmt: skip


def seeded(*, by_lightning: bool) -> Examine:
    def examine(patch: Patch) -> list[Finding]:
        patch.delenv("PL_GLOBAL_SEED", raising=False)
        model = network()
        if by_lightning:
            patch.setenv("PL_GLOBAL_SEED", "0")  # as seed_everything does; setenv is undone after the test
            torch.manual_seed(0)
        else:
            patch.setattr(torch, "initial_seed", lambda: 2**50)
        return found(model, rows(), steps=1)

    return examine


fix("reproducibility", seeded(by_lightning=False), seeded(by_lightning=True), evidence=(f"{2**50}",))

# --- the loss and what is kept of it


def summing(detach: Callable[[Tensor], Tensor]) -> Examine:
    total: list[Any] = [0]
    outputs: list[Any] = []

    def step(model: nn.Module, batch: Any) -> Any:
        out = model(batch[0])
        loss = F.mse_loss(out, batch[1])
        total[0] = total[0] + detach(loss)
        outputs.append(detach(out))
        return loss

    return stepping(step)


def flat(change: Callable[[Any, Any], tuple[Any, Any]]) -> Examine:
    def step(model: nn.Module, batch: Any) -> Any:
        prediction, target = change(model(batch[0]), batch[1])
        return (prediction - target).square().mean()

    return stepping(step, loader=rows(flat=True))


def failing(model: nn.Module, batch: Any) -> Any:
    raise KeyError("the user's own mistake")


fix("retained_graphs", summing(lambda x: x), summing(Tensor.detach))
fix(
    "loss_broadcast",
    flat(lambda p, y: (p, y)), flat(lambda p, y: (p, y.unsqueeze(1))), flat(lambda p, y: (p.squeeze(1), y)),
    place=r"Sub at tests/doctor/test_fixes\.py:\d+", evidence=("(8, 1) broadcasts to (8, 8)",),
)  # fmt: skip
fix(
    "loss_sum",
    stepping(lambda m, b: F.mse_loss(m(b[0]), b[1], reduction="sum"), steps=1),
    stepping(lambda m, b: F.mse_loss(m(b[0]), b[1], reduction="mean"), steps=1),
    stepping(lambda m, b: F.mse_loss(m(b[0]), b[1], reduction="sum") / len(b[0]), steps=1),
    stepping(lambda m, b: ((m(b[0]) - b[1]) ** 2).sum() / len(b[0])),
    place=r"MseLoss at tests/doctor/test_fixes\.py:\d+",
    evidence=("8 values of shape (8, 1) over 8 samples", "the weight 1; in a mean over the samples it is 0.125"),
)  # fmt: skip
fix("step", stepping(failing), stepping(squared), evidence=("KeyError", "the user's own mistake"))


@pytest.mark.filterwarnings("ignore:.*(target size|requires_grad=True).*")
@pytest.mark.parametrize("case", FIXES)
def test_the_fix_makes_the_finding_disappear(case, monkeypatch, tmp_path):
    monkeypatch.tmp_path = tmp_path
    check = case.mistake.partition("/")[0]
    findings = case.broken(monkeypatch)
    named = [one for one in findings if one.check == check]
    assert [one.severity for one in named] == [MISTAKES[case.mistake][0]]
    (finding,) = named
    assert re.fullmatch(case.place, finding.place, re.DOTALL)
    assert [part for part in case.evidence if part not in f"{finding.evidence} {finding.effect}"] == []
    assert {one.check for one in findings if one.severity != "info"} - {check} == set(case.also)
    for mended in case.mended:
        with pytest.MonkeyPatch.context() as patch:
            patch.tmp_path = tmp_path
            left = mended(patch)
        assert [str(one) for one in left if one.fix == finding.fix or one.severity != "info"] == []


def test_every_fix_is_applied_here_and_takes_one_line():
    assert {parameter.values[0].mistake for parameter in FIXES} == set(MISTAKES)
    assert [text for _, *texts in MISTAKES.values() for text in texts if len(text) > 120 or "\n" in text] == []
