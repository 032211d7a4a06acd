"""A point of training in host memory, to which weights, optimizers and random streams can be taken back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_memtools._torch import has_readable_values
from lightning_memtools.memory.nested_tensors import plain_name
from lightning_memtools.memory.virtual import host_memory
from lightning_memtools.state.buffer_keeper import is_expanded
from lightning_memtools.state.starts import BatchStartRecorder, UpdateStart
from lightning_memtools.state.state_snapshot import StateSnapshot


class TrainingPoint:
    """Copies of what training changes: weights and buffers, and with optimizers everything that an update reads.

    With them, `restore` takes parameters, buffers, optimizers (state and settings), attributes of simple types of the
    user's modules, the gradient scaler and all random streams back to the point, bit for bit. The host waits for the
    device once to copy them.

    Args:
        module: The module.
        optimizers: Its optimizers; None to keep only the weights and buffers.
        scaler: The gradient scaler, if there is one.
        restore_loop: Restores what else belongs to the point, such as schedulers and the counters of a loop.

    Attributes:
        parameters: Copies by name.
        buffers: Copies by name.
    """

    def __init__(
        self,
        module: Module,
        optimizers: Sequence[Optimizer] | None = None,
        *,
        scaler: Any = None,
        restore_loop: Callable[[], None] = lambda: None,
    ) -> None:
        self._module, self._scaler, self._restore_loop = module, scaler, restore_loop
        with torch.no_grad(), host_memory():
            self.parameters = {plain_name(name): _on_host(each) for name, each in _written(module.named_parameters())}
            self.buffers = {plain_name(name): _on_host(each) for name, each in _written(module.named_buffers())}
        self._settings = [UpdateStart(each) for each in optimizers or ()]
        self._state = (
            None if optimizers is None else StateSnapshot([each.state for each in optimizers], host=host_memory)
        )
        self._scale = None if scaler is None else scaler.state_dict()
        self._start = None if optimizers is None else BatchStartRecorder(module).record(None)

    def restore(self) -> None:
        """Restore everything to its state at this point.

        Raises:
            RuntimeError: The point was made without optimizers.
        """
        if self._state is None or self._start is None:
            raise RuntimeError("This point holds weights alone.")
        with host_memory():
            load_weights(self._module, self.parameters, self.buffers)
        for settings in self._settings:
            settings.remove_new_state()
            settings.restore_settings()
        self._state.restore()
        if self._scale is not None:
            self._scaler.load_state_dict(self._scale)
        self._restore_loop()
        self._start.restore(self._module)


@torch.no_grad()
def load_weights(module: Module, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Write copies of weights and buffers into a module, by name; those that have another shape stay."""
    for copies, named in ((parameters, module.named_parameters()), (buffers, module.named_buffers())):
        for name, tensor in named:
            copied = copies.get(plain_name(name))
            if copied is not None and copied.shape == tensor.shape and not is_expanded(tensor):
                tensor.copy_(copied)


def _written(named: Any) -> list[tuple[str, Tensor]]:
    return [(name, each) for name, each in named if not is_lazy(each) and has_readable_values(each)]


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
