"""Each fix that the doctor prints is applied as it says, and the finding is gone; and no finding is left out here."""

from __future__ import annotations

import ast
import itertools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import lightning_memtools.doctor
from lightning_memtools import VirtualDevice
from lightning_memtools.doctor import loader_checks, step_trial
from lightning_memtools.doctor.findings import Finding
from lightning_memtools.doctor.parameter_checks import SymmetricWeights
from lightning_memtools.doctor.settings_checks import RejectedSettings
from lightning_memtools.doctor.training_case import TrainingCase
from tests.doctor.specimens import HalfUsed, ZeroesGradients, found, network, rows, squared

Patch = pytest.MonkeyPatch
Examine = Callable[[Patch], list[Finding]]


@dataclass(frozen=True)
class Fix:
    """A fix that the doctor prints.

    Attributes:
        check: The check's name.
        text: A part of the fix that tells it from the others of its check.
        broken: Examines code with the mistake.
        mended: Examine the same code after the fix; one for each way that the fix offers.
        facts: Of the finding: its severity, its place as a regular expression, parts of its evidence, effect and fix;
            `also`: other checks that find something serious.
    """

    check: str
    text: str
    broken: Examine
    mended: tuple[Examine, ...]
    facts: dict[str, Any]

    def left_out(self, finding: Finding) -> list[str]:
        """Return the facts that the finding does not state."""
        left = []
        for name in ("evidence", "effect", "fix"):
            parts = self.facts.get(name, ())
            left += [
                part for part in ([parts] if isinstance(parts, str) else parts) if part not in getattr(finding, name)
            ]
        if not re.fullmatch(self.facts.get("place", ".*"), finding.place, re.DOTALL):
            left.append(finding.place)
        return left if finding.severity == self.facts.get("severity", finding.severity) else [*left, finding.severity]


FIXES: list[Any] = []


def fix(check: str, text: str, broken: Examine, *mended: Examine, needs_cuda: bool = False, **facts: Any) -> None:
    marks = [pytest.mark.cuda_memory] if needs_cuda else []
    FIXES.append(pytest.param(Fix(check, text, broken, mended, facts), id=f"{check}-{text[:24]}", marks=marks))


def loaded(state: dict[str, Any] | bytes, model: nn.Module | None = None) -> Examine:
    """Examine a model and the checkpoint that it is to load."""

    def examine(patch: Patch) -> list[Finding]:
        path = Path(patch.tmp_path) / "weights.pt"  # type: ignore[attr-defined]
        path.write_bytes(state) if isinstance(state, bytes) else torch.save(state, path)
        return found(network(norm=True) if model is None else model, rows(), checkpoint=str(path), steps=1)

    return examine


def stepping(
    step: Callable[..., Any], model: Callable[[], nn.Module] = network, loader: Any = None, **options: Any
) -> Examine:
    return lambda _: found(model(), loader or rows(), step, **options)


def adam(groups: Any) -> Any:
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


def one_each(groups: Any) -> Any:
    return [torch.optim.SGD(groups[0], lr=0.01), adam(groups[1])]


def optimizing(groups: Callable[[Any], Any], model: Callable[[], Any] = network, make: Any = adam) -> Examine:
    def examine(_: Patch) -> list[Finding]:
        one = model()
        return found(one, rows(), optimizer=make(groups(one)))

    return examine


# --- the data

fix(
    "batch_norm_one_sample", "drop_last=True",
    lambda _: found(network(norm=True), rows(33), steps=2),
    lambda _: found(network(norm=True), rows(33, drop_last=True), steps=2),
    lambda _: found(network(norm=True), rows(33, 11), steps=2),
    severity="error", place="1", evidence=("33 samples in batches of 8", "one sample", "more than 1 value"),
)  # fmt: skip


