"""A finding of the doctor, and the report that collects findings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from lightning_memtools.reporting.phrases import counted
from lightning_memtools.reporting.tables import Table, markdown_table, shown_as

Severity = Literal["info", "warning", "error"]
_ORDER: dict[Severity, int] = {"error": 0, "warning": 1, "info": 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """A training mistake that a check found, with the evidence for it.

    Attributes:
        check: The name of the check.
        severity: "error": training fails or is wrong; "warning": training is likely wrong or wasteful; "info": good
            to know.
        place: Where the mistake is: a module, parameter, attribute or line of code.
        evidence: The measurement that shows the mistake.
        effect: What the mistake causes.
        fix: What to do, in one line.
    """

    check: str
    severity: Severity
    place: str
    evidence: str
    effect: str
    fix: str

    def __str__(self) -> str:
        return f"{self.check} ({self.severity}), {self.place}: {self.evidence} {self.effect} Fix: {self.fix}"


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """The findings of an examination, the most serious first.

    Attributes:
        findings: The findings.
        checks: The names of the checks that were run.
        steps: The number of training steps that were watched.
    """

    findings: tuple[Finding, ...] = ()
    checks: tuple[str, ...] = ()
    steps: int = 0

    @classmethod
    def of(cls, findings: Sequence[Finding], checks: Sequence[str], steps: int) -> DoctorReport:
        """Create a report from findings, leaving out duplicates."""
        ordered = sorted(dict.fromkeys(findings), key=lambda finding: _ORDER[finding.severity])
        return cls(tuple(ordered), tuple(checks), steps)

    @property
    def serious(self) -> tuple[Finding, ...]:
        """The findings that are warnings or errors."""
        return tuple(finding for finding in self.findings if finding.severity != "info")

    def table(self) -> Table:
        """Return the findings as a table with one row each."""
        rows = [
            (one.severity, f"{one.check}, {one.place}: {one.evidence} {one.effect}", one.fix) for one in self.findings
        ]
        return Table(("severity", "evidence and effect", "fix"), rows, align="lll")

    def summary(self) -> str:
        """Return one line with the numbers of checks, training steps and findings."""
        steps = counted(self.steps, "training step", "training steps")
        found = (
            f"Findings: {len(self.findings)}, serious: {len(self.serious)}." if self.findings else "Nothing was found."
        )
        return f"{counted(len(self.checks), 'check', 'checks')}, {steps}. {found}"

    def markdown(self) -> str:
        """Return the report as markdown."""
        table = f"\n{markdown_table(self.table())}\n" if self.findings else ""
        return f"# TrainingDoctor\n\n{self.summary()}\n{table}"

    _repr_html_ = shown_as(markdown)

    def as_json(self) -> str:
        """Return the report as JSON, for programs."""
        return json.dumps({"serious": len(self.serious), **asdict(self)}, indent=2)


class TrainingMistakeError(RuntimeError):
    """Raised by TrainingDoctor with `on_finding="raise"`; the message names every serious finding.

    Attributes:
        report: The report with all findings.
    """

    def __init__(self, report: DoctorReport) -> None:
        self.report = report
        super().__init__(
            f"TrainingDoctor found {counted(len(report.serious), 'serious mistake', 'serious mistakes')}:\n"
            + "\n".join(f"- {finding}" for finding in report.serious)
            + "\nNext: mend them, or leave a check out with ignore=[its name]."
        )

    def __reduce__(self) -> tuple[type[TrainingMistakeError], tuple[DoctorReport]]:
        return type(self), (self.report,)
