"""What CUDA does otherwise than the CPU: each kernel of memory/cuda_ops on its own."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pack_sequence

from lightning_memtools._torch import GROUP_NORM_IS_CHANNELS_LAST, KEEPS_CUBLAS_WORKSPACES
from lightning_memtools.estimate import estimate_memory
from lightning_memtools.memory.cuda_ops.attention_kernels import attention_backend
from lightning_memtools.memory.cuda_ops.autocast import cuda_autocast
from lightning_memtools.memory.cuda_ops.reductions import workspaces as reduction_workspaces
from lightning_memtools.memory.sizes import GpuShape, find_gpu
from lightning_memtools.simulation.step_runner import Recipe
from lightning_memtools.simulation.tracer import SimulationSettings, Subject, trace
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


@pytest.mark.parametrize(("norm", "shape"), [(nn.LayerNorm(64), (4096, 64)), (nn.BatchNorm1d(4096), (64, 4096))])
def test_norms_keep_float_statistics_of_half_inputs(norm, shape):
    # Output 4096 x 64 halves; mean and 1/deviation 4096 each.
    for device, n_bytes in (("cuda", 4), ("cpu", 2)):
        kept = saved(Alone(norm), torch.zeros(shape), precision="bf16-true", step=squares, device=device)
        assert kept["module"] == 512 * KIB + 2 * 4096 * n_bytes


def sizes_of(module, batch, operation):
    """The allocations of an operation on CUDA, in their order."""
    subject = Subject(model=Alone(module), step=squares, optimizer=None)
    made = trace(subject, batch, Recipe(steps=1), SimulationSettings(cuda=True))
    return [one.size for one in made.recorder.allocations.values() if operation in str(one.operation)]


def test_dropout_makes_its_mask_before_its_output():
    assert sizes_of(nn.Dropout(0.5), torch.zeros(256, 1024), "native_dropout")[:2] == [MIB // 4, MIB]


def test_a_convolutions_bias_gradient_takes_the_workspace_of_its_sum():
    images = torch.zeros(64, 3, 64, 64)
    plain, with_bias = (
        Counter(sizes_of(nn.Conv2d(3, 64, 3, bias=bias), images, "convolution_backward")) for bias in (False, True)
    )
    gradient = torch.empty(64, 64, 62, 62, device="meta")
    buffers = reduction_workspaces(gradient, [0, 2, 3], GpuShape(), part_bytes=4)
    rounded = [-(-size // 512) * 512 for size in buffers]
    assert len(rounded) == 2
    assert with_bias - plain == Counter([512, *rounded])  # the gradient of 64 elements, and the buffers


# The sum that is the loss leaves the parts of its blocks in one block of 512 bytes, and counts in another.
LOSS_SUM = 1024


def workspaces(made):
    return max(made.timeline.parts["workspace"])


def test_layer_norm_copies_a_strided_input_for_as_long_as_it_runs():
    rows = torch.zeros(8, 64, 512)  # 1 MiB

    def step(model, batch):
        return squares(model, batch.transpose(1, 2))

    assert workspaces(estimate_memory(nn.LayerNorm(64), rows, step=step)) == MIB
    assert workspaces(estimate_memory(nn.LayerNorm(512), rows, step=squares)) == LOSS_SUM
    assert workspaces(estimate_memory(nn.LayerNorm(64), rows, step=step, device="cpu")) == 0


def test_group_norm_needs_values_per_channel_and_per_group():
    # Floats for each of 16 samples, in blocks of at least 512 bytes. tests/null_cuda/test_equal_to_cuda.py has these
    # beside PyTorch's own allocator.
    channels, groups = 4 * 16 * 64, 512
    rows = torch.zeros(16, 64, 8)
    # Backward is the largest: two or three values per channel, two per group; two per channel for the weights alone.
    assert workspaces(estimate_memory(Alone(nn.GroupNorm(4, 64)), rows, step=squares)) == 3 * channels + 2 * groups
    plain = Alone(nn.GroupNorm(4, 64, affine=False))
    assert workspaces(estimate_memory(plain, rows, step=squares)) == 2 * channels + 2 * groups
    assert workspaces(estimate_memory(nn.GroupNorm(4, 64), rows, step=squares)) == 2 * channels

    def forward_alone(module, rows, **options):
        return workspaces(estimate_memory(module, rows, step=lambda m, b: m(b), stage="val", **options))

    assert forward_alone(nn.GroupNorm(4, 64), rows) == 2 * channels
    assert forward_alone(nn.GroupNorm(4, 64), rows, precision="bf16-true") == 2 * channels + 2 * groups
    assert forward_alone(nn.GroupNorm(4, 64, affine=False), rows) == 0
    assert forward_alone(nn.GroupNorm(4, 64), rows[:, :, :1].clone()) == 0


def test_group_norm_copies_a_channels_last_image_before_torch_2_15():
    images = torch.zeros(4, 16, 64, 64).to(memory_format=torch.channels_last)  # 1 MiB
    made = [
        estimate_memory(nn.GroupNorm(4, 16), images, step=lambda m, b: m(b), stage="val", device=device)
        for device in ("cuda", "cpu")
    ]
    copy = 0 if GROUP_NORM_IS_CHANNELS_LAST else MIB
    # And a and b of 4 x 16 channels, 512 bytes each.
    assert made[0].peak_allocated - made[1].peak_allocated == copy + 2 * 512


def test_many_indices_of_an_embedding_are_sorted():
    model = nn.Embedding(10_000, 128)
    few, many = torch.zeros(3072, dtype=torch.long), torch.zeros(4005, dtype=torch.long)
    assert workspaces(estimate_memory(model, few, step=squares)) == LOSS_SUM
    # A sum's gradient is one number, expanded, and so it is copied.
    assert workspaces(estimate_memory(model, few, step=total)) == 4 * 3072 * 128
    n_parts = 400 + 4005
    # Three times the indices, two numbers for each run, and their parts; two counts; and the sums of the parts.
    blocks = [*[8 * 4005] * 5, 8 * n_parts, 8, 8, 4 * n_parts * 128]
    assert workspaces(estimate_memory(model, many, step=squares)) == sum(-(-size // 512) * 512 for size in blocks)


@pytest.mark.parametrize(("precision", "is_copied"), [("16-mixed", False), ("bf16-mixed", True)])
def test_the_log_softmax_of_float16_alone_needs_no_float_copy(precision, is_copied):
    logits = 512 * 8192  # elements: their float result is larger than a product's workspace

    def step(model, rows):
        return F.log_softmax(model(rows), -1)

    made = estimate_memory(nn.Linear(8, 8192, bias=False), torch.zeros(512, 8), step=step, stage="val",
                           precision=precision)  # fmt: skip
    # Half logits and their float result; and for bfloat16 the logits as floats.
    assert made.composition["activations"] // (16 * MIB) == (2 if is_copied else 1)
    assert 6 * logits <= made.composition["activations"] <= (6 + 4 * is_copied) * logits + 4 * MIB


def test_cublas_takes_a_workspace_in_forward_and_in_backward():
    model, rows = mlp(64, 64), torch.zeros(4, 64)
    at_once = 2 if KEEPS_CUBLAS_WORKSPACES else 1
    assert estimate_memory(model, rows, step=total).composition["workspace"] == at_once * 8_519_680
    on_hopper = estimate_memory(model, rows, step=total, capacity="H100 80GB")
    assert on_hopper.composition["workspace"] == at_once * 32 * MIB
    assert estimate_memory(model, rows, step=total, device="cpu").composition["workspace"] == 0


def test_a_convolution_copies_what_is_neither_contiguous_nor_channels_last():
    conv = nn.Conv2d(16, 16, 3, padding=1, bias=False)
    images = torch.zeros(4, 16, 64, 64)  # 1 MiB
    plain = estimate_memory(conv, images, step=squares)
    assert workspaces(plain) == LOSS_SUM
    last = estimate_memory(conv, images.to(memory_format=torch.channels_last), step=squares)
    assert workspaces(last) == 16 * 16 * 9 * 4  # the weight, which lies otherwise than the images
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
    assert attention_backend(query, query, query, mask, is_causal=causal, enable_gqa=False, gpu=GpuShape()) == kernel


@pytest.mark.parametrize(
    ("gpu", "dtype", "head", "kernel"),
    [
        ("V100 16GB", torch.bfloat16, 64, "math"),
        ("V100 16GB", torch.float16, 64, "efficient"),
        ("V100 16GB", torch.float32, 66, "efficient"),
        ("V100 16GB", torch.float16, 66, "math"),
        ("P100 16GB", torch.float16, 66, "efficient"),
        ("T4 16GB", torch.float16, 64, "efficient"),
        ("RTX 3060 12GB", torch.bfloat16, 64, "flash"),
        ("H100 80GB", torch.float32, 66, "math"),
    ],
)
def test_a_gpu_before_ampere_has_no_flash_and_no_fused_bfloat16(gpu, dtype, head, kernel):
    query, shape = heads(head=head, dtype=dtype), GpuShape.of(find_gpu(gpu))
    assert attention_backend(query, query, query, None, is_causal=False, enable_gqa=False, gpu=shape) == kernel


def test_a_kernel_that_is_switched_off_is_not_taken():
    query = heads()
    with sdpa_kernel(SDPBackend.MATH):
        assert attention_backend(query, query, query, None, is_causal=True, enable_gqa=False, gpu=GpuShape()) == "math"


class Attention(nn.Module):
    """Attends to its input, with a mask where it is given one."""

    def __init__(self, *, causal=False):
        super().__init__()
        self.causal = causal

    def forward(self, query, mask=None):
        return F.scaled_dot_product_attention(query, query, query, attn_mask=mask, is_causal=self.causal)


@pytest.mark.parametrize(("precision", "n_bytes"), [("bf16-true", 2), ("32-true", 4)])
def test_fused_attention_keeps_no_scores(precision, n_bytes):
    batch = heads(256, dtype=torch.float32)
    # Flash and efficient attention keep the output and a float per row; math keeps its scores.
    kept = 2 * 4 * 256 * 64 * n_bytes + 2 * 4 * 256 * 4
    # flash: seed and offset of the dropout generator, 512 bytes each
    assert kept <= saved(Alone(Attention()), batch, precision=precision)["module"] <= kept + 2 * 512
    with sdpa_kernel(SDPBackend.MATH):
        assert saved(Alone(Attention()), batch, precision="32-true")["module"] > 2 * 4 * 256 * 256 * 4


@pytest.mark.parametrize(
    ("length", "dtype", "kept"),
    [
        (96, torch.float32, 0),  # as it is
        (100, torch.float32, 100 * 104 * 4 // 512 * 512 + 512),  # with rows of a multiple of eight
        (256, torch.bool, 256 * 256 * 4),  # becomes a mask of the query's type
    ],
)
def test_attention_keeps_the_mask_that_its_kernel_takes(length, dtype, kept):
    def step(model, batch):
        return model.module(batch[0] * model.weight, batch[1]).sum()

    query, model = heads(length, dtype=torch.float32), Alone(Attention())
    with_mask, without = (
        saved(model, (query, mask), step=step)["module"] for mask in (torch.zeros(length, length, dtype=dtype), None)
    )
    assert with_mask - without == kept


def test_flash_sums_the_gradient_of_the_query_in_float():
    made = estimate_memory(Alone(Attention(causal=True)), heads(200), step=total, precision="bf16-true")
    # 200 rows rounded up to 256; and copies of gradient and output, which lie by heads and not by rows.
    assert workspaces(made) == 4 * 2 * 4 * 256 * (64 + 1) + 2 * (2 * 4 * 200 * 64 * 2)


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
    (lambda x: torch.mv(torch.zeros(3, 8), x[0]), torch.bfloat16),
    # What the CPU computes in float32, and CUDA does not.
    (lambda x: F.avg_pool3d(x.view(1, 1, 1, 4, 8), (1, 2, 2)), torch.bfloat16),
    (lambda x: F.pad(x, (1, 1), mode="reflect"), torch.bfloat16),
    # The widest type among the inputs.
    (lambda x: torch.zeros(8).scatter_add(0, torch.zeros(8, dtype=torch.long), x[0]), torch.float32),
    (lambda x: torch.atan2(x, x), torch.bfloat16),
    (lambda x: torch.cat([x, x.float()]), torch.float32),
    (lambda x: x + x, torch.bfloat16),
]


LABELS = torch.zeros(64, dtype=torch.long)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize(
    "loss",
    [
        lambda scores: F.cross_entropy(scores, LABELS),
        lambda scores: F.cross_entropy(scores, LABELS, label_smoothing=0.1),
        lambda scores: F.cross_entropy(scores, scores.detach().softmax(-1)),
        lambda scores: F.cross_entropy(scores.view(8, 512, 8), LABELS.view(8, 8)),
        lambda scores: F.nll_loss(scores.log_softmax(-1), LABELS),
        lambda scores: F.nll_loss(F.log_softmax(scores, 1, dtype=torch.float32), LABELS),
        lambda scores: F.kl_div(scores.log_softmax(-1), scores.detach().softmax(-1), reduction="batchmean"),
        lambda scores: scores.softmax(-1).sum(-1, keepdim=True).mean(),
        lambda scores: F.mse_loss(scores, scores.detach()),
        lambda scores: F.binary_cross_entropy_with_logits(scores, scores.detach()),
    ],
)
def test_losses_of_mixed_precision_are_in_float(loss, precision):
    seen = []

    def step(model, rows):
        seen.append(loss(model(rows)))
        return seen[-1]

    made = estimate_memory(nn.Linear(8, 512), torch.zeros(64, 8), step=step, precision=precision)
    assert [(one.dtype, one.dim()) for one in seen] == [(torch.float32, 0)] * 2
    assert made.gradient_count == made.parameter_count


def test_the_logarithms_of_cross_entropy_are_in_half_and_copied_for_the_loss():
    # cross_entropy_loss in ATen/native/LossNLL.cpp asks for log_softmax in its input's type; nll_loss is on the list.
    n_scores = 4096 * 512
    # Without a bias, whose gradient's workspace would be the peak.
    made = estimate_memory(nn.Linear(8, 512, bias=False), torch.zeros(4096, 8), precision="bf16-mixed", steps=1,
                           step=lambda m, b: F.cross_entropy(m(b), torch.zeros(4096, dtype=torch.long)))  # fmt: skip
    # Where backward begins: logarithms as halves and as floats, and the gradient of those.
    assert made.peak_at.operation == "aten.nll_loss_backward"
    assert made.composition["activations"] // n_scores == 2 + 4
    assert made.composition["temporaries"] // n_scores == 4


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


def test_every_operator_on_the_lists_of_cuda_is_on_ours_and_no_other():
    def listed(key):
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        # Without those for tensors with named dimensions, which torch 2.11 still has.
        names = (
            name for name in torch._C._dispatch_get_all_op_names() if "imname" not in name and "names_" not in name
        )
        return {name for name in names if has(name, key)}

    cpus_own, cudas = listed("AutocastCPU"), listed("AutocastCUDA")
    assert len(cudas) > 100
    with cuda_autocast():
        ours = listed("AutocastCPU")
        passed_on = {
            name for name in ours if torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough(name, "AutocastCPU")
        }
    # Made of others that are on the list, such as matrix products; or called by nobody else; or, cuDNN's recurrent
    # layers, in `recurrent`.
    composed = {
        "aten::_convolution", "aten::convolution", "aten::cudnn_convolution", "aten::cudnn_convolution_transpose",
        "aten::_scaled_dot_product_flash_attention", "aten::chain_matmul", "aten::einsum", "aten::linalg_multi_dot",
        "aten::gru_cell", "aten::lstm_cell", "aten::rnn_relu_cell", "aten::rnn_tanh_cell", "aten::norm.Scalar",
        "aten::norm.ScalarOpt_dim", "aten::_thnn_fused_gru_cell", "aten::_thnn_fused_lstm_cell",
        "aten::_cudnn_rnn",
    }  # fmt: skip
    assert cudas - (ours - passed_on) <= composed
    in_lower_precision = {
        "aten::_addmm_activation", "aten::_native_multi_head_attention", "aten::mkldnn_rnn_layer",
        "aten::conv1d.padding", "aten::conv2d.padding", "aten::conv3d.padding",
    }  # fmt: skip
    assert ours - passed_on - cudas <= in_lower_precision
    assert listed("AutocastCPU") == cpus_own


def test_what_autocast_refuses_on_cuda_is_refused():
    with pytest.raises(RuntimeError, match=r"BCELoss\) .*autocast.*BCEWithLogitsLoss"):
        estimate_memory(nn.Linear(8, 8), torch.zeros(4, 8), precision="bf16-mixed",
                        step=lambda m, b: F.binary_cross_entropy(m(b).sigmoid(), b))  # fmt: skip
    # and on the CPU it runs again, in float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = torch.zeros(4, dtype=torch.bfloat16)
        assert F.binary_cross_entropy(half, half).dtype is torch.float32


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


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_packed_sequences_keep_as_much_as_the_same_rows_unpacked(kind):
    length, n_sequences = 40, 16
    rows = torch.zeros(length, n_sequences, 16)
    packed = pack_sequence(list(rows.unbind(1)))
    weights = list(getattr(nn, kind)(16, 32).parameters())
    state = torch.zeros(1, n_sequences, 32)
    states = (state, state.clone()) if kind == "LSTM" else state
    function = torch.rnn_tanh if kind == "RNN" else getattr(torch, kind.lower())

    options = (True, 1, 0.0, True, False)  # biases, layers, dropout, training, both directions

    def step(model, batch):
        own, (sequences, states) = list(model.parameters()), batch
        if isinstance(sequences, torch.Tensor):
            out = function(sequences, states, own, *options, False)  # noqa: FBT003, torch's batch_first
        else:
            out = function(sequences.data, sequences.batch_sizes, states, own, *options)
        return out[0].square().sum()

    model = nn.ParameterList(weights)
    made = [estimate_memory(model, (one, states), step=step) for one in (rows, packed)]
    # Beside them the sizes of the steps, which are moved along here.
    assert made[1].peak_allocated - made[0].peak_allocated == 512


def test_fused_optimizers_take_no_temporaries_and_keep_counts_on_the_device():
    model, rows = nn.Linear(2048, 2048, bias=False), torch.zeros(1, 2048)  # more than a product's workspace
    matrix = 2048 * 2048 * 4
    made = estimate_memory(model, rows, step=total, optimizer=lambda p: torch.optim.Adam(p, fused=True))
    assert max(made.timeline.parts["optimizer"]) == 2 * matrix + 512
    assert made.peak_at.phase != "optimizer"
    foreach = estimate_memory(model, rows, step=total, optimizer=torch.optim.Adam)
    assert max(foreach.timeline.parts["optimizer"]) == 2 * matrix
    assert foreach.composition["temporaries"] == matrix


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "NAdam", "RMSprop", "Rprop", "Adadelta", "RAdam", "Adamax"])
def test_capturable_optimizers_keep_counts_on_the_device(kind):
    model, rows = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)), torch.zeros(1, 512)
    make = getattr(torch.optim, kind)
    plain, made = (
        estimate_memory(model, rows, step=total, optimizer=make(model.parameters(), capturable=capturable))
        for capturable in (False, True)
    )
    counts = 1 + (kind == "NAdam")  # NAdam has a second scalar for each parameter
    grown = max(made.timeline.parts["optimizer"]) - max(plain.timeline.parts["optimizer"])
    assert grown == counts * 4 * 512


def test_attention_within_torchs_own_functions_takes_cudas_kernel_too():
    class OfTorch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.MultiheadAttention(64, 4, dropout=0.1, batch_first=True)

        def forward(self, x):
            return self.module(x, x, x, need_weights=False)[0]

    original = F.scaled_dot_product_attention
    assert sum(saved(OfTorch(), torch.empty(2, 256, 64)).values()) < 2 * 4 * 256 * 256 * 4  # the scores
    assert F.scaled_dot_product_attention is original
