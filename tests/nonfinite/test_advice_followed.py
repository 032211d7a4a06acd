"""Every sentence of advice of HaltOnNaN: printed in a run, and followed in the same run, which is right.

Where a sentence names several ways, each is followed; what may be the reason is tried where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_memtools import HaltOnNaN
from lightning_memtools.nonfinite.bad_step import ADVICE, ANY_OPERATION, ANY_OVERFLOW, OF_OPERATIONS, NonFiniteError
from tests.lightning_models import trainer
from tests.nonfinite.given_loss import BAD, D, Loss, N, Net, batches
from tests.nonfinite.test_not_the_data import bias, targets, where_afterwards

EPS = 1e-6


@dataclass
class Run:
    """A run: its loss, what the module has, its batches, and options of the Trainer and of HaltOnNaN."""

    loss: Loss
    parts: dict[str, Any] = field(default_factory=dict)
    data: list[Any] = field(default_factory=batches)
    options: dict[str, Any] = field(default_factory=dict)
    halt: dict[str, Any] = field(default_factory=dict)
    kind: type[Net] = Net
    optimizer: Callable[[Any], Any] | None = None


def outcome(run: Run, root: Path) -> str:
    """Train; return the error's text, "" if there is none. Then the weights are finite."""
    L.seed_everything(0, verbose=False)
    model = run.kind(run.loss, run.optimizer, **run.parts)
    halt, saver = HaltOnNaN(directory=str(root / "out"), **run.halt), ModelCheckpoint(root / "kept", every_n_epochs=1)
    options = {"logger": False, "enable_checkpointing": True, "num_sanity_val_steps": 0} | run.options
    fit = trainer(root, halt, saver, **options)
    loader: Any = DataLoader(run.data, batch_size=None)  # type: ignore[arg-type]
    evaluates = run.kind.validation_step is not L.LightningModule.validation_step
    try:
        fit.fit(model, loader, loader if evaluates else None)
    except NonFiniteError as error:
        return str(error)
    assert all(each.isfinite().all() for each in model.state_dict().values())
    return ""


def printed_and_followed(sentence: str, printed: Run, ways: list[Run], root: Path) -> None:
    """The sentence is in the error of the first run; none of the others has an error."""
    text = outcome(printed, root / "printed")
    assert sentence in text, text
    assert [outcome(way, root / str(n)) for n, way in enumerate(ways)] == [""] * len(ways)


# --- operations

Function = Callable[[Tensor], Any]


def amount(m: Any, batch: dict[str, Tensor]) -> Any:
    """Positive; 0 for one sample of the bad batch. It depends on weights."""
    return batch["x"].abs().sum(1) * (1 + m.net(batch["x"]).square().mean())


def zero_row() -> list[dict[str, Tensor]]:
    data = batches()
    data[BAD]["x"][3] = 0
    return data


def at(x: Tensor, value: float) -> Tensor:
    """A value where x is 0, else a half."""
    return torch.where(x == 0, value, 0.5 + 0 * x)


def rows(x: Tensor, last: Tensor) -> Tensor:
    return torch.stack([at(x, -torch.inf), last], 1)


def labels(x: Tensor) -> Tensor:
    """Of two classes; none in the bad batch."""
    return torch.full((len(x),), -100 if (x == 0).any() else 1)


def is_labelled(x: Tensor, loss: Callable[[], Any]) -> Any:
    return None if (x == 0).any() else loss()


def ctc(x: Tensor, **options: Any) -> Any:
    scores = torch.stack([x, 2 * x, 3 * x], 1)[:, None].log_softmax(2)
    length = 2 if (x == 0).any() else N
    return F.ctc_loss(scores, torch.ones(1, 3, dtype=torch.long), torch.tensor([length]), torch.tensor([3]), **options)


def pair(x: Tensor) -> Tensor:
    return torch.stack([x, x], 1)


def fewer(x: Tensor) -> Tensor:
    return x[:1] if (x == 0).any() else x


