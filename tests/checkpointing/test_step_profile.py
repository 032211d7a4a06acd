"""The measurements of each layer agree with arithmetic."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from lightning_memtools._torch import KEEPS_CUBLAS_WORKSPACES, clear_cublas_workspaces
from lightning_memtools.checkpointing.apply_plan import AppliedPlan
from lightning_memtools.checkpointing.chains import find_chains, find_modules
from lightning_memtools.checkpointing.checkpoint_options import CheckpointOptions
from lightning_memtools.checkpointing.checkpoint_plan import chain_plans
from lightning_memtools.checkpointing.memory_model import Range, Unit, estimate
from lightning_memtools.checkpointing.optimal_ranges import OptimalRanges
from lightning_memtools.checkpointing.planning import StepPlanner, plan_checkpoints
from lightning_memtools.checkpointing.step_profile import StepProfile, predict, profile_step
from lightning_memtools.memory.sizes import format_size
from lightning_memtools.memory.virtual import VirtualDevice
from lightning_memtools.simulation.step_trace import TracedStep
from tests.checkpointing.models import Block

ROWS, WIDTH = 512, 64
BYTES = ROWS * WIDTH * 4


def measured(model: nn.Module, *args: torch.Tensor) -> StepProfile:
    chains = find_chains(model, CheckpointOptions.parse(bn_dropout="recompute"))[:1]
    return profile_step(TracedStep(model, args, lambda copy, args: copy(*args), device="cuda"), chains)


def units_of(*layers: nn.Module) -> dict[int, Unit]:
    found = measured(nn.Sequential(*layers), torch.empty(ROWS, WIDTH))
    return {place[1]: unit for unit, place in zip(found.units, found.places, strict=True) if place is not None}


def test_a_linear_layer_keeps_its_input():
    one = units_of(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH))[1]
    assert (one.in_kept, one.out_kept, one.own_bytes) == (BYTES, 0, 0)
    assert one.out_bytes == 2 * BYTES
    assert one.operations == 2 * ROWS * WIDTH * 2 * WIDTH
    # Its input is kept before it computes: running it again ends at once.
    assert one.tail_operations == one.operations
    # From torch 2.15 on, the product has a workspace of its own, which cuBLASLt takes to add the bias.
    workspace = 0 if KEEPS_CUBLAS_WORKSPACES else 2**20
    assert one.forward_bytes == 2 * BYTES + workspace


def test_an_activation_keeps_its_result_and_counts_one_operation_per_element():
    one = units_of(nn.Linear(WIDTH, WIDTH), nn.Tanh())[1]
    assert (one.in_kept, one.out_kept, one.own_bytes) == (0, BYTES, 0)
    assert (one.operations, one.tail_operations) == (ROWS * WIDTH, 0)


def test_dropout_keeps_a_mask_of_one_byte_per_element():
    one = units_of(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))[1]
    assert (one.in_kept, one.out_kept, one.own_bytes) == (0, 0, ROWS * WIDTH)
    assert one.out_bytes == BYTES


def test_a_view_and_an_in_place_layer_have_no_storage_of_their_own():
    units = units_of(nn.Linear(WIDTH, WIDTH), nn.Unflatten(1, (4, 16)), nn.Flatten(), nn.ReLU(inplace=True))
    assert [units[at].same_storage for at in range(4)] == [False, True, True, True]
    assert [units[at].out_bytes for at in range(4)] == [BYTES, 0, 0, 0]
    # A range that began with the views would keep a storage that is overwritten.
    assert [units[at].may_start for at in range(4)] == [True, False, False, False]


def test_a_storage_that_two_operators_keep_counts_once():
    class Twice(nn.Module):
        def forward(self, x):
            y = x.sin()
            return y * y + y.exp()

    one = units_of(nn.Linear(WIDTH, WIDTH), Twice())[1]
    # sin keeps its input; the product keeps y; exp keeps its result.
    assert one.in_kept == BYTES
    assert one.own_bytes == 2 * BYTES


def test_the_peak_of_backward_is_the_gradients_of_output_and_input():
    one = units_of(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Tanh())[1]
    # Before: the gradient of its result. At the highest: that of its input too.
    assert one.backward_base == pytest.approx(one.backward_peak - BYTES)


def test_a_sum_of_two_gradients_takes_no_memory_of_its_own_as_in_training():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            y = self.first(x)
            return (y * 2).sum() + (y * 3).sum()

    model, x = Model(), torch.randn(ROWS, WIDTH)
    predicted = predict(TracedStep(model, (x,), lambda copy, args: copy(*args)), ()).peak_bytes
    with VirtualDevice() as device:
        device.track(model, x)
        for _ in range(3):
            loss = model(x)
            model.zero_grad()
            loss.backward()
        assert device.stats().peak_allocated == predicted


def encoder() -> nn.Sequential:
    return nn.Sequential(*(nn.TransformerEncoderLayer(256, 8, 1024, 0.1, batch_first=True) for _ in range(4)))


def perceptron() -> nn.Sequential:
    return nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(512, 512), nn.ReLU(), nn.Dropout(0.1))))


@pytest.mark.parametrize(("model", "shape"), [(encoder(), (32, 128, 256)), (perceptron(), (4096, 512))])
def test_the_memory_model_is_exact_where_sums_over_biases_take_buffers(model, shape):
    """A bias's gradient is a sum with buffers of 8 MiB, before which a layer that ran again has freed its tensors."""
    chains = find_chains(model, CheckpointOptions.parse(bn_dropout="recompute"))[:1]
    step = TracedStep(model, (torch.empty(*shape),), lambda copy, args: copy(*args), device="cuda")
    profile = profile_step(step, chains)
    planner = OptimalRanges(profile.units, profile.plain.peak_bytes)
    plans = {planner.best(peak) for peak, _ in planner.frontier()[::10]}
    layers = [at for at, place in enumerate(profile.places) if place is not None]
    for first in (0, 1, 2):  # which of these are the peak's depends on where a range begins
        plans.add(tuple(Range(at, min(at + 3, layers[-1] + 1)) for at in layers[first::3]))
    assert len(plans) > 4
    for ranges in plans:
        assert (
            estimate(profile.units, ranges).peak_bytes == predict(step, chain_plans(profile, chains, ranges)).peak_bytes
        )


