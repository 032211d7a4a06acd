"""The memory that cuDNN's convolutions take while they run, beside the tensors.

Tensor cores want channels last. For tensors in another memory format, an engine keeps transposed copies of its inputs
and results in its workspace; gradients of weights that several blocks share are summed there; and before compute
capability 8.0, float32 convolutions of 3x3 go through Winograd's transform. The rule was fitted to what cuDNN 9.20's
heuristics say for ResNet-50 and VGG-16 on five GPUs. On the third of the shapes that was held back, its mean error is
13.5% of input and output. Groups and volumes are not in that data: no workspace is counted for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch

from lightning_memtools.memory.sizes import GpuShape

aten = torch.ops.aten
CONVOLUTIONS = frozenset({aten.convolution.default, aten.convolution_backward.default})
"""The operators whose workspaces `workspaces_of` knows."""

Operation = Literal["forward", "input gradient", "weight gradient"]
_FEW_CHANNELS = 8
_SMALL_MAP = 7
_AMPERE, _HOPPER = (8, 0), (9, 0)
_A100 = GpuShape()
_TILE = 128  # rows and columns of a product of matrices that one block makes


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionShape:
    """A convolution of images or sequences.

    Attributes:
        source: The sizes of its input: samples, channels, and the places in each direction.
        out: Those of its output.
        kernel: The places of its kernel in each direction.
        element_size: The bytes of an element.
        channels_last: Whether it runs in this memory format.
    """

    source: tuple[int, ...]
    out: tuple[int, ...]
    kernel: tuple[int, ...]
    element_size: int
    channels_last: bool = False

    def workspace(self, operation: Operation, gpu: GpuShape = _A100) -> int:
        """Return the bytes of the workspace on a GPU."""
        capability = gpu.compute_capability
        if len(self.source) > 4:  # noqa: PLR2004, volumes
            return 0
        if capability < _AMPERE and self.element_size > 2:  # noqa: PLR2004, float32 without tensor cores
            return self._winograd(operation)
        has_half_rules = self.element_size == 2 or capability >= _HOPPER  # noqa: PLR2004
        if self.channels_last:
            return self._padded if has_half_rules and self._has_few_channels else self._last(operation, has_half_rules)
        return self._first(operation, gpu, has_half_rules=has_half_rules)

    def _first(self, operation: Operation, gpu: GpuShape, *, has_half_rules: bool) -> int:
        moved = self._in + self._out + self._weight
        if self._has_few_channels:
            return self._padded + self._out if has_half_rules or operation == "weight gradient" else 0
        if self._is_pointwise:
            if operation != "weight gradient":
                return 0
            # One sum for each sample, in float32.
            return min(self.source[0] * self._weight * 4 // self.element_size, self._in + self._out + self._weight)
        if operation == "weight gradient" and prod(self.kernel) > 1 and gpu.compute_capability < _HOPPER:
            # Where one sum of the weight's gradient would leave multiprocessors idle, several are made and then added.
            columns = -(-self.source[1] * prod(self.kernel) // _TILE)
            n_tiles = -(-self.out[1] // _TILE) * columns
            return moved + gpu.multiprocessors // n_tiles * self._weight
        if has_half_rules or operation != "forward":
            return moved
        return self._in + self._weight

    def _last(self, operation: Operation, has_half_rules: bool) -> int:
        if has_half_rules or self._is_pointwise:
            return 0
        if operation == "forward":
            return self._in + self._weight
        if operation == "input gradient":
            return 0 if prod(self.kernel) == 1 else self._weight + (self._in + self._out) // 2
        return self._in if prod(self.kernel) == 1 else self._in + self._out

    def _winograd(self, operation: Operation) -> int:
        """Return the bytes of the transformed input, output and weight of F(4x4, 3x3)."""
        is_strided = self.source[2:] != self.out[2:]
        if prod(self.kernel) == 1 or is_strided or self._has_few_channels:
            return self._weight * self.source[0] if operation == "weight gradient" and self._is_pointwise else 0
        tiles = self.source[0] * prod(-(-size // 4) for size in self.out[2:])
        channels, filters = self.source[1], self.out[1]
        copies = self._in + self._out if self.channels_last and operation == "weight gradient" else 0
        if self.channels_last and operation != "weight gradient":
            return self._in + self._out + 2 * self._weight
        return 36 * self.element_size * (channels * tiles + filters * tiles + channels * filters) + copies

    @property
    def _in(self) -> int:
        return prod(self.source) * self.element_size

    @property
    def _out(self) -> int:
        return prod(self.out) * self.element_size

    @property
    def _weight(self) -> int:
        return self.source[1] * self.out[1] * prod(self.kernel) * self.element_size

    @property
    def _has_few_channels(self) -> bool:
        return self.source[1] < _FEW_CHANNELS

    @property
    def _padded(self) -> int:
        """The input with channels up to a multiple of four."""
        return self._in // self.source[1] * -(-self.source[1] // 4) * 4

    @property
    def _is_pointwise(self) -> bool:
        """True for a product of matrices as it lies; small maps and strides are copied first."""
        same = self.source[2:] == self.out[2:]
        return prod(self.kernel) == 1 and same and max(self.source[2:]) > _SMALL_MAP


def workspaces_of(func: Any, args: tuple[Any, ...], out: Any, gpu: GpuShape) -> Iterator[int]:
    """Yield the bytes of the workspaces of one of `CONVOLUTIONS`, in the order in which it takes them."""
    if func is aten.convolution.default:
        source, weight, groups, transposed = args[0], args[1], args[8], args[6]
        gradient, operations = out, ["forward"]
    else:
        gradient, source, weight, transposed, groups = args[0], args[1], args[2], args[7], args[9]
        names = ("input gradient", "weight gradient")
        operations = [name for name, wanted in zip(names, args[10], strict=False) if wanted]
    if groups != 1:
        return
    formats = {memory_format_of(source), memory_format_of(weight)}
    shape = ConvolutionShape(
        source=tuple(gradient.shape if transposed else source.shape),
        out=tuple(source.shape if transposed else gradient.shape),
        kernel=tuple(weight.shape[2:]),
        element_size=source.element_size(),
        channels_last=torch.channels_last in formats,
    )
    # A transposed convolution runs forward what is the gradient of the input of the other.
    swapped = {"forward": "input gradient", "input gradient": "forward"}
    for name in operations:
        yield shape.workspace(swapped.get(name, name) if transposed else name, gpu)  # type: ignore[arg-type]


def memory_format_of(tensor: torch.Tensor) -> torch.memory_format:
    """Return the memory format that a tensor's strides suggest, as suggest_memory_format of c10 does."""
    order = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}.get(tensor.dim())
    if order is None or tensor.stride(1) == 0:
        return torch.contiguous_format
    least = 0
    for dim in order:
        size, stride = tensor.shape[dim], tensor.stride(dim)
        if size == 0 or stride < least or (dim == 0 and least == tensor.stride(1)):
            return torch.contiguous_format
        least = stride * size
    return torch.channels_last if len(order) == 4 else torch.channels_last_3d  # noqa: PLR2004, images