IMAGE = (1, 2, 2, N // 2)
OPERATIONS: dict[str, tuple[Function, list[Function]]] = {
    "log": (torch.log, [lambda x: torch.log(x.clamp(min=EPS)), F.logsigmoid]),
    "div": (lambda x: x.detach().cos() / x, [lambda x: x.detach().cos() / (x + EPS)]),
    "sqrt": (torch.sqrt, [lambda x: torch.sqrt(x + EPS)]),
    "pow": (lambda x: x.pow(-1.5), [lambda x: x.clamp(min=0.01).pow(-1.5), lambda x: (x + 0.01).pow(-1.5)]),
    "acos": (lambda x: at(x, 2.0).acos(), [lambda x: at(x, 2.0).clamp(-1 + EPS, 1 - EPS).acos()]),
    "exp": (
        lambda x: at(x, 200.0).exp(),
        [lambda x: torch.logsumexp(at(x, 200.0), 0), lambda x: at(x, 200.0).clamp(max=20).exp()],
    ),
    "softmax": (lambda x: rows(x, at(x, -torch.inf)).softmax(1), [lambda x: rows(x, x).softmax(1)]),
    "log_softmax": (
        lambda x: rows(x, at(x, -torch.inf)).log_softmax(1), [lambda x: rows(x, x).log_softmax(1).clamp(min=-9)]
    ),
    "nll_loss_forward": (
        lambda x: F.cross_entropy(pair(x), labels(x)),
        [lambda x: is_labelled(x, lambda: F.cross_entropy(pair(x), labels(x)))],
    ),
    "nll_loss2d_forward": (
        lambda x: F.cross_entropy(pair(x).reshape(IMAGE), labels(x).reshape(1, 2, -1)),
        [lambda x: is_labelled(x, lambda: F.cross_entropy(pair(x).reshape(IMAGE), labels(x).reshape(1, 2, -1)))],
    ),
    "ctc_loss": (
        ctc, [lambda x: ctc(x, zero_infinity=True), lambda x: is_labelled(x, lambda: ctc(x))]
    ),
    "mean": (lambda x: x[x > (9e9 if (x == 0).any() else 0)].mean(), [lambda x: is_labelled(x, x[x > 0].mean)]),
    "var": (lambda x: fewer(x).var(), [torch.var, lambda x: fewer(x).var(correction=0)]),
    "std": (lambda x: fewer(x).std(), [torch.std, lambda x: torch.sqrt(fewer(x).var(correction=0) + EPS)]),
}  # fmt: skip
OTHER: dict[str, tuple[Function, list[Function]]] = {
    ANY_OPERATION: (lambda x: at(x, -0.5).lgamma().erfinv(), [lambda x: at(x, 0.5).lgamma().tanh().erfinv()]),
    ANY_OVERFLOW: (
        lambda x: at(x, 1e30).square(), [lambda x: at(x, 1e30).clamp(max=9).square(), lambda x: F.normalize(x, dim=0)]
    ),
}  # fmt: skip


def with_function(function: Function) -> Run:
    def loss(m: Any, batch: dict[str, Tensor]) -> Any:
        value = function(amount(m, batch))
        return None if value is None else 1e-3 * value.sum() + m.net(batch["x"]).square().mean()

    return Run(loss, data=zero_row())


SENTENCES = [
    *((text, *OPERATIONS[name]) for name, text in OF_OPERATIONS.items()),
    *((text, *functions) for text, functions in OTHER.items()),
]


@pytest.mark.filterwarnings("ignore:.*(returned `None`|degrees of freedom).*")
@pytest.mark.parametrize(("sentence", "printed", "ways"), SENTENCES, ids=[text[:40] for text, *_ in SENTENCES])
def test_advice_on_an_operation_is_right_where_it_is_printed(sentence, printed, ways, tmp_path):
    parts = sentence.split("{name}")
    printed_and_followed(max(parts, key=len), with_function(printed), list(map(with_function, ways)), tmp_path)


# --- causes


def plain(m: Any, batch: dict[str, Any]) -> Any:
    return m.net(batch["x"]).square().mean()


def without(index: int, data: list[Any]) -> list[Any]:
    return [each for n, each in enumerate(data) if n != index]


def dirty() -> list[Any]:
    data = batches()
    data[BAD]["x"][3, 1] = torch.nan
    return data


def nan_weight() -> nn.Linear:
    layer = nn.Linear(D, D)
    layer.weight.data[0, 0] = torch.nan
    return layer


def sgd(lr: float) -> Callable[[Any], Any]:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)


def adam(eps: float) -> Callable[[Any], Any]:
    return lambda parameters: torch.optim.Adam(parameters, eps=eps)


def half_loss(m: Any, batch: dict[str, Any]) -> Any:
    x = batch["x"] * torch.tensor([1.0, 1, 1, 0])  # a feature that is constant: its gradients are 0
    return m.net(x.to(m.net.weight.dtype)).float().square().mean()


class Clips(Net):
    by = 0.0

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(self.by).mul_(self.by)


