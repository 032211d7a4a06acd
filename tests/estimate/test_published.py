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
    # PyTorch's own CUDA allocator (on the null device, tests/null_cuda/test_published_on_cuda.py) reserves -2.2, +2.3,
    # +5.5 and +2.6% beside these totals, 3.15% on the mean, and these estimates are equal to it to the byte. So what is
    # left is not the simulation's. (Where gradients are zeroed before backward, the third run reserves 1.3% more.)
    assert fmean(errors) < 0.032
