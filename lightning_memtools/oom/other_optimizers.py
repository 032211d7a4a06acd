"""Optimizers that need less memory than the failed step's, and how a step with one of them is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lightning_memtools._torch import has_kernel
from lightning_memtools.simulation.fakes import copy_optimizer

# Adagrad's fused form is for the CPU alone in older versions of torch.
_FUSED = (Adam, AdamW, SGD, *((Adagrad,) if has_kernel("aten::_fused_adagrad_", "CUDA") else ()))
# bitsandbytes: smaller parameters keep states in float32, larger ones have one float32 for each block of them.
_LEAST_IN_8_BIT = 4096
_BLOCK = 256


@dataclass(frozen=True, slots=True)
class OtherOptimizer:
    """An optimizer to take in place of another one.

    Attributes:
        title: The change in a few words.
        code: The code to write in the program.
        cost: What it costs: the more it changes the result of training, the higher.
        make: Makes one for parameters; or the optimizer itself, over those of the failed step.
        note: A remark on how it was traced.
    """

    title: str
    code: str
    cost: float
    make: Callable[[list[Parameter]], Optimizer] | Optimizer
    note: str = ""


def fused_form(optimizer: Optimizer) -> OtherOptimizer | None:
    """Return the fused form of an optimizer, which computes the same without intermediate results; None without one."""
    name = type(optimizer).__name__
    if type(optimizer) not in _FUSED or any(
        group.get("fused") or group.get("differentiable") for group in optimizer.param_groups
    ):
        return None

    # A copy keeps the settings of each group. Its constructor would read learning rates that are tensors.
    fused = copy_optimizer(optimizer, lambda tensor: tensor, with_state=False)
    for group in fused.param_groups:
        group |= {"fused": True, "foreach": None}
    return OtherOptimizer(f"Use the fused form of {name}", f"torch.optim.{name}(..., fused=True)", 0.1, fused)


def smaller_states(optimizer: Optimizer) -> Iterator[OtherOptimizer]:
    """Yield optimizers with a smaller state than this one's, the smallest first."""
    if isinstance(optimizer, SGD):
        return
    title = f"Replace {type(optimizer).__name__} with {{}}, which has a smaller state"
    sgd = OtherOptimizer(title.format("SGD"), "torch.optim.SGD(parameters, momentum=0.9, ...)", 4.0, _sgd)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if type(optimizer) not in {Adam, AdamW} or any(group.get("amsgrad") for group in optimizer.param_groups):
        yield sgd  # bitsandbytes refuses amsgrad
        return

    name = f"{type(optimizer).__name__}8bit"
    note = "The size of its state was computed, and bitsandbytes itself was not run"
    eight = OtherOptimizer(title.format(name), f"bitsandbytes.optim.{name}(parameters, ...)", 2.0, EightBitStates, note)
    n_sgd = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    yield from (eight, sgd) if sum(map(_n_bytes_in_8_bit, parameters)) <= n_sgd else (sgd, eight)


def _sgd(parameters: list[Parameter]) -> Optimizer:
    # Adafactor's state is smaller still, but its step reads values, which a trace does not have.
    return SGD(parameters, lr=1e-3, momentum=0.9)


class EightBitStates(Optimizer):
    """Makes the states that Adam8bit and AdamW8bit of bitsandbytes make, and updates nothing.

    Their kernels compute in place: a step allocates nothing but the states.

    Args:
        parameters: The parameters.
    """

    def __init__(self, parameters: list[Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make the states of parameters that have none yet."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for parameter in (one for group in self.param_groups for one in group["params"] if one.grad is not None):
            if not self.state[parameter]:
                self.state[parameter] = {f"state{i}": _state(parameter) for i in (1, 2)}
                if parameter.numel() >= _LEAST_IN_8_BIT:
                    n_blocks = -(-parameter.numel() // _BLOCK)
                    for i in (1, 2):
                        self.state[parameter][f"absmax{i}"] = torch.zeros(n_blocks, device=parameter.device)
        return loss


def _n_bytes_in_8_bit(parameter: Tensor) -> int:
    n = parameter.numel()
    return 8 * n if n < _LEAST_IN_8_BIT else 2 * (n + 4 * -(-n // _BLOCK))


def _state(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, dtype=torch.uint8 if parameter.numel() >= _LEAST_IN_8_BIT else torch.float32)