class LastOutput(nn.Module):
    """An LSTM, of which only the outputs count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0]


@pytest.mark.parametrize("norm", [LastOutput, lambda: nn.RMSNorm(WIDTH), lambda: nn.GroupNorm(4, 32)])
def test_layers_that_cuda_runs_otherwise_run_so_again(norm):
    """While `backward` runs, torch takes off the modes that run them as CUDA does, unless they are kept on."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(), nn.Tanh()) for _ in range(4)))
    chains = find_chains(model, CheckpointOptions.parse(bn_dropout="recompute"))[:1]
    step = TracedStep(model, (torch.empty(16, 32, WIDTH),), lambda copy, args: copy(*args), device="cuda")
    profile = profile_step(step, chains)
    layers = [at for at, place in enumerate(profile.places) if place is not None]
    ranges = (Range(layers[0], layers[-1] + 1),)
    again = predict(step, chain_plans(profile, chains, ranges))
    assert estimate(profile.units, ranges).peak_bytes == pytest.approx(again.peak_bytes, abs=512)
    assert estimate(profile.units, ranges).extra_operations == again.operations - profile.plain.operations


def test_a_step_that_runs_backward_itself_is_measured_like_one_that_does_not():
    model = encoder()
    chains = find_chains(model, CheckpointOptions.parse(bn_dropout="recompute"))[:1]

    def forward(copy, args):
        copy(*args).sum().backward()

    step = TracedStep(model, (torch.empty(32, 128, 256),), forward, device="cuda")
    profile = profile_step(step, chains)
    ranges = tuple(Range(at, at + 1) for at, place in enumerate(profile.places) if place is not None)
    assert estimate(profile.units, ranges).peak_bytes == predict(step, chain_plans(profile, chains, ranges)).peak_bytes


