"""Checksums of the records in event files: CRC-32C, as TFRecord files have them."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

_CASTAGNOLI = 0x82F63B78
_MASK = 0xA282EAD8
_ALL_ONES = 0xFFFFFFFF
# Longer records are few: texts. A loop over their bytes takes less time than as many calls of numpy.
_LONG_BYTES = 2000


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = (byte >> 1) ^ (_CASTAGNOLI if byte & 1 else 0)
    return byte


_TABLE = [_entry(byte) for byte in range(256)]


def masked_crc(data: bytes) -> int:
    """Return the checksum of TFRecord files: CRC-32C, rotated and shifted."""
    crc = _ALL_ONES
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return int(_masked(crc ^ _ALL_ONES))


def first_damaged(data: bytes, spans: Sequence[tuple[int, int]]) -> int | None:
    """Return the index of the first record whose checksum, the four bytes behind it, is another; None if all are right.

    Records of one length, as points of one curve have, are checked together, byte by byte.

    Args:
        data: A piece of an event file.
        spans: The start and stop of each record in it.
    """
    import numpy as np  # noqa: PLC0415, TensorBoard's start should not wait for it

    by_length: dict[int, list[int]] = defaultdict(list)
    for index, (start, stop) in enumerate(spans):
        by_length[stop - start].append(index)
    values, table = np.frombuffer(data, np.uint8), np.array(_TABLE, np.uint32)
    bad: list[int] = []
    for length, indices in by_length.items():
        if length > _LONG_BYTES:
            bad += [at for at in indices if masked_crc(data[slice(*spans[at])]) != _stored(data, spans[at][1])]
            continue
        starts = np.array([spans[at][0] for at in indices])
        crc = np.full(len(indices), _ALL_ONES, np.uint32)
        for offset in range(length):
            crc = table[(crc ^ values[starts + offset]) & 0xFF] ^ (crc >> 8)
        right = np.array([_stored(data, spans[at][1]) for at in indices], np.uint32)
        bad += [indices[at] for at in np.flatnonzero(_masked(crc ^ _ALL_ONES) != right)]
    return min(bad, default=None)


def _stored(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", data, at)[0])


def _masked(crc: Any) -> Any:  # a number, or an array of them
    return (((crc >> 15) | (crc << 17)) + _MASK) & _ALL_ONES
