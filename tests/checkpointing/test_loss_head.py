"""A language model whose logits fill the memory is told so, and what it would need with its loss in chunks."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_memtools.checkpointing.loss_head import step_with_chunked_loss
from lightning_memtools.checkpointing.planning import plan_checkpoints
from lightning_memtools.checkpointing.step_profile import predict
from lightning_memtools.oom.report_page import ActionKind
from lightning_memtools.simulation.step_trace import TracedStep
from tests.oom.advice_runs import checks_of

WIDTH, WORDS, ROWS = 32, 16384, 512


class Language(L.LightningModule):
    """A few blocks of a small width under the logits of a large vocabulary."""

    def __init__(self, classes: int = WORDS, *, in_chunks: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(classes, WIDTH)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
                                     for _ in range(4)])  # fmt: skip
        self.head = nn.Linear(WIDTH, classes, bias=False)
        self.in_chunks = in_chunks

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        if self.in_chunks:
            options = torch.nn.LinearCrossEntropyOptions()
            flat = hidden.flatten(0, 1)
            loss: Tensor = F.linear_cross_entropy(flat, self.head.weight, words.reshape(-1), options=options)
            return loss
        logits = self.head(hidden).float()
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), words.reshape(-1))

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        loss: Tensor = self(batch)
        return loss


def step_of(model: nn.Module, words: Tensor) -> TracedStep:
    return TracedStep(model, (words,), lambda model, args: model(*args), device="cuda")


def test_the_step_is_traced_as_if_its_loss_were_written_with_linear_cross_entropy():
    words = torch.zeros(4, ROWS // 4, dtype=torch.long)
    found = step_with_chunked_loss(step_of(Language(), words))
    assert found is not None
    assert (found.rows, found.classes, found.logits_bytes) == (ROWS, WORDS, ROWS * WORDS * 4)
    plain = predict(step_of(Language(), words), ())
    written = predict(step_of(Language(in_chunks=True), words), ())
    # Logits, log-probabilities and their gradient, of which two are there at a time.
    assert plain.peak_bytes - written.peak_bytes > 1.5 * found.logits_bytes
    # But for the logits of one chunk, which torch's fake kernel does not make.
    assert abs(found.cost.peak_bytes - written.peak_bytes) <= ROWS * WIDTH // 2 * 4 + ROWS * WIDTH * 4


@pytest.mark.cuda_memory
def test_its_peak_is_the_measured_one_of_a_model_that_is_written_so():
    words = torch.zeros(4, ROWS // 4, dtype=torch.long, device="cuda")
    found = step_with_chunked_loss(step_of(Language().cuda(), words))
    assert found is not None
    model = Language(in_chunks=True).cuda()
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        loss = model(words)
        model.zero_grad()
        loss.backward()
    assert found.cost.peak_bytes == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.01)


def test_the_plan_says_what_no_plan_can_lower():
    words = torch.zeros(4, ROWS // 4, dtype=torch.long)
    (note,) = plan_checkpoints(Language(), words).notes
    assert note.startswith("the logits (512 x 16,384) take 32.0 MiB for each copy; with torch.nn.functional.linear_")
    assert plan_checkpoints(Language(1000), words.clamp(max=999)).notes == ()


class Accuracy(Language):
    """Looks at its logits for something else besides the loss."""

    def forward(self, words: Tensor) -> Tensor:
        logits = self.head(self.words(words))
        right = (logits.argmax(-1) == words).float().mean()
        loss: Tensor = F.cross_entropy(logits.flatten(0, 1), words.reshape(-1)) + 0 * right
        return loss


class Smoothed(Language):
    """A loss that torch computes in chunks no more than before."""

    def forward(self, words: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.words(words)).flatten(0, 1), words.reshape(-1), label_smoothing=0.1)


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(8, 16), Accuracy, Smoothed], ids=["no loss", "accuracy", "smoothed"]
)
def test_what_cannot_be_computed_in_chunks_gets_no_number(make):
    model = make()
    given = torch.zeros(2, 8) if isinstance(model, nn.Linear) else torch.zeros(4, 8, dtype=torch.long)
    found = step_with_chunked_loss(step_of(model, given))
    assert (found is None) == (not isinstance(model, Accuracy))


def test_a_report_of_running_out_of_memory_advises_it():
    words = torch.zeros(4, ROWS // 4, dtype=torch.long)
    plain = predict(step_of(Language(), words), ()).peak_bytes
    checks = checks_of(Language(), words, int(0.9 * plain))
    (action,) = [one for one in checks.actions if one.kind == ActionKind.LOSS]
    assert action.fits
    assert action.detail.startswith("Each copy of the logits (512 x 16,384) takes 32.0 MiB. ")
    assert "linear_cross_entropy" in action.code
