"""Event files read back as TensorBoard reads them."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def scalars(log_dir: str | Path | None) -> dict[str, list[tuple[int, float]]]:
    """Tag to (step, value) points in a run's event files."""
    events = EventAccumulator(str(log_dir), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(p.step, p.value) for p in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def texts_of(log_dir: str | Path | None) -> dict[str, list[str]]:
    """Tag to the texts in a run's event files."""
    events = EventAccumulator(str(log_dir), size_guidance={"tensors": 0})
    events.Reload()
    tags = [tag for tag in events.Tags()["tensors"] if tag.endswith("/text_summary")]
    return {
        tag.removesuffix("/text_summary"): [point.tensor_proto.string_val[0].decode() for point in events.Tensors(tag)]
        for tag in tags
    }
