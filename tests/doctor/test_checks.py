"""For every check a broken specimen that is found and named exactly, and its healthy neighbour that is not."""

from __future__ import annotations

import itertools
import re
import time
from contextlib import nullcontext
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_memtools import VirtualDevice
from lightning_memtools.doctor import loader_checks
from lightning_memtools.doctor.examination import CHECKS
from lightning_memtools.doctor.settings_checks import RejectedSettings
from lightning_memtools.doctor.training_case import TrainingCase
from lightning_memtools.memory.shared_memory import free_in_container
from tests.doctor.specimens import found, network, only, rows, serious, squared


def test_a_last_batch_of_one_sample_is_found_with_the_batch_norm_that_raises():
    finding = only(found(network(norm=True), rows(33), steps=2), "batch_norm_one_sample")
    assert (finding.severity, finding.place) == ("error", "1")
    assert "33 samples in batches of 8 leave a last batch of one sample" in finding.evidence
    assert "Expected more than 1 value per channel" in finding.evidence
    assert "drop_last=True" in finding.fix


def test_the_error_that_is_predicted_comes_true():
    findings = found(network(norm=True), rows(33), steps=5)
    assert [(f.check, f.place) for f in findings if f.is_serious] == [("batch_norm_one_sample", "1"), ("step", "1")]


@pytest.mark.parametrize(
    ("model", "loader"),
    [
        (network(norm=True), rows(34)),
        (network(norm=True), rows(33, drop_last=True)),
        (network(), rows(33)),
        # Normalizes over space too, so that one sample is enough.
        (nn.Sequential(nn.Unflatten(1, (1, 4)), nn.BatchNorm1d(1), nn.Flatten(), nn.Linear(4, 1)), rows(33)),
    ],
    ids=["two_samples", "drop_last", "no_norm", "spatial"],
)
def test_a_last_batch_that_does_no_harm_is_left_alone(model, loader):
    assert not serious(found(model, loader, steps=2))


class Copied(DataLoader[Any]):
    """Makes its own batches, as loaders of single-cell models do: every one has eight samples."""

    def __iter__(self):
        return (next(super(Copied, self).__iter__()) for _ in range(5))


def test_a_loader_that_makes_its_own_batches_is_left_alone():
    assert not serious(found(network(norm=True), Copied(rows(33).dataset, 8), steps=5))


def test_shared_memory_that_is_too_small_is_found_with_the_need(monkeypatch):
    monkeypatch.setattr(loader_checks, "free_shared_memory", lambda: 1000)
    x = torch.randn(32, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8, num_workers=1, prefetch_factor=8)
    finding = only(found(network(), loader, steps=1), "shared_memory")
    # 8 x (4 + 1) numbers of 4 bytes in a batch, 8 batches ahead
    assert "1 worker x 8 batches of 160 B need 1.25 KiB" in finding.evidence
    assert "1000 B were free" in finding.evidence
    monkeypatch.setattr(loader_checks, "free_shared_memory", lambda: 1280)
    assert not serious(found(network(), loader, steps=1))


def test_a_containers_limit_counts(tmp_path):
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert free_in_container(tmp_path) == 700
    (tmp_path / "memory.max").write_text("max\n")
    assert free_in_container(tmp_path) is None
    assert free_in_container(tmp_path / "nothing") is None


def saved(tmp_path, state) -> str:
    torch.save(state, tmp_path / "weights.pt")
    return str(tmp_path / "weights.pt")


def test_a_checkpoint_that_fits_is_left_alone(tmp_path):
    model = network(norm=True)
    for state in (model.state_dict(), {"state_dict": model.state_dict(), "epoch": 3}):
        assert not serious(found(model, rows(), checkpoint=saved(tmp_path, state), steps=1))


def test_a_checkpoint_that_is_no_checkpoint_is_found(tmp_path):
    path = tmp_path / "weights.pt"
    path.write_text("half of a download")
    finding = only(found(network(), rows(), checkpoint=str(path), steps=1), "checkpoint_keys")
    assert (finding.severity, finding.place) == ("error", str(path))
    # What torch raises depends on the first bytes: "ha" asks for entry 97 of an empty memo.
    assert finding.evidence == "It could not be read: KeyError: 97. It is no zip file, as torch.save writes them"


def test_a_checkpoint_with_objects_that_would_run_code_is_no_mistake(tmp_path):
    path = saved(tmp_path, {"state_dict": network().state_dict(), "settings": Settings("sgd", "32-true", None)})
    finding = only(found(network(), rows(), checkpoint=path, steps=1), "checkpoint_keys")
    assert finding.severity == "info"
    assert "Save the state_dict alone" in finding.fix


