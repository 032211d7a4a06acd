"""Applying a plan does not change what the model is, and removing it leaves nothing behind."""

from __future__ import annotations

import copy
import pickle
from collections import Counter

import pytest
import torch
from torch import nn

from lightning_memtools.checkpointing.apply_plan import AppliedPlan, ChainPlan, Range
from lightning_memtools.checkpointing.chains import find_chains
from lightning_memtools.checkpointing.checkpoint_options import CheckpointOptions
from tests.checkpointing.models import nested, same_seed

COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "slice": lambda module: module[:],
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),  # noqa: S301, our own
}


def applied_to(model: nn.Module, *ranges: Range, **options) -> AppliedPlan:
    (chain,) = find_chains(model, CheckpointOptions.parse(bn_dropout="recompute", **options))
    return AppliedPlan(model, [ChainPlan(chain.name, chain.layers, ranges)])


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_is_the_plain_sequential_with_its_own_weights(how):
    model = same_seed(nested)
    keys = list(model.state_dict())
    before = [(type(one), name) for name, one in model.named_modules()]
    with applied_to(model, Range(0, 8)):
        assert [(type(one), name) for name, one in model.named_modules()] == before
        assert list(model.state_dict()) == keys
        twin = COPIES[how](model)
    assert vars(twin).keys() == vars(model).keys()
    assert type(twin) is nn.Sequential
    assert list(twin.state_dict()) == keys
    if how not in {"copy", "slice"}:  # those share their layers
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert twin.eval()(torch.ones(2, 32)).abs().max() == 0
        assert model.eval()(torch.ones(2, 32)).abs().max() > 0


def test_a_plan_for_a_model_of_another_depth_raises_and_leaves_nothing_applied():
    model = nn.Sequential(*(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))) for _ in range(2)))
    plans = [
        ChainPlan(str(at), tuple(f"{at}.{layer}" for layer in range(6 if at else 4)), (Range(0, 4),)) for at in (0, 1)
    ]
    with pytest.raises(AttributeError, match="`4`"):
        AppliedPlan(model, plans)
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_layers_run_again_in_backward_and_their_hooks_fire_again():
    model = same_seed(nested)
    runs: Counter[str] = Counter()
    for name in ("0", "1.0", "1.1.0", "2.1"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: runs.update([name]))
    with applied_to(model, Range(0, 5)):
        out = model(torch.randn(6, 32))
        assert runs == {"0": 1, "1.0": 1, "1.1.0": 1, "2.1": 1}
        out.sum().backward()
        # Running again ends with the last tensor that backward needs: a Linear's input, before the layer is done.
        assert runs == {"0": 2, "1.0": 2, "1.1.0": 2, "2.1": 1}


@pytest.mark.parametrize("trained_in_evaluation_mode", [False, True])
def test_evaluation_runs_the_plain_chain_unless_the_model_was_in_evaluation_mode_before(trained_in_evaluation_mode):
    model = same_seed(nested)
    runs: Counter[str] = Counter()
    model[0].register_forward_hook(lambda *_: runs.update(["first layer"]))
    if trained_in_evaluation_mode:
        model.eval()
    with applied_to(model, Range(0, 8)):
        model.eval()
        model(torch.ones(2, 32, requires_grad=True)).sum().backward()
    assert runs["first layer"] == 1 + trained_in_evaluation_mode