def workers(n: int, prefetch: int, free: int) -> Examine:
    def examine(patch: Patch) -> list[Finding]:
        patch.setattr(loader_checks, "free_shared_memory", lambda: free)
        loader = DataLoader(rows().dataset, 8, num_workers=n, prefetch_factor=prefetch)
        return found(network(), loader, steps=1)

    return examine


fix(  # 8 x (4 + 1) numbers of 4 bytes in a batch, 8 batches ahead
    "shared_memory", "Fewer workers", workers(2, 4, 640),
    workers(1, 4, 640), workers(2, 2, 640), workers(2, 4, 1280), evidence=("160 B need 1.25 KiB", "640 B were free"),
    effect="bus error (insufficient shared memory)",
)  # fmt: skip


def less_the_mean(model: nn.Module, batch: Any) -> Any:
    x, y = batch
    x -= x.mean(0)
    return F.mse_loss(model(x), y)


def copied_first(model: nn.Module, batch: Any) -> Any:
    return less_the_mean(model, [batch[0].clone(), batch[1]])


def out_of_place(model: nn.Module, batch: Any) -> Any:
    x, y = batch
    return F.mse_loss(model(x - x.mean(0)), y)


fix(
    "changed_batch", "Work on a copy",
    lambda _: found(network(), list(rows()), less_the_mean),
    lambda _: found(network(), list(rows()), copied_first),
    lambda _: found(network(), list(rows()), out_of_place),
    lambda _: found(network(), list(rows())),
    severity="warning", evidence=("float32[8, 4] of its batch", "data set's own"),
)  # fmt: skip
# A collated batch is a copy.
fix("changed_batch", "Work on a copy", stepping(less_the_mean), stepping(out_of_place), severity="info")


class Slow(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.005)
        return super().__getitem__(index)


def busy(model: nn.Module, batch: Any) -> Any:
    time.sleep(0.03)  # so that a worker is ready before the next step
    return squared(model, batch)


MANY: Any = rows(96).dataset
SLOW = Slow(*MANY.tensors)
fix(
    "data_waiting", "num_workers",
    lambda _: found(network(), DataLoader(SLOW, 8), busy, steps=10),
    lambda _: found(network(), DataLoader(SLOW, 8, num_workers=2, persistent_workers=True), busy, steps=10),
    lambda _: found(network(), DataLoader(MANY, 8), busy, steps=10),
    severity="info", evidence="of the time of 6 steps",  # a CPU is not idle meanwhile: it loads the data
)  # fmt: skip

# --- the checkpoint

STATE = network(norm=True).state_dict()
OTHER_SIZE = network(6, norm=True).state_dict()
NO_COUNTERS = {key: value for key, value in STATE.items() if "num_batches" not in key}


def versioned(state: Any) -> Any:
    """As a state_dict that says that its BatchNorm counts; without it torch adds the counters itself."""
    state = type(STATE)(state)
    state._metadata = STATE._metadata  # type: ignore[attr-defined]
    return state


class Wrapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network(norm=True)

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


def no_statistics() -> nn.Module:
    model = network(norm=True)
    model[1] = nn.BatchNorm1d(8, track_running_stats=False)
    return model


