"""Peaks that can be worked out by hand, and what an estimate says of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memtools import VirtualDevice
from lightning_memtools.estimate import estimate_memory
from tests.estimate.networks import Classifier, classify, mlp, total
from tests.zoo import torchvision_models

KIB, MIB = 2**10, 2**20
WIDTH = 256
MATRIX = WIDTH * WIDTH * 4  # 256 KiB, whole blocks of 512 bytes


def layers(n):
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(n)])


def estimate(model, batch, optimizer=None, **options):
    return estimate_memory(model, batch, step=options.pop("step", total), optimizer=optimizer, **options)


@pytest.mark.parametrize(
    ("optimizer", "states", "temporaries"),
    [
        (lambda p: torch.optim.SGD(p, 0.1), 0, 0),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), 1, 0),
        # Adam, one parameter at a time: a square root, its quotient, and the last parameter's denominator still.
        (lambda p: torch.optim.Adam(p, foreach=False), 2, 3 * MATRIX),
    ],
)
def test_the_optimizers_of_article_a(optimizer, states, temporaries):
    model = layers(6)
    made = estimate(model, torch.zeros(1, WIDTH), optimizer)
    at_peak = made.composition
    assert at_peak["parameters"] == at_peak["gradients"] == 6 * MATRIX
    assert at_peak["optimizer"] == states * 6 * MATRIX
    # Beside them the gradients of activations, a row each.
    assert temporaries <= at_peak["temporaries"] <= temporaries + 3 * KIB
    assert sum(at_peak.values()) == made.peak_allocated


def test_the_peak_of_article_a_is_reached_in_the_second_forward():
    # Parameters and gradients are small here, activations large: the first step has no gradients in forward.
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])
    one, made, three = (estimate(model, torch.zeros(WIDTH, WIDTH), torch.optim.Adam, steps=n) for n in (1, 2, 3))
    assert one.peak_allocated < made.peak_allocated == three.peak_allocated
    assert made.peak_at.step == 2
    assert made.peak_at.phase == "forward"
    # What the second forward finds: old gradients, and two moments, that the first did not.
    assert made.composition["gradients"] == 4 * (MATRIX + KIB)
    assert made.composition["optimizer"] == 2 * 4 * (MATRIX + KIB)


def test_resnet18_as_in_article_d():
    with torch.device("meta"):
        model = torchvision_models().resnet18()
        batch = torch.zeros(1, 3, 224, 224), torch.zeros(1, dtype=torch.long)
    made = estimate_memory(model, batch, step=classify, optimizer=torch.optim.SGD)
    assert made.parameter_count == made.gradient_count == 11_689_512
    modules = {module.name: module for module in made.modules}
    assert modules["layer1"].output_shapes == ((1, 64, 56, 56),)
    assert modules["fc"].n_parameters == 513_000
    # A convolution's output is what batch normalisation saves: 64 x 112 x 112 floats.
    assert modules["conv1"].saved_bytes == 64 * 112 * 112 * 4
    # ReLU in place keeps nothing of its own.
    assert modules["relu"].saved_bytes == 0


def test_evaluation_keeps_no_activations():
    model, rows = layers(8), torch.zeros(2048, WIDTH)
    batch = 2048 * WIDTH * 4
    made = estimate(model, rows, step=lambda model, rows: model(rows), stage="val")
    # One layer's input, its output, and the batch, which the caller holds.
    assert made.peak_allocated == 8 * MATRIX + 3 * batch + made.composition["workspace"]
    assert made.composition["gradients"] == 0
    assert sorted(module.at_peak_bytes for module in made.modules)[-2:] == [batch, batch]
    assert sum(module.at_peak_bytes for module in made.modules) == made.composition["activations"] == 2 * batch
    training = estimate(model, rows)
    assert training.peak_allocated > 8 * MATRIX + 8 * batch


def test_meta_real_and_nested_batches_give_the_same():
    model = mlp(16, 32, 4)
    nested = {"rows": [torch.zeros(8, 16)], "labels": (torch.zeros(8, dtype=torch.long), "a word", 3)}

    def step(model, batch):
        assert batch["labels"][1:] == ("a word", 3)
        return F.cross_entropy(model(batch["rows"][0]), batch["labels"][0])

    meta = {"rows": [torch.zeros(8, 16, device="meta")], "labels": (nested["labels"][0].to("meta"), "a word", 3)}
    real, unreal = (estimate(model, batch, step=step) for batch in (nested, meta))
    assert real.peak_allocated == unreal.peak_allocated
    assert real.batch_size == unreal.batch_size == 8


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own, when it loads the compiler
def test_a_compiled_model_is_estimated_as_its_eager_step_with_a_note():
    rows = torch.zeros(32, WIDTH)
    plain = estimate(layers(2), rows, torch.optim.SGD)
    whole = estimate(torch.compile(layers(2)), rows, torch.optim.SGD)
    part = nn.Sequential(torch.compile(layers(1)), layers(1))
    in_part = estimate(part, rows, torch.optim.SGD)
    for made in (whole, in_part):
        assert made.composition == plain.composition
        assert [note.startswith("torch.compile is left out") for note in made.notes] == [True]
    assert [module.name for module in whole.modules] == ["", "0", "1"]
    batch = torch.zeros(16, 32), torch.zeros(16, dtype=torch.long)
    compiled = estimate_memory(torch.compile(Classifier()), batch)
    assert compiled.composition == estimate_memory(Classifier(), batch).composition


def test_no_estimate_within_a_virtual_device():
    with VirtualDevice(), pytest.raises(RuntimeError, match="Leave that one first"):
        estimate(layers(1), torch.zeros(1, WIDTH))
