"""Small models that fail, each for one known reason, and healthy ones that look as if they did.

Every failing one trains well until a known batch, or until it has run away; the tests find the first bad step by brute
force. `bad_data` is the one place where a batch is made special.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_memtools.nonfinite.bad_step import NonFiniteCause

BATCH, FEATURES, N_BATCHES, BAD_BATCH = 8, 6, 8, 5


@dataclass(frozen=True)
class Case:
    """A model of the gallery.

    Attributes:
        make: Makes the module; its weights follow from the global seed.
        batches: The batches of an epoch, as training_step gets them.
        cause: What it fails of; None for a healthy one.
        bad_batch: Which batch makes it fail; None where it runs away by itself or never fails.
        operation: Which operation makes the first bad value; of a backward pass, the forward operation.
        module: In which module; empty for training_step and what it calls.
        code: What stands on the line of this file where it does.
        backward: Whether it is in the backward pass.
        tried: What is tried to confirm the cause, and how that goes.
    """

    make: Callable[[], L.LightningModule]
    batches: list[Any]
    cause: NonFiniteCause | None = None
    bad_batch: int | None = BAD_BATCH
    operation: str = ""
    module: str = ""
    code: str = ""
    backward: bool = False
    tried: str = "with sample 0 in the place of sample 3 the step is finite"

    @property
    def line(self) -> int:
        """The number of the line with `code`."""
        lines = Path(__file__).read_text().splitlines()
        (number,) = (number for number, line in enumerate(lines, start=1) if line.strip() == self.code)
        return number

    def loader(self) -> DataLoader[Any]:
        """The batches, in order."""
        dataset: Any = self.batches
        return DataLoader(dataset, batch_size=None)


def good_data(n: int = N_BATCHES) -> list[Tensor]:
    """Standard normal batches, shape [8, 6]."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(BATCH, FEATURES, generator=generator) for _ in range(n)]


def bad_data(change: Callable[[Tensor], object]) -> list[Tensor]:
    """The same with one batch changed in place."""
    batches = good_data()
    change(batches[BAD_BATCH])
    return batches


class Small(L.LightningModule):
    """A linear layer, BatchNorm and a loss for subclasses to spoil."""

    masked = False  # a causal mask of -inf in the body, as decoders have it by right
    lr = 1e-2

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.norm = nn.BatchNorm1d(FEATURES)
        self.last = nn.Linear(FEATURES, 3)

    def body(self, x):
        hidden = torch.tanh(self.norm(self.first(x)))
        if self.masked:
            mask = torch.full((len(x), len(x)), -torch.inf).triu(1)
            hidden = torch.softmax(hidden @ hidden.T + mask, dim=1) @ hidden
        return self.last(hidden)

    def loss(self, x):
        return self.body(x).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class LogOfZero(Small):
    def loss(self, x):
        amount = x.abs().sum(1) * torch.sigmoid(self.body(x)).sum(1)
        return -torch.log(amount).mean()


class ZeroOverZero(Small):
    def loss(self, x):
        share = x.abs() / x.abs().sum(1, keepdim=True)
        return self.body(share).square().mean()


class SqrtAtZero(Small):
    """The loss stays finite: the backward pass of the root divides by zero, times a gradient of zero."""

    def loss(self, x):
        return (torch.sqrt((x * self.body(x).mean()).square().sum(1)) - 1).square().mean() + self.body(x).mean()


class HalfOverflow(L.LightningModule):
    """Float16 throughout: a value of 1000 squared is beyond 65504."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES, dtype=torch.float16)

    def training_step(self, batch, batch_idx):
        return self.first(batch.half()).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class ExpOverflow(Small):
    def loss(self, x):
        return torch.exp(x.amax(1) * torch.sigmoid(self.body(x)).amax(1)).mean()


class ZeroDeviation(Small):
    def loss(self, x):
        standard = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)
        return self.body(standard).square().mean()


class ExplodingRecurrence(L.LightningModule):
    """Forty steps through a linear recurrence: once its weights pass 1, the gradient grows with their 40th power."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(FEATURES, FEATURES)
        with torch.no_grad():
            self.cell.weight.copy_(0.9 * torch.eye(FEATURES))

    def training_step(self, batch, batch_idx):
        hidden = torch.zeros_like(batch)
        for _ in range(40):
            hidden = self.cell(hidden) + batch
        return (hidden - 1000).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=5e-7)


