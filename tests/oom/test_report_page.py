"""The page of a report, and what it takes from a failed step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_memtools.memory.processes import GpuProcess, other_gpu_processes
from lightning_memtools.memory.stats import MemoryStats
from lightning_memtools.oom.actions import Action, ActionKind, Outcome, ranked
from lightning_memtools.oom.advice_checks import Advice
from lightning_memtools.oom.failed_step import _name_of_gpu
from lightning_memtools.oom.failure_facts import FailureFacts, FailureMoment, off_device
from lightning_memtools.oom.report_page import ReportPage


@pytest.mark.parametrize(
    ("name", "gpu"), [("NVIDIA GPU of next year", None), ("Tesla T4", "T4 16GB"), ("NVIDIA L4 (dry run)", "L4 24GB")]
)
def test_a_trace_runs_the_kernels_of_the_failed_gpu(name, gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert _name_of_gpu(torch.device("cuda", 0)) == gpu


GIB = 2**30
FACTS = FailureFacts(
    moment=FailureMoment("train", 7, 3, "backward", 1, 4),
    device="cuda:1 (NVIDIA H200)",
    stats=MemoryStats(allocated=6 * GIB, reserved=7 * GIB, active=6 * GIB, capacity=8 * GIB),
    requested=2 * GIB,
    free=GIB // 2,
    used_by_others=GIB // 2,
    batch=off_device({"x": torch.empty(4, 3), "name": "a", "y": torch.empty(4, dtype=torch.int64)}),
)


def test_the_page_says_what_failed_where_with_which_batch_and_what_is_reserved_and_in_nobodys_use():
    page = ReportPage(facts=FACTS)
    where, _, what = page.headline.partition(": ")
    assert where.endswith("cuda:1 (NVIDIA H200) (train, step 7, batch 3, backward, rank 1 of 4)")
    assert "2.00 GiB with 512 MiB free" in what
    assert "| batch | 4 samples: float32 [4, 3] (48 B), int64 [4] (32 B) |" in page.markdown()
    assert "free in pieces (fragmentation) | 1.00 GiB |" in page.markdown()


def test_without_nvml_the_section_says_so():
    # The real function, on a machine without a driver: whatever it says is what the section says.
    said = other_gpu_processes(0) if not torch.cuda.is_available() else "not known: no driver"
    assert isinstance(said, str)
    assert said.startswith("not known: ")
    text = ReportPage(facts=FACTS, processes=said).markdown()
    assert f"## Other processes on the device\n\nN{said[1:]}." in text


def test_other_processes_are_listed_and_their_absence_is_said():
    processes = [GpuProcess(12, "python", 3 * GIB), GpuProcess(13, "", None)]
    text = ReportPage(facts=FACTS, processes=processes).markdown()
    assert "(pid 12, 3.00 GiB), process (pid 13, not known)" in text
    assert "## Other processes on the device\n\nNone." in ReportPage(facts=FACTS, processes=[]).markdown()
    assert "Other processes" not in ReportPage(facts=FACTS).markdown()


def action(title: str, outcome: Outcome, kind: ActionKind = ActionKind.CHECKPOINTING, **more: Any) -> Action:
    return Action(kind=kind, title=title, outcome=outcome, detail=f"detail of {title}", **more)


def test_the_cause_comes_first_then_what_is_enough_and_what_was_not_checked_has_no_number():
    order = [
        action("cause, enough", Outcome.ENOUGH, cause="c"),
        action("cause, large", Outcome.NOT_ENOUGH, cause="c", saved=3),
        action("cause, small", Outcome.NOT_ENOUGH, cause="c", saved=1),
        action("least intrusive", Outcome.ENOUGH, ActionKind.STOP_PROCESS),
        action("enough", Outcome.ENOUGH, ActionKind.BATCH_SIZE, saved=9, code="n=1"),
        action("may be enough", Outcome.MAY_BE_ENOUGH, saved=1),
        action("more", Outcome.NOT_ENOUGH, saved=2),
        action("little", Outcome.NOT_ENOUGH, saved=1),
        action("useless", Outcome.USELESS),
    ]
    assert ranked(reversed(order)) == order
    text = ReportPage(facts=FACTS, advice=Advice(order)).markdown()
    assert "4. least intrusive. detail of least intrusive.\n5. enough (`n=1`). detail of enough.\n6. may" in text
    assert "do not help:\n\n- useless. " in text