class ClipsRightly(Clips):
    by = 1.0


def side_branch(m: Any, batch: dict[str, Any]) -> Any:
    m.side(batch["x"] / batch["x"].abs().sum(1, keepdim=True))
    return plain(m, batch)


def side_branch_mended(m: Any, batch: dict[str, Any]) -> Any:
    m.side(batch["x"] / (batch["x"].abs().sum(1, keepdim=True) + EPS))
    return plain(m, batch)


def running(m: Any, batch: dict[str, Any], eps: float = 0.0) -> Any:
    share = batch["x"].abs().sum(1)
    m.kept = 0.9 * m.kept + (share / (share + eps)).mean().detach()
    return m.net(batch["x"]).square().mean() * m.kept


OUTSIDE = {"bad": torch.tensor(torch.nan), "mended": torch.ones(())}


class Evaluates(Net):
    smallest = 0.0

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", torch.log(batch["x"].abs().sum(1).clamp(min=self.smallest)).mean())


class EvaluatesRightly(Evaluates):
    smallest = EPS


class SpoilsWeights(Net):
    """Writes NaN into a weight after training, before the validation."""

    value = torch.nan

    def on_validation_start(self) -> None:
        self.net.weight.data[0, 0] = self.value

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", plain(self, batch))


class LeavesWeights(SpoilsWeights):
    value = 0.5


def summed(m: Any, batch: dict[str, Any]) -> Any:
    return F.mse_loss(m.net(batch["x"]), batch["x"], reduction="sum")


def square_in_half(m: Any, batch: dict[str, Any], dtype: torch.dtype | None = None) -> Any:
    x = m.net(batch["x"].to(m.net.weight.dtype))
    return 1e-3 * (x.to(dtype or x.dtype) * 300).square().float().mean()


def large_in_half(m: Any, batch: dict[str, Any]) -> Any:
    return 3e4 * m.net(batch["x"].to(m.net.weight.dtype)).float().square().mean()


def times_nan(m: Any, batch: dict[str, Any]) -> Any:
    return plain(m, batch) * float("nan")


def streams(m: Any, batch: dict[str, Any]) -> Any:
    return plain(m, batch) * next(m.numbers)


def numbers() -> Iterator[float]:
    return chain(repeat(1.0, BAD), [float("nan")], repeat(1.0))


def in_batch(value: Callable[[int], float]) -> list[Any]:
    return batches(number=value)