class SummedLoss(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 1)

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.first(batch), batch.sum(1, keepdim=True), reduction="sum")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class _BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.abs()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x / x.abs()  # 0 / 0 at 0


BAD_FUNCTION = _BadBackward.__name__


class CustomBackward(Small):
    def loss(self, x):
        return _BadBackward.apply(self.body(x) * x[:, :1]).mean()


class UnitEmbedding(Small):
    """Embeddings scaled to length one; the padding row is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, FEATURES, padding_idx=0)

    def loss(self, x):
        words = self.words(x)
        return self.body(words / words.norm(dim=1, keepdim=True)).square().mean()


class MaskedSoftmax(Small):
    """A row whose mask lets nothing through has no softmax."""

    def loss(self, batch):
        scores, allowed = self.body(batch["x"]), batch["allowed"]
        weights = torch.softmax(scores.masked_fill(~allowed, -torch.inf), dim=1)
        return (weights * scores).sum(1).square().mean()


class IgnoredTargets(Small):
    def loss(self, batch):
        return F.cross_entropy(self.body(batch["x"]), batch["y"], ignore_index=-1)


class BadCheckpoint(Small):
    """A weight is NaN from the start."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.last.weight[1, 2] = torch.nan


class OneSample(Small):
    """The variance over a batch of one sample is 0 / 0."""

    def loss(self, x):
        hidden = self.last(torch.tanh(self.first(x)))
        return ((hidden - hidden.mean(0)).square().sum(0) / (len(x) - 1)).mean()


class ArcCosine(Small):
    """acos beyond 1, by rounding or by data."""

    def loss(self, x):
        return torch.acos(0.9 * torch.tanh(self.body(x)) * x[:, :1].clamp(min=1)).mean()


