"""Steps that run out of memory are run in parts with the gradients of the whole batch, or refused for a true reason."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BatchEncoding

from lightning_memtools.memory.error_frames import in_one_line
from lightning_memtools.recovery import step_recovery, step_start
from tests.callbacks.recovery_runs import Steps


class Tokens(nn.Module):
    """Predicts tokens; the loss is a mean over those that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)

    def forward(self, batch):
        hidden = torch.tanh(self.embedding(batch["ids"]))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), batch["labels"].flatten())


def texts(*lengths: int) -> dict[str, Tensor]:
    ids, labels = torch.randint(1, 50, (2, len(lengths), 20), generator=torch.Generator().manual_seed(0))
    for row, length in enumerate(lengths):
        ids[row, length:], labels[row, length:] = 0, -100
    return {"ids": ids, "labels": labels}


def tokens_in(batch: Any) -> int:
    return int((batch["labels"] != -100).sum())


def on_texts(model: nn.Module, **options: Any) -> Steps:
    return Steps(model, lambda batch: len(batch["ids"]), 5, **options)


def refusal(run: Steps, batch: Any) -> str:
    """The note on the error of a batch that is not run in parts."""
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
        run.run(batch)
    (note,) = caught.value.__notes__
    return note.partition("did not run this step again: ")[2]


EVEN, UNEVEN = (20,) * 8, (20, 20, 20, 20, 3, 3, 3, 3)


@pytest.mark.parametrize("lengths", [EVEN, UNEVEN, (*(20,) * 4, *(0,) * 4)])
def test_a_mean_over_tokens_has_the_gradients_of_the_whole_batch_if_tokens_are_counted(lengths):
    run = on_texts(Tokens(), loss_weight=tokens_in)
    assert run.step(texts(*lengths)) < 1e-5
    assert run.recovery.recoveries.n_recovered == 1
    assert run.told == []


def test_a_loss_that_is_a_sum_is_added():
    class Sums(Tokens):
        def forward(self, batch):
            return super().forward(batch) * tokens_in(batch)

    assert on_texts(Sums(), loss="sum").step(texts(*UNEVEN)) < 1e-5


@dataclass
class Graphs:
    """Graphs side by side: their nodes, the graph of each node, and a target for each graph."""

    nodes: Tensor
    graph: Tensor
    target: Tensor


def graphs(*n_nodes: int) -> Graphs:
    graph = torch.arange(len(n_nodes)).repeat_interleave(torch.tensor(n_nodes))
    nodes = torch.randn(len(graph), 8, generator=torch.Generator().manual_seed(0)) + graph[:, None]
    return Graphs(nodes, graph, torch.arange(len(n_nodes)) * 3.0)


UNEQUAL = graphs(2, 2, 3, 3, 20, 30, 40, 50)


def parts_of(batch: Graphs, n_parts: int) -> list[Graphs]:
    return [
        Graphs(batch.nodes[mine], batch.graph[mine] - ids[0], batch.target[ids])
        for ids in torch.arange(len(batch.target)).tensor_split(n_parts)
        for mine in [torch.isin(batch.graph, ids)]
    ]


def n_graphs(batch: Graphs) -> int:
    return len(batch.target)


class OverGraphs(nn.Module):
    """Its loss is a mean over graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 1)

    def forward(self, batch: Graphs) -> Tensor:
        means = torch.zeros(len(batch.target), 1).index_add(0, batch.graph, self.net(batch.nodes))
        return (means[:, 0] - batch.target).square().mean()


def on_graphs(**options: Any) -> Steps:
    return Steps(OverGraphs(), n_graphs, fits=4, **options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"loss_weight": lambda batch: 0}, r"parts of \[0.0, 0.0\]"),
        ({"loss_weight": lambda batch: 4}, r"parts of \[4.0, 4.0\] as loss_weight= counts are not the batch of 4.0"),
        ({"loss_weight": lambda batch: dict[str, float]()["mask"]}, "loss_weight raised KeyError: 'mask'"),
        ({"split": lambda batch, n: [batch[:3]]}, r"its 1 parts of \[3.0\] samples are not the batch of 8.0"),
        ({"split": lambda batch, n: [], "loss": "sum"}, "its 0 parts"),
        ({"split": lambda batch, n: None, "loss": "sum"}, "split_batch or loss_weight raised TypeError"),
    ],
)
def test_what_the_users_functions_return_is_quoted_if_it_is_not_the_batch(options, reason):
    run = Steps(nn.Linear(8, 1), len, 4, **options)
    run.model.forward = lambda batch: batch.sum() * run.model.weight.sum()
    assert re.search(reason, refusal(run, torch.ones(8, 8)))


@dataclass
class Pair:
    """A batch of a class of the user's."""

    x: Tensor
    y: Tensor


def halves(batch: Pair, n_parts: int) -> list[Pair]:
    return [Pair(*pair) for pair in zip(batch.x.chunk(n_parts), batch.y.chunk(n_parts), strict=True)]


def puts(batch: Any) -> Any:
    batch["x"] = batch["x"] / 255
    return batch["x"], batch["y"]


def pops(batch: Any) -> Any:
    return batch["x"] / 255, batch.pop("y")


def puts_deep(batch: Any) -> Any:
    batch["of"]["x"][0] = batch["of"]["x"][0] / 255
    return batch["of"]["x"][0], batch["y"]


