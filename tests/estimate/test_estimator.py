"""Peaks that can be worked out by hand, and what an estimate says of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode

from lightning_memtools import VirtualDevice
from lightning_memtools.estimate import estimate_memory
from tests.estimate.networks import (
    Classifier,
    Decoder,
    Encoder,
    Gan,
    Recurrent,
    UNet,
    classify,
    mlp,
    next_token,
    total,
)
from tests.zoo import torchvision_models

KIB, MIB = 2**10, 2**20
WIDTH = 256
MATRIX = WIDTH * WIDTH * 4  # 256 KiB, whole blocks of 512 bytes


def layers(n):
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(n)])


def estimate(model, batch, optimizer=None, **options):
    return estimate_memory(model, batch, step=options.pop("step", total), optimizer=optimizer, device="cpu", **options)


def test_one_layer_without_an_optimizer():
    # Forward: weight, input, output, and the loss while the output is still there; the gradients are smaller.
    rows = torch.zeros(512, WIDTH)
    made = estimate(layers(1), rows, steps=1)
    batch = 512 * WIDTH * 4
    assert made.composition["parameters"] == MATRIX
    assert made.composition["inputs"] == batch
    assert made.peak_allocated == MATRIX + batch + batch + 512


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
    # Adam keeps a step count for each parameter, in host memory on CUDA, on the device here.
    counts = 6 * 512 if states == 2 else 0
    assert at_peak["optimizer"] == states * 6 * MATRIX + counts
    # Beside them the gradients of activations, a row each.
    assert temporaries <= at_peak["temporaries"] <= temporaries + 3 * KIB
    assert sum(at_peak.values()) == made.peak_allocated


def test_the_foreach_implementation_takes_one_more_copy_of_all_parameters():
    # On CUDA, Adam is foreach by default: the square roots of all second moments at once.
    n_layers = 48  # more than a product's workspace
    made = estimate_memory(layers(n_layers), torch.zeros(1, WIDTH), step=total, optimizer=torch.optim.Adam)
    assert made.composition["temporaries"] == n_layers * MATRIX
    assert made.composition["optimizer"] == 2 * n_layers * MATRIX  # step counts stay on the host
    assert made.peak_at.phase == "optimizer"
    assert made.peak_at.operation == "aten._foreach_sqrt"


def test_the_peak_of_article_a_is_reached_in_the_second_forward():
    # Parameters and gradients are small here, activations large: the first step has no gradients in forward.
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])
    made = estimate(model, torch.zeros(WIDTH, WIDTH), torch.optim.Adam, steps=3)
    first, second, third = made.step_peaks
    assert first < second == third == made.peak_allocated
    assert made.peak_at.step == 2
    assert made.peak_at.phase == "forward"
    # What the second forward finds: old gradients, and two moments, that the first did not.
    assert made.composition["gradients"] == 4 * (MATRIX + KIB)
    assert made.composition["optimizer"] == 2 * 4 * (MATRIX + KIB) + 8 * 512


def test_walk_through_of_article_a():
    """Constant: 2 P with gradients, 4 P with Adam. Variable: inputs, activations, loss."""
    model = mlp(1024, 2048, 1024)
    n_parameters = 1024 * 2048 * 2 + 2048 + 1024
    made = estimate_memory(model, torch.zeros(8, 1024), step=total, optimizer=torch.optim.Adam)
    assert made.parameter_count == made.gradient_count == n_parameters
    size = 4 * n_parameters
    at_peak = made.composition
    assert (at_peak["parameters"], at_peak["gradients"], at_peak["optimizer"]) == (size, size, 2 * size)


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


def test_tied_and_frozen_parameters_count_once_and_not_at_all():
    model = Decoder(n_tokens=500, width=64)
    model.blocks[0].requires_grad_(requires_grad=False)
    n_all = sum(parameter.numel() for parameter in model.parameters())
    n_frozen = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    made = estimate(model, torch.zeros(2, 8, dtype=torch.long), step=next_token)
    assert made.parameter_count == n_all
    assert made.gradient_count == n_all - n_frozen


def test_evaluation_keeps_no_activations():
    model, rows = layers(8), torch.zeros(2048, WIDTH)
    batch = 2048 * WIDTH * 4
    made = estimate(model, rows, step=lambda model, rows: model(rows), stage="val")
    # One layer's input, its output, and the batch, which the caller holds.
    assert made.peak_allocated == 8 * MATRIX + 3 * batch
    assert made.composition["gradients"] == 0
    assert sorted(module.at_peak_bytes for module in made.modules)[-2:] == [batch, batch]
    assert sum(module.at_peak_bytes for module in made.modules) == made.composition["activations"] == 2 * batch
    training = estimate(model, rows)
    assert training.peak_allocated > 8 * MATRIX + 8 * batch


def test_half_precision_halves_parameters_and_inputs():
    model, rows = layers(3), torch.zeros(64, WIDTH)
    full, half = (estimate(model, rows, precision=name).composition for name in ("32-true", "bf16-true"))
    for part in ("parameters", "gradients", "inputs"):
        assert 2 * half[part] == full[part]


def test_ddp_holds_every_gradient_once_more():
    model, rows = layers(4), torch.zeros(4, WIDTH)
    alone = estimate(model, rows, torch.optim.SGD)
    in_ddp = estimate(model, rows, torch.optim.SGD, ddp_bucket_mb=25)
    assert in_ddp.peak_allocated - alone.peak_allocated == 4 * MATRIX
    assert in_ddp.composition["gradients"] == 2 * alone.composition["gradients"]


def test_gradients_as_bucket_views_exist_twice_while_ddp_rebuilds_its_buckets():
    model, rows = layers(4), torch.zeros(4, WIDTH)
    made = estimate(model, rows, torch.optim.SGD, ddp_bucket_mb=25, gradient_as_bucket_view=True)
    # In the second forward; later one gradient at a time exists twice, until it is in its bucket.
    assert made.composition["gradients"] == 2 * 4 * MATRIX
    assert (made.peak_at.step, made.peak_at.phase) == (2, "forward")
    first = estimate(model, rows, torch.optim.SGD, ddp_bucket_mb=25, gradient_as_bucket_view=True, steps=1)
    assert first.composition["gradients"] == 4 * MATRIX + MATRIX
    assert made.gradient_count == made.parameter_count
    with pytest.raises(ValueError, match=r"belongs to DDP: give .* ddp_bucket_mb=25"):
        estimate(model, rows, gradient_as_bucket_view=True)


def test_a_lightning_module_runs_every_stage():
    module = Classifier()
    batch = torch.zeros(64, 32), torch.zeros(64, dtype=torch.long)
    training = estimate_memory(module, batch, clip=1.0, accumulate=2)
    evaluation = estimate_memory(module, batch, stage="val")
    assert training.gradient_count == training.parameter_count
    assert evaluation.gradient_count == 0
    assert evaluation.peak_allocated < training.peak_allocated
    assert training.composition["optimizer"] == 2 * training.composition["parameters"]


def test_manual_optimization_shows_its_phases():
    made = estimate_memory(Gan(), torch.zeros(64, 64))
    phases = [phase for _, step, phase in made.timeline.marks if step == 1]
    assert phases[:1] == ["inputs"]
    assert phases.count("backward") == 2
    assert phases.count("optimizer") == 2


def test_the_place_of_a_peak_in_backward_is_the_module_of_forward():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.narrow, self.wide = nn.Linear(8, 8), nn.Linear(8, 4096)

        def forward(self, rows):
            return self.wide(self.narrow(rows)).square()

    made = estimate(Wide(), torch.zeros(64, 8), steps=1)
    assert made.peak_at.phase == "backward"
    assert made.peak_at.module == "(model)"  # the square is the model's own


def test_the_loss_of_a_language_model_is_the_peak():
    made = estimate_memory(Decoder(n_tokens=20_000), torch.zeros(4, 64, dtype=torch.long), step=next_token)
    assert made.peak_at.phase == "backward"
    assert made.peak_at.operation == "aten._log_softmax_backward_data"


def test_user_options_of_the_allocator_are_used():
    model, rows = layers(2), torch.zeros(600, WIDTH)
    plain, rounded = (estimate(model, rows, allocator=conf) for conf in ("", "roundup_power2_divisions:2"))
    assert plain.composition["inputs"] == 600 * KIB
    # The next of two steps between 512 KiB and 1 MiB.
    assert rounded.composition["inputs"] == 768 * KIB
    assert estimate(model, rows, allocator="expandable_segments:True").peak_reserved % (2 * MIB) == 0


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


def test_fake_models_and_fake_batches_give_the_same():
    with FakeTensorMode():
        fake_model, fake_rows = mlp(16, 32, 4), torch.zeros(8, 16)
    model, rows = mlp(16, 32, 4), torch.zeros(8, 16)
    made = [
        estimate(one, batch, torch.optim.Adam) for one, batch in ((model, rows), (model, fake_rows), (fake_model, rows))
    ]
    assert made[0].composition == made[1].composition == made[2].composition
    assert isinstance(next(fake_model.parameters()), FakeTensor)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize(
    ("model", "batch", "step"),
    [
        (UNet(), torch.zeros(4, 3, 32, 32), total),
        (Encoder(), torch.zeros(16, 16, 32), total),
        (Decoder(), torch.zeros(8, 64, dtype=torch.long), next_token),
        (Recurrent(), torch.zeros(64, 40, 16), total),
        (Classifier(), (torch.zeros(512, 32), torch.zeros(512, dtype=torch.long)), None),
        (Gan(), torch.zeros(512, 64), None),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, nn.Module) else "",
)
def test_mixed_precision_keeps_less_for_backward(model, batch, step, precision):
    full, mixed = (estimate_memory(model, batch, step=step, precision=name) for name in ("32-true", precision))
    kept = [sum(module.saved_bytes for module in made.modules) for made in (full, mixed)]
    assert 0.4 * kept[0] < kept[1] < kept[0]
    assert mixed.gradient_count == full.gradient_count > 0
    assert mixed.composition["parameters"] == full.composition["parameters"]


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


@pytest.mark.parametrize("reads", [False, True])
def test_a_step_may_use_the_name_of_a_cuda_device_that_does_not_exist(reads):
    def moves(model, rows):
        rows = rows.cuda(non_blocking=True).to("cuda:0").to(torch.device("cuda", 1), torch.float32)
        shape = rows.shape
        more = torch.ones(shape, device="cuda") + rows.new_ones(shape, device=torch.device("cuda"))
        return model(rows + more).sum() * (1.0 if not reads or rows.sum().item() < 1e9 else 2.0)

    def stays(model, rows):
        more = torch.ones(rows.shape) + rows.new_ones(rows.shape)
        return model(rows + more).sum() * (1.0 if not reads or rows.sum().item() < 1e9 else 2.0)

    model, rows = layers(2), torch.zeros(64, WIDTH)
    moved, stayed = (estimate_memory(model, rows, step=step, optimizer=torch.optim.Adam) for step in (moves, stays))
    assert moved.composition == stayed.composition
    assert moved.peak_reserved == stayed.peak_reserved
    assert moved.notes == ()  # the batch is known


def test_no_estimate_within_a_virtual_device():
    with VirtualDevice(), pytest.raises(RuntimeError, match="Leave that one first"):
        estimate(layers(1), torch.zeros(1, WIDTH))
