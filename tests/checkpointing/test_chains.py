"""Which modules are chains, and which of their layers may run twice."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from torch import nn

from lightning_memtools.checkpointing.chains import find_chains, find_modules
from lightning_memtools.checkpointing.checkpoint_options import CheckpointOptions
from lightning_memtools.checkpointing.exact_recomputation import is_dropout
from tests.zoo import timm, torchvision_models


class Subclass(nn.Sequential):
    """Made by its own constructor, run by Sequential's forward."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, width), nn.ReLU())


class OwnForward(nn.Sequential):
    """Does something else with its children."""

    def forward(self, input):  # noqa: A002, Sequential's own name
        return super().forward(input) + input


class Model(nn.Module):
    """Sequentials of all sorts within modules that have forwards of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(OrderedDict(norm=nn.LayerNorm(4), subclass=Subclass(4), own=OwnForward(Subclass(4))))
        self.list = nn.ModuleList([Subclass(4), nn.Linear(4, 4)])
        self.empty = nn.Sequential()


def found(model: nn.Module, **options) -> dict[str, tuple[str, ...]]:
    return {chain.name: chain.layers for chain in find_chains(model, CheckpointOptions.parse(**options))}


def test_sequentials_of_any_subclass_at_any_depth_that_run_as_sequential_does():
    assert found(Model()) == {
        "stem": ("stem.norm", "stem.subclass.0", "stem.subclass.1", "stem.own"),
        "stem.own.0": ("stem.own.0.0", "stem.own.0.1"),
        "list.0": ("list.0.0", "list.0.1"),
    }


def test_include_takes_what_it_names_and_nothing_else():
    options = CheckpointOptions.parse(include=["list.*"])
    chains = find_chains(Model(), options)
    assert [chain.name for chain in chains] == ["list.0"]
    assert [chain.name for chain in find_modules(Model(), chains, options)] == ["list.1"]
    assert set(found(Model(), include=["stem", "stem.own"])) == {"stem"}
    assert set(found(Model(), exclude=["stem"])) == {"list.0"}


def test_compiled_layers_are_not_recomputed():
    model = nn.Sequential(nn.Linear(4, 4), Subclass(4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.ReLU())
    model[1].compile(backend="eager")
    model[3].compile(backend="eager")
    (chain,) = find_chains(model, CheckpointOptions.parse())
    assert chain.layers == ("0", "1", "2.0", "2.1", "3")
    assert chain.outside == {1: "compiled", 4: "compiled"}


NEVER_TWICE = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(4),
    "LazyBatchNorm1d": nn.LazyBatchNorm1d,
    "Dropout": lambda: nn.Dropout(0.1),
    "Dropout2d": lambda: nn.Dropout2d(0.1),
    "AlphaDropout": lambda: nn.AlphaDropout(0.1),
    "StochasticDepth": lambda: torchvision_models().convnext.StochasticDepth(0.1, "row"),
    "DropPath": lambda: timm().layers.DropPath(0.1),
    "DropBlock2d": lambda: timm().layers.DropBlock2d(0.1),
    "PatchDropout": lambda: timm().layers.PatchDropout(0.1),
}


@pytest.mark.parametrize("name", NEVER_TWICE)
def test_dropout_and_batchnorm_of_any_class_stay_outside_in_training(name):
    model = nn.Sequential(nn.Linear(4, 4), NEVER_TWICE[name]())
    (training,) = find_chains(model, CheckpointOptions.parse())
    (evaluating,) = find_chains(model.eval(), CheckpointOptions.parse())
    assert training.outside == {1: f"{name} never runs twice"}
    assert evaluating.outside == {}


@pytest.mark.parametrize("rate", [0, 0.0])
def test_dropout_that_drops_nothing_is_an_ordinary_layer(rate):
    assert not is_dropout(nn.Dropout(rate))
    assert not is_dropout(timm().layers.DropPath(rate))
