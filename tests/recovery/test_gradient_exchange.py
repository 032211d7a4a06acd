"""The exchange of gradients of a rank that runs its step again, on PyTorch's CUDA code."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_memtools._torch import SilentGroup, reduces_over
from lightning_memtools.recovery.gradient_exchange import GradientExchange
from tests.integration.recovery_on_ranks import RunsOut


class Net(nn.Module):
    """Six layers; memory runs out in the backward pass of the one that is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(6))

    def forward(self, x: Tensor, fails_at: int | None = None) -> Any:
        for index, layer in enumerate(self.layers):
            x = RunsOut.apply(torch.tanh(layer(x)), index == fails_at)
        return x


@pytest.fixture
def only_rank():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
    gc.collect()
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()  # other tests of this process compare what is allocated
        torch.cuda.empty_cache()


@pytest.mark.cuda_memory
@pytest.mark.usefixtures("only_rank")
def test_buckets_on_a_gpu_are_sent_once_and_memory_is_that_of_a_healthy_step():
    net = Net().cuda()
    wrapper = DistributedDataParallel(net, device_ids=[0], bucket_cap_mb=0.8)
    strategy = SimpleNamespace(model=wrapper, lightning_module=net)
    exchange = GradientExchange(strategy)
    x, sent, allocated = torch.randn(8, 512, device="cuda"), [], []
    for step in range(5):
        net.zero_grad()
        exchange.begin()
        try:
            wrapper(x, 1 if step in {0, 2} else None).sum().backward()
        except torch.OutOfMemoryError:
            complete = [parameter for parameter in net.parameters() if parameter.grad is not None]
            assert len(complete) == 8  # of the four layers behind it
            assert exchange.leave(complete) == ""
            with exchange.run_of_step(2):
                assert strategy.model is net
                for part in x.chunk(2):
                    strategy.model(part).sum().backward()
            exchange.rejoin()
            sent.append(step)
        assert strategy.model is wrapper
        assert all(parameter.grad is not None for parameter in net.parameters())
        allocated.append(torch.cuda.memory_allocated())
    assert sent == [0, 2]
    assert len(set(allocated[1:])) == 1  # after the first step DDP makes its buckets anew


class FailsToSend(SilentGroup):
    """Memory runs out when a bucket is sent, and it is not known whether the others have it."""

    def __init__(self, like: Any, at: int) -> None:
        super().__init__(like)
        self.at = at

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        if self.n_all_reduces == self.at:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().allreduce(tensors, options)


@pytest.mark.usefixtures("only_rank")
@pytest.mark.parametrize("at", [0, 2])
def test_a_bucket_that_fails_while_it_is_sent_is_not_sent_again(at):
    net = Net()
    wrapper = DistributedDataParallel(net, bucket_cap_mb=0.8)
    exchange = GradientExchange(SimpleNamespace(model=wrapper, lightning_module=net))
    x = torch.randn(8, 512)
    wrapper(x).sum().backward()  # then DDP makes its buckets anew
    net.zero_grad()
    exchange.begin()
    loss = wrapper(x).sum()
    with reduces_over(wrapper, FailsToSend(wrapper.process_group, at)), pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    complete = [parameter for parameter in net.parameters() if parameter.grad is not None]
    assert complete
    assert "a bucket of gradients" in exchange.leave(complete)
    assert all(parameter.grad is None for parameter in net.parameters())