class Manual(Small):
    """Two optimizers, stepped by the module itself; the second one's loss takes the log of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(FEATURES, 1)

    def training_step(self, batch, batch_idx):
        generator, critic = self.optimizers()
        for optimizer, loss in (
            (generator, lambda: self.body(batch).square().mean()),
            (critic, lambda: -torch.log(batch.abs().sum(1) * torch.sigmoid(self.critic(batch)).sum(1)).mean()),
        ):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        own = [p for name, p in self.named_parameters() if not name.startswith("critic")]
        return [torch.optim.AdamW(ps, lr=self.lr) for ps in (own, self.critic.parameters())]


def _set(value: float, rows: slice) -> Callable[[Tensor], object]:
    def change(batch: Tensor) -> None:
        batch[rows] = value

    return change


BODY = "hidden = torch.tanh(self.norm(self.first(x)))"
ZERO_ROW, ALL = slice(3, 4), slice(None)
WORDS = [torch.randint(1, 5, (BATCH,), generator=torch.Generator().manual_seed(i)) for i in range(N_BATCHES)]
ALLOWED = torch.ones(BATCH, 3, dtype=torch.bool)


def _with_padding() -> list[Tensor]:
    words = [each.clone() for each in WORDS]
    words[BAD_BATCH][2] = 0
    return words


def _with_masks() -> list[dict[str, Tensor]]:
    batches = [{"x": x, "allowed": ALLOWED.clone()} for x in good_data()]
    batches[BAD_BATCH]["allowed"][1] = False
    return batches


def _with_targets() -> list[dict[str, Tensor]]:
    batches = [{"x": x, "y": torch.arange(BATCH) % 3} for x in good_data()]
    batches[BAD_BATCH]["y"] = torch.full((BATCH,), -1)
    return batches


FAILING: dict[str, Case] = {
    "log_of_zero": Case(
        LogOfZero, bad_data(_set(0.0, ZERO_ROW)), NonFiniteCause.DOMAIN,
        operation="aten.log", code="return -torch.log(amount).mean()",
    ),
    "zero_over_zero": Case(
        ZeroOverZero, bad_data(_set(0.0, ZERO_ROW)), NonFiniteCause.DOMAIN,
        operation="aten.div", code="share = x.abs() / x.abs().sum(1, keepdim=True)",
    ),
    "sqrt_backward_at_zero": Case(
        SqrtAtZero, bad_data(_set(0.0, ZERO_ROW)), NonFiniteCause.DOMAIN, operation="aten.sqrt", backward=True,
        code="return (torch.sqrt((x * self.body(x).mean()).square().sum(1)) - 1).square().mean() + self.body(x).mean()",
    ),
    "half_overflow": Case(
        HalfOverflow, bad_data(_set(1000.0, ZERO_ROW)), NonFiniteCause.LOW_PRECISION,
        operation="aten.pow", code="return self.first(batch.half()).square().mean()",
        tried="",
    ),
    "exp_overflow": Case(
        ExpOverflow, bad_data(_set(400.0, ZERO_ROW)), NonFiniteCause.OVERFLOW,
        operation="aten.exp", code="return torch.exp(x.amax(1) * torch.sigmoid(self.body(x)).amax(1)).mean()",
        tried="",
    ),
    "zero_deviation": Case(
        ZeroDeviation, bad_data(_set(2.0, ZERO_ROW)), NonFiniteCause.DOMAIN,
        operation="aten.div", code="standard = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)",
    ),
    "nan_in_inputs": Case(
        Small, bad_data(_set(torch.nan, ALL)), NonFiniteCause.DIRTY_DATA,
        operation="aten.addmm", module="first", code=BODY,
        tried="",
    ),
    "inf_in_inputs": Case(
        Small, bad_data(_set(torch.inf, ALL)), NonFiniteCause.DIRTY_DATA,
        operation="aten.addmm", module="first", code=BODY,
        tried="",
    ),
    "nan_in_one_sample": Case(
        Small, bad_data(lambda batch: batch[3:4, 2:3].fill_(torch.nan)), NonFiniteCause.DIRTY_DATA,
        operation="aten.addmm", module="first", code=BODY,
    ),
    "exploding_recurrence": Case(
        ExplodingRecurrence, good_data(60), NonFiniteCause.EXPLODING, None,
        operation="aten.addmm", module="cell", code="hidden = self.cell(hidden) + batch",
        tried="",
    ),
    "summed_loss": Case(
        SummedLoss, good_data(60), NonFiniteCause.EXPLODING, None, operation="aten.mse_loss",
        code='return F.mse_loss(self.first(batch), batch.sum(1, keepdim=True), reduction="sum")',
        tried="",
    ),
    "custom_backward": Case(
        CustomBackward, bad_data(_set(0.0, ZERO_ROW)), NonFiniteCause.DOMAIN,
        operation="aten.div", code="return gradient * x / x.abs()  # 0 / 0 at 0", backward=True,
    ),
    "embedding": Case(
        UnitEmbedding, _with_padding(), NonFiniteCause.DOMAIN, operation="aten.div",
        code="return self.body(words / words.norm(dim=1, keepdim=True)).square().mean()",
        tried="with sample 0 in the place of sample 2 the step is finite",
    ),
    "fully_masked_softmax": Case(
        MaskedSoftmax, _with_masks(), NonFiniteCause.DOMAIN, operation="aten.softmax",
        code="weights = torch.softmax(scores.masked_fill(~allowed, -torch.inf), dim=1)",
        tried="with sample 0 in the place of sample 1 the step is finite",
    ),
    "all_targets_ignored": Case(
        IgnoredTargets, _with_targets(), NonFiniteCause.DOMAIN, operation="aten.nll_loss_forward",
        code='return F.cross_entropy(self.body(batch["x"]), batch["y"], ignore_index=-1)',
        tried="",
    ),
    "bad_parameter": Case(
        BadCheckpoint, good_data(), NonFiniteCause.BAD_PARAMETER, 0, operation="aten.addmm", module="last",
        code="return self.last(hidden)",
        tried="",
    ),
    "one_sample": Case(
        OneSample, [*good_data()[:BAD_BATCH], good_data()[0][:1]], NonFiniteCause.DOMAIN, operation="aten.div",
        code="return ((hidden - hidden.mean(0)).square().sum(0) / (len(x) - 1)).mean()",
        tried="",
    ),
    "arc_cosine": Case(
        ArcCosine, bad_data(_set(50.0, ZERO_ROW)), NonFiniteCause.DOMAIN, operation="aten.acos",
        code="return torch.acos(0.9 * torch.tanh(self.body(x)) * x[:, :1].clamp(min=1)).mean()",
    ),
    "manual": Case(
        Manual, bad_data(_set(0.0, ZERO_ROW)), NonFiniteCause.DOMAIN, operation="aten.log",
        code="(critic, lambda: -torch.log(batch.abs().sum(1) * torch.sigmoid(self.critic(batch)).sum(1)).mean()),",
    ),
}  # fmt: skip
BODY_IS_MASKED = [name for name, case in FAILING.items() if hasattr(case.make, "masked") and name != "one_sample"]


class CausalAttention(Small):
    """-inf above the diagonal, as every decoder has it."""

    def loss(self, x):
        values = self.first(x)
        mask = torch.full((BATCH, BATCH), -torch.inf).triu(1)
        return self.last(torch.softmax(values @ values.T + mask, dim=1) @ values).square().mean()


class ForbiddenClass(Small):
    """Logits of -inf, and a cross entropy that never asks for them."""

    def loss(self, x):
        logits = self.body(x).masked_fill(torch.tensor([False, False, True]), -torch.inf)
        return F.cross_entropy(logits, torch.arange(BATCH) % 2)


class OverflowingNorm(L.LightningModule):
    """Gradients of 1e20: finite, but their squares are not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 40)

    def training_step(self, batch, batch_idx):
        return (self.first(batch) * 1e20).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-22)


