"""Runs a bad step again on this rank, within the training process: explains it, and writes it to a capsule."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

import torch

from lightning_memtools.memory.nested_tensors import names_of
from lightning_memtools.memory.virtual import host_memory
from lightning_memtools.nonfinite.bad_step import (
    BadStep,
    Evidence,
    PastStep,
    StepConditions,
    StepOutcome,
    digests_of,
    doubts_about,
    is_same_number,
    mismatches,
)
from lightning_memtools.nonfinite.diagnosis import Explanation, KnownOfStep, NonFiniteCause, what_grew
from lightning_memtools.nonfinite.explain import explain
from lightning_memtools.nonfinite.finite_checks import floats_of, norms_of
from lightning_memtools.nonfinite.halt_report import CapsuleNote, RankFindings
from lightning_memtools.nonfinite.step_rerun import (
    CannotRerunError,
    EarlierValues,
    StepRerun,
    says_nothing,
    values_up_to_nan,
)
from lightning_memtools.state.capsule.capsule_file import to_plain, write_capsule
from lightning_memtools.state.capsule.environment import machine_now, origin_now, switches_now
from lightning_memtools.state.capsule.saved_module import saved_module, saved_start, saved_weights


class BadStepRerun:
    """Runs a bad step again on this rank. A failure here is only noted: it must not hide the halt.

    Use it after the step was undone, and before anything else changes.
    """

    def __init__(  # noqa: PLR0917, all that a step needs
        self,
        module: Any,
        trainer: Any,
        conditions: StepConditions,
        bad_step: BadStep,
        evidence: Evidence,
        history: Sequence[PastStep],
        *,
        restored: Collection[str] = (),
    ) -> None:
        self._module, self._trainer, self._conditions = module, trainer, conditions
        self._bad_step, self._evidence = bad_step, evidence
        self._micro = bad_step.step.micro
        self._known = KnownOfStep(
            grown=what_grew(history, evidence),
            learning_rates=evidence.learning_rates,
            plain_sgd=evidence.plain_sgd,
            scaler=evidence.scaler,
            doubts=doubts_about(self._micro, evidence.unrestored),
        )
        self._doubts = list(self._known.doubts)
        self._digests, self._digests_of = self._own_digests(), "step"
        self._explanation: Explanation | None = None
        self._has_run = self._is_bad = False
        self._restored = restored
        self._written: tuple[str, ...] = ()
        self._says_nothing = False
        self._values: EarlierValues | None = None

    def findings(self, *, explains: bool, keeps: bool) -> RankFindings:
        """Run the step again, and find out what made it bad.

        Args:
            explains: Whether to look for the cause.
            keeps: Whether the step will be written to a file, with which a replay is to be compared.
        """
        rank = self._evidence.rank
        if all(micro.batch is None for micro in self._micro):
            return RankFindings(rank, None, "not sought: the batch was no longer held")
        try:
            with self._step_rerun() as rerun:
                before = _norms_by_name(self._module)
                plain = rerun.run()
                self._note_writes(before)
                self._compare(plain)
                if keeps and self._is_bad:
                    self._values = values_up_to_nan(rerun)
                if not explains:
                    return RankFindings(
                        rank, None, "not asked for (explain=False)", self._again(), self._is_bad, self._written
                    )
                self._explanation = explain(rerun, plain, replace(self._known, doubts=self._doubts))
        except CannotRerunError as error:
            if not self._has_run:
                self._doubts.append(f"It could not be run again in the training process: {error}.")
            return RankFindings(rank, None, f"not found: {error}", self._again(), self._is_bad)
        except Exception as error:  # noqa: BLE001, see the class
            return RankFindings(rank, None, f"not found: {type(error).__name__}: {error}")
        return RankFindings(rank, self._explanation, "", self._again(), self._is_bad, self._written)

    def _note_writes(self, before: Mapping[str, float]) -> None:
        """Find the parameters that the forward pass has written: in ways that leave no trace, too."""
        known = {*self._restored, *self._evidence.unrestored}
        now = _norms_by_name(self._module)
        same = (name for name, norm in now.items() if is_same_number(norm, before.get(name, norm)))
        self._written = tuple(sorted(now.keys() - known - set(same)))

    def write(
        self, path: Path, max_bytes: int, about: dict[str, Any], more: Mapping[str, Any] | None = None
    ) -> CapsuleNote:
        """Write the bad step to a capsule file.

        Args:
            path: The file.
            max_bytes: Its largest size.
            about: What the JSON file beside it holds too.
            more: What else it holds, as plain values.
        """
        if all(each.batch is None for each in self._micro):
            return CapsuleNote(note="not written: the batch was no longer held")
        left_out, lacks = list[str](), list[str]()
        saved = self._contents(left_out, lacks) | dict(more or {})
        about |= {"losses": list(map(repr, self._bad_step.losses)), "class": saved["module"]["class"]}
        about |= {"machine": saved["machine"], "doubts": self._doubts}
        left_out += lacks
        try:
            write_capsule(saved, path, max_bytes, about, left_out)
        except Exception as error:  # noqa: BLE001, see the class
            return CapsuleNote(note=f"could not be written: {type(error).__name__}: {error}")
        note = f"without {', '.join(left_out)}" if left_out else ""
        return CapsuleNote(path, note, ", ".join(lacks))

    def _contents(self, left_out: list[str], lacks: list[str]) -> dict[str, Any]:
        """Return the step as plain values.

        Args:
            left_out: Takes the names of everything that is left out.
            lacks: Takes the names of batches, and of parts of a batch, that are left out.
        """
        module, explanation = self._module, self._explanation
        explained = None if explanation is None else {**asdict(explanation), "cause": explanation.cause.value}
        return {
            "step": self._evidence.step,
            "conditions": {**asdict(self._conditions), "trainer": dict(self._conditions.trainer)},
            "machine": machine_now(str(next((p.device for p in module.parameters()), torch.device("cpu")))),
            "switches": switches_now(),
            "origin": origin_now(),
            "module": saved_module(module, left_out),
            "weights": saved_weights(module),
            "micro": [
                {
                    "index": each.index,
                    "batch": to_plain(each.batch, lacks, "batch"),
                    "start": saved_start(each.start),
                    "steps_before": each.steps_before,
                    "resumed": saved_start(each.resumed) if each.steps_before else None,
                }
                for each in self._micro
                if each.batch is not None
            ],
            "optimizers": [to_plain(each.state_dict(), [], "optimizer") for each in self._trainer.optimizers],
            "parameters": names_of(module, self._bad_step.step.parameters),
            "losses": list(self._bad_step.losses),
            "digests": self._digests,
            "digests_of": self._digests_of,
            "doubts": self._doubts,
            "values": None if self._values is None else list(map(list, astuple(self._values))),
            "explanation": to_plain(explained, [], ""),
        }

    def _step_rerun(self) -> StepRerun:
        return StepRerun(
            self._module,
            self._micro,
            self._conditions,
            optimizers=self._trainer.optimizers,
            parameters=self._bad_step.step.parameters,
            trainer=self._trainer,
            host=host_memory,
        )

    def _own_digests(self) -> dict[str, str]:
        """Return digests of the step's own gradients, where these are this rank's alone and have not been replaced."""
        if self._evidence.late or self._evidence.carried or self._trainer.world_size > 1:
            return {}
        parameters = self._bad_step.step.parameters
        named = zip(names_of(self._module, parameters), parameters, strict=True)
        return digests_of({name: p.grad for name, p in named if p.grad is not None})

    def _again(self) -> str:
        if not self._has_run:
            return ""
        if self._explanation is not None and self._explanation.cause is NonFiniteCause.NOT_REPRODUCIBLE:
            return ""
        if self._says_nothing and not self._doubts:
            return "all losses and gradients are NaN or Inf again, so there is no number to compare."
        compared = "losses and gradients" if self._digests_of == "step" else "losses"
        return " ".join(self._doubts) or f"{compared} are the same bit for bit."

    def _compare(self, plain: StepOutcome) -> None:
        self._has_run, self._is_bad, self._says_nothing = True, not plain.is_finite, says_nothing(plain)
        found = mismatches(self._bad_step.losses, self._digests, plain)
        if not self._digests:
            self._digests, self._digests_of = digests_of(plain.gradients), "replay"
        # Where the step was bad and is finite now, the difference is what is to be explained, and no reason for doubt.
        if found and not plain.is_finite:
            self._doubts.append(f"Run again in the training process, the step was not the same. {' '.join(found)}")


def _norms_by_name(module: Any) -> dict[str, float]:
    named = [(name, floats) for name, p in module.named_parameters() if (floats := floats_of(p)) is not None]
    norms = norms_of([floats for _, floats in named], exact=True)
    return {name: float(norm) for (name, _), norm in zip(named, norms, strict=True)}
