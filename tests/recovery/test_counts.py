"""The weights of parts are counted, asked for or tried, never guessed; and a refusal names the true reason."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.callbacks.recovery_runs import Steps


@dataclass
class Graphs:
    """Graphs side by side: their nodes, the graph of each node, edges, and a target for each graph."""

    nodes: Tensor
    graph: Tensor
    edges: Tensor
    target: Tensor


def graphs(*n_nodes: int) -> Graphs:
    graph = torch.arange(len(n_nodes)).repeat_interleave(torch.tensor(n_nodes, dtype=torch.long))
    nodes = torch.randn(len(graph), 8, generator=torch.Generator().manual_seed(0)) + graph[:, None]
    return Graphs(nodes, graph, torch.zeros(2, 3 * len(graph), dtype=torch.long), torch.arange(len(n_nodes)) * 3.0)


UNEQUAL = graphs(2, 2, 3, 3, 20, 30, 40, 50)


def parts_of(batch: Graphs, n_parts: int) -> list[Graphs]:
    """Cut between graphs; some parts may be empty."""
    parts = []
    for ids in torch.arange(len(batch.target)).tensor_split(n_parts):
        mine = torch.isin(batch.graph, ids)
        first = int(ids[0]) if len(ids) else 0
        edges = batch.edges[:, : 3 * int(mine.sum())]
        parts.append(Graphs(batch.nodes[mine], batch.graph[mine] - first, edges, batch.target[ids]))
    return parts


def pairs_of(batch: Graphs, n_parts: int) -> list[tuple[Graphs, int]]:
    return [(part, len(part.target)) for part in parts_of(batch, n_parts)]


class OverGraphs(nn.Module):
    """Its loss is a mean over graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 1)

    def forward(self, batch: Graphs) -> Tensor:
        means = torch.zeros(len(batch.target), 1).index_add(0, batch.graph, self.net(batch.nodes))
        return (means[:, 0] - batch.target).square().mean()


class OverNodes(OverGraphs):
    """Its loss is a mean over nodes."""

    def forward(self, batch):
        return (self.net(batch.nodes)[:, 0] - batch.target[batch.graph]).square().mean()


def on_graphs(model: nn.Module, **options: Any) -> Steps:
    return Steps(model, n_graphs, fits=4, **options)


def n_graphs(batch: Graphs) -> int:
    return len(batch.target)


@pytest.mark.parametrize("loss", ["auto", "mean"])
def test_a_mean_over_graphs_is_not_weighted_by_the_nodes_that_its_tensors_are_long(loss):
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
        on_graphs(OverGraphs(), loss=loss, split=parts_of).step(UNEQUAL)
    assert "let split_batch return pairs" in caught.value.__notes__[0]


@pytest.mark.parametrize("options", [{"split": pairs_of}, {"split": parts_of, "loss_weight": n_graphs}])
@pytest.mark.parametrize("loss", ["auto", "mean"])
def test_sizes_that_are_returned_or_a_weight_give_the_gradients_of_the_whole_batch(loss, options):
    assert on_graphs(OverGraphs(), loss=loss, **options).step(UNEQUAL) < 1e-4


@pytest.mark.parametrize("loss", ["auto", "mean"])
def test_lengths_that_most_tensors_share_are_not_taken_for_numbers_of_samples(loss):
    """Without edges, most tensors are as long as there are nodes."""

    def without_edges(batch: Graphs, n_parts: int) -> list[Graphs]:
        parts = parts_of(Graphs(batch.nodes, batch.graph, UNEQUAL.edges, batch.target), n_parts)
        return [Graphs(one.nodes, one.graph, torch.zeros(()), one.target) for one in parts]

    whole = Graphs(UNEQUAL.nodes, UNEQUAL.graph, torch.zeros(()), UNEQUAL.target)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        on_graphs(OverNodes(), loss=loss, split=without_edges).step(whole)
    assert "cannot be counted; let split_batch return pairs" in caught.value.__notes__[0]


def test_parts_without_samples_are_left_out():
    run = on_graphs(OverGraphs(), loss="mean", split=lambda batch, n: [*pairs_of(batch, n), *pairs_of(graphs(), 1)])
    assert run.step(UNEQUAL) < 1e-4


def test_sizes_that_do_not_add_up_are_quoted():
    for sizes in ([3, -1], [0, 0]):
        run = on_graphs(
            OverGraphs(), split=lambda batch, n, sizes=sizes: list(zip(parts_of(batch, n), sizes, strict=True))
        )
        with pytest.raises(torch.OutOfMemoryError) as caught:
            run.step(UNEQUAL)
        assert f"parts of {sizes} samples" in caught.value.__notes__[0]


def test_split_batch_is_called_when_the_failed_step_is_released():
    alive: list[bool] = []
    held: list[weakref.ref[Tensor]] = []

    class Notes(OverGraphs):
        def forward(self, batch: Graphs) -> Tensor:
            hidden = batch.nodes.exp()
            if len(batch.target) == len(UNEQUAL.target):
                held.append(weakref.ref(hidden))
            loss = super().forward(batch) + 0 * hidden.sum()
            if len(batch.target) == len(UNEQUAL.target) and len(held) > 0 and self.fails:
                self.fails = False
                raise torch.OutOfMemoryError("CUDA out of memory.")  # with its frame, which holds `hidden`
            return loss

        fails = True

    def split(batch: Graphs, n_parts: int) -> Any:
        gc.collect()
        alive.extend(one() is not None for one in held)
        return pairs_of(batch, n_parts)

    on_graphs(Notes(), split=split).step(UNEQUAL)
    assert alive
    assert not any(alive)


class Vae(nn.Module):
    """Draws random numbers for each of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(16, 8), nn.Linear(4, 16)

    def forward(self, batch):
        mean, log_variance = self.encoder(batch).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return (self.decoder(code) - batch).square().mean() + 0.1 * mean.square().mean()


@pytest.mark.parametrize("seed", range(20))
def test_a_loss_that_draws_random_numbers_is_refused_for_that_reason_with_every_seed(seed):
    torch.manual_seed(seed)
    with pytest.raises(torch.OutOfMemoryError, match="training_step draws random numbers"):
        Steps(Vae(), len, fits=5).step(torch.randn(8, 16))


class Frozen(nn.Module):
    """Puts its BatchNorm into evaluation mode when it runs."""

    def __init__(self, *, freezes: bool) -> None:
        super().__init__()
        self.norm, self.head, self.freezes = nn.BatchNorm1d(8), nn.Linear(8, 1), freezes

    def forward(self, batch):
        if self.freezes:
            self.norm.eval()
        return self.head(self.norm(batch)).square().mean()


def test_what_is_announced_of_batch_norm_holds_when_memory_runs_out():
    torch.manual_seed(0)
    for freezes in (True, False):
        run = Steps(Frozen(freezes=freezes), len, fits=5)
        run.step(torch.randn(4, 8))
        assert bool(run.told) is not freezes
        if freezes:
            assert run.step(torch.randn(8, 8)) < 1e-5
        else:
            assert "norm normalizes" in run.told[0]
            with pytest.raises(torch.OutOfMemoryError) as caught:
                run.step(torch.randn(8, 8))
            assert run.told[0] in caught.value.__notes__[0]
