"""Packs sequences by lengths that are known: torch's kernels for it read them without an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from lightning_memtools._torch import PACK_PADDED, PAD_PACKED, has_readable_values, without_dispatch_modes
from lightning_memtools.simulation.known_values import KnownValues


class _PackedSequences(torch.autograd.Function):
    """Packs sequences as torch does (PackedSequence.cpp), by lengths that are known."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, sizes: list[int], batch_first: bool) -> Tensor:
        """Return the rows of all time steps, one below the other."""
        ctx.shape, ctx.sizes, ctx.batch_first = source.shape, sizes, batch_first
        steps = source.transpose(0, 1) if batch_first else source
        parts = [
            steps[first:last, :n].contiguous().view(-1, *steps.shape[2:]) for first, last, n in _runs_of_equal(sizes)
        ]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Put each row's gradient where the row was."""
        (gradient,) = gradients
        shape = [ctx.shape[1], ctx.shape[0], *ctx.shape[2:]] if ctx.batch_first else ctx.shape
        out = gradient.new_zeros(shape)
        offset = 0
        for step, n in enumerate(ctx.sizes):
            out[step, :n].copy_(gradient[offset : offset + n])
            offset += n
        return (out.transpose(0, 1) if ctx.batch_first else out), None, None


def _runs_of_equal(sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield first step, end and number of sequences of each run of time steps with equally many sequences."""
    first = 0
    for size, run in groupby(sizes):
        last = first + len(list(run))
        yield first, last, size
        first = last


def _pack(values: KnownValues, source: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    known = values.read(lengths)
    with without_dispatch_modes():
        sizes: list[int] = [int((known > step).sum()) for step in range(int(known.max()))]
    packed: Tensor = _PackedSequences.apply(source, sizes, batch_first)  # type: ignore[no-untyped-call]
    return packed, torch.tensor(sizes)


def _pad(values: KnownValues, source: Tensor, batch_sizes: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    batch_first, padding_value, total_length = options
    known = values.read(batch_sizes)
    with without_dispatch_modes():
        sizes: list[int] = known.tolist()
    length = max(total_length, len(sizes))
    out = source.new_full((length, sizes[0], *source.shape[1:]), padding_value)
    offset = 0
    for first, last, n in _runs_of_equal(sizes):
        rows = source[offset : offset + (last - first) * n]
        out[first:last, :n].copy_(rows.view(last - first, n, *source.shape[1:]))
        offset += (last - first) * n
    lengths = torch.tensor([sum(n > at for n in sizes) for at in range(sizes[0])])
    return (out.transpose(0, 1) if batch_first else out), lengths


def _run(values: KnownValues, function: Callable[..., Any], source: Tensor, sizes: Any, *args: Any) -> Any:
    """Run a recurrent function; for a packed sequence, with the known values of its batch sizes."""
    is_packed = isinstance(args[1], (list, tuple))  # the weights; otherwise they come second
    return function(source, values.read(sizes) if is_packed else sizes, *args)


def packing(values: KnownValues, replaced: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return replacements of torch's functions for packed sequences. They read lengths from the known values.

    Args:
        values: The known values.
        replaced: The replacements of torch's recurrent functions, which are called instead of these.
    """
    readers = {PACK_PADDED: partial(_pack, values), PAD_PACKED: partial(_pad, values)}
    for one in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu):
        readers[one] = partial(_run, values, replaced.get(one, one))
    return {one: partial(_without_values, reader, replaced.get(one, one)) for one, reader in readers.items()}


def _without_values(reader: Callable[..., Any], function: Callable[..., Any], source: Tensor, *args: Any) -> Any:
    return function(source, *args) if has_readable_values(source) else reader(source, *args)
