"""Faults that public packages showed (transformers, PINA, MONAI, NequIP, torchjd, deepinv), without the package."""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from inspect import signature
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import ConfusionMatrix, MeanMetric, MetricCollection

from lightning_memtools import GradientCheckpointing, HaltOnNaN, OOMReport, VirtualDevice, diagnose, estimate_memory
from lightning_memtools.checkpointing.repetition_proof import fingerprint
from lightning_memtools.memory.nested_tensors import named_tensors, tensors_in
from lightning_memtools.nonfinite.bad_step import NonFiniteError
from lightning_memtools.nonfinite.finite_checks import bad_inputs
from lightning_memtools.simulation.known_values import values_known
from lightning_memtools.state.state_snapshot import StateSnapshot

QUIET: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
QUIET |= {"enable_progress_bar": False, "enable_model_summary": False, "max_steps": 6}


class Net(L.LightningModule):
    def __init__(self, net: nn.Module, step: Any, optimizer: Any = torch.optim.Adam) -> None:
        super().__init__()
        self.net, self._step, self._optimizer = net, step, optimizer

    def training_step(self, batch, batch_idx):
        return self._step(self.net, batch)

    def configure_optimizers(self):
        return self._optimizer(self.parameters())


def fit(model: Net, batches: Any, *callbacks: L.Callback, size: int = 8) -> None:
    L.Trainer(**QUIET, callbacks=[*callbacks]).fit(model, DataLoader(batches, size))


def mean_square(net: Any, x: Any) -> Any:
    return net(x).square().mean()


def test_transformers_takes_fakes_of_a_trace_for_ordinary_tensors_so_that_mamba_takes_no_branch_for_export():
    asked = pytest.importorskip("transformers.utils.import_utils")
    with FakeTensorMode(), values_known():
        assert not asked.is_tracing(torch.ones(1))


class Experts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 64, width) / 8)

    def forward(self, x):
        return nn.functional.grouped_mm(x, self.weight, offs=torch.tensor([16, 32, 48, 64], dtype=torch.int32)).relu()


def test_products_of_groups_in_float32_take_what_they_take():
    net, x = nn.Sequential(Experts(64), Experts(60)), torch.randn(64, 64)
    with VirtualDevice("24GiB", cuda_like=True) as device:
        device.track(net)
        optimizer = torch.optim.AdamW(net.parameters())
        for _ in range(2):
            device.count_batch(batch := x.clone())
            optimizer.zero_grad()
            mean_square(net, batch).backward()
            optimizer.step()
        real = device.stats().peak_allocated
    estimate = estimate_memory(net, x, step=mean_square, optimizer=torch.optim.AdamW)
    assert estimate.peak_allocated - estimate.composition["workspace"] == pytest.approx(real, rel=0.02)


class Frozen(OrderedDict[str, int]):
    def update(self, *_: Any, **__: Any) -> None:
        raise TypeError("frozen")

    __setitem__ = setdefault = pop = clear = update  # type: ignore[assignment]


def test_a_dict_that_refuses_to_be_written_is_left_alone():
    net = nn.Linear(4, 4)
    net.config = config = Frozen()
    OrderedDict.__setitem__(config, "a", 1)
    estimate_memory(net, torch.ones(2, 4), step=lambda model, x: model(x).sum())
    assert dict(config) == {"a": 1}


def test_properties_of_the_users_objects_are_not_read_for_names():
    class Scheduler:
        def __init__(self) -> None:
            self._config = {"beta": 1, "alphas": torch.ones(2)}

        def __getattr__(self, name: str) -> Any:
            if name == "beta":
                warnings.warn("deprecated", FutureWarning, stacklevel=2)
            return vars(self)["_config"][name]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [name for name, _ in named_tensors(Scheduler(), "it")] == ["it.alphas"]


def test_statistics_that_a_batch_norm_writes_are_not_where_its_nan_came_from(tmp_path):
    norms = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
    net = nn.Sequential(*norms, nn.Flatten(), nn.Linear(128, 1))
    model = Net(net, mean_square, lambda parameters: torch.optim.Adam(parameters, 1e25))
    with pytest.raises(NonFiniteError) as caught:
        fit(model, torch.randn(64, 1, 8, 8), HaltOnNaN(directory=str(tmp_path)))
    assert "buffer" not in caught.value.explanation.what
    assert caught.value.explanation.operation == "aten.convolution"


