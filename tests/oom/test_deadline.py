"""What is under way ends at its next module once the time is over."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memtools.oom.deadline import Deadline, OutOfTimeError


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The thread's processor time, which only the test moves."""
    now = [100.0]
    monkeypatch.setattr("time.thread_time", lambda: now[0])
    return now


def test_a_deadline_ends_after_its_seconds(clock) -> None:
    deadline = Deadline(8.0)
    clock[0] += 7.9
    deadline.check()
    assert deadline.left_s == pytest.approx(0.1)
    clock[0] += 0.2
    with pytest.raises(OutOfTimeError, match="the time for the checks was over"):
        deadline.check()


def test_a_forward_pass_and_an_optimizers_step_are_interrupted_and_only_within(clock) -> None:
    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            clock[0] += 5
            return x

    reached: list[str] = []
    layers = nn.Sequential(Slow(), Slow(), nn.Linear(2, 2))
    layers[2].register_forward_pre_hook(lambda *_: reached.append("last"))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    deadline = Deadline(8.0)
    with deadline.interrupting():
        with pytest.raises(OutOfTimeError):
            layers(torch.ones(1, 2))
        with pytest.raises(OutOfTimeError):
            optimizer.step()
    assert not reached
    layers(torch.ones(1, 2))
    optimizer.step()
    assert reached == ["last"]