@pytest.mark.parametrize(("name", "message"), [("", "is a directory; give one file"), ("none.pt", "does not exist")])
def test_a_checkpoint_that_is_not_there_is_refused(name, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        found(network(), rows(), checkpoint=str(tmp_path / name))


def test_missing_counters_of_batch_norm_are_explained(tmp_path):
    state = network(norm=True).state_dict()
    del state["1.num_batches_tracked"]
    finding = only(found(network(norm=True), rows(), checkpoint=saved(tmp_path, state), steps=1), "checkpoint_keys")
    assert finding.place.endswith("weights.pt: 1.num_batches_tracked")
    assert "PyTorch 0.4.1" in finding.evidence
    with pytest.raises(RuntimeError, match="Missing key"):
        network(norm=True).load_state_dict(torch.load(tmp_path / "weights.pt"))


def test_a_state_dict_of_a_pytorch_that_knew_no_counters_loads_and_is_left_alone(tmp_path):
    state = {k: v for k, v in network(norm=True).state_dict().items() if "num_batches" not in k}
    network(norm=True).load_state_dict(state)
    assert not serious(found(network(norm=True), rows(), checkpoint=saved(tmp_path, state), steps=1))


def test_unexpected_statistics_are_explained(tmp_path):
    model = network(norm=True)
    model[1] = nn.BatchNorm1d(8, track_running_stats=False)
    path = saved(tmp_path, network(norm=True).state_dict())
    finding = only(found(model, rows(), checkpoint=path, steps=1), "checkpoint_keys")
    assert "3 statistics of BatchNorm that the model has no place for" in finding.evidence


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_a_wrappers_prefix_is_named_with_the_line_that_removes_it(prefix, tmp_path):
    state = {prefix + key: value for key, value in network().state_dict().items()}
    finding = only(found(network(), rows(), checkpoint=saved(tmp_path, state), steps=1), "checkpoint_keys")
    assert f"All 4 keys fit the model once {prefix!r} is removed" in finding.evidence
    mended = eval(finding.fix.partition(" = ")[2], {"state": state})  # noqa: S307, the advice has to run
    network().load_state_dict(mended)


def test_other_sizes_and_names_are_reported_one_by_one(tmp_path):
    state = network(width=6).state_dict()
    finding = only(found(network(), rows(), checkpoint=saved(tmp_path, state), steps=1), "checkpoint_keys")
    assert "0.weight is torch.Size([6, 4]) in the checkpoint and torch.Size([8, 4]) in the model" in finding.evidence
    state = network().state_dict()
    state["0.weights"] = state.pop("0.weight")
    finding = only(found(network(), rows(), checkpoint=saved(tmp_path, state), steps=1), "checkpoint_keys")
    assert "1 missing (0.weight) and 1 unexpected (0.weights)" in finding.evidence
    assert "0.weight may be called 0.weights there" in finding.evidence


def test_parameters_that_get_gradients_and_are_in_no_optimizer_are_found():
    model = network()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.01)
    finding = only(found(model, rows(), optimizer=optimizer), "optimizer_parameters")
    assert finding.place == "0.weight, 0.bias"
    assert "2 parameters get gradients (160 bytes after 3 steps)" in finding.evidence
    model[0].requires_grad_(requires_grad=False)
    assert not found(model, rows(), optimizer=optimizer, ignore=["reproducibility"])


def test_a_parameter_in_two_optimizers_is_found():
    model = network()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01), torch.optim.Adam(model[2].parameters())]
    finding = only(found(model, rows(), optimizer=optimizers), "optimizer_parameters")
    assert finding.place == "2.weight, 2.bias"
    assert "group 0 of optimizer 0 (SGD) and in group 0 of optimizer 1 (Adam)" in finding.evidence
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.01), torch.optim.Adam(model[2].parameters())]
    assert not serious(found(model, rows(), optimizer=optimizers))


def test_frozen_parameters_in_the_optimizer_are_worth_a_remark_only():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model[0].requires_grad_(requires_grad=False)
    finding = only(found(model, rows(), optimizer=optimizer), "optimizer_parameters")
    assert (finding.severity, finding.place) == ("info", "0.weight, 0.bias")


def test_constant_initialisation_is_found_with_its_gradients():
    model = network()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.01)
    finding = only(found(model, rows()), "symmetric_weights")
    assert finding.place == "0.weight"
    assert "All 8 rows of 0.weight are equal, and so are the rows of its first gradient" in finding.evidence


