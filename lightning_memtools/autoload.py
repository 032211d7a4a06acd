"""Entry points by which Lightning gets callbacks for each Trainer: with MEMTOOLS=1, those of `memtools run`.

pyproject.toml names these functions as entry points.
"""

from __future__ import annotations

import os
import warnings

VARIABLE = "MEMTOOLS"
"""The environment variable: "1", or the options of `memtools run` as JSON. A script's processes inherit it."""
_OFF = {"", "0", "false", "no", "off"}


def for_lightning() -> list[object]:
    """Return the callbacks to add to a new Trainer; `lightning` calls this as an entry point. Never raises."""
    return _callbacks("lightning.pytorch")


def for_pytorch_lightning() -> list[object]:
    """Return the callbacks to add to a new Trainer; `pytorch_lightning` calls this as an entry point. Never raises."""
    return _callbacks("pytorch_lightning")


def _callbacks(package: str) -> list[object]:
    asked = os.environ.get(VARIABLE, "").strip()
    if asked.lower() in _OFF:
        return []
    from lightning_memtools.warning_categories import DegradedWarning  # noqa: PLC0415, only where it is asked for

    try:
        from lightning_memtools._lightning import PACKAGE  # noqa: PLC0415, as above
        from lightning_memtools.verdict.in_trainer.run_summary import RunSummary  # noqa: PLC0415, as above

        if package != PACKAGE:
            raise RuntimeError(f"this program imported {PACKAGE} first, and a Trainer is of {package}")  # noqa: TRY301
        return [RunSummary.asked_for(asked)]
    except Exception as error:  # noqa: BLE001, it is called while the user's Trainer is made
        text = f"{VARIABLE} is set, but this Trainer runs without memtools: {error}"
        warnings.warn(text, DegradedWarning, stacklevel=2)
        return []