def test_the_report_of_a_full_device_knows_the_labels():
    def step(net: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        x, y = batch
        logits = net(x)
        mask = torch.zeros_like(logits).scatter(1, y[:, None], 1.0)
        return nn.functional.cross_entropy(logits + mask * (logits[mask == 1] - 0.5).unsqueeze(1), y)

    net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))
    data = DataLoader(TensorDataset(torch.randn(4096, 256), torch.randint(0, 10, (4096,))), 1024)
    report = OOMReport()
    with VirtualDevice("14MiB"), pytest.raises(torch.OutOfMemoryError):
        L.Trainer(**QUIET, callbacks=[report]).fit(Net(net, step), data)
    assert [action.peak for action in report.advice if action.peak is not None]


def test_rows_are_called_samples_only_where_all_tensors_have_as_many():
    nodes = torch.ones(64, 3)
    nodes[42] = torch.nan
    (bad,) = bad_inputs({"pos": nodes, "energy": torch.ones(8)}, 1)
    assert str(bad).endswith("in row 42")


def test_parameters_without_gradients_far_apart_are_named_one_by_one():
    net = nn.ModuleDict({name: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for name in ("a", "b")})
    report = diagnose(
        nn.ModuleDict({"model": net}),
        [torch.ones(2, 4)],
        torch.optim.SGD(net.parameters(), 0.1),
        step=lambda m, batch: m["model"]["b"][0](m["model"]["a"][0](batch[0])).square().mean(),
        checks="missing_gradients",
    )
    assert "model.a.1.weight" in report.findings[0].place


class Wrapping(torch.optim.Optimizer):
    """As the optimizers of opacus, and many others: it steps another, whose groups are its own."""

    def __init__(self, parameters):
        self.inner = torch.optim.SGD(parameters, lr=0.1)
        own = {"param_groups", "state"}
        vars(self).update({name: value for name, value in vars(self.inner).items() if name not in own})

    param_groups = property(
        lambda self: self.inner.param_groups, lambda self, groups: setattr(self.inner, "param_groups", groups)
    )
    state = property(lambda self: self.inner.state, lambda self, state: setattr(self.inner, "state", state))

    def step(self, closure=None):
        return self.inner.step(closure)


def test_an_optimizer_that_wraps_another_is_left_alone_by_an_estimate():
    net = nn.Linear(4, 4)
    optimizer = Wrapping(net.parameters())
    net(torch.ones(2, 4)).sum().backward()
    before, groups = net.weight.detach().clone(), optimizer.inner.param_groups
    estimate_memory(net, torch.ones(2, 4), step=lambda model, x: model(x).sum(), optimizer=optimizer)
    assert optimizer.inner.param_groups is groups
    assert groups[0]["params"][0] is net.weight
    assert torch.equal(before, net.weight)


def test_factorizations_succeed_in_an_estimate_and_an_error_says_what_was_assumed():
    def loss(model, x):
        factor, failed = torch.linalg.cholesky_ex(model(x).T @ model(x))
        assert not failed.any()
        assert sum_is_small or not bool(factor.sum() > 0)
        return factor.sum()

    sum_is_small = True
    assert estimate_memory(nn.Linear(4, 4), torch.ones(8, 4), step=loss).peak_allocated > 0
    sum_is_small = False
    with pytest.raises(AssertionError) as caught:
        estimate_memory(nn.Linear(4, 4), torch.ones(8, 4), step=loss)
    assert any("Assumed at" in note and "is True" in note for note in caught.value.__notes__)


def test_a_list_of_numbers_from_the_batch_may_be_an_index_or_a_tensor():
    """As in pytorch-lifestream, of the last state of each sequence."""

    def loss(model, batch):
        sequences, lengths = batch
        states, last = model(sequences), [length - 1 for length in lengths]
        states.clone()[range(2), last] = 0.0
        assert torch.tensor([*lengths]).tolist() == [2, 3]
        return states[range(2), last].sum()

    estimate = estimate_memory(nn.Linear(4, 4), (torch.ones(2, 3, 4), torch.tensor([2, 3])), step=loss)
    assert (estimate.peak_allocated > 0, estimate.notes) == (True, ())


class Lengthless(tuple[Any, ...]):
    """As e3nn's Irreps, which modules of NequIP and MACE hold."""

    __slots__ = ()

    def __len__(self):
        raise NotImplementedError