def test_rows_that_their_biases_tell_apart_are_left_alone():
    model = network()
    nn.init.constant_(model[0].weight, 0.01)  # the biases are random
    assert not serious(found(model, rows()))


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


def test_zero_weights_whose_gradients_differ_are_left_alone():
    model = nn.Sequential(network(), nn.Linear(1, 3))
    nn.init.zeros_(model[1].weight)  # as the heads of many networks

    def step(model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), (batch[1][:, 0] > 0).long())

    assert not serious(found(model, rows(), step))


def test_a_moved_copy_that_is_thrown_away_is_found_with_its_line():
    def step(model: nn.Module, batch: Any) -> Any:
        x, y = batch
        x.to("cpu")
        return F.mse_loss(model(x), y)

    finding = only(found(network(), rows(), step), "devices")
    assert finding.place.startswith("tests/doctor/test_checks.py:")
    assert '`x.to("cpu")` moves a tensor and throws the moved copy away' in finding.evidence


def test_a_moved_copy_that_is_used_is_left_alone():
    def step(model: nn.Module, batch: Any) -> Any:
        model.to("cpu")  # a module moves in place
        x = batch[0].to("cpu")
        return F.mse_loss(model(x), batch[1].cpu())

    assert not serious(found(network(), rows(), step))


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
        (Settings("fused", "16-mixed", 1.0), "does not allow for gradient clipping"),
        (Settings("lbfgs", "16-mixed", None), "LBFGS"),
        (Settings("sgd", "16-mixed", None, half=True), "Attempting to unscale FP16 gradients"),
        (Settings("fused", "16-mixed", None), None),
        (Settings("fused", "bf16-mixed", 1.0), "does not allow for gradient clipping"),
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
    class Model(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, _):
            return self.net(batch[0].to(self.dtype)).square().mean()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), fused=fused)

        def train_dataloader(self):
            return rows()

    trainer = L.Trainer(accelerator="cpu", precision=precision, gradient_clip_val=clip, max_steps=1, logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                        default_root_dir=tmp_path)  # fmt: skip
    model = Model()
    case = TrainingCase(model=model, optimizers=[model.configure_optimizers()], precision=precision, clip=clip)
    findings = list(RejectedSettings(case).before_training())
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping") if findings else nullcontext():
        trainer.fit(model)
    assert trainer.global_step == (not findings)


def test_parameters_that_a_reentrant_checkpoint_cuts_off_are_found_and_the_fix_helps():
    def steps(*, reentrant: bool) -> Any:
        def step(model: Any, batch: Any) -> Any:
            inner = checkpoint(model[0], batch[0], use_reentrant=reentrant)
            return F.mse_loss(model[1:](inner), batch[1])

        return step

    finding = only(found(network(), rows(), steps(reentrant=True)), "missing_gradients")
    assert (finding.severity, finding.place) == ("warning", "0")
    assert finding.fix == "checkpoint(..., use_reentrant=False)"
    findings = found(network(), rows(), steps(reentrant=False))
    assert "missing_gradients" not in {finding.check for finding in findings}


def test_parameters_without_a_gradient_are_worth_a_remark_that_names_their_module():
    model = nn.ModuleDict({"used": network(), "unused": nn.Linear(3, 2)})
    finding = only(found(model, rows(), lambda m, batch: squared(m["used"], batch)), "missing_gradients")
    assert (finding.severity, finding.place) == ("info", "unused")
    assert "2 parameters in the optimizer had no gradient (None) in any of 8 steps" in finding.evidence


def test_a_generator_that_trains_in_every_second_step_is_left_alone():
    model = nn.ModuleDict({"one": network(), "other": network()})
    names = itertools.cycle(["one", "other"])
    assert not serious(found(model, rows(), lambda m, batch: squared(m[next(names)], batch)))


@pytest.mark.parametrize("norm", [torch.nn.Identity(), torch.nn.Dropout(0.5)], ids=["plain", "dropout"])
def test_zero_gradients_alone_are_worth_a_remark_only(norm):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), norm, nn.Linear(4, 1))
    nn.init.constant_(model[0].bias, -100)  # dead ReLUs
    finding = only(found(model, rows()), "missing_gradients")
    assert finding.severity == "info"
    assert finding.place == "0.weight, 0.bias, 3.weight"


