from __future__ import annotations

import torch

from lightning_memtools.memory.leaks.growing_graphs import graph_clock, spans


def loss_of(weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.randn(3, 4) @ weight).square().mean()


def weight() -> torch.Tensor:
    return torch.randn(4, 4, requires_grad=True)


def test_a_sum_over_all_steps_spans_all_epochs():
    w = weight()
    total = 0.0
    clocks = [graph_clock()]
    for _ in range(3):
        for _ in range(5):
            loss = loss_of(w)
            total += loss
            loss.backward()
        clocks.append(graph_clock())
    assert isinstance(total, torch.Tensor)
    assert spans(total, clocks)
    assert not spans(loss, clocks)
    assert not spans(total.detach(), clocks)
    assert not spans(w, clocks)
    assert not spans(total, [*clocks, graph_clock()])  # it did not grow since


def test_the_latest_step_with_something_from_long_ago_does_not_span_what_lies_between():
    w = weight()
    clocks = [graph_clock()]
    prior = w.square().sum()
    clocks.append(graph_clock())
    for _ in range(2):
        loss = loss_of(w) + prior
        clocks.append(graph_clock())
    assert not spans(loss, clocks)