def test_a_tuple_that_refuses_to_say_its_length_is_searched_and_restored():
    held = Lengthless((torch.ones(2), "0e"))
    assert [tensor is held[0] for tensor in tensors_in({"irreps": held})] == [True]
    snapshot = StateSnapshot([held])
    held[0].zero_()
    snapshot.restore()
    assert held[0].tolist() == [1, 1]


class Labelled(torch.Tensor):
    """As PINA's: a new one is made of any tensor, and its own methods want the labels that a view does not have."""

    @staticmethod
    def __new__(cls, x, labels):
        return super().__new__(cls, x)

    def __init__(self, x, labels):
        self.labels = labels

    def to(self, *args, **kwargs):
        return Labelled(super().to(*args, **kwargs), self.labels)

    def clone(self, *args, **kwargs):
        return Labelled(super().clone(*args, **kwargs), self.labels)

    def flatten(self, *_, **__):
        raise ValueError("MONAI's refuse to be sliced where their labels differ")


def test_a_users_own_class_of_tensors_can_be_traced_to_a_nan_and_lies_on_a_virtual_device():
    def loss(net, batch):
        out = Labelled(net(batch), ["u"])
        doubled = (out.clone() + out).as_subclass(torch.Tensor)
        return torch.log(doubled - doubled).mean() if bad else doubled.square().mean()

    batches, bad = [Labelled(torch.randn(8, 4), ["a", "b"]) for _ in range(6)], True
    data = DataLoader(batches, batch_size=None)
    with pytest.raises(NonFiniteError) as caught:
        L.Trainer(**QUIET, callbacks=[HaltOnNaN()]).fit(Net(nn.Linear(4, 1), loss), data)
    assert caught.value.explanation is not None, str(caught.value)
    assert caught.value.explanation.operation == "aten.log"
    bad, weights = False, []
    for device in (VirtualDevice("1GiB"), contextlib.nullcontext()):
        torch.manual_seed(0)
        net = nn.Linear(4, 1)
        with device:
            L.Trainer(**QUIET).fit(Net(net, loss), data)
        weights.append(net.weight.detach().clone())
    assert torch.equal(*weights)
    assert "__new__" not in vars(torch.Tensor)
    plain = batches[0].as_subclass(torch.Tensor)
    assert torch.equal(fingerprint(batches[0]), fingerprint(plain))  # by which GradientCheckpointing compares
    assert not torch.equal(fingerprint(batches[0]), fingerprint(plain + 1))


class Odd(nn.Module):
    """As EDM2's layers, models of forces, and codebooks that begin with the means of their first batch."""

    def __init__(self, kind):
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(64, 512), nn.Linear(512, 64), kind
        self.register_buffer("is_ready", torch.zeros(()))

    def forward(self, x):
        if self.kind == "begins":
            hidden = self.a(x if self.is_ready else x.repeat(2, 1)).tanh()
            self.is_ready.data.fill_(1)
            return x + self.b(hidden)[: len(x)]
        with torch.set_grad_enabled(self.kind == "takes a gradient"):
            at = x.detach().requires_grad_()
            writes = self.kind == "changes b.weight"
            out = self.b.weight.mul_(0.99) if writes else torch.autograd.grad(self.a(at).tanh().sum(), at)[0]
        return self.b(self.a(x).tanh()) + out.mean()


@pytest.mark.filterwarnings("ignore:The layer net.0 did not do the same")
@pytest.mark.parametrize("kind", ["changes b.weight", "takes a gradient", "begins"])
def test_layers_that_cannot_be_run_again_are_left_out_or_found(kind):
    weights, checkpointing = [], GradientCheckpointing()
    for callbacks in ([], [checkpointing]):
        torch.manual_seed(0)
        net = Net(nn.ModuleList([Odd(kind), Odd(kind)]), lambda net, x: mean_square(net[1], net[0](x)))
        fit(net, torch.randn(384, 64), *callbacks, size=64)
        weights.append(nn.utils.parameters_to_vector(net.parameters()))
    assert torch.equal(*weights)
    assert checkpointing.plan.left_out.get("net.0", "it begins when it runs") == f"it {kind} when it runs"


