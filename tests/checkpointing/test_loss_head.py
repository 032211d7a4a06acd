"""A language model whose logits fill the memory is trained with its loss in chunks, and is told so."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memtools import GradientCheckpointing
from lightning_memtools.checkpointing.apply_plan import AppliedPlan
from lightning_memtools.checkpointing.checkpoint_options import CheckpointOptions
from lightning_memtools.checkpointing.loss_head import LossHeadWarning
from lightning_memtools.checkpointing.loss_in_chunks import loss_in_chunks
from lightning_memtools.checkpointing.planning import StepPlanner, plan_checkpoints, predict
from lightning_memtools.simulation.tracer import StepRequest
from tests.doctor.specimens import LANGUAGE_MODELS, language_model

WIDTH, WORDS, ROWS = 32, 16384, 512


class Language(L.LightningModule):
    """A few blocks of a small width under the logits of a large vocabulary."""

    def __init__(self, classes: int = WORDS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(classes, WIDTH)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
                                     for _ in range(4)])  # fmt: skip
        self.head = nn.Linear(WIDTH, classes, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits = self.head(hidden).float()
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), words.reshape(-1))

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        loss: Tensor = self(batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def step_of(model: nn.Module, words: Tensor) -> StepRequest:
    return StepRequest(model=model, batch=(words,), step=lambda model, args: model(*args))


def words_of(rows: int = ROWS, classes: int = WORDS) -> Tensor:
    return torch.randint(classes, (4, rows // 4), generator=torch.Generator().manual_seed(0))


class Accuracy(Language):
    """Looks at its logits for something else besides the loss."""

    def forward(self, words: Tensor) -> Tensor:
        logits = self.head(self.words(words))
        right = (logits.argmax(-1) == words).float().mean()
        loss: Tensor = F.cross_entropy(logits.flatten(0, 1), words.reshape(-1)) + 0 * right
        return loss


def test_the_trace_tells_the_plain_peak_and_that_of_chunks():
    found = loss_in_chunks(step_of(Language(), words_of()))
    assert found is not None
    assert (found.names, found.read_by) == (("head",), "")
    assert found.logits == (ROWS, WORDS, ROWS * WORDS * 4)
    assert found.plain == predict(step_of(Language(), words_of()), ())
    assert found.cost == predict(step_of(Language(), words_of()), (), ["head"])
    # Logits, log-probabilities and their gradient, of which two are there at a time; a chunk is half of the rows.
    assert found.plain.peak_bytes - found.cost.peak_bytes > 1.5 * found.logits[2]
    assert found.cost.flops == found.plain.flops


@pytest.mark.parametrize(("make", "read_by"), [(lambda: nn.Linear(8, 2048), None), (Accuracy, "argmax")])
def test_what_cannot_be_computed_in_chunks_gets_no_plan(make, read_by):
    model = make()
    given = torch.zeros(2, 8) if isinstance(model, nn.Linear) else words_of()
    found = loss_in_chunks(step_of(model, given))
    assert (found is None) == (read_by is None)
    if found is not None:
        assert found.names == ()
        assert found.read_by.startswith(f"`{read_by}` at ")
        assert plan_checkpoints(model, given).heads == ()


def test_the_plan_is_that_of_chunks_where_it_lowers_the_peak():
    plan, kept = (plan_checkpoints(Language(), words_of(), loss_head=how) for how in ("auto", "keep"))
    assert plan.heads == ("head",)
    assert plan.notes[0].startswith(
        "the loss of head is computed in chunks of 256 rows: the logits (512 x 16,384) take"
    )
    assert kept.heads == ()
    assert kept.plain == plan.plain
    assert plan.peak_bytes < 0.7 * kept.peak_bytes
    (note,) = plan_checkpoints(Accuracy(), words_of()).notes
    assert "`argmax` at tests/checkpointing/test_loss_head.py:" in note


def test_within_a_budget_the_loss_in_chunks_comes_before_recomputation():
    step = step_of(Language(), words_of())
    found = loss_in_chunks(step)
    assert found is not None

    def plan(budget: float | str) -> Any:
        return StepPlanner(step).plan(CheckpointOptions.parse(memory_budget=budget))

    enough = plan(f"{found.plain.peak_bytes}B")
    assert (enough.heads, enough.extra_operations) == ((), 0)
    chunks = plan(f"{found.cost.peak_bytes}B")
    assert chunks.heads == ("head",)
    assert not any(chain.ranges for chain in chunks.chains)
    assert chunks.refused is None
    assert chunks.planned == found.cost
    both = plan(f"{found.cost.peak_bytes - 500_000}B")
    assert both.heads == ("head",)
    assert any(chain.ranges for chain in both.chains)
    share = plan(found.cost.activation_bytes / found.plain.activation_bytes + 0.001)
    assert (share.heads, share.planned) == (("head",), found.cost)
    tighter = 0.95 * found.cost.activation_bytes / found.plain.activation_bytes
    assert plan(tighter).planned.activation_bytes <= tighter * found.plain.activation_bytes


def fit(model: Any, *callbacks: Any, batches: int = 4, **options: Any) -> dict[str, Tensor]:
    data: Any = torch.stack([words_of()[at % 4].view(-1) for at in range(4 * batches)])
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=list(callbacks), **options,
    )  # fmt: skip
    trainer.fit(model, DataLoader(data, batch_size=4))
    return {name: one.detach().clone() for name, one in model.named_parameters()}


@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2}], ids=str)
def test_a_fit_ends_with_the_same_weights_within_rounding(options, capsys):
    plain = fit(Language(), **options)
    callback = GradientCheckpointing()
    model = Language()
    with warnings.catch_warnings():
        warnings.simplefilter("error", LossHeadWarning)
        chunked = fit(model, callback, **options)
    assert callback.plan is not None
    assert callback.plan.heads == ("head",)
    assert "the loss of head is computed in chunks of 256 rows" in " ".join(capsys.readouterr().out.split())
    begin = dict(Language().named_parameters())
    for name, weight in plain.items():
        moved = (weight - begin[name]).norm()
        assert (chunked[name] - weight).norm() <= (0.01 if "precision" in options else 1e-4) * moved
    assert "forward" not in vars(model.head)
    assert list(model.state_dict()) == list(Language().state_dict())


def of_library(kind: str) -> Any:
    torch.manual_seed(0)
    return language_model(kind, vocab_size=2000).train()


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_models_of_transformers_as_they_are(kind):
    words = torch.randint(3, 2000, (4, 150), generator=torch.Generator().manual_seed(0))
    labels = words.masked_fill(words % 5 == 0, -100)
    step = StepRequest(
        model=of_library(kind), batch=(words, labels), step=lambda m, a: m(input_ids=a[0], labels=a[1]).loss
    )
    found = loss_in_chunks(step)
    assert found is not None
    assert len(found.names) == 1
    assert found.cost.peak_bytes < found.plain.peak_bytes
    results = []
    for heads in ((), found.names):
        model = of_library(kind).eval()  # without dropout, whose numbers the two runs would have to share
        with AppliedPlan(model, (), heads=heads, prove=True) as applied:
            loss = model(input_ids=words, labels=labels).loss
            loss.backward()
        results.append([loss.detach(), *(one.grad for one in model.parameters() if one.grad is not None)])
    assert [head.n_losses for head in applied.heads.values()] == [1]
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm() + 1e-7


@pytest.mark.cuda_memory
def test_its_peak_is_the_measured_one():
    words = words_of().cuda()
    for make in (Language, lambda: of_library("Bert")):
        model = make().cuda()
        forward = (lambda m, a: m(*a)) if make is Language else (lambda m, a: m(input_ids=a[0], labels=a[0]).loss)
        given = (words if make is Language else words % 2000,)
        plan = StepPlanner(StepRequest(model=model, batch=given, step=forward)).plan(CheckpointOptions.parse())
        assert plan.heads
        with AppliedPlan(model, plan.chains, heads=plan.heads):
            for _ in range(2):
                torch.cuda.reset_peak_memory_stats()
                loss = forward(model, given)
                model.zero_grad()
                loss.backward()
            assert plan.peak_bytes == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.01)
        del model, loss
