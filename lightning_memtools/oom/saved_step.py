"""The failed step as a file, so that checks for which there was no time can be made later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lightning_memtools.nonfinite.capsule.capsule_file import CapsuleError, module_contents
from lightning_memtools.nonfinite.capsule.environment import importing_from, origin_now
from lightning_memtools.nonfinite.capsule.module_rebuild import Find, rebuilt
from lightning_memtools.nonfinite.capsule.plain_values import from_plain, to_plain
from lightning_memtools.nonfinite.tensor_names import plain_name
from lightning_memtools.oom.failed_step import FailedRun, FailedStep
from lightning_memtools.oom.failure_facts import sizes_only
from lightning_memtools.oom.recorded_history import RecordedHistory
from lightning_memtools.oom.report_page import ReportPage
from lightning_memtools.reporting.files import NO_RUN
from lightning_memtools.simulation.step import Precision
from lightning_memtools.simulation.trainer_stand_in import (
    TrainerStandIn,
    attach,
    configured_optimizers,
    forward_of,
    is_lightning_module,
)

VERSION = 1
_OF_STEP = ("is_cuda_like", "cuda", "gpu", "config", "evaluation_began", "processes", "predictions")
_OF_RUN = ("precision", "accumulate", "clip", "empties_cache", "plan")


Trusts = Callable[[str, str], bool]
"""Called with the name of a module and its place; returns whether it may be imported, which runs its code."""


class SavedStepError(Exception):
    """A saved step cannot be read, or its module cannot be made; the message says why, and what to do."""


def write_step(path: Path, page: ReportPage, failed: FailedStep) -> bool:
    """Write a failed step, without any value of a tensor, and return True; False where a file cannot hold it.

    Raises:
        OSError: It cannot be written.
    """
    run, left_out = failed.run, list[str]()
    saved = {
        "version": VERSION,
        "origin": origin_now(),
        "page": to_plain(replace(page, file=NO_RUN, snapshot="", actions=(), notes=[]), left_out, "page"),
        "step": to_plain({name: getattr(failed, name) for name in _OF_STEP}, left_out, "step"),
        "run": to_plain({name: getattr(run, name) for name in _OF_RUN}, left_out, "run"),
    }
    if left_out:
        return False
    saved["module"] = module_contents(run.model, [])
    saved["weights"] = {
        "parameters": {plain_name(name): sizes_only(each.detach()) for name, each in run.model.named_parameters()},
        "buffers": {plain_name(name): sizes_only(each) for name, each in run.model.named_buffers()},
    }
    torch.save(saved, path)
    return True


def read_step(
    path: Path,
    *,
    model: Any,
    trusts: Trusts,
    snapshot: Mapping[str, Any] | None,
) -> tuple[ReportPage, FailedStep]:
    """Return the report, without actions, and the step that `write_step` wrote.

    The module is made on the meta device where its constructor allows that.

    Args:
        path: The file.
        model: A LightningModule of the same class, or a function or class that makes one; None to make the class from
            its saved hyperparameters.
        trusts: Decides which modules may be imported.
        snapshot: The memory snapshot that was written beside the report; None where there is none.

    Raises:
        SavedStepError: The file cannot be read, or the module cannot be made.
    """
    try:
        saved: Any = torch.load(path, weights_only=True)
    except Exception as error:
        raise SavedStepError(f"{path} cannot be read: {type(error).__name__}: {error}.") from error
    if not isinstance(saved, dict) or saved.get("version") != VERSION or "step" not in saved:
        raise SavedStepError(f"{path} was not saved by this version of OOMReport.")
    try:
        with importing_from(saved["origin"], trusts) as find:
            page: ReportPage = from_plain(saved["page"], find)
            step, run = from_plain(saved["step"], find), from_plain(saved["run"], find)
            module = _module(saved, model, find)
    except (CapsuleError, ImportError) as error:
        why = str(error).partition("\nNext: ")[0]
        raise SavedStepError(
            f"{why}\nNext: add --model package.function, which makes the module, or --trust to import the modules "
            "that the file names."
        ) from error
    facts, history = page.facts, None
    if snapshot is not None and facts.stats.capacity is not None:
        history = RecordedHistory(snapshot, step["config"], facts.stats.capacity, facts.used_by_others or 0)
    failed_run = FailedRun(model=module, **run)
    if is_lightning_module(module):
        failed_run = _with_optimizers(failed_run, facts.moment.batch_idx or 0)
    return page, FailedStep(facts=facts, run=failed_run, history=history, **step)


def _module(saved: Mapping[str, Any], model: Any, find: Find) -> nn.Module:
    meta = torch.device("meta")
    # Many constructors work on the meta device, which takes no memory; some read values of what they make.
    with suppress(Exception), meta:
        return rebuilt(saved, model, meta, find)
    return rebuilt(saved, model, meta, find)


def _with_optimizers(run: FailedRun, batch_idx: int) -> FailedRun:
    """Return the run with its optimizers and forward pass, both without a Trainer."""
    module: Any = run.model
    context = Precision.parse(run.precision).context
    stand_in = TrainerStandIn(
        backward=lambda loss, *args, **kwargs: loss.backward(*args, **kwargs),
        module=module,
        facts={"precision_plugin": SimpleNamespace(train_step_context=context)},
    )
    attach(module, stand_in)
    stand_in.use(*configured_optimizers(module))
    return replace(run, optimizers=tuple(stand_in.optimizers), forward=forward_of(stand_in, module, batch_idx))
