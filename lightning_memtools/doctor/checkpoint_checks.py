"""Checks of a checkpoint: which of its keys do not fit the model, before it is loaded."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor, nn

from lightning_memtools.doctor.findings import Finding
from lightning_memtools.doctor.training_case import TrainingCase
from lightning_memtools.memory.error_frames import in_one_line
from lightning_memtools.reporting.phrases import counted, first_of
from lightning_memtools.simulation.fakes import TensorExchange, borrowed, fake_mode

# What wrappers put before every key: DataParallel and DDP, torch.compile, a module that holds the model.
_PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "state_dict.")
_CONTAINERS = ("state_dict", "model_state_dict", "model", "module")
_COUNTER = "num_batches_tracked"
_SIZE = re.compile(
    r"size mismatch for (\S+): copying a param with shape (.+?) from checkpoint.*current model is (.+?)\.$",
    re.MULTILINE,
)


class CheckpointKeys:
    """Check: keys of a checkpoint that are missing, unexpected, or of another size, found by loading it into fakes."""

    def __init__(self, case: TrainingCase) -> None:
        self._case = case

    def before_loading(self) -> Iterator[Finding]:
        """Load the checkpoint into a copy of the model without memory."""
        path = self._case.checkpoint
        if path is None:
            return
        try:
            state = weights_in(path)
        except Exception as error:  # noqa: BLE001, whatever is wrong with the file
            is_refused = isinstance(error, UnpicklingError) and is_zipfile(path)
            yield Finding(
                "checkpoint_keys",
                # Objects other than tensors are refused, and are no mistake: loading them would run their code.
                "info" if is_refused else "error",
                path,
                f"It could not be read: {in_one_line(error)}"
                + ("" if is_zipfile(path) else ". It is no zip file, as torch.save writes them"),
                "Its keys were not compared with the model's.",
                "Save the state_dict alone, or compare by hand: model.load_state_dict(state, strict=False)."
                if is_refused
                else "Check that it is a checkpoint, and complete.",
            )
            return
        yield from compare_keys(self._case.model, state, path)

    def loading(self, state: Mapping[str, Tensor]) -> Iterator[Finding]:
        """Compare a state_dict that is just being loaded."""
        yield from compare_keys(self._case.model, state, "the checkpoint")


def weights_in(path: str) -> Mapping[str, Tensor]:
    """Return the state_dict in a checkpoint file of Lightning, or of a plain script.

    Nothing in the file is executed (`weights_only=True`).

    Raises:
        ValueError: There is no state_dict in it.
    """
    loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    for key in _CONTAINERS:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping) or not any(isinstance(value, Tensor) for value in loaded.values()):
        raise ValueError(f"it holds {type(loaded).__name__}, and no state_dict")
    return loaded


def compare_keys(model: nn.Module, state: Mapping[str, Tensor], path: str) -> Iterator[Finding]:
    """Yield a finding for each kind of difference between a state_dict and a model.

    Args:
        model: The model. It is not changed.
        state: The state_dict.
        path: Its file, for the findings.
    """
    missing, unexpected, sizes = _tried(model, state)
    prefix = _wrapper_prefix(model, state) if missing and unexpected else None
    if prefix is not None:
        yield prefix_finding(path, *prefix, n_keys=len(state))
        return
    counters = [key for key in missing if key.endswith(_COUNTER)]
    extra = [key for key in unexpected if key.endswith((_COUNTER, "running_mean", "running_var"))]
    if counters:
        yield Finding(
            "checkpoint_keys",
            "error",
            f"{path}: {first_of(counters)}",
            f"A trial load misses {counted(len(counters), 'counter', 'counters')} of batches, which BatchNorm has had "
            "since PyTorch 0.4.1.",
            "load_state_dict raises 'Missing key(s)'. The counter matters only to BatchNorm(momentum=None).",
            f"Add state[key] = torch.tensor(0) for each of them ({counters[0]!r} is one), or load with strict=False.",
        )
    if extra:
        yield Finding(
            "checkpoint_keys",
            "error",
            f"{path}: {first_of(extra)}",
            f"A trial load finds {counted(len(extra), 'statistic', 'statistics')} of BatchNorm that the model "
            "has no place for.",
            "load_state_dict raises 'Unexpected key(s)'. The model was built without these "
            "layers, or with track_running_stats=False.",
            "Build the model as it was saved, or remove these keys from the state_dict.",
        )
    missing = [key for key in missing if key not in counters]
    unexpected = [key for key in unexpected if key not in extra]
    if missing or unexpected:
        yield _other_keys(path, missing, unexpected)
    if sizes:
        name, saved, current = sizes[0]
        yield Finding(
            "checkpoint_keys",
            "error",
            f"{path}: {first_of([size[0] for size in sizes])}",
            f"{counted(len(sizes), 'tensor has', 'tensors have')} another size: {name} is {saved} in "
            f"the checkpoint and {current} in the model.",
            "load_state_dict raises 'size mismatch', also with strict=False.",
            "Build the model with the sizes it was saved with, or leave these keys out, load with strict=False and "
            "train them anew.",
        )


def prefix_finding(path: str, added: str, removed: str, *, n_keys: int) -> Finding:
    """Return the finding of keys that differ by a prefix.

    Args:
        path: The checkpoint.
        added: The prefix that all its keys have.
        removed: The prefix that all the model's keys have.
        n_keys: How many there are.
    """
    if added:
        evidence = f"All {n_keys} keys fit the model once {added!r} is removed from their front."
        fix = f"state = {{key.removeprefix({added!r}): value for key, value in state.items()}}"
    else:
        evidence = f"All {n_keys} keys fit the model once {removed!r} is put in front of them."
        fix = f"state = {{{removed!r} + key: value for key, value in state.items()}}"
    return Finding(
        "checkpoint_keys",
        "error",
        path,
        f"{evidence} It was saved from {'a wrapped' if added else 'an inner'} model.",
        "load_state_dict raises, and with strict=False it loads nothing at all.",
        fix,
    )


def _other_keys(path: str, missing: Sequence[str], unexpected: Sequence[str]) -> Finding:
    near = [
        f"{key} may be called {alike[0]} there"
        for key in missing[:3]
        if (alike := difflib.get_close_matches(key, unexpected, n=1, cutoff=0.8))
    ]
    parts = [
        f"{len(keys)} {word} ({first_of(keys)})"
        for keys, word in ((missing, "missing"), (unexpected, "unexpected"))
        if keys
    ]
    return Finding(
        "checkpoint_keys",
        "error",
        f"{path}: {first_of([*missing, *unexpected])}",
        f"A trial load finds {' and '.join(parts)}." + (f" {'; '.join(near)}." if near else ""),
        "load_state_dict raises; with strict=False what is missing keeps its initial values.",
        "Build the model as it was saved, or rename the keys of the state_dict.",
    )


def _tried(model: nn.Module, state: Mapping[str, Tensor]) -> tuple[list[str], list[str], list[tuple[str, str, str]]]:
    """Load a state_dict into a fake copy of the model, so that every rule and hook of its modules applies."""
    sizes: list[tuple[str, str, str]] = []
    with fake_mode(), borrowed([model], TensorExchange()):
        try:
            found = nn.Module.load_state_dict(model, state, strict=False)
        except RuntimeError as error:  # the only way in which torch tells of sizes
            sizes = [match.groups() for match in _SIZE.finditer(str(error))]  # type: ignore[misc]
            wrong = {size[0] for size in sizes}
            if not wrong:
                raise
            keys = set(model.state_dict())
            return sorted(keys - set(state)), sorted(set(state) - keys), sizes
    return list(found.missing_keys), list(found.unexpected_keys), sizes


def _wrapper_prefix(model: nn.Module, state: Mapping[str, Tensor]) -> tuple[str, str] | None:
    expected, saved = set(model.state_dict()), set(state)
    for prefix in _PREFIXES:
        if {key.removeprefix(prefix) for key in saved} == expected and all(key.startswith(prefix) for key in saved):
            return prefix, ""
        if {prefix + key for key in saved} == expected:
            return "", prefix
    return None