fix(  # what torch raises depends on the first bytes: "ha" asks for entry 97 of an empty memo
    "checkpoint_keys", "Check that it is a checkpoint", loaded(b"half of a download"), loaded(STATE),
    severity="error", place=".*/weights.pt", evidence="KeyError: 97. It is no zip file",
)  # fmt: skip
fix(
    "checkpoint_keys", "Save the state_dict alone",
    loaded({"state_dict": STATE, "step": Fix}), loaded(STATE), loaded({"state_dict": STATE, "epoch": 3}),
    severity="info",  # objects that would run code are no mistake
)  # fmt: skip
fix(
    "checkpoint_keys", "Add state[key] = torch.tensor(0)",
    loaded(versioned(NO_COUNTERS)), loaded(versioned({**NO_COUNTERS, "1.num_batches_tracked": torch.tensor(0)})),
    place=r".*weights\.pt: 1\.num_batches_tracked", evidence="PyTorch 0.4.1",
    effect="load_state_dict raises 'Missing key(s)'",
)  # fmt: skip
fix(
    "checkpoint_keys", "remove these keys",
    loaded(STATE, no_statistics()), loaded(STATE),
    loaded({key: STATE[key] for key in no_statistics().state_dict()}, no_statistics()),
    place=r".*1\.num_batches_tracked.*", evidence="3 statistics of BatchNorm",
    effect="load_state_dict raises 'Unexpected key(s)'",
)  # fmt: skip
fix(
    "checkpoint_keys", "Build the model with the sizes",
    loaded(OTHER_SIZE), loaded(OTHER_SIZE, network(6, norm=True)),
    evidence="0.weight is torch.Size([6, 4]) in the checkpoint and torch.Size([8, 4])",
)  # fmt: skip
fix(
    "checkpoint_keys", ".removeprefix(", loaded({f"module.{key}": value for key, value in STATE.items()}), loaded(STATE)
)
fix(
    "checkpoint_keys", " + key: value",
    loaded(STATE, Wrapping()), loaded({f"net.{key}": value for key, value in STATE.items()}, Wrapping()),
)  # fmt: skip
fix(
    "checkpoint_keys", "rename the keys",
    loaded({key.replace("0.weight", "0.weights"): value for key, value in STATE.items()}), loaded(STATE),
    evidence=("1 missing (0.weight) and 1 unexpected (0.weights)", "may be called 0.weights"),
)  # fmt: skip

# --- parameters and optimizers

Half: Any = lambda: nn.ModuleDict({"one": network(), "other": nn.Linear(3, 2)})  # noqa: E731


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


def one_of_two(model: Any, batch: Any) -> Any:
    return squared(model["one"], batch)


def decayed(optimizer: Callable[..., Any]) -> Examine:
    """Examine a module whose second part had a gradient once, which zero_grad() may leave there as zeros."""

    def examine(_: Patch) -> list[Finding]:
        model: Any = Half()
        for parameter in model["other"].parameters():
            parameter.grad = torch.zeros_like(parameter)
        made = optimizer(model.parameters(), lr=0.01, weight_decay=0.1)
        return found(model, rows(), one_of_two, optimizer=made)

    return examine


fix(
    "optimizer_parameters", "Give each parameter to one group",
    optimizing(lambda m: [m.parameters(), m[2].parameters()], make=one_each),
    optimizing(lambda m: [m[0].parameters(), m[2].parameters()], make=one_each),
    place=r"2\.weight, 2\.bias", evidence="optimizer 0 (SGD) and in group 0 of optimizer 1 (AdamW)",
)  # fmt: skip
fix(
    "optimizer_parameters", "if p.requires_grad",
    optimizing(lambda m: m.parameters(), first_frozen),
    optimizing(lambda m: [p for p in m.parameters() if p.requires_grad], first_frozen),
    severity="info", place=r"0\.weight, 0\.bias",
)  # fmt: skip
fix(
    "optimizer_parameters", "Add them to the optimizer",
    optimizing(lambda m: m[2].parameters()), optimizing(lambda m: m.parameters()),
    optimizing(lambda m: m[2].parameters(), first_frozen),
    place=r"0\.weight, 0\.bias", evidence=("2 parameters", "(160 bytes after 3 steps)"),
)  # fmt: skip
fix(
    "missing_gradients", "Follow their output to the loss",
    lambda _: found(dead(), rows()), lambda _: found(dead(0.1), rows()),
)  # fmt: skip
fix(
    "missing_gradients", "use_reentrant=False",
    *(
        stepping(lambda m, b, how=how: F.mse_loss(m[1:](checkpoint(m[0], b[0], use_reentrant=how)), b[1]))
        for how in (True, False)
    ),
    severity="warning", place="0", fix="checkpoint(..., use_reentrant=False)",
)  # fmt: skip
chained: Any = lambda: nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 1)})  # noqa: E731