class HalfUsed(nn.Module):
    """Its second part takes part in the loss times zero, as is done so that DDP finds no unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = network(), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.used(x) + 0.0 * sum(parameter.sum() for parameter in self.unused.parameters())


def test_weights_that_only_weight_decay_moves_are_found_with_their_shrink_per_step():
    model = HalfUsed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    finding = only(found(model, rows(), optimizer=optimizer), "missing_gradients")
    assert (finding.severity, finding.place) == ("warning", "unused.weight, unused.bias")
    assert "The gradients of 2 parameters were exactly zero in all of 8 steps" in finding.evidence
    assert "weight_decay=0.1 shrank unused." in finding.evidence
    assert "by 0.001 of its norm in one step" in finding.evidence  # lr x weight_decay
    assert "63% are lost in 1000 such steps" in finding.effect  # 1 - 0.999 ** 1000


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
    assert "The autograd graphs of 6 of 6 earlier steps are alive at step 8" in finding.evidence

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


def test_the_latest_output_alone_is_left_alone():
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.latest = network(), None

    def step(model: Any, batch: Any) -> Any:
        model.latest = squared(model.net, batch)
        return model.latest

    assert not serious(found(Keeps(), rows(), step))


def test_graphs_in_evaluation_are_found():
    def evaluate(model: nn.Module, batch: Any) -> Any:
        return squared(model, batch)

    options = {"val_dataloader": rows(16), "steps": 3}
    finding = only(found(network(), rows(), evaluate=evaluate, **options), "evaluation_graphs")
    assert "1 output of an evaluation batch came with an autograd graph" in finding.evidence
    assert not serious(found(network(), rows(), evaluate=torch.no_grad()(evaluate), **options))


def test_batch_norm_in_train_mode_in_evaluation_is_found():
    def forgets_eval(model: nn.Module, batch: Any) -> Any:
        with torch.no_grad():
            return squared(model, batch)

    def evaluates(model: nn.Module, batch: Any) -> Any:
        with torch.no_grad():
            return squared(model.eval(), batch)

    options = {"val_dataloader": rows(16), "steps": 3}
    finding = only(found(network(norm=True), rows(), evaluate=forgets_eval, **options), "module_modes")
    assert finding.place == "1"
    assert "changed their running statistics" in finding.evidence
    assert not serious(found(network(norm=True), rows(), evaluate=evaluates, **options))


@pytest.mark.parametrize(
    ("predicted", "target", "named"),
    [
        (lambda m, x: m(x), lambda y: y, "mse_loss"),
        (lambda m, x: m(x)[:, 0], lambda y: y[:, None], "mse_loss"),
    ],
    ids=["column_against_flat", "flat_against_column"],
)
def test_a_loss_that_broadcasts_is_found_with_its_line(predicted, target, named):
    def step(model: nn.Module, batch: Any) -> Any:
        return F.mse_loss(predicted(model, batch[0]), target(batch[1]))

    with pytest.warns(UserWarning, match="target size"):
        step(network(), next(iter(rows(flat=True))))
    finding = only(found(network(), rows(flat=True), step), "loss_broadcast")
    assert finding.place.startswith(f"{named} at tests/doctor/test_checks.py:")
    assert "broadcast to (8, 8)" in finding.evidence


def test_a_difference_by_hand_that_broadcasts_is_found_too():
    def step(model: nn.Module, batch: Any) -> Any:
        return ((model(batch[0]) - batch[1]) ** 2).mean()

    finding = only(found(network(), rows(flat=True), step), "loss_broadcast")
    assert finding.place.startswith("the difference at tests/doctor/test_checks.py:")
    assert not serious(found(network(), rows(), step))


def test_a_target_that_the_step_squeezes_is_found_too():
    def step(model: nn.Module, batch: Any) -> Any:
        return ((model(batch[0]) - batch[1].squeeze().float()) ** 2).mean()

    finding = only(found(network(), rows(), step), "loss_broadcast")
    assert "broadcast to (8, 8)" in finding.evidence


def test_distances_to_fixed_places_are_left_alone():
    def step(model: nn.Module, batch: Any) -> Any:
        return (model(batch[0]) - torch.linspace(-1, 1, 16)).square().mean() + squared(model, batch)

    assert not serious(found(network(), rows(), step))


def test_all_pairs_on_purpose_are_left_alone():
    def step(model: nn.Module, batch: Any) -> Any:
        scores, targets = model(batch[0])[:, 0], batch[1]
        return ((scores - scores[:, None]) - (targets - targets[:, None])).pow(2).mean()

    assert not serious(found(network(), rows(flat=True), step))


@pytest.mark.parametrize("norm", [False, True])
def test_a_sum_over_the_batch_is_found_by_the_gradients_growth(norm):
    def step(model: nn.Module, batch: Any) -> Any:
        return F.mse_loss(model(batch[0]), batch[1], reduction="sum")

    finding = only(found(network(norm=norm), rows(), step, steps=1), "loss_sum")
    assert finding.place.startswith("tests/doctor/test_checks.py:")
    assert "The gradient grows 2.00 times" in finding.evidence


@pytest.mark.parametrize("factor", [lambda x: x / 2, lambda x: -x * 0.5, lambda x: x + 1.0])
def test_a_sum_with_a_factor_is_found(factor):
    def step(model: nn.Module, batch: Any) -> Any:
        return factor(((model(batch[0]) - batch[1]) ** 2).sum())

    finding = only(found(network(), rows(), step, steps=1), "loss_sum")
    assert "The gradient grows 2.00 times" in finding.evidence


def test_a_sum_that_is_divided_is_left_alone():
    def step(model: nn.Module, batch: Any) -> Any:
        return F.mse_loss(model(batch[0]), batch[1], reduction="sum") / len(batch[0])

    assert not serious(found(network(), rows(), step))
    assert not serious(found(network(), rows(), lambda m, b: ((m(b[0]) - b[1]) ** 2).sum() / len(b[0])))


def test_a_part_left_in_eval_mode_is_found():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)).eval(), nn.Linear(4, 1))
    finding = only(found(model, rows()), "module_modes")
    assert finding.place == "1"
    assert "eval mode, with 1 Dropout in it" in finding.evidence
    assert not serious(found(model.train(), rows()))


def test_a_frozen_part_in_eval_mode_is_left_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), nn.Linear(4, 1))
    model[1].requires_grad_(requires_grad=False)
    assert not serious(found(model, rows()))


def test_frozen_batch_statistics_are_worth_a_remark_only():
    model = network(norm=True)
    model[1].eval()
    assert only(found(model, rows()), "module_modes").severity == "info"


def test_a_batch_that_belongs_to_the_data_and_is_changed_in_place_is_found():
    def step(model: nn.Module, batch: Any) -> Any:
        x, y = batch
        x -= x.mean(0)
        return F.mse_loss(model(x), y)

    batches = list(rows())
    finding = only(found(network(), batches, step), "changed_batch")
    assert finding.severity == "warning"
    assert "float32[8, 4] of its batch, whose memory is the data set's own" in finding.evidence
    # A collated batch is a copy.
    assert only(found(network(), rows(), step), "changed_batch").severity == "info"
    assert not serious(found(network(), batches))


class Slow(TensorDataset):
    """Takes a millisecond for a sample."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.001)
        return super().__getitem__(index)


