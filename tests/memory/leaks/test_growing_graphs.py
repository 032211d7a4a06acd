from __future__ import annotations

from functools import partial

import torch
from torch import nn

from lightning_memtools.memory.leaks.growing_graphs import graph_clock, spans, tensors_with_graph


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


class Holder:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def test_tensors_with_a_graph_are_found_wherever_an_attribute_leads():
    w = weight()
    kept = {name: loss_of(w) for name in "abcdefg"}

    def hook(module, args, output, default=kept["b"]):
        return kept_in_closure

    kept_in_closure = [kept["a"]]
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].total = kept["c"]
    model.register_forward_hook(hook)
    model.plain = Holder(history=[{"x": (kept["d"],)}])
    model.call = partial(hook, kept["e"])
    model.method = Holder(f=kept["f"]).__init__
    model.detached = loss_of(w).detach()
    model.leaf = w
    left_out = Holder(g=kept["g"])
    model.left_out = left_out
    found = {id(t) for t in tensors_with_graph([model], stop_at=[left_out])}
    assert found == {id(kept[name]) for name in "abcdef"}
