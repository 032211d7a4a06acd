"""Buffers come back bit for bit, whatever a step did to them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memtools.state.buffer_keeper import LARGE_BYTES, BufferKeeper
from tests.nonfinite.observe import differences


class Net(nn.Module):
    mask: torch.Tensor
    replaced: torch.Tensor
    turned: torch.Tensor
    hidden: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.inner = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4, dtype=torch.float64))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("nothing", None)
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).T)
        self.register_buffer("hidden", torch.zeros(2), persistent=False)

    def step(self) -> None:
        x = torch.randn(8, 4)
        self.norm(x)
        self.inner[0](x)
        self.inner[1](x.double())
        self.mask.logical_not_()
        self.replaced = self.replaced + 1
        self.turned.add_(1)
        self.hidden.add_(1)


def copies(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def test_restore_undoes_every_kind_of_write():
    net = Net()
    keeper = BufferKeeper(net)
    for _ in range(3):
        keeper.keep()
        before = copies(net)
        identities = {name: id(buffer) for name, buffer in net.named_buffers()}
        net.step()
        assert len(differences(before, copies(net))) == len(before)
        keeper.restore()
        assert differences(before, copies(net)) == []
        assert {name: id(buffer) for name, buffer in net.named_buffers()} == identities
        assert keeper.unrestored() == []
        net.step()


def test_while_the_flag_is_set_the_copies_are_those_from_before():
    net = Net()
    keeper = BufferKeeper(net)
    flag = torch.zeros(())
    keeper.keep(unless=flag)
    net.step()
    keeper.keep(unless=flag)
    before = copies(net)
    net.step()
    flag.fill_(1)
    for _ in range(3):
        keeper.keep(unless=flag)
        net.step()
    keeper.restore()
    assert differences(before, copies(net)) == []


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("constant", torch.zeros(LARGE_BYTES // 4 + 1))
        self.register_buffer("queue", torch.zeros(LARGE_BYTES // 4 + 1))


def held_bytes(keeper: BufferKeeper) -> int:
    return sum(copies.flat.nbytes for copies in keeper._copies)


def test_a_large_buffer_that_no_step_writes_costs_memory_in_the_first_step_only():
    net = Large()
    keeper = BufferKeeper(net)
    one = net.queue.numel() * 4
    keeper.keep()
    assert held_bytes(keeper) == 2 * one
    net.queue.add_(1)
    for _ in range(3):
        keeper.keep()
        assert held_bytes(keeper) == one
        before = copies(net)
        net.queue.add_(1)
        keeper.restore()
        assert differences(before, copies(net)) == []


def test_a_late_first_write_to_a_large_buffer_is_named_and_kept_from_then_on():
    net = Large()
    keeper = BufferKeeper(net)
    keeper.keep()
    keeper.keep()
    assert held_bytes(keeper) == 0
    net.constant.add_(1)
    assert keeper.unrestored() == ["constant"]
    keeper.keep()
    assert keeper.unrestored() == []
    before = copies(net)
    net.constant.add_(1)
    keeper.restore()
    assert differences(before, copies(net)) == []


@pytest.mark.parametrize(
    ("change", "n"),
    [
        (lambda net: setattr(net, "one", torch.ones(5)), 5),
        (lambda net: setattr(net.one, "data", torch.ones(4)), 4),
        (lambda net: net.one.resize_(2).fill_(1), 2),
    ],
    ids=["of another shape", "with other memory", "resized in its place"],
)
def test_a_buffer_that_changes_is_kept_anew(change, n):
    net = nn.Module()
    net.register_buffer("one", torch.zeros(4))
    net.register_buffer("other", torch.zeros(2))
    keeper = BufferKeeper(net)
    keeper.keep()
    change(net)
    keeper.keep()
    net.one.fill_(torch.nan)
    keeper.restore()
    assert net.one.tolist() == [1] * n