MANY: dict[str, Any] = {"data": batches() * 12}
FLOAT16: dict[str, Any] = {"precision": "16-true"}
CAUSES: dict[str, Callable[[], tuple[Run, list[Run]]]] = {
    "dirty data": lambda: (
        Run(plain, data=dirty()),
        [Run(plain, data=without(BAD, dirty())), Run(plain, data=batches())],
    ),
    "late mask": lambda: (
        Run(where_afterwards, data=batches(y=targets)),
        [
            Run(
                lambda m, b: (m.net(b["x"])[~b["y"].isnan()] - b["y"][~b["y"].isnan()]).square().mean(),
                data=batches(y=targets),
            ),
            Run(
                lambda m, b: torch.where(b["y"].isnan(), 0.0, m.net(b["x"]) - b["y"].nan_to_num()).square().mean(),
                data=batches(y=targets),
            ),
        ],
    ),
    "mask": lambda: (
        Run(
            lambda m, b: F.cross_entropy(m.net(b["x"]) + b["bias"], b["y"]),
            data=batches(bias=lambda _: bias(0), y=lambda i: torch.full((N,), 3 if i == BAD else 1)),
        ),
        [
            Run(
                lambda m, b: F.cross_entropy(m.net(b["x"]) + b["bias"], b["y"]),
                data=batches(bias=lambda _: bias(0), y=lambda _: torch.full((N,), 1)),
            )
        ],
    ),
    "bad weights": lambda: (Run(plain, {"net": nan_weight()}), [Run(plain)]),
    "bad eps": lambda: (
        Run(half_loss, optimizer=adam(1e-8), options=FLOAT16),
        [
            Run(half_loss, optimizer=adam(1e-4), options=FLOAT16),
            Run(half_loss, optimizer=adam(1e-8), options={"precision": "bf16-mixed"}),
            Run(half_loss, optimizer=adam(1e-8)),
        ],
    ),
    "bad update": lambda: (Run(plain, kind=Clips), [Run(plain, kind=ClipsRightly)]),
    "bad state": lambda: (
        Run(side_branch, {"side": nn.BatchNorm1d(D)}, zero_row()),
        [Run(side_branch_mended, {"side": nn.BatchNorm1d(D)}, zero_row())],
    ),
    "large state": lambda: (
        Run(large_in_half, optimizer=adam(1e-4), options=FLOAT16),
        [
            Run(large_in_half, optimizer=adam(1e-4), options=FLOAT16 | {"gradient_clip_val": 1.0}),
            Run(large_in_half, optimizer=adam(1e-4), options={"precision": "bf16-mixed"}),
            Run(large_in_half, optimizer=adam(1e-4)),
        ],
    ),
    "bad attribute": lambda: (
        Run(running, {"kept": torch.ones(())}, zero_row()),
        [Run(lambda m, b: running(m, b, EPS), {"kept": nn.Buffer(torch.ones(()))}, zero_row())],
    ),
    "bad tensor from elsewhere": lambda: (
        Run(lambda m, b: plain(m, b) * OUTSIDE["bad"]),
        [Run(lambda m, b: plain(m, b) * OUTSIDE["mended"])],
    ),
    "evaluation": lambda: (
        Run(plain, data=zero_row(), kind=Evaluates),
        [Run(plain, data=zero_row(), kind=EvaluatesRightly)],
    ),
    "evaluation, weights": lambda: (Run(plain, kind=SpoilsWeights), [Run(plain, kind=LeavesWeights)]),
    "exploding": lambda: (
        Run(summed, **MANY, optimizer=sgd(0.7)),
        [
            Run(summed, **MANY, optimizer=sgd(1e-3)),
            Run(summed, **MANY, optimizer=sgd(0.7), options={"gradient_clip_val": 1.0}),
            Run(lambda m, b: F.mse_loss(m.net(b["x"]), b["x"]), **MANY, optimizer=sgd(0.7)),
        ],
    ),
    "low precision": lambda: (
        Run(square_in_half, options=FLOAT16),
        [
            Run(square_in_half, options={"precision": "bf16-mixed"}),
            Run(square_in_half),
            Run(lambda m, b: square_in_half(m, b, torch.float32), options=FLOAT16),
        ],
    ),
    "constant": lambda: (Run(times_nan), [Run(plain)]),
    "not reproducible": lambda: (
        Run(streams, {"numbers": numbers()}),
        [Run(lambda m, b: plain(m, b) * b["number"], data=in_batch(lambda _: 1.0))],
    ),
}


def test_every_sentence_on_a_cause_is_here():
    assert {*CAUSES, "unknown"} == set(ADVICE)


@pytest.mark.parametrize("name", CAUSES)
def test_advice_on_a_cause_is_right_where_it_is_printed(name, tmp_path):
    parts = ADVICE[name].replace("{rates}", "{").replace("{eps:g}", "{").replace("{name}", "{").split("{")
    printed_and_followed(max(parts, key=len), *CAUSES[name](), tmp_path)


def test_a_rate_that_is_too_large_for_weights_is_lowered(tmp_path):
    """The other reason that the sentence on a bad update names as possible."""

    def loss(m: Any, batch: dict[str, Any]) -> Any:
        return 100 * plain(m, batch)

    ways = [Run(loss, optimizer=sgd(1e-5))]
    printed_and_followed("A learning rate that is too large", Run(loss, optimizer=sgd(3e38)), ways, tmp_path)


@pytest.mark.filterwarnings("ignore:Error detected in")
def test_where_no_rerun_is_made_anomaly_detection_names_the_operation(tmp_path):
    run = with_function(torch.sqrt)
    run.halt = {"explain": False, "save_step": False}
    assert ADVICE["unknown"] in outcome(run, tmp_path)
    run.options = {"detect_anomaly": True}
    with pytest.raises(RuntimeError, match="returned nan values"):
        outcome(run, tmp_path)


def test_gradients_that_were_not_seen_are_seen_with_manual_backward(tmp_path, recwarn):
    class ByHand(Net):
        is_hidden = True

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.trainer.optimizers[0] if self.is_hidden else self.optimizers()
            loss = self.loss(self, batch)
            backward: Any = torch.Tensor.backward if self.is_hidden else self.manual_backward
            backward(loss)
            optimizer.step()

    for hidden, n in ((True, 1), (False, 0)):
        recwarn.clear()
        outcome(Run(plain, kind=type("Kind", (ByHand,), {"is_hidden": hidden})), tmp_path)
        assert sum("use self.optimizers() and self.manual_backward" in str(each.message) for each in recwarn) == n