def test_layers_that_return_their_input_take_no_part_of_the_backward_pass_of_the_one_that_made_it():
    """A dropout that drops nothing returns the attention's own tensor, whose gradient both wait for."""
    model = nn.Sequential(*(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(3)))
    step = TracedStep(model, (torch.empty(16, 24, 32),), lambda copy, args: copy(*args), device="cuda")
    options = CheckpointOptions.parse()
    found = find_chains(model, options)
    chains = [*found, *find_modules(model, found, options)]
    profile = profile_step(step, chains)
    for name in ("0.self_attn", "2.self_attn", "2.linear1"):
        index = next(at for at, chain in enumerate(chains) if chain.name == name)
        ranges = (Range(*profile.spans[index, 0]),)
        traced = predict(step, chain_plans(profile, chains, ranges))
        assert estimate(profile.units, ranges).peak_bytes == traced.peak_bytes


def penalized(copy: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    y = copy(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    loss: torch.Tensor = y.square().mean() + gradient.square().sum()
    return loss


def test_the_backward_pass_that_ends_the_step_is_measured_where_layers_run_backward_twice():
    model = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(32, 32), nn.Softplus())))
    step = TracedStep(model, torch.empty(384, 32), penalized)
    profile = profile_step(step, find_chains(model, CheckpointOptions.parse()))
    assert estimate(profile.units, ()).peak_bytes == profile.plain.peak_bytes


def test_the_table_shows_what_each_chain_keeps_before_and_after():
    blocks = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(3)]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Sequential(*blocks), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

        def forward(self, x):
            return self.two(self.one(x))

    plan = plan_checkpoints(Model(), torch.empty(ROWS, WIDTH), segments=2)
    first, second = plan.chains
    # Each block keeps its input and the result of tanh; the model's input is there in any case.
    assert first.plain_kept_bytes == 3 * 4 * BYTES + 2 * BYTES
    assert second.plain_kept_bytes == 2 * BYTES
    kept = first.kept_bytes + second.kept_bytes
    assert kept < first.plain_kept_bytes + second.plain_kept_bytes
    assert first.extra_operations + second.extra_operations == plan.planned.operations - plan.plain.operations
    row = next(line for line in plan.table().splitlines() if line.startswith("| one"))
    assert [cell.strip() for cell in row.split("|")[5:7]] == ["1.75 MiB", format_size(first.kept_bytes)]


def dense() -> tuple[nn.Module, torch.Tensor, type[torch.optim.Optimizer]]:
    return nn.Sequential(*[Block(512, 8, 0.1) for _ in range(4)]), torch.empty(16, 128, 512), torch.optim.AdamW


def sparse() -> tuple[nn.Module, torch.Tensor, type[torch.optim.Optimizer]]:
    """A model whose embedding has a sparse gradient: a row for each token, half as many bytes as the embedding has."""
    blocks = [Block(256, 8, 0.1) for _ in range(4)]
    return (
        nn.Sequential(nn.Embedding(4096, 256, sparse=True), *blocks),
        torch.zeros(16, 128, dtype=torch.long),
        torch.optim.SGD,
    )


@pytest.mark.cuda_memory
@pytest.mark.parametrize("kind", [dense, sparse])
def test_predicted_peaks_are_those_of_pytorchs_allocator(kind):
    model, batch, make_optimizer = kind()
    optimizer = make_optimizer(model.parameters())
    step = TracedStep(model, batch, lambda copy, given: copy(given).square().mean(), (optimizer,), device="cuda")
    plan = StepPlanner(step).plan(CheckpointOptions.parse(bn_dropout="recompute"))
    assert plan.plain is not None
    assert plan.planned is not None
    assert plan.planned.peak_bytes < 0.7 * plan.plain.peak_bytes
    for cost, chains in ((plan.plain, ()), (plan.planned, plan.chains)):
        gc.collect()
        clear_cublas_workspaces()
        torch.cuda.empty_cache()
        others = torch.cuda.memory_allocated()
        on_device, given = copy.deepcopy(model).cuda(), batch.cuda()
        optimizer = make_optimizer(on_device.parameters())
        with AppliedPlan(on_device, chains):
            for _ in range(3):
                torch.cuda.reset_peak_memory_stats()
                loss = on_device(given).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        # The step without a plan is equal. Layers that keep products are predicted up to 0.65% too high.
        rel = 0.01 if chains else 0.005
        assert torch.cuda.max_memory_allocated() - others == pytest.approx(cost.peak_bytes, rel=rel)
        del on_device, given, optimizer, loss
