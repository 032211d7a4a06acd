"""Which modules are chains, which layers may run twice, and what plan_checkpoints finds, chooses and refuses."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from lightning_memtools.checkpointing.chains import find_chains, find_modules
from lightning_memtools.checkpointing.checkpoint_options import CheckpointOptions
from lightning_memtools.checkpointing.exact_recomputation import is_dropout
from lightning_memtools.checkpointing.planning import plan_checkpoints
from tests.checkpointing.models import conv_bn_relu, encoder, nested
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


def test_skip_is_refused_where_only_recompute_saves_memory_and_the_refusal_says_so():
    sample = torch.empty(4, 3, 32, 32)
    model = conv_bn_relu(16, 8)
    skip, recompute = (plan_checkpoints(model, sample, bn_dropout=mode) for mode in ("skip", "recompute"))
    assert skip.refused is not None
    assert 'With bn_dropout="recompute", BatchNorm and Dropout layers may run twice' in skip.refused
    assert skip.chains == ()
    assert recompute.refused is None
    assert recompute.peak_bytes < 0.6 * recompute.plain_peak_bytes
    assert recompute.extra_operations <= 0.33
    assert skip.left_out["1"] == "BatchNorm2d never runs twice"


@pytest.mark.parametrize(("segments", "ranges"), [(1, []), (3, [(0, 3), (3, 6)]), (4, [(0, 2), (2, 4), (4, 6)])])
def test_chunks_are_those_of_checkpoint_sequential(segments, ranges):
    plan = plan_checkpoints(encoder(10), torch.empty(16, 24, 32), segments=segments)
    assert [one for chain in plan.chains for one in chain.ranges] == ranges


def test_the_budget_is_kept_with_less_recomputation_the_larger_it_is():
    model, x = encoder(8, 0.0), torch.empty(16, 24, 32)
    plain = plan_checkpoints(model, x, memory_budget=1.0)
    assert plain.extra_operations == 0
    assert "within the budget" in (plain.refused or "")
    extras = []
    for share in (0.9, 0.6, 0.4):
        plan = plan_checkpoints(model, x, memory_budget=share)
        assert plan.planned.activation_bytes <= share * plan.plain.activation_bytes
        extras.append(plan.extra_operations)
    assert extras == sorted(extras)
    assert extras[0] > 0
    limit = plan_checkpoints(model, x).plain_peak_bytes // 2
    assert plan_checkpoints(model, x, memory_budget=f"{limit}B").peak_bytes <= limit


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segments": 0}, "segments=0 is not a number of chunks: give an int of at least 1"),
        ({"segments": True}, "segments=True"),
        ({"segments": 2.0}, "segments=2.0"),
        ({"memory_budget": 0.0}, "memory_budget=0.0 is not a share"),
        ({"memory_budget": 1.5}, "memory_budget=1.5 is not a share"),
        ({"memory_budget": 1}, "a bare int never means either"),
        ({"memory_budget": "8"}, "Not a size: '8'"),
        ({"memory_budget": "0GiB"}, "leaves no memory at all"),
        ({"bn_dropout": "avoid"}, "bn_dropout='avoid' is neither"),
        ({"include": "blocks.*"}, r"give a list of patterns, as include=\['blocks"),
        ({"include": ["nothing.*"]}, r"pattern 'nothing\.\*' matches no module of Sequential. Examples of its names: "),
        ({"exclude": ["9"]}, "exclude: the pattern '9' matches no module"),
        ({"segments": 2, "memory_budget": 0.5}, "contradict each other"),
    ],
)
def test_errors_of_options_name_the_value_and_what_is_accepted(options, message):
    with pytest.raises(ValueError, match=message):
        plan_checkpoints(nested(), torch.empty(6, 32), **options)
