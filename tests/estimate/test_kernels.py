"""What CUDA does otherwise than the CPU: each entry of the table in docs/estimate-memory.md on its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memtools.estimate import estimate_memory
from lightning_memtools.estimate.functions import attention_backend
from tests.estimate.networks import Recurrent, mlp, total

KIB, MIB = 2**10, 2**20


def saved(model, batch, *, device="cuda", step=total, **options):
    """Activation bytes that each module leaves for backward."""
    made = estimate_memory(model, batch, step=step, device=device, **options)
    return {module.name: module.saved_bytes for module in made.modules}


def squares(model, batch):
    """A loss whose gradient is dense; that of a sum is one number, expanded."""
    return model(batch).square().sum()


class Alone(nn.Module):
    """One module behind a parameter that makes its input require a gradient."""

    def __init__(self, module):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.module = module

    def forward(self, *inputs):
        return self.module(*(tensor * self.weight for tensor in inputs))


def test_dropout_keeps_a_mask_of_bytes_on_cuda_and_of_floats_on_the_cpu():
    model, rows = Alone(nn.Dropout(0.5)), torch.zeros(256, 1024)
    out = MIB
    assert saved(model, rows)["module"] == out // 4
    assert saved(model, rows, device="cpu")["module"] == out
    # The output itself goes: sum keeps no values.


def test_layer_norm_keeps_float_statistics_of_half_inputs():
    model, rows = Alone(nn.LayerNorm(64)), torch.zeros(4096, 64)
    # Output 4096 x 64 halves; mean and 1/deviation 4096 each.
    on_cuda, on_cpu = (
        saved(model, rows, precision="bf16-true", step=squares, device=device)["module"] for device in ("cuda", "cpu")
    )
    assert on_cuda == 512 * KIB + 2 * 16 * KIB
    assert on_cpu == 512 * KIB + 2 * 8 * KIB


def workspaces(made):
    return max(made.timeline.parts["workspace"])


def test_layer_norm_copies_a_strided_input_for_as_long_as_it_runs():
    rows = torch.zeros(8, 64, 512)  # 1 MiB

    def step(model, batch):
        return squares(model, batch.transpose(1, 2))

    assert workspaces(estimate_memory(nn.LayerNorm(64), rows, step=step)) == MIB
    assert workspaces(estimate_memory(nn.LayerNorm(512), rows, step=squares)) == 0
    assert workspaces(estimate_memory(nn.LayerNorm(64), rows, step=step, device="cpu")) == 0


def test_group_norm_needs_two_floats_per_sample_and_channel():
    made = estimate_memory(nn.GroupNorm(4, 64), torch.zeros(16, 64, 8), step=total)
    assert workspaces(made) == 2 * 4 * 16 * 64


def test_many_indices_of_an_embedding_are_sorted():
    model = nn.Embedding(10_000, 128)
    few, many = torch.zeros(3072, dtype=torch.long), torch.zeros(4000, dtype=torch.long)
    assert workspaces(estimate_memory(model, few, step=total)) == 0
    n_parts = 400 + 4000
    expected = 2 * 4000 * 8 + 4 * n_parts * 128
    assert workspaces(estimate_memory(model, many, step=total)) == -(-expected // 512) * 512


def test_cublas_takes_a_workspace_in_forward_and_in_backward():
    model, rows = mlp(64, 64), torch.zeros(4, 64)
    assert estimate_memory(model, rows, step=total).composition["workspace"] == 2 * 8_519_680
    on_hopper = estimate_memory(model, rows, step=total, capacity="H100 80GB")
    assert on_hopper.composition["workspace"] == 2 * 32 * MIB
    assert estimate_memory(model, rows, step=total, device="cpu").composition["workspace"] == 0


def test_a_convolution_copies_what_is_neither_contiguous_nor_channels_last():
    conv = nn.Conv2d(16, 16, 3, padding=1)
    images = torch.zeros(4, 16, 64, 64)  # 1 MiB
    plain = estimate_memory(conv, images, step=squares)
    assert workspaces(plain) == 0
    last = estimate_memory(conv, images.to(memory_format=torch.channels_last), step=squares)
    assert workspaces(last) == 0
    turned = estimate_memory(conv, images, step=lambda m, b: squares(m, b.transpose(2, 3)))
    assert workspaces(turned) == MIB


def heads(length=128, head=64, dtype=torch.bfloat16, n_heads=4):
    return torch.zeros(2, n_heads, length, head, dtype=dtype)


@pytest.mark.parametrize(
    ("query", "mask", "causal", "kernel"),
    [
        (heads(), None, True, "flash"),
        (heads(dtype=torch.float16), None, False, "flash"),
        (heads(dtype=torch.float32), None, True, "efficient"),
        (heads(), torch.zeros(128, 128, dtype=torch.bool), False, "efficient"),
        (heads(head=512), None, False, "efficient"),
        (heads(head=66, dtype=torch.float32), None, False, "math"),
        (heads(dtype=torch.float64), None, False, "math"),
        (heads()[0], None, False, "math"),
    ],
)
def test_attention_takes_the_kernel_that_cuda_takes(query, mask, causal, kernel):
    assert attention_backend(query, query, query, mask, is_causal=causal, enable_gqa=False) == kernel


def test_a_kernel_that_is_switched_off_is_not_taken():
    from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: PLC0415, beside its one use

    query = heads()
    with sdpa_kernel(SDPBackend.MATH):
        assert attention_backend(query, query, query, None, is_causal=True, enable_gqa=False) == "math"


def attend(model, batch):
    query, key, value = (model(batch) for _ in range(3))
    return F.scaled_dot_product_attention(query, key, value).sum()


@pytest.mark.parametrize(
    ("dtype", "precision", "kept"),
    [
        # Flash and efficient attention keep the output and a float per row; math keeps its scores.
        (torch.float32, "bf16-true", 2 * 4 * 256 * 64 * 2 + 2 * 4 * 256 * 4),
        (torch.float32, "32-true", 2 * 4 * 256 * 64 * 4 + 2 * 4 * 256 * 4),
    ],
)
def test_fused_attention_keeps_no_scores(dtype, precision, kept):
    class Attention(nn.Module):
        def forward(self, query):
            return F.scaled_dot_product_attention(query, query, query)

    batch = heads(256, dtype=dtype)
    # flash: seed and offset of the dropout generator, 512 bytes each
    bytes_kept = saved(Alone(Attention()), batch, precision=precision)["module"]
    assert kept <= bytes_kept <= kept + 2 * 512
    scores = 2 * 4 * 256 * 256 * 4
    from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: PLC0415, beside its one use

    with sdpa_kernel(SDPBackend.MATH):
        assert saved(Alone(Attention()), batch, precision="32-true")["module"] > scores


def test_flash_sums_the_gradient_of_the_query_in_float():
    class Attention(nn.Module):
        def forward(self, query):
            return F.scaled_dot_product_attention(query, query, query, is_causal=True)

    made = estimate_memory(Alone(Attention()), heads(200), step=total, precision="bf16-true")
    assert workspaces(made) == 4 * 2 * 4 * 256 * (64 + 1)  # 200 rows rounded up to 256


def test_a_bool_mask_becomes_a_mask_of_the_queries_type():
    class Attention(nn.Module):
        def forward(self, query, mask):
            return F.scaled_dot_product_attention(query, query, query, attn_mask=mask)

    model = Alone(Attention())

    def step(model, batch):
        return model.module(batch[0] * model.weight, batch[1]).sum()

    batch = heads(256, dtype=torch.float32), torch.zeros(256, 256, dtype=torch.bool)
    with_mask = saved(model, batch, step=step)["module"]
    without = saved(model, (batch[0], None), step=step)["module"]
    assert with_mask - without == 256 * 256 * 4


DTYPES_OF_AUTOCAST = [
    (lambda x: F.layer_norm(x, (8,)), torch.float32),
    (lambda x: F.softmax(x, -1), torch.float32),
    (lambda x: x.log_softmax(-1), torch.float32),
    (lambda x: x.exp(), torch.float32),
    (lambda x: x.pow(2), torch.float32),
    (lambda x: x.sum(), torch.float32),
    (lambda x: F.mse_loss(x, x), torch.float32),
    (F.gelu, torch.bfloat16),
    (F.relu, torch.bfloat16),
    (lambda x: F.linear(x, torch.zeros(4, 8)), torch.bfloat16),
    (lambda x: x + x, torch.bfloat16),
]


@pytest.mark.parametrize(("function", "dtype"), DTYPES_OF_AUTOCAST)
def test_autocast_keeps_to_the_lists_of_cuda(function, dtype):
    seen = []

    def step(model, batch):
        half = model(batch)  # a linear layer: bfloat16
        assert half.dtype is torch.bfloat16
        out = function(half)
        seen.append(out.dtype)
        return out.sum()

    estimate_memory(nn.Linear(8, 8), torch.zeros(4, 8), step=step, precision="bf16-mixed")
    assert seen == [dtype, dtype]


def test_the_users_own_autocast_for_cuda_acts_on_the_fakes_and_leaves_no_trace():
    seen = []

    def step(model, batch):
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(batch)
        seen.append(out.dtype)
        return out.float().sum()

    before = torch.autocast.__init__
    estimate_memory(nn.Linear(8, 8), torch.zeros(4, 8), step=step)
    assert seen == [torch.float16] * 2
    assert torch.autocast.__init__ is before
    # autocast on the CPU does as before: layer_norm in bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.layer_norm(torch.zeros(4, 8, dtype=torch.bfloat16), (8,)).dtype is torch.bfloat16


def test_mixed_precision_keeps_half_copies_of_the_weights_through_the_step():
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
    kept = saved(model, torch.zeros(8, 512), precision="bf16-mixed")
    # The first layer keeps the input and its output in bfloat16. Its weight is needed for no gradient, the second's is.
    assert kept["0"] == 2 * 8 * 512 * 2
    assert kept["1"] == 512 * 512 * 2


def test_scaling_of_16_mixed_adds_its_scalars_only():
    model, rows = mlp(64, 256, 8), torch.zeros(32, 64)
    scaled, unscaled = (estimate_memory(model, rows, step=total, precision=name) for name in ("16-mixed", "bf16-mixed"))
    assert 0 < scaled.peak_allocated - unscaled.peak_allocated <= 8 * 512


@pytest.mark.parametrize(("kind", "kept"), [("LSTM", 6), ("GRU", 4), ("RNN", 1)])
def test_recurrent_layers_keep_one_space_for_all_time_steps(kind, kept):
    length, batch, hidden = 40, 16, 32
    rows = torch.zeros(batch, length, 16)
    model = Recurrent(kind)
    made = saved(model, rows)["layer"]
    places = batch * length
    out = places * hidden * 4
    reserve = places * hidden * kept * 4
    states = (2 if kind == "LSTM" else 1) * batch * hidden * 4
    # The given states are zeros made by the layer, of which it keeps those that its results do not replace.
    assert out + reserve <= made <= out + reserve + 2 * states


def test_fused_optimizers_take_no_temporaries_and_keep_counts_on_the_device():
    model, rows = nn.Linear(512, 512, bias=False), torch.zeros(1, 512)
    made = estimate_memory(model, rows, step=total, optimizer=lambda p: torch.optim.Adam(p, fused=True))
    assert max(made.timeline.parts["optimizer"]) == 2 * 512 * 512 * 4 + 512
    assert made.peak_at.phase != "optimizer"
    foreach = estimate_memory(model, rows, step=total, optimizer=torch.optim.Adam)
    assert max(foreach.timeline.parts["optimizer"]) == 2 * 512 * 512 * 4
    assert foreach.composition["temporaries"] == 512 * 512 * 4
