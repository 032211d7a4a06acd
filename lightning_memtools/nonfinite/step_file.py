"""Writes a bad step to a file beside the last good checkpoint, and runs it again from there in a fresh process."""

from __future__ import annotations

import contextlib
import inspect
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_memtools._torch import buffers_of, is_in_memory
from lightning_memtools.memory.nested_tensors import map_tensors, plain_name
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.nonfinite.bad_step import BadStep
from lightning_memtools.nonfinite.explain import explain
from lightning_memtools.nonfinite.finite_checks import find_bad
from lightning_memtools.nonfinite.step_guard import MicroBatch
from lightning_memtools.nonfinite.step_rerun import (
    PRECISIONS,
    SIMPLE,
    TRAINER_FACTS,
    CannotRerunError,
    StepConditions,
    StepRerun,
    configured,
    mismatches,
)
from lightning_memtools.reporting.tables import shown_as
from lightning_memtools.simulation.step_runner import is_lightning_module
from lightning_memtools.state.random_state import RandomState, random_streams_restored

VERSION = 6


class StepFileError(RuntimeError):
    """Raised when the file of a bad step cannot be written, read or replayed. The message says why, and what to do."""


def step_as_plain(
    bad: BadStep, rerun: StepRerun, *, parameters: Sequence[str], digests: Mapping[str, str], checkpoint: str
) -> dict[str, Any]:
    """Return the content of a bad step's file, as values that `torch.load(weights_only=True)` accepts.

    `parameters`: the names of the parameters that got gradients. `digests`: the hashes of the gradients. `checkpoint`:
    the name of the file with the weights. If a batch holds values that are not accepted, StepFileError is raised.
    """
    module, micro = rerun.module, rerun.micro
    left_out = [str(each.index) for each in micro if not _is_plain(each.batch)]
    if left_out:
        raise StepFileError(
            f"batch {', '.join(left_out)} holds other things than tensors, numbers, texts, lists, tuples and dicts. "
            "Let the collate function return a dict of tensors to get the file"
        )
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    return {
        "version": VERSION,
        "step": bad.step,
        "rank": bad.rank,
        "text": f"{bad.headline}\nCause: {bad.cause}: {bad.because}\n{bad.what}",
        "checkpoint": checkpoint,
        "conditions": {**asdict(rerun.conditions), "trainer": dict(rerun.conditions.trainer)},
        "machine": {"torch": str(torch.__version__), "device": str(device)},
        "evaluating": [plain_name(name) for name, part in module.named_modules() if not part.training],
        "buffers": {plain_name(name): compact(each) for name, each in module.named_buffers() if _is_plain(each)},
        "micro": [
            {
                "index": each.index,
                "batch": map_tensors(each.batch, compact),
                "random": None if each.random is None else each.random.as_plain(),
                "updates_before": each.updates_before,
            }
            for each in micro
        ],
        "parameters": list(parameters),
        "losses": [loss for _, loss in bad.losses],
        "digests": dict(digests),
        "doubts": list(bad.doubts),
    }


def _is_plain(value: Any) -> bool:
    """Return True if `torch.load(weights_only=True)` would return the value unchanged from a file."""
    if isinstance(value, Tensor):
        is_sparse = value.layout in {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc}
        return type(value) in {Tensor, nn.Parameter} and (is_sparse or is_in_memory(value))
    if type(value) in {dict, OrderedDict}:
        return all(type(key) in SIMPLE and _is_plain(item) for key, item in value.items())
    return all(map(_is_plain, value)) if type(value) in {list, tuple, set} else type(value) in SIMPLE


def compact(tensor: Tensor) -> Tensor:
    """Return the tensor, copied if it is only part of its storage, because torch.save writes the whole storage."""
    tensor = tensor.detach()
    is_whole = tensor.layout != torch.strided or tensor.untyped_storage().nbytes() <= tensor.nbytes
    return tensor if is_whole else tensor.clone()


def read_step(path: Path) -> dict[str, Any]:
    """Return the content of a bad step's file, with tensors on the CPU. Loading the file cannot run any code.

    Raises:
        StepFileError: The file is missing or incomplete, or has another format version.
    """
    saved = _loaded(path, "the file of a step")
    if not isinstance(saved, dict) or saved.get("version") != VERSION:
        raise StepFileError(
            f"{path} is no file of a step that this lightning_memtools reads (version {VERSION}), though torch can "
            "load it.\nNext: pass the file nonfinite-step<n>-rank<r>.pt that HaltOnNaN wrote."
        )
    return saved


