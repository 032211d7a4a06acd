"""Estimates against published measurements of real GPUs."""

from __future__ import annotations

from statistics import fmean

from tests.estimate.published import predicted_reserved, runs

# One constant for all runs, for what NVML counts beside the allocator. Zero follows them best, less than a CUDA context
# takes: either these totals leave it out, or reserved memory comes out too high by about as much.
CONTEXT_BYTES = 0


def test_totals_of_published_runs_are_met_within_four_percent():
    errors = []
    for run in runs():
        measured = run["nvml_peak_bytes"]
        errors.append(abs(predicted_reserved(run) + CONTEXT_BYTES - measured) / measured)
    assert fmean(errors) < 0.04
    assert max(errors) < 0.08
    # What is reached; a change that makes it worse should be seen. PyTorch's own CUDA allocator reserves 2.2, 2.3, 1.3
    # and 2.4% beside these totals (on the null device); here the third run, ConvNeXt with AdamW, is 5.5% too high since
    # reductions take their workspaces, and the others are as there.
    assert fmean(errors) < 0.032
