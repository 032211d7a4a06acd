"""What a user gets wrong, and what the message says of it."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from lightning_memtools.estimate import estimate_memory
from tests.estimate.networks import Classifier, Gan, mlp, total


class Reads(nn.Module):
    """Looks at values, and picks rows by them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, rows):
        hidden = self.layer(rows)
        if hidden.sum().item() > 1e9:  # the line that the message has to name
            hidden = hidden * 2
        return hidden[hidden > -1e9]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_what_a_step_reads_of_values_that_are_not_known_is_named_with_what_was_assumed(device):
    with torch.device(device):
        model = Reads()
    weight = model.layer.weight
    made = estimate_memory(model, torch.ones(64, 32), step=total, optimizer=torch.optim.SGD)
    number, mask = sorted(made.notes, key=lambda note: "mask" in note)
    source = inspect.getsource(Reads).splitlines()
    first = inspect.getsourcelines(Reads)[1]
    for note, code in ((number, ".item()"), (mask, "hidden[hidden")):
        line = first + next(at for at, text in enumerate(source) if code in text)
        assert f"test_bad_input.py:{line}:" in note
    assert "1.0" in number
    assert "everything" in mask
    assert model.layer.weight is weight
    assert weight.grad is None


def test_lbfgs_is_refused_with_what_it_would_keep():
    with pytest.raises(ValueError, match="LBFGS is not estimated"):
        estimate_memory(mlp(4, 4), torch.ones(2, 4), step=total, optimizer=torch.optim.LBFGS)


def test_an_operator_without_a_fake_kernel_is_named():
    library = torch.library.Library("memtools_test", "DEF")
    library.define("scale(Tensor x) -> Tensor")
    library.impl("scale", lambda x: x * 2, "CPU")
    try:
        with pytest.raises(RuntimeError, match=r"memtools_test.scale[\s\S]*test_bad_input.py[\s\S]*register_fake"):
            estimate_memory(
                mlp(8, 8, 8),
                torch.ones(4, 8),
                step=lambda m, b: torch.ops.memtools_test.scale(b).sum() + m(b).sum(),
            )
    finally:
        library._destroy()


def test_the_users_own_error_stays_on_top(caplog):
    def step(model, batch):
        return model(batch["rows"]).sum()

    with pytest.raises(KeyError, match="rows"):
        estimate_memory(mlp(8, 8), {"columns": torch.ones(2, 8)}, step=step)
    with pytest.raises(RuntimeError, match=r"\[2, 9\] X \[8, 8\]"):
        estimate_memory(mlp(8, 8), torch.ones(2, 9), step=total)
    assert caplog.text == ""


def test_a_capacity_below_the_parameters_says_by_how_much():
    made = estimate_memory(mlp(1024, 1024), torch.ones(1, 1024), step=total, capacity="1MiB")
    assert not made.fits("1MiB")
    report = made.to_markdown()
    assert "take 4.00 MiB, 3.00 MiB more than its 1.00 MiB" in report
    assert made.shortfall("1MiB") == made.peak_allocated - 2**20
    assert made.max_batch_size("1MiB") == 0


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"stage": "fit"}, ValueError, "'fit'. Accepted are 'train', 'val', 'test', 'predict'"),
        ({"precision": "fp16"}, ValueError, "'fp16'. Accepted are '32-true'"),
        ({"steps": 0}, ValueError, "steps is 0: .*at least 1"),
        ({"accumulate": 1.5}, ValueError, "accumulate is 1.5"),
        ({"step": None}, ValueError, "is no LightningModule.*Pass step="),
        ({"capacity": "24"}, ValueError, "Not a capacity: '24'"),
        ({"allocator": "expandable:True"}, ValueError, "expandable"),
        ({"clip": -1.0}, ValueError, "clip is -1.0: .*the norm"),
        ({"optimizer": torch.optim.SGD(mlp(4, 4).parameters())}, ValueError, "none of the parameters of Sequential"),
        ({"model": nn.LazyLinear(3)}, ValueError, "LazyModules.*dummy batch"),
        ({"model": Gan(), "step": None, "clip": 1.0}, ValueError, "Gan optimizes manually.*accumulate and clip"),
        ({"optimizer": "Adam"}, TypeError, "optimizer is 'Adam': .*torch.optim.AdamW"),
        ({"step": 3}, TypeError, "step must be a function.* got int"),
        ({"optimizer": lambda _parameters: 3}, TypeError, "optimizer returned 3: .*torch.optim.Optimizer"),
        ({"step": lambda m, b: m(b)}, TypeError, r"shape \[2, 4\].*return the loss"),
        ({"model": lambda x: x}, TypeError, "model must be an nn.Module, got function"),
    ],
    ids=range(16),
)
def test_bad_arguments_name_what_is_accepted(changes, error, message):
    with pytest.raises(error, match=message):
        estimate_memory(**({"model": mlp(4, 4), "batch": torch.ones(2, 4), "step": total} | changes))


def test_a_stage_that_the_module_lacks_is_named():
    batch = (torch.zeros(2, 32), torch.zeros(2, dtype=torch.long))
    # It inherits a test_step from Lightning, which does nothing.
    with pytest.raises(ValueError, match=r"Classifier has no test_step.*stage='test'"):
        estimate_memory(Classifier(), batch, stage="test")
    module = Classifier()
    module.validation_step = None
    with pytest.raises(ValueError, match=r"Classifier has no validation_step.*stage='val'"):
        estimate_memory(module, batch, stage="val")
