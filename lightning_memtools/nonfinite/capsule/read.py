"""Reads a capsule, and says what is wrong with one that cannot be read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_memtools.nonfinite.capsule.write import VERSION


class CapsuleError(RuntimeError):
    """A capsule cannot be read or replayed. The message says why, what can still be read, and what to do."""


def read_capsule(path: Path) -> dict[str, Any]:
    """What `write_capsule` wrote; tensors are on the CPU.

    Raises:
        CapsuleError: There is none, it is not whole, or of another version.
    """
    about = _about(path)
    if not path.is_file():
        raise CapsuleError(f"There is no capsule {path}.{still_known(about)}")
    try:
        saved: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        size, written = path.stat().st_size, about.get("bytes")
        if written is not None and size != written:
            why = f"it is truncated: {size} bytes of {written}"
        else:
            why = " ".join([f"{type(error).__name__}:", *str(error).splitlines()[:1]])
        raise CapsuleError(
            f"{path} cannot be read: {why}.{still_known(about)}\nNext: copy it once more from where it was written."
        ) from error
    if not isinstance(saved, dict) or "version" not in saved or "about" not in saved:
        raise CapsuleError(f"{path} is no capsule of HaltOnNaN, though torch can load it.")
    if saved["version"] != VERSION:
        about = about or json.loads(saved["about"])
        by = about.get("machine", {}).get("lightning_memtools", "another version")
        raise CapsuleError(
            f"{path} is of capsule version {saved['version']}; this lightning_memtools reads version {VERSION}."
            f"{still_known(about)}\nNext: install lightning_memtools {by}, which wrote it."
        )
    return saved


def still_known(about: Mapping[str, Any]) -> str:
    """What the small JSON tells, as sentences to add to an error."""
    if not about:
        return " Nothing of it can be read: the small JSON beside it is missing too."
    known = [f"\nStill known: {about.get('headline', '')}"]
    known += [f"{what}: {about[key]}" for key, what in (("cause", "Cause"), ("what", "Operation")) if about.get(key)]
    if about.get("checkpoint"):
        known.append(f"Weights and optimizer state before the step: {about['checkpoint']}")
    return "\n".join(known)


def _about(path: Path) -> dict[str, Any]:
    try:
        about = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}