def chained_and_frozen() -> Any:
    model = chained()
    model["first"].requires_grad_(requires_grad=False)
    return model


def through(model: Any, batch: Any) -> Any:
    return F.mse_loss(model["second"](model["first"](batch[0])), batch[1])


def detached(model: Any, batch: Any) -> Any:
    return F.mse_loss(model["second"](model["first"](batch[0]).detach()), batch[1])


fix(
    "missing_gradients", "Nothing, if the loss leaves them out",
    stepping(detached, chained), stepping(detached, chained_and_frozen), stepping(through, chained),
    severity="info", place="first", evidence=("2 parameters", "in any of 8 steps"), fix="detach()",
)  # fmt: skip
fix(
    "missing_gradients", "Put them into a group with weight_decay=0",
    optimizing(lambda m: m.parameters(), HalfUsed),
    optimizing(lambda m: [
        {"params": m.used.parameters()}, {"params": m.unused.parameters(), "weight_decay": 0.0}
    ], HalfUsed),
    optimizing(lambda m: [p for p in m.parameters() if p.requires_grad], half_frozen),
    severity="warning", place=r"unused\.weight, unused\.bias",
    evidence=("2 parameters", "exactly zero in all of 8 steps", "weight_decay=0.1 shrank unused.",
              "0.001 of its norm"),  # lr x weight_decay
    effect="63% are lost in 1000 such steps",  # 1 - 0.999 ** 1000
)  # fmt: skip
fix("missing_gradients", "let zero_grad() set gradients to None", decayed(ZeroesGradients), decayed(torch.optim.SGD))


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
    "symmetric_weights", "nn.init.kaiming_uniform_", constant(mended=False), constant(mended=True),
    place=r"0\.weight", evidence=("All 8 rows of 0.weight", "first gradient"), effect="the capacity of one",
)  # fmt: skip

# --- modules and devices


def partly_in_eval(*, training: bool = False, frozen: bool = False) -> nn.Sequential:
    part = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)).eval()
    model = nn.Sequential(nn.Linear(4, 4), part, nn.Linear(4, 1))
    if training:
        model[1].train()
    part.requires_grad_(not frozen)
    return model


def evaluated(evaluate: Callable[..., Any], **options: Any) -> Examine:
    return lambda _: found(network(**options), rows(), val_dataloader=rows(16), evaluate=evaluate, steps=3)


fix(
    "module_modes", ".train() before training",
    *(lambda _, how=how: found(partly_in_eval(**how), rows()) for how in ({}, {"training": True}, {"frozen": True})),
    place="1", evidence="with 1 Dropout",
)  # fmt: skip
fix(
    "module_modes", "Call model.eval() before evaluation",
    evaluated(torch.no_grad()(squared), norm=True),
    evaluated(torch.no_grad()(lambda m, batch: squared(m.eval(), batch)), norm=True),
    place="1", evidence="changed their running statistics",
)  # fmt: skip
fix(
    "evaluation_graphs", "with torch.no_grad()",
    evaluated(squared), evaluated(torch.no_grad()(squared)), evaluated(lambda m, batch: squared(m, batch).detach()),
    evidence="1 output of an evaluation batch",
)  # fmt: skip


def thrown_away(model: nn.Module, batch: Any) -> Any:
    x, y = batch
    x.to("cpu")
    return F.mse_loss(model(x), y)


def assigned(model: nn.Module, batch: Any) -> Any:
    model.to("cpu")  # a module moves in place
    x = batch[0].to("cpu")
    return F.mse_loss(model(x), batch[1].cpu())