class RunningBounds(Small):
    """Buffers that start at infinity, and one that stays there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("lowest", torch.tensor(torch.inf))
        self.register_buffer("limit", torch.tensor(torch.inf))

    def loss(self, x):
        self.lowest = torch.minimum(self.lowest, x.min())
        return self.body(x).clamp(max=self.limit).square().mean()


class MaskInBatch(Small):
    """The batch itself holds a mask of -inf."""

    def loss(self, batch):
        return torch.logsumexp(self.body(batch["x"]) + batch["mask"], dim=1).mean()


class MissingTargets(Small):
    """NaN marks targets that are missing; the loss leaves them out."""

    def loss(self, batch):
        known = ~batch["y"].isnan()
        return (self.body(batch["x"])[known] - batch["y"][known]).square().mean()


class SparseAndUnused(Small):
    """Sparse gradients, a parameter without a gradient, an integer one, an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, FEATURES, sparse=True)
        self.unused = nn.Linear(2, 2)
        self.count = nn.Parameter(torch.zeros(3, dtype=torch.long), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0))

    def loss(self, x):
        return self.body(self.words(x)).square().mean() + self.empty.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class InfiniteBound(Small):
    """A frozen parameter that is infinite by right."""

    def __init__(self) -> None:
        super().__init__()
        self.bound = nn.Parameter(torch.tensor(torch.inf), requires_grad=False)

    def loss(self, x):
        return torch.minimum(self.body(x), self.bound).square().mean()


class NoLossNow(Small):
    """Every third step is left out by returning None."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx % 3 == 1 else self.loss(batch)


MASK = torch.tensor([0.0, 0.0, -torch.inf])

HEALTHY: dict[str, Case] = {
    "causal_attention": Case(CausalAttention, good_data(), bad_batch=None),
    "forbidden_class": Case(ForbiddenClass, good_data(), bad_batch=None),
    "overflowing_norm": Case(OverflowingNorm, good_data(), bad_batch=None),
    "running_bounds": Case(RunningBounds, good_data(), bad_batch=None),
    "mask_in_batch": Case(MaskInBatch, [{"x": x, "mask": MASK.expand(BATCH, 3)} for x in good_data()], bad_batch=None),
    "missing_targets": Case(
        MissingTargets,
        [{"x": x, "y": torch.where(x[:, :3] > 1, torch.nan, x[:, :3])} for x in good_data()],
        bad_batch=None,
    ),
    "sparse_and_unused": Case(SparseAndUnused, WORDS, bad_batch=None),
    "infinite_bound": Case(InfiniteBound, good_data(), bad_batch=None),
    "no_loss_now": Case(NoLossNow, good_data(), bad_batch=None),
}
