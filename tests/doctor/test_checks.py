"""For every check a broken specimen that is found and named exactly, and its healthy neighbour that is not."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_memtools.doctor.examination import CHECKS
from lightning_memtools.doctor.settings_checks import RejectedSettings
from lightning_memtools.doctor.training_case import TrainingCase
from lightning_memtools.memory.shared_memory import free_in_container
from tests.doctor.specimens import HalfUsed, found, network, only, rows, serious, squared
from tests.lightning_models import Regression, trainer


def test_the_error_that_is_predicted_comes_true():
    findings = found(network(norm=True), rows(33), steps=5)
    assert [(f.check, f.place) for f in findings if f.is_serious] == [("batch_norm_one_sample", "1"), ("step", "1")]


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


@pytest.mark.parametrize(("name", "message"), [("", "is a directory; give one file"), ("none.pt", "does not exist")])
def test_a_checkpoint_that_is_not_there_is_refused(name, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        found(network(), rows(), checkpoint=str(tmp_path / name))


def saved(tmp_path, state) -> str:
    torch.save(state, tmp_path / "weights.pt")
    return str(tmp_path / "weights.pt")


def test_without_counters_of_batch_norm_only_a_state_dict_of_a_pytorch_that_knew_none_loads(tmp_path):
    state = network(norm=True).state_dict()
    del state["1.num_batches_tracked"]
    with pytest.raises(RuntimeError, match="Missing key"):  # and is found: see test_fixes.py
        network(norm=True).load_state_dict(state)
    no_statistics = network(norm=True)
    no_statistics[1] = nn.BatchNorm1d(8, track_running_stats=False)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        no_statistics.load_state_dict(network(norm=True).state_dict())
    network(norm=True).load_state_dict(dict(state))
    assert not serious(found(network(norm=True), rows(), checkpoint=saved(tmp_path, dict(state)), steps=1))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_a_wrappers_prefix_is_named_with_the_line_that_removes_it(prefix, tmp_path):
    state = {prefix + key: value for key, value in network().state_dict().items()}
    finding = only(found(network(), rows(), checkpoint=saved(tmp_path, state), steps=1), "checkpoint_keys")
    assert f"All 4 keys fit the model once {prefix!r}" in finding.evidence
    mended = eval(finding.fix.partition(" = ")[2], {"state": state})  # noqa: S307, the advice has to run
    network().load_state_dict(mended)


def test_frozen_parameters_that_are_in_no_optimizer_are_not_worth_a_remark():
    model = network()
    model[0].requires_grad_(requires_grad=False)
    assert not found(
        model, rows(), optimizer=torch.optim.SGD(model[2].parameters(), lr=0.01), ignore=["reproducibility"]
    )


def with_constant_rows():
    model = network()
    nn.init.constant_(model[0].weight, 0.01)  # the biases are random, and tell the rows apart
    return model


def with_zero_head():
    model = nn.Sequential(network(), nn.Linear(1, 3))
    nn.init.zeros_(model[1].weight)  # as the heads of many networks; their gradients differ
    return model


def frozen_in_eval_mode():
    part = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval().requires_grad_(requires_grad=False)
    return nn.Sequential(nn.Linear(4, 4), part, nn.Linear(4, 1))


def two_in_turn():
    names = itertools.cycle(["one", "other"])
    model = nn.ModuleDict({"one": network(), "other": network()})
    return found(model, rows(), lambda m, batch: squared(m[next(names)], batch))


def latest_kept(model: Any, batch: Any) -> Any:
    model.latest = squared(model, batch)
    return model.latest


def to_fixed_places(model: nn.Module, batch: Any) -> Any:
    return (model(batch[0]) - torch.linspace(-1, 1, 16)).square().mean() + squared(model, batch)


def all_pairs(model: nn.Module, batch: Any) -> Any:
    scores, targets = model(batch[0])[:, 0], batch[1]
    return ((scores - scores[:, None]) - (targets - targets[:, None])).pow(2).mean()


HEALTHY = {
    "rows that their biases tell apart": lambda: found(with_constant_rows(), rows()),
    "zero weights": lambda: found(
        with_zero_head(), rows(), lambda m, batch: F.cross_entropy(m(batch[0]), (batch[1][:, 0] > 0).long())
    ),
    "two modules that train in turn": two_in_turn,
    "the latest output": lambda: found(network(), rows(), latest_kept),
    "distances to fixed places": lambda: found(network(), rows(), to_fixed_places),
    "all pairs": lambda: found(network(), rows(flat=True), all_pairs),
    "a frozen part in eval mode": lambda: found(frozen_in_eval_mode(), rows()),
}


@pytest.mark.parametrize("case", HEALTHY)
def test_what_is_meant_so_is_left_alone(case):
    assert not serious(HEALTHY[case]())


def test_frozen_batch_statistics_are_worth_a_remark_only():
    model = network(norm=True)
    model[1].eval()
    assert only(found(model, rows()), "module_modes").severity == "info"


def test_a_trial_leaves_nothing_in_the_variables_around_the_step():
    seen: list[Any] = []
    total: Any = 0

    def step(model: nn.Module, batch: Any) -> Any:
        nonlocal total
        loss = squared(model, batch)
        total = total + loss.detach()
        seen.append(loss.detach())
        return loss

    assert not serious(found(network(), rows(), step))
    assert len(seen) == 8
    assert float(total) == pytest.approx(float(sum(seen)))


def test_a_buffer_on_another_device_is_found():
    model = network()
    model[0].register_buffer("scale", torch.ones(3, device="meta"))
    finding = only(found(model, rows()), "devices")
    assert finding.place == "0.scale"
    assert "0.scale is on meta" in finding.evidence


class Settings(NamedTuple):
    optimizer: str
    precision: str
    clip: float | None
    half: bool = False


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (Settings("fused", "16-mixed", 1.0), "gradient clipping"),
        (Settings("lbfgs", "16-mixed", None), "LBFGS"),
        (Settings("sgd", "16-mixed", None, half=True), "Attempting to unscale FP16 gradients"),
        (Settings("fused", "16-mixed", None), None),
        (Settings("fused", "bf16-mixed", 1.0), "gradient clipping"),
        (Settings("fused", "bf16-true", 1.0), None),
        (Settings("fused", "bf16-mixed", None), None),
        (Settings("lbfgs", "bf16-mixed", None), None),
        (Settings("sgd", "16-mixed", 1.0), None),
    ],
)
def test_combinations_that_lightning_rejects_late(settings, text):
    model = network().half() if settings.half else network()
    optimizer = {
        "fused": lambda p: torch.optim.Adam(p, fused=True),
        "lbfgs": torch.optim.LBFGS,
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    }[settings.optimizer](model.parameters())
    case = TrainingCase(model=model, optimizers=[optimizer], precision=settings.precision, clip=settings.clip)
    effects = [finding.effect for finding in RejectedSettings(case).before_training()]
    assert len(effects) == (text is not None)
    assert text is None or text in effects[0]


@pytest.mark.parametrize(
    ("precision", "fused", "clip"),
    [("bf16-mixed", True, 1.0), ("bf16-mixed", False, 1.0), ("bf16-true", True, 1.0), ("bf16-mixed", True, None)],
)
def test_lightning_rejects_clipping_where_the_doctor_says_so_and_takes_its_advice(tmp_path, precision, fused, clip):
    class Model(Regression):
        def training_step(self, batch, batch_idx):
            return self.net(batch[0].to(self.dtype)).square().mean()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), fused=fused)

    run = trainer(tmp_path, precision=precision, gradient_clip_val=clip, max_steps=1, logger=False)
    model = Model()
    case = TrainingCase(model=model, optimizers=[model.configure_optimizers()], precision=precision, clip=clip)
    findings = list(RejectedSettings(case).before_training())
    with pytest.raises(RuntimeError, match="gradient clipping") if findings else nullcontext():
        run.fit(model, rows())
    assert run.global_step == (not findings)


@pytest.mark.parametrize("norm", [torch.nn.Identity(), torch.nn.Dropout(0.5)], ids=["plain", "dropout"])
def test_zero_gradients_alone_are_worth_a_remark_only(norm):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), norm, nn.Linear(4, 1))
    nn.init.constant_(model[0].bias, -100)  # dead ReLUs
    finding = only(found(model, rows()), "missing_gradients")
    assert finding.severity == "info"
    assert finding.place == "0.weight, 0.bias, 3.weight"


def test_weights_without_a_gradient_that_no_weight_decay_moves_are_worth_a_remark_only():
    model = HalfUsed()
    groups = [{"params": model.used.parameters()}, {"params": model.unused.parameters(), "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    finding = only(found(model, rows(), optimizer=optimizer), "missing_gradients")
    assert (finding.severity, finding.place) == ("info", "unused.weight, unused.bias")


def test_total_loss_with_a_graph_is_found_with_its_holder():
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.total_loss = network(), torch.zeros(())

    def step(model: Any, batch: Any) -> Any:
        loss = squared(model.net, batch)
        model.total_loss += loss
        return loss

    finding = only(found(Sums(), rows(), step), "retained_graphs")
    assert (finding.severity, finding.place) == ("error", "Sums.total_loss")
    assert "6 of 6 earlier steps are alive at step 8" in finding.evidence

    def detached(model: Any, batch: Any) -> Any:
        loss = squared(model.net, batch)
        model.total_loss += loss.detach()
        return loss

    assert not serious(found(Sums(), rows(), detached))


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


def test_outputs_kept_with_their_graphs_are_found_in_a_closure():
    outputs: list[torch.Tensor] = []

    def step(model: nn.Module, batch: Any) -> Any:
        out = model(batch[0])
        outputs.append(out)
        return F.mse_loss(out, batch[1])

    finding = only(found(network(), rows(), step), "retained_graphs")
    assert "outputs" in finding.place
    assert "step (test_checks.py" in finding.place
    assert "held through 6 tensors with 192 B" in finding.evidence


@pytest.mark.parametrize(
    ("loss", "place", "warns"),
    [
        (F.mse_loss, "mse_loss at tests/doctor/test_checks.py:", True),
        (nn.L1Loss(), "l1_loss at tests/doctor/test_checks.py:", True),
        (lambda p, y: F.mse_loss(p[:, 0], y[:, None]), "mse_loss at tests/doctor/test_checks.py:", True),
        (
            lambda p, y: ((p - y[:, None].squeeze().float()) ** 2).mean(),
            "the difference at tests/doctor/test_checks.py:",
            False,
        ),
    ],
    ids=["column_against_flat", "l1_of_a_module", "flat_against_column", "squeezed"],
)
def test_a_loss_that_broadcasts_is_found_with_its_line(loss, place, warns):
    def step(model: nn.Module, batch: Any) -> Any:
        return loss(model(batch[0]), batch[1])

    with pytest.warns(UserWarning, match="target size") if warns else nullcontext():
        step(network(), next(iter(rows(flat=True))))
    finding = only(found(network(), rows(flat=True), step), "loss_broadcast")
    assert finding.place.startswith(place)
    assert "broadcast to (8, 8)" in finding.evidence


@pytest.mark.parametrize(
    ("loss", "norm", "place"),
    [
        (lambda p, y: F.mse_loss(p, y, reduction="sum"), True, "tests/doctor/test_checks.py:"),
        (lambda p, y: ((p - y) ** 2).sum() / 2, False, ""),
        (lambda p, y: -((p - y) ** 2).sum() * 0.5, False, ""),
        (lambda p, y: ((p - y) ** 2).sum() + 1.0, False, ""),
    ],
)
def test_a_sum_over_the_batch_is_found_by_the_gradients_growth(loss, norm, place):
    def step(model: nn.Module, batch: Any) -> Any:
        return loss(model(batch[0]), batch[1])

    finding = only(found(network(norm=norm), rows(), step, steps=1), "loss_sum")
    assert finding.place.startswith(place)
    assert "grows 2.00 times" in finding.evidence


def test_each_check_can_be_left_out():
    model = nn.ModuleDict({"used": network(), "unused": nn.Linear(3, 2)})
    assert not found(model, rows(), lambda m, batch: squared(m["used"], batch), ignore=list(CHECKS))
