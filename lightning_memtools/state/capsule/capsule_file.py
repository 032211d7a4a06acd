"""Writes the state of a step to a file, whole or not at all, and reads it again."""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_memtools.memory.sizes import format_size
from lightning_memtools.state.capsule.plain_values import n_bytes_of

VERSION = 1
_DROPPABLE = [("optimizers", "optimizer state"), ("weights", "weights and buffers")]


def write_capsule(
    saved: dict[str, Any], path: Path, max_bytes: int, about: Mapping[str, Any], left_out: list[str]
) -> None:
    """Write a step to `path`, and a small JSON file beside it, which tells what is known without loading the step.

    Both appear whole or not at all. If the file would be larger than `max_bytes`, the optimizers' state is left out,
    which a replay of loss and gradients rarely uses; then the weights and buffers; then nothing is written.

    Args:
        saved: The step, as plain values.
        path: The file.
        max_bytes: Its largest size.
        about: The contents of the JSON file.
        left_out: The names of what `saved` does not hold; gets those of the parts that do not fit.

    Raises:
        ValueError: It does not fit even without weights.
        OSError: It cannot be written.
    """
    droppable = [(part, what, n) for part, what in _DROPPABLE if (n := n_bytes_of(saved[part]))]
    path.parent.mkdir(parents=True, exist_ok=True)
    while (n_bytes := _write_if_it_fits(saved, path, max_bytes, {**about, "left_out": left_out})) > max_bytes:
        if not droppable:
            raise ValueError(
                f"without weights it still takes {format_size(n_bytes)}, more than max_bytes ({format_size(max_bytes)})"
            )
        part, what, dropped = droppable.pop(0)
        left_out.append(f"{what} ({format_size(dropped)}, for max_bytes)")
        saved[part] = None


def _write_if_it_fits(saved: dict[str, Any], path: Path, max_bytes: int, about: dict[str, Any]) -> int:
    """Write both files if the capsule is not larger than allowed; return its size in bytes."""
    needed = n_bytes_of(saved)
    if needed > max_bytes:
        return needed  # the tensors alone are too large: do not fill the disk to find out
    about = {"version": VERSION, **about}
    saved |= {"version": VERSION, "left_out": list(about["left_out"]), "about": json.dumps(about)}
    n_bytes = _whole(path, lambda file: torch.save(saved, file), max_bytes)
    if n_bytes <= max_bytes:
        text = json.dumps({**about, "capsule": path.name, "bytes": n_bytes}, indent=2) + "\n"
        try:
            _whole(path.with_suffix(".json"), lambda file: file.write(text.encode()))
        except OSError:
            path.unlink()
            raise
    return n_bytes


def _whole(path: Path, write: Callable[[Any], object], max_bytes: float = math.inf) -> int:
    """Write a file under another name first, so that nobody sees half of it; return its size.

    A file that is too large is deleted.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        n_bytes = unfinished.stat().st_size
        if n_bytes <= max_bytes:
            unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return n_bytes


class CapsuleError(RuntimeError):
    """Raised when a capsule cannot be read or replayed. It says why, what can still be read, and what to do."""


def read_capsule(path: Path) -> dict[str, Any]:
    """Return what `write_capsule` wrote, with tensors on the CPU.

    Raises:
        CapsuleError: There is no capsule, it is not whole, or it is of another version.
    """
    about = _about_beside(path)
    if not path.is_file():
        raise CapsuleError(f"There is no capsule {path}.{_still_known(about)}")
    try:
        _refuse_what_unpacks_to_more(path)
        saved: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        size, written = path.stat().st_size, about.get("bytes")
        if written is not None and size != written:
            why = f"it is truncated: {size} bytes of {written}"
        else:
            why = " ".join([f"{type(error).__name__}:", *str(error).splitlines()[:1]])
        raise CapsuleError(
            f"{path} cannot be read: {why}.{_still_known(about)}\nNext: copy it once more from where it was written."
        ) from error
    if not isinstance(saved, dict) or "version" not in saved or "about" not in saved:
        raise CapsuleError(f"{path} is no capsule of HaltOnNaN, though torch can load it.")
    if saved["version"] != VERSION:
        about = about or json.loads(saved["about"])
        by = about.get("machine", {}).get("lightning_memtools", "another version")
        raise CapsuleError(
            f"{path} is of capsule version {saved['version']}; this lightning_memtools reads version {VERSION}."
            f"{_still_known(about)}\nNext: install lightning_memtools {by}, which wrote it."
        )
    return saved


def _refuse_what_unpacks_to_more(path: Path) -> None:
    """Raise ValueError for an archive that declares more bytes than it has: torch.save compresses nothing."""
    with zipfile.ZipFile(path) as archive:
        n_bytes = sum(each.file_size for each in archive.infolist())
    # A comment could hold a second directory, which torch might read instead of this.
    if n_bytes > path.stat().st_size or archive.comment:
        raise ValueError(f"it would unpack to {format_size(n_bytes)}, more than its own size")


def _still_known(about: Mapping[str, Any]) -> str:
    """Return the contents of the JSON file, as sentences to add to an error."""
    if not about:
        return " Nothing of it can be read: the small JSON beside it is missing too."
    known = [f"\nStill known: {about.get('headline', '')}"]
    known += [f"{what}: {about[key]}" for key, what in (("cause", "Cause"), ("what", "Operation")) if about.get(key)]
    if about.get("checkpoint"):
        known.append(f"Weights and optimizer state before the step: {about['checkpoint']}")
    return "\n".join(known)


def _about_beside(path: Path) -> dict[str, Any]:
    try:
        about = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}