def test_waiting_for_data_is_found_with_its_share():
    loader = rows()
    slow = DataLoader(Slow(*loader.dataset.tensors), 8)
    finding = only(found(network(), slow, steps=12), "data_waiting")
    assert finding.severity == "info"  # a CPU is not idle meanwhile: it loads the data
    assert "of the time of 8 steps passed between two steps" in finding.evidence
    assert "data_waiting" not in [finding.check for finding in found(network(), loader, steps=12)]


def test_memory_that_would_fill_the_device_is_found():
    kept: list[torch.Tensor] = []

    def step(model: nn.Module, batch: Any) -> Any:
        kept.append(torch.zeros(2**18))  # 1 MiB
        return squared(model, batch)

    with VirtualDevice("64MiB"):
        findings = found(network(), rows(), step, steps=12)
    finding = only(findings, "memory_growth")
    assert "grew in each of 9 steps after the third, by 1.00 MiB on average" in finding.evidence
    assert re.search(r"What piles up: `kept in .*`, a list of \d+ tensors, [\d.]+ MiB", finding.evidence)
    with VirtualDevice("64MiB"):
        assert not serious(found(network(), rows(), steps=12))
        assert "memory_growth" not in [one.check for one in found(network(), rows(), steps=12)]


def test_a_spike_of_the_loss_is_found_with_its_step():
    counter = itertools.count(-1)  # the trial counts too

    def step(model: nn.Module, batch: Any) -> Any:
        return squared(model, batch) * (1000 if next(counter) == 10 else 1)

    finding = only(found(network(), rows(), step, steps=15), "loss_spikes")
    assert (finding.severity, finding.place) == ("info", "step 10")


def test_an_unseeded_run_is_worth_a_remark(monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.setattr(torch, "initial_seed", lambda: 2**50)
    assert only(found(network(), rows()), "reproducibility").severity == "info"
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    assert "reproducibility" not in [one.check for one in found(network(), rows())]


def test_each_check_can_be_left_out():
    model = nn.ModuleDict({"used": network(), "unused": nn.Linear(3, 2)})
    assert not found(model, rows(), lambda m, batch: squared(m["used"], batch), ignore=list(CHECKS))
