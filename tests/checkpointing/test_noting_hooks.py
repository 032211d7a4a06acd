"""What hooks note of the steps that planning traces."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_memtools import plan_checkpoints


class Store:
    """Keeps what a hook gives it."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.last: torch.Tensor | None = None
        self.calls = 0

    def add(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        self.seen.append(out)
        self.last = out
        self.calls += 1


SEEN_BY_ALL: list[torch.Tensor] = []


def hooked_model() -> tuple[nn.Sequential, dict[str, Any]]:
    """A model with hooks that keep what they see in every place that a hook can reach."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)])
    seen: list[torch.Tensor] = []
    calls = 0
    store = Store()

    def by_closure(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        seen.append(out)
        SEEN_BY_ALL.append(out)

    model[1].register_forward_hook(by_closure)
    model[2].register_forward_hook(store.add)
    model[3].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    return model, {"seen": lambda: len(seen), "calls": lambda: calls, "store": lambda: (store.calls, len(store.seen)),
                   "last": lambda: store.last, "global": lambda: len(SEEN_BY_ALL)}  # fmt: skip


def test_what_hooks_note_of_a_traced_step_is_forgotten_and_their_layers_never_run_twice():
    model, noted = hooked_model()
    x = torch.zeros(256, 64)
    before = {name: read() for name, read in noted.items()}
    plan = plan_checkpoints(model, x)
    assert {name: read() for name, read in noted.items()} == before
    left_out = plan.left_out
    assert set(left_out) == {"1", "2", "3"}
    assert left_out["1"] == "it changes calls (of a hook) when it runs"
    assert plan.refused is None
    with plan.apply(model):
        model(x).sum().backward()
    assert (noted["calls"](), noted["store"](), noted["seen"]()) == (1, (1, 1), 2)
    SEEN_BY_ALL.clear()


class Features(nn.Module):
    """A loss on what hooks saw in the middle of the model; they forget it at the beginning of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)])
        seen: list[torch.Tensor] = []
        self.seen = seen
        self.body[4].register_forward_hook(lambda _module, _args, out: seen.append(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.clear()
        out = self.body(x).square().mean()
        (one,) = self.seen
        loss: torch.Tensor = out + one.abs().mean()
        return loss


def test_a_loss_on_what_hooks_saw_is_planned_and_trains_bit_for_bit_the_same():
    torch.manual_seed(0)
    model, x = Features(), torch.randn(256, 64)
    plan = plan_checkpoints(model, x)
    assert plan.refused is None
    assert plan.peak_bytes < 0.9 * plan.plain_peak_bytes
    assert model.seen == []
    found = []
    for chains in (None, plan):
        applied = None if chains is None else chains.apply(model)
        model.zero_grad()
        loss = model(x)
        loss.backward()
        found.append([loss.detach(), *(one.grad.clone() for one in model.parameters())])
        if applied is not None:
            applied.remove()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
