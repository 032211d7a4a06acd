"""What a notebook and a prompt show of callbacks and results."""

from __future__ import annotations

import inspect
from dataclasses import is_dataclass

import pytest
from lightning.pytorch import Callback

import lightning_memtools
from lightning_memtools import DryRunResult, EmptyCache, HaltOnNaN, MemoryMonitor, OOMRecovery, default_callbacks
from lightning_memtools.doctor.findings import DoctorReport
from lightning_memtools.null_cuda.dry_run.result import DryRunStage
from lightning_memtools.reporting.tables import Table, markdown_table, shown_as

RESULTS = ["BatchSizeResult", "CheckpointPlan", "DoctorReport", "DryRunResult", "MemoryEstimate", "Replay"]


def test_a_callback_is_shown_as_it_was_made():
    assert repr(MemoryMonitor()) == "MemoryMonitor()"
    assert repr(MemoryMonitor(phases=True, every_n_steps=5)) == "MemoryMonitor(every_n_steps=5, phases=True)"
    assert repr(EmptyCache(min_reclaimable=0.1)) == "EmptyCache(min_reclaimable=0.1)"
    made = HaltOnNaN(max_skips=2, directory="it's")
    assert repr(eval(repr(made))) == repr(made)  # noqa: S307, our own text
    assert repr(default_callbacks()[0]) == "MemoryMonitor()"


def test_every_callback_is_shown_without_its_address():
    made = [getattr(lightning_memtools, name) for name in lightning_memtools.__all__]
    callbacks = [one for one in made if inspect.isclass(one) and issubclass(one, Callback)]
    assert len(callbacks) == 10
    callbacks.remove(OOMRecovery)
    assert all(repr(one()) == f"{one.__name__}()" for one in callbacks)
    assert repr(OOMRecovery(loss="mean")) == "OOMRecovery(loss='mean')"


@pytest.mark.parametrize("name", RESULTS)
def test_every_result_has_a_repr_and_a_page_in_a_notebook(name):
    result = getattr(lightning_memtools, name)
    assert is_dataclass(result)
    assert "_repr_html_" in vars(result)
    assert result.__repr__ is not object.__repr__


def test_a_notebook_shows_text_and_never_markup():
    html = shown_as(lambda text: text)("<script>x</script> & y\nz")
    assert html == "<p>&lt;script&gt;x&lt;/script&gt; &amp; y<br />\nz</p>\n"
    table = shown_as(lambda row: markdown_table(Table(("name", "size"), [row])))(("__a__ <b>", "1"))
    assert "<td>__a__ &lt;b&gt;</td>" in table
    assert '<td style="text-align:right">1</td>' in table
    assert DoctorReport(checks=())._repr_html_().startswith("<h3>TrainingDoctor</h3>")


def test_a_dry_run_says_if_it_fits():
    stage = DryRunStage(stage="train", peak_allocated_bytes=2**30, peak_reserved_bytes=2**30)
    page = DryRunResult(device="RTX 4090", capacity_bytes=24 * 2**30, status=0, stages=[stage])._repr_html_()
    assert "Dry run on RTX 4090, 24.0 GiB. It fits." in page
    assert "<th>stage</th>" in page
    idle = DryRunResult(device="RTX 4090", capacity_bytes=24 * 2**30, status=0, stages=[stage], optimizer_steps=0)
    assert not idle.fits
    assert idle.verdict.startswith("No optimizer step ran")
    full = DryRunResult(device="RTX 4090", capacity_bytes=24 * 2**30, status=3, error="CUDA out of memory")
    assert "It runs out of memory. CUDA out of memory" in str(full)