def sets(batch: Any) -> Any:
    batch.x = batch.x / 255
    return batch.x, batch.y


class Changes(nn.Module):
    """Changes its batches before memory runs out."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.net, self.change = nn.Linear(3, 1), change

    def forward(self, batch: Any) -> Tensor:
        x, y = self.change(batch)
        loss = F.mse_loss(self.net(x), y)
        if len(x) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss


@pytest.mark.parametrize(
    ("change", "make", "options"),
    [
        (puts, lambda x, y: {"x": x, "y": y}, {}),
        (pops, lambda x, y: {"x": x, "y": y}, {}),
        (pops, lambda x, y: BatchEncoding({"x": x, "y": y}), {}),
        (puts_deep, lambda x, y: {"of": {"x": [x]}, "y": y}, {}),
        (sets, Pair, {"split": halves, "loss_weight": lambda batch: len(batch.x)}),
    ],
)
def test_items_and_attributes_that_a_failed_attempt_changed_are_restored(change, make, options):
    x, y = torch.rand(8, 3) * 255, torch.rand(8, 1)
    run = Steps(Changes(change), lambda _: 0, 99, **options)
    run.run(make(x, y))
    net = run.model.net
    right = torch.autograd.grad(F.mse_loss(net(x / 255), y), net.weight)
    torch.testing.assert_close(net.weight.grad, *right, rtol=1e-5, atol=1e-7)


class Frozen(nn.Module):
    """Puts its BatchNorm into evaluation mode when it runs."""

    def __init__(self, *, freezes: bool) -> None:
        super().__init__()
        self.norm, self.head, self.freezes = nn.BatchNorm1d(8), nn.Linear(8, 1), freezes

    def forward(self, batch):
        if self.freezes:
            self.norm.eval()
        return self.head(self.norm(batch)).square().mean()


def test_what_is_told_of_batch_norm_holds_when_memory_runs_out():
    frozen = Steps(Frozen(freezes=True), len, fits=5)
    assert frozen.step(torch.randn(8, 8)) < 1e-5
    assert frozen.told == []
    run = Steps(Frozen(freezes=False), len, fits=5)
    run.run(torch.randn(4, 8))
    assert "norm normalizes" in run.told[0]
    assert run.told[0] in refusal(run, torch.randn(8, 8))


def test_batches_as_large_as_one_that_failed_are_split_at_once():
    run = Steps(nn.Linear(1, 1), len, fits=10)
    sizes: list[int] = []

    def forward(batch: Tensor) -> Tensor:
        sizes.append(len(batch))
        return nn.functional.linear(batch, run.model.weight).mean()

    run.model.forward = forward
    # The second is smaller than what failed before; of two parts, each of the fourth would be larger.
    for n, expected in ((12, [12, 6, 6]), (11, [11, 5, 6]), (10, [10]), (30, [7, 8, 7, 8]), (16, [8, 8])):
        sizes.clear()
        run.run(torch.ones(n, 1))
        assert sizes == expected


class BrokenError(Exception):
    """An error in our own code."""


@pytest.mark.parametrize("place", ["before", "while it is taken back", "while parts run"])
@pytest.mark.parametrize("warnings_are_errors", [False, True])
def test_an_error_of_ours_does_not_replace_the_users(place, warnings_are_errors, monkeypatch):
    def fail(*_: Any) -> Any:
        raise BrokenError("broken")

    names = {
        "before": (step_start, "in_new_containers"),
        "while it is taken back": (step_start.RandomState, "restore"),
        "while parts run": (step_recovery.StepRecovery, "_run_parts"),
    }
    monkeypatch.setattr(*names[place], fail)
    run = on_texts(Tokens(), loss_weight=tokens_in)
    with warnings.catch_warnings(record=not warnings_are_errors) as caught:
        warnings.simplefilter("error" if warnings_are_errors else "always")
        reason = refusal(run, texts(*EVEN))
    if not warnings_are_errors:
        (warning,) = caught
        assert "OOMRecovery itself failed: BrokenError: broken" in str(warning.message)
    assert "OOMRecovery itself failed" in reason
    if place == "before":
        with pytest.warns(UserWarning, match="BrokenError: broken"):
            run.run(texts(20, 20))  # a step that fits goes on
        assert all(parameter.grad is not None for parameter in run.model.parameters())


def test_an_error_that_only_a_part_raises_is_the_steps_own():
    class Refuses(Tokens):
        def forward(self, batch):
            assert len(batch["ids"]) > 4, "too few"
            return super().forward(batch)

    with pytest.raises(AssertionError, match="too few") as caught:
        on_texts(Refuses()).run(texts(*EVEN))
    assert "ran this batch in parts" in caught.value.__notes__[0]
    assert in_one_line(caught.value.__cause__) == "OutOfMemoryError: CUDA out of memory."


def test_a_part_without_a_loss_is_refused_among_others_with_one():
    run = on_texts(Tokens())
    forward = run.forward

    def some(batch: Any) -> Any:
        result = forward(batch)
        return replace(result, closure_loss=None) if len(batch["ids"]) == 2 and batch["ids"][1, 3] == 0 else result

    run.forward = some
    run.fits = 3
    assert "no loss for 2 of its 4 parts" in refusal(run, texts(*UNEVEN))
