"""Writes a bad step to a file, whole or not at all, and reads it again."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from lightning_memtools.memory.sizes import format_size
from lightning_memtools.nonfinite.capsule.environment import machine_now, needs_of, origin_now, switches_now
from lightning_memtools.nonfinite.capsule.plain_values import compact, n_bytes_of, to_plain
from lightning_memtools.nonfinite.earlier_values import EarlierValues
from lightning_memtools.nonfinite.micro_batches import Attributes, BatchStart, MicroBatch, simple_items
from lightning_memtools.nonfinite.step_outcome import StepConditions
from lightning_memtools.nonfinite.tensor_names import plain_name, tensors_in_attributes

VERSION = 1


@dataclasses.dataclass(slots=True, kw_only=True)
class Capsule:
    """The contents of a capsule.

    Attributes:
        step: The training step.
        module: The LightningModule, with the weights and buffers that the step began with.
        micro: The step's micro-batches.
        conditions: The conditions under which it ran.
        optimizers: The module's optimizers, before the update.
        scaler: The gradient scaler's state; empty without one.
        parameters: The names of the parameters whose gradients belong to the step.
        losses: Its losses.
        digests: Name of the parameter to the digest of its gradient.
        digests_of: The run whose gradients they digest: ``"step"``, or ``"replay"`` where the step's own no longer
            existed or were shared by the ranks.
        doubts: The reasons why a replay may differ, one sentence each.
        about: Plain values to add to the JSON file.
        values: What the step computes up to its first NaN; None if it was not run again.
        explanation: The fields of the explanation, as plain values; None without one.
    """

    step: int
    module: Module
    micro: Sequence[MicroBatch]
    conditions: StepConditions
    optimizers: Sequence[Optimizer]
    scaler: Mapping[str, Any]
    parameters: Sequence[str]
    losses: Sequence[float]
    digests: Mapping[str, str]
    digests_of: str
    doubts: Sequence[str]
    about: Mapping[str, Any]
    values: EarlierValues | None
    explanation: Mapping[str, Any] | None


@dataclasses.dataclass(frozen=True, slots=True)
class WrittenCapsule:
    """The result of writing a capsule.

    Attributes:
        left_out: The names of the values that the capsule does not hold.
        lacks: Those of them that are a batch or belong to one.
        needs: Says what has to be done before it can be replayed; empty if nothing.
    """

    left_out: Sequence[str]
    lacks: Sequence[str]
    needs: Sequence[str]


def write_capsule(capsule: Capsule, path: Path, max_bytes: int) -> WrittenCapsule:
    """Write the capsule to `path`, and a small JSON file beside it.

    Both appear whole or not at all. If the file would be larger than `max_bytes`, the optimizers' state is left out,
    which a replay of loss and gradients rarely uses; then the weights and buffers; then nothing is written.

    Raises:
        ValueError: It does not fit even without weights.
        OSError: It cannot be written.
    """
    left_out, lacks = list[str](), list[str]()
    saved = _contents(capsule, left_out, lacks)
    left_out += lacks
    parts = [("optimizers", "optimizer state"), ("weights", "weights and buffers")]
    droppable = [(part, what, n) for part, what in parts if (n := n_bytes_of(saved[part]))]
    path.parent.mkdir(parents=True, exist_ok=True)
    while (n_bytes := _write_if_it_fits(saved, path, max_bytes, _about(capsule, saved, left_out))) > max_bytes:
        if not droppable:
            raise ValueError(
                f"without weights it still takes {format_size(n_bytes)}, more than max_bytes ({format_size(max_bytes)})"
            )
        part, what, dropped = droppable.pop(0)
        left_out.append(f"{what} ({format_size(dropped)}, for max_bytes)")
        saved[part] = None
    return WrittenCapsule(left_out, lacks, saved["module"]["needs"])


def _write_if_it_fits(saved: dict[str, Any], path: Path, max_bytes: int, about: dict[str, Any]) -> int:
    """Write both files if the capsule is not larger than allowed; return its size in bytes."""
    needed = n_bytes_of(saved)
    if needed > max_bytes:
        return needed  # the tensors alone are too large: do not fill the disk to find out
    saved |= {"left_out": about["left_out"], "about": json.dumps(about)}
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


def _about(capsule: Capsule, saved: Mapping[str, Any], left_out: Sequence[str]) -> dict[str, Any]:
    """Return the contents of the JSON file: what is known of the capsule without loading it."""
    return {
        "version": VERSION,
        **capsule.about,
        "losses": [repr(loss) for loss in capsule.losses],
        "class": saved["module"]["class"],
        "machine": saved["machine"],
        "left_out": list(left_out),
        "needs": saved["module"]["needs"],
        "doubts": list(capsule.doubts),
    }


def _contents(capsule: Capsule, left_out: list[str], lacks: list[str]) -> dict[str, Any]:
    module = capsule.module
    held = [each for each in capsule.micro if each.batch is not None]
    if not held:
        lacks.append("the batch, which was no longer held")
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    return {
        "version": VERSION,
        "step": capsule.step,
        "conditions": {**dataclasses.asdict(capsule.conditions), "trainer": dict(capsule.conditions.trainer)},
        "machine": machine_now(str(device)),
        "switches": switches_now(),
        "module": module_contents(module, left_out),
        "origin": origin_now(),
        "weights": {
            "parameters": {plain_name(name): compact(each) for name, each in module.named_parameters()},
            "buffers": {plain_name(name): compact(each) for name, each in module.named_buffers()},
        },
        "micro": [_micro(each, module, lacks) for each in held],
        "optimizers": [to_plain(each.state_dict(), [], "optimizer") for each in capsule.optimizers],
        "scaler": dict(capsule.scaler),
        "parameters": list(capsule.parameters),
        "losses": list(capsule.losses),
        "digests": dict(capsule.digests),
        "digests_of": capsule.digests_of,
        "doubts": list(capsule.doubts),
        "values": None
        if capsule.values is None
        else {
            "operations": list(capsule.values.operations),
            "digests": torch.tensor(capsule.values.digests, dtype=torch.int64),
        },
        "explanation": None if capsule.explanation is None else to_plain(dict(capsule.explanation), [], ""),
    }


def module_contents(module: Any, left_out: list[str]) -> dict[str, Any]:
    """Return what a module is made again from, without its weights, as plain values.

    Args:
        module: The module.
        left_out: Gets the names of its tensors that are neither parameters nor buffers.
    """
    kind = type(module)
    hparams: list[str] = []
    left_out += _odd_attributes(module)
    return {
        "class": f"{kind.__module__}:{kind.__qualname__}",
        "hparams": {key: to_plain(value, hparams, key) for key, value in dict(getattr(module, "hparams", {})).items()},
        "hparams_left_out": hparams,
        "needs": needs_of(module, [name.partition(" (")[0] for name in hparams]),
        "attributes": _attributes({name: simple_items(vars(part)) for name, part in module.named_modules()}),
        "evaluating": [plain_name(name) for name, part in module.named_modules() if not part.training],
        "frozen": [plain_name(name) for name, each in module.named_parameters() if not each.requires_grad],
    }


def _odd_attributes(module: Any) -> list[str]:
    """Name the tensors that the module keeps as plain attributes: a step may use them, and they are not restored."""
    return [f"attribute {name} (a tensor that is no buffer)" for name, _ in tensors_in_attributes(module)]


def _attributes(attributes: Attributes) -> Attributes:
    return {plain_name(name): values for name, values in attributes.items() if values}


def _micro(micro: MicroBatch, module: Module, lacks: list[str]) -> dict[str, Any]:
    return {
        "index": micro.index,
        "batch": to_plain(micro.batch, lacks, "batch"),
        "start": _start(micro.start, module),
        "steps_before": micro.steps_before,
        "resumed": _start(micro.resumed, module) if micro.steps_before else None,
        "fetched": None
        if micro.fetched is None
        else [[each.index, each.loader_index, each.random.packed()] for each in micro.fetched],
    }


def _start(start: BatchStart | None, module: Module) -> dict[str, Any] | None:
    if start is None:
        return None
    # Only where it is not what the capsule says of the module, because a step toggles it.
    is_other = start.frozen not in {None, frozenset(n for n, p in module.named_parameters() if not p.requires_grad)}
    frozen = sorted(map(plain_name, start.frozen or ())) if is_other else None
    return {
        "random": start.random.packed(),
        "attributes": _attributes(start.attributes),
        "frozen": frozen,
        "generators": to_plain({plain_name(name): each for name, each in start.generators.items()}, [], ""),
    }


class CapsuleError(RuntimeError):
    """Raised when a capsule cannot be read or replayed. It says why, what can still be read, and what to do."""


def read_capsule(path: Path) -> dict[str, Any]:
    """Return what `write_capsule` wrote, with tensors on the CPU.

    Raises:
        CapsuleError: There is no capsule, it is not whole, or it is of another version.
    """
    about = _about_beside(path)
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
