"""How much memory a device has, written as a size or as the name of a GPU."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lightning_memtools.memory.sizes import GIB, parse_size

# Where no driver's figure is known. Of those that are, the smallest share of the marketing size is 0.977 without error
# correction in the memory itself, and 0.911 with it: tests/memory/test_capacity.py keeps the estimates below them all.
_USABLE_SHARE = 0.95
_USABLE_SHARE_WITH_INLINE_ECC = 0.91

_MAKERS = re.compile(r"nvidia|geforce|tesla|[\s_\-]+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of the data file ``gpus.json``, which names the source of each figure.

    Attributes:
        name: Its name with its size, such as "H100 80GB".
        usable_bytes: What a process can use at most: the total that the driver reports.
        estimated: Whether ``usable_bytes`` is an estimate from the marketing size, set low: no figure was found.
    """

    name: str
    usable_bytes: int
    estimated: bool


def parse_capacity(text: str) -> int:
    """Turn a size such as ``"24GiB"`` or a GPU's name such as ``"RTX 4090"`` or ``"H100 80GB"`` into bytes.

    A GPU's capacity is what its driver reports to a process as the total, less than the vendor's figure. Where that is
    not known it is estimated from the vendor's figure, read as GiB: 95% of it, 91% with error correction in the memory.

    Raises:
        ValueError: The text is neither, or names a GPU that comes with different sizes.
    """
    gpu = find_gpu(text)
    if gpu is not None:
        return gpu.usable_bytes
    try:
        size = parse_size(text)
    except ValueError as error:
        raise ValueError(
            f"Not a capacity: {text!r}.{_suggestion(text)} A capacity is a GPU's name or a size. {error}"
        ) from None
    if size <= 0:
        raise ValueError(f"Not a capacity: {text!r}. A device has more than zero bytes.")
    return size


def find_gpu(text: str) -> Gpu | None:
    """The GPU of that name; None where the text is no known GPU's name.

    Upper and lower case, spaces, hyphens and the words NVIDIA, GeForce and Tesla make no difference. The size may be
    left out where a GPU comes with one only.

    Raises:
        ValueError: The GPU comes with different sizes, and the text gives none.
    """
    matches = _gpus().get(_key(text), [])
    if len(matches) > 1:
        names = " or ".join(repr(gpu.name) for gpu in matches)
        raise ValueError(f"{text!r} comes with different sizes: write {names}.")
    return matches[0] if matches else None


def known_gpus() -> list[Gpu]:
    """Every GPU of the data file."""
    return list(dict.fromkeys(gpu for gpus in _gpus().values() for gpu in gpus))


@cache
def _gpus() -> dict[str, list[Gpu]]:
    content = json.loads(Path(__file__).with_name("gpus.json").read_text(encoding="utf-8"))
    by_name: dict[str, list[Gpu]] = {}
    for row in content["gpus"]:
        usable = row["usable_bytes"]
        if usable is None:
            share = _USABLE_SHARE_WITH_INLINE_ECC if row.get("inline_ecc") else _USABLE_SHARE
            # Vendors write GB, but a "24GB" card has 24 * 2**30 bytes of memory chips.
            estimate = int(float(row["marketing"].removesuffix("GB")) * GIB * share)
        gpu = Gpu(
            name=f"{row['name']} {row['marketing']}",
            usable_bytes=estimate if usable is None else usable,
            estimated=usable is None,
        )
        for name in (row["name"], gpu.name):
            by_name.setdefault(_key(name), []).append(gpu)
    return by_name


def _key(name: str) -> str:
    return _MAKERS.sub("", name).lower()


def _suggestion(text: str) -> str:
    names = {_key(gpu.name): gpu.name for gpu in known_gpus()}
    # "4090" is nearer to "rtx409024gb" than the measure says, so a name that contains the text comes first.
    key = _key(text)
    contained = [name for other, name in names.items() if key and key in other]
    near = [names[other] for other in difflib.get_close_matches(key, names, n=3)]
    suggestions = list(dict.fromkeys([*contained, *near]))[:3]
    return f" Did you mean {' or '.join(map(repr, suggestions))}?" if suggestions else ""
