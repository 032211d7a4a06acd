"""Mistakes in other forms than test_fixes.py has them, and what looks like a mistake and is none."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_memtools.memory.shared_memory import free_in_container
from tests.doctor.specimens import HalfUsed, found, network, only, rows, serious, squared


class Copied(DataLoader[Any]):
    """Makes its own batches, as loaders of single-cell models do: every one has eight samples."""

    def __iter__(self):
        return (next(super(Copied, self).__iter__()) for _ in range(5))


@pytest.mark.parametrize(
    ("model", "loader"),
    [
        (network(norm=True), rows(34)),
        (network(), rows(33)),
        # Normalizes over space too, so that one sample is enough.
        (nn.Sequential(nn.Unflatten(1, (1, 4)), nn.BatchNorm1d(1), nn.Flatten(), nn.Linear(4, 1)), rows(33)),
        (network(norm=True), Copied(rows(33).dataset, 8)),
    ],
    ids=["two_samples", "no_norm", "spatial", "own_batches"],
)
def test_a_last_batch_that_does_no_harm_is_left_alone(model, loader):
    assert not serious(found(model, loader, steps=5))


def test_a_containers_limit_counts(tmp_path):
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert free_in_container(tmp_path) == 700
    (tmp_path / "memory.max").write_text("max\n")
    assert free_in_container(tmp_path) is None
    assert free_in_container(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: FileNotFoundError"),
        (b"half of a download", "cannot be read: "),
        ({"state_dict": {}, "step": HalfUsed}, "cannot be read: "),  # loading it would run code
        ({"epoch": 3}, "holds dict, and no state_dict"),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_refused(content, message, tmp_path):
    path = tmp_path / "weights.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(ValueError, match=message):
        found(network(), rows(), checkpoint=str(path))


def test_old_checkpoints_without_counters_load_as_torch_loads_them(tmp_path):
    state = dict(network(norm=True).state_dict())
    del state["1.num_batches_tracked"]
    network(norm=True).load_state_dict(state)  # a plain dict has no version: torch adds the counters
    torch.save(state, tmp_path / "old.pt")
    assert not serious(found(network(norm=True), rows(), checkpoint=str(tmp_path / "old.pt"), steps=1))


def with_constant_rows():
    model = network()
    nn.init.constant_(model[0].weight, 0.01)  # the biases are random, and tell the rows apart
    return model


def latest_kept(model: Any, batch: Any) -> Any:
    model.latest = squared(model, batch)
    return model.latest


def to_fixed_places(model: nn.Module, batch: Any) -> Any:
    return (model(batch[0]) - torch.linspace(-1, 1, 16)).square().mean() + squared(model, batch)


def all_pairs(model: nn.Module, batch: Any) -> Any:
    scores, targets = model(batch[0])[:, 0], batch[1]
    return ((scores - scores[:, None]) - (targets - targets[:, None])).pow(2).mean()


def to_all_targets(model: nn.Module, batch: Any) -> Any:
    return (model(batch[0])[:, 0, None] - batch[1]).abs().amin(1).mean()  # the nearest target, as in Chamfer distance


def penalized(model: nn.Module, batch: Any) -> Any:
    return squared(model, batch) + 1e-3 * sum(p.pow(2).sum() for p in model.parameters())


def weighted(model: nn.Module, batch: Any) -> Any:
    weights = torch.linspace(0.1, 0.3, len(batch[0]))[:, None]
    return (weights * (model(batch[0]) - batch[1]) ** 2).sum() / weights.sum()


def scaled_mean(model: nn.Module, batch: Any) -> Any:
    return 10 * ((model(batch[0]) - batch[1]) ** 2).sum() / len(batch[0])


HEALTHY = {
    "rows that their biases tell apart": lambda: found(with_constant_rows(), rows()),
    "the latest output": lambda: found(network(), rows(), latest_kept),
    "distances to fixed places": lambda: found(network(), rows(), to_fixed_places),
    "all pairs": lambda: found(network(), rows(flat=True), all_pairs),
    "each prediction and each target": lambda: found(network(), rows(flat=True), to_all_targets),
    "a penalty on weights": lambda: found(network(), rows(), penalized),
    "a weighted mean": lambda: found(network(), rows(), weighted),
    "a mean times ten": lambda: found(network(), rows(), scaled_mean),
}


@pytest.mark.parametrize("case", HEALTHY)
def test_what_is_meant_so_is_left_alone(case):
    assert not serious(HEALTHY[case]())


def test_what_has_a_gradient_in_every_second_step_is_not_said_to_have_none():
    names = itertools.cycle(["one", "other"])
    model = nn.ModuleDict({"one": network(), "other": network()})
    findings = found(model, rows(), lambda m, batch: squared(m[next(names)], batch))
    assert not serious(findings)
    assert [finding for finding in findings if finding.check == "missing_gradients"] == []


@pytest.mark.parametrize("epoch", [8, 11, 16])
def test_a_sum_that_each_short_epoch_resets_is_found(epoch):
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.total_loss, self.n = network(), torch.zeros(()), 0

    def step(model: Any, batch: Any) -> Any:
        if model.n % epoch == 0:
            model.total_loss = torch.zeros(())
        model.n += 1
        loss = squared(model.net, batch)
        model.total_loss += loss
        return loss

    finding = only(found(Sums(), rows(32, 1), step, steps=20), "retained_graphs")
    assert (finding.severity, finding.place) == ("error", "Sums.total_loss")


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, y: ((p - y) ** 2).sum() / 2,
        lambda p, y: -((p - y) ** 2).sum() * 0.5,
        lambda p, y: 1.0 + p.mean() + F.binary_cross_entropy_with_logits(p, y.sigmoid(), reduction="sum"),
        lambda p, y: ((p - y) ** 2).mean(1).sum(),
        lambda p, y: F.cross_entropy(torch.cat([p, -p], 1), (y[:, 0] > 0).long(), reduction="sum"),
    ],
)
def test_a_sum_over_the_batch_is_found(loss):
    finding = only(found(network(), rows(), lambda m, b: loss(m(b[0]), b[1]), steps=1), "loss_sum")
    assert "over 8 samples" in finding.evidence