fix(
    "devices", "Assign the result: x = ", stepping(thrown_away), stepping(assigned),
    place=r"tests/doctor/test_fixes\.py:.*", evidence='`x.to("cpu")` moves a tensor',
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


fix("devices", "once everything is registered", left_behind(mended=False), left_behind(mended=True), needs_cuda=True)
fix(
    "devices", "self.register_buffer(",
    *(lambda _, how=how: found(Scaled(is_buffer=how).cuda(), rows()) for how in (False, True)), needs_cuda=True,
    also=["step"],
)  # fmt: skip

# --- settings


def settings(
    precision: str,
    clip: float | None = 1.0,
    make: Callable[..., Any] = torch.optim.SGD,
    model: Callable[[], nn.Module] = network,
    **options: Any,
) -> Examine:
    def examine(_: Patch) -> list[Finding]:
        one = model()
        case = TrainingCase(model=one, optimizers=[make(one.parameters(), **options)], precision=precision, clip=clip)
        return list(RejectedSettings(case).before_training())

    return examine


Adam = torch.optim.Adam
fix(
    "rejected_settings", "fused=False",
    settings("16-mixed", 1.0, Adam, fused=True), settings("16-mixed", 1.0, Adam, fused=False),
    settings("bf16-true", 1.0, Adam, fused=True), settings("16-mixed", None, Adam, fused=True),
)  # fmt: skip
fix(
    "rejected_settings", "or another optimizer",
    *(settings(how, None, torch.optim.LBFGS) for how in ("16-mixed", "32-true", "bf16-mixed")), settings("16-mixed"),
)  # fmt: skip
fix(
    "rejected_settings", "model.float()",
    settings("16-mixed", model=lambda: network().half()), settings("16-mixed", model=lambda: network().half().float()),
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


def deterministic(*, on: bool) -> Examine:
    def examine(patch: Patch) -> list[Finding]:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        try:
            torch.use_deterministic_algorithms(on)  # as Trainer(deterministic=True) does
            return found(network().cuda(), rows(), steps=1)
        finally:
            torch.use_deterministic_algorithms(mode=False)

    return examine


fix(
    "reproducibility", "seed_everything(0", seeded(by_lightning=False), seeded(by_lightning=True), severity="info"
)  # fmt: skip
fix("reproducibility", "Trainer(deterministic=True)", deterministic(on=False), deterministic(on=True), needs_cuda=True)

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


def growing(keep: Callable[[Tensor], Any]) -> Examine:
    kept: list[Any] = []

    def step(model: nn.Module, batch: Any) -> Any:
        kept.append(keep(torch.ones(2**18)))  # 1 MiB
        return squared(model, batch)

    def examine(_: Patch) -> list[Finding]:
        with VirtualDevice("64MiB"):
            return found(network(), rows(), step, steps=12)

    return examine


def flat(change: Callable[[Any, Any], tuple[Any, Any]]) -> Examine:
    def step(model: nn.Module, batch: Any) -> Any:
        prediction, target = change(model(batch[0]), batch[1])
        return (prediction - target).square().mean()

    return stepping(step, loader=rows(flat=True))


fix("retained_graphs", "Keep numbers and not graphs", summing(lambda x: x), summing(Tensor.detach))
fix(
    "memory_growth", "Keep numbers, or tensors on the host", growing(lambda x: x), growing(lambda x: float(x.sum())),
    evidence=("9 steps after the third, by 1.00 MiB", "What piles up: `kept in ", ", a list of ", " tensors, "),
)  # fmt: skip
fix(
    "loss_broadcast", "target.unsqueeze(1), or prediction.squeeze(1)",
    flat(lambda p, y: (p, y)), flat(lambda p, y: (p, y.unsqueeze(1))), flat(lambda p, y: (p.squeeze(1), y)),
    place=r".*tests/doctor/test_fixes\.py:.*", evidence="(8, 1) and (8,) broadcast to (8, 8)",
)  # fmt: skip
fix(
    "loss_sum", 'reduction="mean"',
    stepping(lambda m, b: F.mse_loss(m(b[0]), b[1], reduction="sum"), steps=1),
    stepping(lambda m, b: F.mse_loss(m(b[0]), b[1], reduction="mean"), steps=1),
    stepping(lambda m, b: F.mse_loss(m(b[0]), b[1], reduction="sum") / len(b[0]), steps=1),
    stepping(lambda m, b: ((m(b[0]) - b[1]) ** 2).sum() / len(b[0])),
    place=r"tests/doctor/test_fixes\.py:.*", evidence="The gradient grows 2.00 times", effect="diverge",
)  # fmt: skip


def with_rates(early: float, late: float) -> Examine:
    """Examine a training whose learning rate changes after ten steps."""

    def examine(_: Patch) -> list[Finding]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=early)
        numbers = itertools.count(-1)  # the trial counts too

        def step(m: nn.Module, batch: Any) -> Any:
            optimizer.param_groups[0]["lr"] = late if next(numbers) >= 10 else early
            return squared(m, batch)

        return found(model, rows(), step, optimizer=optimizer, steps=16)

    return examine


def with_batch(size: float) -> Examine:
    batches = [next(iter(rows())) for _ in range(15)]
    batches[10] = [batches[10][0], batches[10][1] * size]
    return lambda _: found(network(), batches, steps=15)


fix("loss_spikes", "lower the learning rate", with_rates(0.01, 10.0), with_rates(0.01, 0.01))
fix("loss_spikes", "look at this batch", with_batch(1000.0), with_batch(1.0), severity="info", place="step 10")

# --- the checks themselves


def failing(model: nn.Module, batch: Any) -> Any:
    raise KeyError("the user's own mistake")


def broken_check(**options: Any) -> Examine:
    def examine(patch: Patch) -> list[Finding]:
        patch.setattr(SymmetricWeights, "before_training", lambda _: 1 / 0)
        return found(network(), rows(), **options)

    return examine


fix("step", "Mend the step first", stepping(failing), stepping(squared))
fix("symmetric_weights", "Leave it out with ignore=", broken_check(), broken_check(ignore=["symmetric_weights"]))

# This says that there is nothing to do.
NOTHING = {step_trial.why_no_trial.__name__}


@pytest.mark.filterwarnings("ignore:.*(target size|requires_grad=True|scheduler).*")
@pytest.mark.parametrize("case", FIXES)
def test_the_fix_makes_the_finding_disappear(case, monkeypatch, tmp_path):
    monkeypatch.tmp_path = tmp_path
    made = case.broken(monkeypatch)
    findings = [one for one in made if one.check == case.check and case.text in one.fix]
    assert len(findings) == 1
    assert case.left_out(findings[0]) == []
    assert {one.check for one in made if one.is_serious} - {case.check} == set(case.facts.get("also", ()))
    for mended in case.mended:
        with pytest.MonkeyPatch.context() as patch:
            patch.tmp_path = tmp_path
            left = mended(patch)
        assert [str(one) for one in left if one.fix == findings[0].fix or one.is_serious] == []


def test_every_fix_in_the_source_is_applied_here():
    room = Path(lightning_memtools.doctor.__file__).parent
    calls = [
        (f"{path.name}:{node.lineno}", node.args)
        for path in sorted(room.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding"
    ]
    assert len(calls) >= 30
    cases = [parameter.values[0] for parameter in FIXES]
    for place, (check, *_, written) in calls:
        for text in set(texts_of(written)) - NOTHING:
            fixed = [case for case in cases if case.text in text and ast.unparse(check) in {repr(case.check), "name"}]
            assert fixed, f"no test applies the fix of {place}: {text}"


def texts_of(written: ast.expr) -> list[str]:
    """The texts that an expression can have, without what f-strings put in."""
    if isinstance(written, ast.IfExp):
        return [*texts_of(written.body), *texts_of(written.orelse)]
    if isinstance(written, ast.JoinedStr):
        return ["".join(str(one.value) for one in written.values if isinstance(one, ast.Constant))]
    if isinstance(written, ast.Constant):
        return [str(written.value)]
    if isinstance(written, ast.Call):
        return [ast.unparse(written.func)]
    return []  # a variable: the checkpoint's prefix, of which both texts are applied above