def test_weights_that_hooks_update_in_backward_are_not_said_to_have_been_bad_before(tmp_path):
    """As the gradient release of torch-optimi."""

    def update(parameter):
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    def release(parameters):
        for each in (parameters := [*parameters]):
            each.register_post_accumulate_grad_hook(update)
        return torch.optim.SGD(parameters, 0.1)

    def train(batches):
        model = Net(nn.Linear(4, 1), lambda net, x: mean_square(net, x) / x.abs().max(), release)
        fit(model, batches, HaltOnNaN(directory=str(tmp_path)))

    with pytest.warns(UserWarning, match="HaltOnNaN saw no gradient"):
        train(torch.ones(48, 4))
    for value, cause in ((torch.nan, "dirty data"), (0.0, "not known")):
        with pytest.raises(NonFiniteError, match=r"The step writes net.weight") as caught:
            train(torch.ones(48, 4).index_fill(0, torch.arange(16, 24), value))
        assert caught.value.cause == cause


class Two(Net):
    """Two optimizers and one loss, as Muon beside AdamW; or none that Lightning sees, as torchjd's."""

    automatic_optimization = False
    is_seen = True

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss) if self.is_seen else loss.backward()
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("is_seen", [True, False])
def test_updates_without_a_loss_of_their_own_are_not_shown_as_nan(is_seen):
    model = Two(nn.Linear(4, 1), mean_square, lambda parameters: [torch.optim.SGD([each], 0.1) for each in parameters])
    model.is_seen = is_seen
    with pytest.raises(NonFiniteError) as caught:
        fit(model, torch.randn(24, 4).index_fill(0, torch.tensor(20), torch.nan), HaltOnNaN())
    assert caught.value.cause == "dirty data"
    shown = [line for line in str(caught.value).splitlines() if line.startswith("Last losses")]
    assert [line.split().count("nan") for line in shown] == [1] * is_seen


def test_an_optimizer_that_the_module_holds_counts_in_an_estimate_and_is_left_alone():
    """As in the routines of torch-uncertainty, which return the one that they were given."""
    model = Net(nn.Linear(64, 64), mean_square, lambda _: model.held)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}
    model.held = {"optimizer": optimizer, "lr_scheduler": scheduler}
    model.net.weight.grad = torch.ones(64, 64)
    estimate = estimate_memory(model, torch.ones(4, 64))
    assert estimate.composition["optimizer"] == 2 * estimate.composition["parameters"]
    assert (optimizer.param_groups[0]["lr"], model.net.weight.grad is None) == (1e-3, False)
    assert scheduler["scheduler"].optimizer is optimizer


def test_states_of_metrics_and_their_defaults_move_with_the_module_and_are_compared():
    """As in torch-spatiotemporal: torchmetrics asks by `allclose` which metrics of a collection hold the same."""
    model = Net(nn.Linear(4, 1), lambda net, x: model.metrics.update(loss := net(x).mean()) or loss)
    model.metrics = MetricCollection({"a": MeanMetric(), "b": MeanMetric()})
    model.metric = ConfusionMatrix("multiclass", num_classes=256)
    estimate = estimate_memory(model, torch.ones(2, 4))
    assert (estimate.notes, estimate.composition["other"] // 2**20) == ((), 1)


class AsksForItsData(Net):
    def on_train_epoch_start(self):
        assert len(self.trainer.fit_loop._combined_loader.flattened[0].dataset)


def test_hooks_ask_for_a_loaders_dataset_and_pipelines_for_what_a_recomputed_forward_takes():
    """As cellarium-ml's module and pipeline do."""

    def loss(net, x):
        for block in net:
            x = block(**dict.fromkeys(signature(block.forward).parameters, x))
        return x.mean()

    layers = (nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64), nn.Tanh())
    net, callback = nn.ModuleList(nn.Sequential(*layers) for _ in range(3)), GradientCheckpointing()
    fit(AsksForItsData(net, loss), torch.randn(384, 64), callback, size=64)
    assert callback.plan.chains


def test_modules_run_within_transforms_of_torch_func_on_a_virtual_device():
    """As deepinv's Tomography does to find the adjoint of an operator."""
    with VirtualDevice("1GiB"):
        net, x = nn.Linear(4, 4), torch.ones(2, 4)
        out, pull_back = torch.func.vjp(net, x)
        assert torch.equal(*pull_back(out), out @ net.weight)
        assert torch.equal(torch.func.vmap(net)(x), net(x))
