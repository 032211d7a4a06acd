"""Log directories for the Memory tab's tests."""

from __future__ import annotations

from pathlib import Path

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import FileWriter, SummaryWriter

SPIKES = (7_123, 25_001, 49_998)
ATTACK = '<img src=x onerror="window.attacked = 1"><script>window.attacked = 1</script>'


def write_long_run(directory: Path) -> None:
    """A run of 50,000 steps, with a point of each, with peaks of 3 GiB at the steps of SPIKES and 1 GiB elsewhere."""
    writer = FileWriter(str(directory))  # it writes all values of a step at once, which takes less time
    for step in range(50_000):
        values = {
            "memory/train/peak_allocated_gib": 1.0 + (2.0 if step in SPIKES else 0.0) + 0.01 * (step % 7),
            "memory/train/allocated_gib": 0.5,
            "memory/train/peak_reserved_gib": 3.5,
            "memory/train/reserved_gib": 3.5,
            "loss/train": 2.0 / (1 + step / 1000),
        } | ({"memory/capacity_gib": 8.0} if step == 0 else {})
        writer.add_summary(Summary(value=[Summary.Value(tag=tag, simple_value=v) for tag, v in values.items()]), step)
    writer.close()


def write_failed_run(directory: Path) -> None:
    """A run that logged one point, at the step in which memory ran out, with a report."""
    with SummaryWriter(str(directory)) as writer:
        writer.add_scalar("memory/train/peak_allocated_gib", 3.5, 0)
        writer.add_scalar("memory/train/peak_reserved_gib", 3.75, 0)
        writer.add_scalar("memory/train/allocated_gib", 3.0, 0)
        writer.add_scalar("memory/train/reserved_gib", 3.25, 0)
        writer.add_scalar("memory/composition/parameters_gib", 1.0, 0)
        writer.add_scalar("memory/composition/activations_gib", 2.5, 0)
        writer.add_scalar("memory/capacity_gib", 4.0, 0)
        writer.add_scalar("memory/ooms", 1.0, 0)
        facts = "|  |  |\n|---|---|\n| when | step 0 |"
        writer.add_text("memtools/oom_report", f"## What happened\n\n{facts}\n\n> No memory\n> left.", 0)
        sizes = "Batch size: train 96, val 128 (in 9 trials, 2.0 s). On VirtualDevice."
        for step in (0, 1):  # two calls
            writer.add_text("memtools/batch_size", f"# Batch size\n\n{sizes}", step)
        plan = "| module |\n|---|\n| net |"
        writer.add_text("memtools/ended", "OutOfMemoryError: CUDA out of memory. Tried to allocate.", 0)
        writer.add_text("memtools/checkpoint_plan", f"### Plan\n\n{plan}\n\n- activations: 5.20 MiB", 0)


def write_halted_run(directory: Path) -> None:
    """A run that has a report and no curves."""
    with SummaryWriter(str(directory)) as writer:
        writer.add_text("memtools/doctor", "# TrainingDoctor\n\nShapes differ.", 0)


def write_cpu_run(directory: Path) -> None:
    """A run on a plain CPU with several losses, one of them negative, and tags that are markup."""
    with SummaryWriter(str(directory)) as writer:
        for step in range(10):
            writer.add_scalar("memory/host_rss_gib", 1.0 + 0.1 * step, step)
            writer.add_scalar("loss/train/d_loss", -5.0 - 0.1 * step, step)
            writer.add_scalar("loss/train/g_loss", -2.0 - 0.1 * step, step)
            writer.add_scalar(f"loss/val/{ATTACK}", -8.0, step)
        writer.add_text(f"memtools/{ATTACK}", f"```\n{'wide' * 200}\n```\n\n> {'wide' * 200}", 9)


def write_small_run(directory: Path, *, text: str = "", tag: str = "memtools/memory_summary") -> None:
    """A run of ten points with one validation run."""
    with SummaryWriter(str(directory)) as writer:
        for step in range(10):
            writer.add_scalar("memory/train/peak_allocated_gib", 1.0 + 0.1 * step, step)
            writer.add_scalar("memory/train/allocated_gib", 0.5, step)
            writer.add_scalar("memory/train/peak_reserved_gib", 2.0, step)
            writer.add_scalar("memory/train/reserved_gib", 2.0, step)
            writer.add_scalar("memory/capacity_gib", 4.0, step)
            writer.add_scalar("memory/alloc_retries", 0.0 if step < 6 else 2.0, step)
            writer.add_scalar("time/step_ms", 500.0 if step == 0 else 20.0, step)
            writer.add_scalar("time/data_ms", 5.0, step)
            writer.add_scalar("loss/train", 1.0 - 0.05 * step, step)
        writer.add_scalar("memory/val/peak_allocated_gib", 1.25, 9)
        writer.add_scalar("memory/leaks", 2.0, 7)
        writer.add_scalar("loss/val", 0.7, 9)
        if text:
            writer.add_text(tag, text, 9)