def _loaded(path: Path, what: str) -> Any:
    if not path.is_file():
        raise StepFileError(f"There is no file {path}.\nNext: copy {what} there from where it was written.")
    try:
        with zipfile.ZipFile(path) as archive:  # torch.save compresses nothing
            n_bytes = sum(each.file_size for each in archive.infolist())
            # A comment could hold a second directory, which torch might read instead of this.
            if n_bytes > path.stat().st_size or archive.comment:
                raise ValueError(f"it would unpack to {format_size(n_bytes)}, more than its own size")  # noqa: TRY301
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        lines = str(error).splitlines() or [""]
        why = next((line.strip() for line in lines if "GLOBAL" in line), lines[0])  # torch's message is a page
        raise StepFileError(
            f"{path} cannot be read as {what}: {type(error).__name__}: {why}\nNext: copy it once more from where it "
            "was written; if you trust it, pass the module that load_from_checkpoint(..., weights_only=False) returns."
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The result of running a bad step again from the file that HaltOnNaN wrote.

    Attributes:
        path: The file.
        step: The training step.
        losses: The loss of each micro-batch (in manual optimization: of each backward pass).
        gradients: The gradient of each parameter, by parameter name, without a gradient scaler's factor.
        is_finite: Whether all losses and gradients are finite in this run.
        mismatches: The differences between this run and the original step, each as a sentence.
        doubts: The reasons why this run may differ from the original step, each as a sentence.
        explanation: The BadStep with the operation that made the first NaN or Inf; None if no operation was identified.
        text: The message in which HaltOnNaN reported the step.
        model: The module, in its state when the step began.
        batches: The batches of the step.
    """

    path: Path
    step: int
    losses: tuple[float, ...]
    gradients: Mapping[str, Tensor] = field(repr=False)
    is_finite: bool
    mismatches: tuple[str, ...]
    doubts: tuple[str, ...]
    explanation: BadStep | None
    text: str
    model: nn.Module = field(repr=False)
    batches: tuple[Any, ...] = field(repr=False)

    @property
    def exact(self) -> bool:
        """True if losses and gradients equal those of the original step bit for bit, including NaN and Inf."""
        return not self.mismatches

    def summary(self) -> str:
        """Return a string with the losses, how they differ from the original, and what made the first NaN or Inf."""
        n_bad, bad = len(find_bad(self.gradients.items())), self.explanation
        lines = [
            f"Step {self.step} of {self.path}, run again.",
            f"Losses: {' '.join(f'{x:.6g}' for x in self.losses)}",
            f"Gradients: {len(self.gradients)}, of which {n_bad} hold NaN or Inf",
            "Bit for bit the same as in the step: losses and gradients."
            if self.exact
            else "\n- ".join(["Not the same as in the step:", *self.mismatches]),
            *(f"Note: {doubt}" for doubt in self.doubts),
        ]
        if bad is not None:
            lines += ["", f"Cause: {bad.cause}: {bad.because}", bad.what]
            lines += [f"Tried: {bad.confirmed}."] if bad.confirmed else []
            lines.append(f"Next: {bad.advice}")
        elif self.is_finite:
            lines += ["", "The step is finite now. When it was not:", self.text]
        return "\n".join(lines)

    _repr_html_ = shown_as(summary)


def replay(path: str | Path, *, model: Any) -> Replay:
    """Run again a step that HaltOnNaN wrote to a file, and compare losses and gradients with the original.

    The weights come from the checkpoint in the same folder. On the machine where the step ran, losses and gradients
    are the same bit for bit. No Trainer, data set or process group is needed, and nothing is logged or written. Both
    files are opened with ``weights_only=True``, so that they cannot run any code.

    Args:
        path: The file, ``nonfinite-step<n>-rank<r>.pt``.
        model: The LightningModule; or its class, on which ``load_from_checkpoint`` is called; or a function that
            returns the module. The weights are loaded into the module.

    Raises:
        StepFileError: A file cannot be read, or the module cannot be created or does not fit the checkpoint.
    """
    with random_streams_restored():  # making a module uses random numbers
        try:
            return _replay(Path(path), model)
        except StepFileError:
            raise
        except CannotRerunError as error:
            raise StepFileError(f"{path}: {error}") from error
        except Exception as error:
            raise StepFileError(
                f"{path} cannot be replayed: {type(error).__name__}: {error}\nNext: pass the module as the training "
                "script makes it, replay(path, model=my_module) or --model package:function; or copy the file again."
            ) from error


def _replay(path: Path, model: Any) -> Replay:
    saved = read_step(path)
    # A file beside it and no other: a step's file must not choose what is opened.
    checkpoint = path.with_name(Path(str(saved["checkpoint"])).name)
    doubts, device = list(map(str, saved["doubts"])), torch.device(saved["machine"]["device"])
    weights: Any = None  # where its checkpoint cannot be opened
    try:
        weights = _loaded(checkpoint, "the checkpoint of the last good state")
    except StepFileError as error:
        # Hyperparameters of other classes, such as OmegaConf's, are not loaded, because that could run code.
        if not isinstance(model, nn.Module) or not isinstance(error.__cause__, UnpicklingError):
            raise
        doubts.append("Its checkpoint cannot be opened safely: the module runs with the weights that it has.")
    module = _module_of(model, checkpoint, weights)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        doubts.append(f"Its device, {device}, is not here: it is run on the CPU.")
        device = torch.device("cpu")
    if saved["machine"]["torch"] != torch.__version__:
        doubts.append(f"It ran with torch {saved['machine']['torch']}, and this is {torch.__version__}.")
    module.to(device)
    _set_buffers(module, saved["buffers"], device)
    evaluating = set(saved["evaluating"])
    for name, part in module.named_modules():
        part.training = plain_name(name) not in evaluating
    micro = [
        MicroBatch(
            int(each["index"]),
            map_tensors(each["batch"], lambda tensor: tensor.to(device)),
            None if each["random"] is None else RandomState.from_plain(each["random"]),
            updates_before=int(each["updates_before"]),
        )
        for each in saved["micro"]
    ]
    conditions = _conditions(saved["conditions"])
    optimizers, schedulers = configured(module, conditions)
    for optimizer, state in zip(optimizers, (weights or {}).get("optimizer_states", ()), strict=False):
        with contextlib.suppress(ValueError, KeyError):  # the step sees a fresh optimizer
            optimizer.load_state_dict(state)
    wanted = set(saved["parameters"])
    parameters = [p for name, p in module.named_parameters() if plain_name(name) in wanted]
    rates = tuple(float(group["lr"]) for each in optimizers for group in each.param_groups if "lr" in group)
    bad = BadStep(step=int(saved["step"]), rank=int(saved["rank"]), learning_rates=rates, doubts=tuple(doubts))
    rerun = StepRerun(module, micro, conditions, optimizers=optimizers, schedulers=schedulers, parameters=parameters)
    with rerun:
        outcome = rerun.run()
        losses, is_finite = tuple(float(loss) for loss in outcome.losses), outcome.is_finite
        gradients = {name: gradient.clone() for name, gradient in outcome.gradients.items()}
        unlike = mismatches(saved["losses"], saved["digests"], outcome)
        if not is_finite:
            try:
                explain(rerun, outcome, bad)
            except CannotRerunError as error:
                doubts.append(f"The operation was not found: {error}.")
    return Replay(
        path=path,
        step=bad.step,
        losses=losses,
        gradients=gradients,
        is_finite=is_finite,
        mismatches=tuple(unlike),
        doubts=tuple(doubts),
        explanation=bad if bad.what else None,
        text=str(saved["text"]),
        model=module,
        batches=tuple(each.batch for each in micro),
    )


def _module_of(model: Any, checkpoint: Path, weights: Any) -> nn.Module:
    """Return `model`, or the module created by the class or function `model`, with the checkpoint's weights loaded."""
    if isinstance(model, nn.Module):
        module = model
    elif isinstance(model, type) and hasattr(model, "load_from_checkpoint"):
        load: Any = model.load_from_checkpoint
        # It was opened safely above; versions of Lightning without the argument open it as they do.
        options = {"weights_only": True} if "weights_only" in inspect.signature(load).parameters else {}
        module = load(checkpoint, map_location="cpu", **options)
    else:
        module = model()
    if not is_lightning_module(module):
        raise StepFileError(f"{type(module).__name__} is no LightningModule, so that it has no step to replay.")
    if weights is None:
        return module
    saved: Mapping[str, Tensor] = weights["state_dict"]
    configure: Any = getattr(module, "configure_model", None)
    if configure is not None and saved.keys() - module.state_dict().keys():
        configure()
    here = {plain_name(key): key for key in module.state_dict()}
    state = {here.get(plain_name(key), key): value for key, value in saved.items()}
    for key, tensor in (*module.named_parameters(), *module.named_buffers()):
        if key in state and state[key].dtype != tensor.dtype and not is_lazy(tensor):
            tensor.data = tensor.data.to(state[key].dtype)  # Trainer(precision="64-true") has converted it
    module.load_state_dict(state)
    return module


def _set_buffers(module: nn.Module, saved: Mapping[str, Tensor], device: torch.device) -> None:
    """Set all buffers to their saved values, including non-persistent buffers, which checkpoints leave out."""
    parts = {plain_name(name): part for name, part in module.named_modules()}
    for name, value in saved.items():
        owner, _, key = name.rpartition(".")
        buffers_of(parts[owner])[key] = value.to(device)


def _conditions(saved: Mapping[str, Any]) -> StepConditions:
    """Return the settings under which the step ran, read from its file. Only plain values are accepted."""
    conditions = StepConditions(**saved)
    if conditions.precision not in PRECISIONS:
        raise ValueError(f"precision={conditions.precision!r} is none of {', '.join(PRECISIONS)}")
    facts = {key: value for key, value in conditions.trainer.items() if key in TRAINER_FACTS and type(value) in SIMPLE}
    return replace(conditions, trainer=facts)
