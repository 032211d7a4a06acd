"""A number for a tensor's bits, computed where the tensor is."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_memtools._torch import has_readable_values

_CHUNK = 2**17
_STEP = -0x61C8864680B583EB  # odd, so that no earlier chunk is multiplied away


def fingerprint(tensor: Tensor) -> Tensor:
    """Return a number that differs, for practical purposes, if any bit or the order of the elements differs.

    A sum modulo 2^64 of 8 bytes each times a fixed random odd number (multilinear hashing, Carter and Wegman 1979): one
    element that differs always changes it. `torch.hash_tensor` would be the same for elements in another order, and for
    any even number of equal elements. It is 0 for tensors whose values cannot be read.
    """
    if not has_readable_values(tensor):
        return torch.zeros((), dtype=torch.int64)
    with torch.no_grad():
        try:
            if tensor.is_quantized:  # to read such a tensor under another type ends the process
                tensor = tensor.int_repr()
            values = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().flatten()
            octets = values.view(torch.uint8)
            if octets.storage_offset() % 8:  # such a view cannot be read as 8-byte numbers
                octets = octets.clone()
            n_whole = len(octets) // 8 * 8
            total = _hash(octets[:n_whole].view(torch.int64))
            return total.mul_(_STEP).add_(_hash(octets[n_whole:].to(torch.int64)))
        except (NotImplementedError, RuntimeError, TypeError):  # sparse and nested tensors
            return torch.zeros((), dtype=torch.int64)


def _hash(bits: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    weights = _weights(min(_CHUNK, len(bits)), bits.device)
    for start in range(0, len(bits), _CHUNK):  # in chunks, which take little memory
        part = bits[start : start + _CHUNK]
        # The high half is added to the low one first: two signs that change would cancel modulo 2^64.
        folded = (part >> 32).bitwise_xor_(part)
        total.mul_(_STEP).add_(folded.mul_(weights[: len(part)]).sum())
    return total


def _weights(n: int, device: torch.device) -> Tensor:
    """Return n random odd numbers, the same in every call. No random stream of the user is drawn from."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**62), 2**62, (n,), generator=generator).mul_(2).add_(1).to(device)
