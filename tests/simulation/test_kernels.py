"""What CUDA does otherwise than the CPU: each kernel of memory/cuda_ops on its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memtools._torch import KEEPS_CUBLAS_WORKSPACES
from lightning_memtools.estimate import estimate_memory
from lightning_memtools.memory.cuda_ops.attention import attention_backend
from lightning_memtools.memory.cuda_ops.autocast import cuda_autocast
from lightning_memtools.memory.cuda_ops.functions import cudnn_spaces
from lightning_memtools.memory.sizes import GpuShape, find_gpu
from tests.estimate.networks import mlp, total

MIB = 2**20


def test_cublas_takes_a_workspace_in_forward_and_in_backward():
    model, rows = mlp(64, 64), torch.zeros(4, 64)
    at_once = 2 if KEEPS_CUBLAS_WORKSPACES else 1
    assert estimate_memory(model, rows, step=total).composition["workspace"] == at_once * 8_519_680
    on_hopper = estimate_memory(model, rows, step=total, capacity="H100 80GB")
    assert on_hopper.composition["workspace"] == at_once * 32 * MIB


def heads(length=128, head=64, dtype=torch.bfloat16, n_heads=4):
    return torch.zeros(2, n_heads, length, head, dtype=dtype)


@pytest.mark.parametrize(
    ("query", "options", "gpu", "kernel"),
    [
        (heads(), {"is_causal": True}, "A100 80GB", "flash"),
        (heads(dtype=torch.float32), {"is_causal": True}, "A100 80GB", "efficient"),
        (heads(), {"mask": torch.zeros(128, 128, dtype=torch.bool)}, "A100 80GB", "efficient"),
        (heads(head=512), {}, "A100 80GB", "efficient"),
        (heads(head=66, dtype=torch.float32), {}, "A100 80GB", "math"),
        (heads()[0], {}, "A100 80GB", "math"),
        (heads(head=66, dtype=torch.float32), {}, "H100 80GB", "math"),
        # Before Ampere there is no flash attention, and no fused kernel for bfloat16.
        (heads(), {}, "V100 16GB", "math"),
        (heads(dtype=torch.float16), {}, "V100 16GB", "efficient"),
        (heads(head=66, dtype=torch.float16), {}, "V100 16GB", "math"),
        (heads(head=66, dtype=torch.float16), {}, "P100 16GB", "efficient"),
    ],
)
def test_attention_takes_the_kernel_that_cuda_takes(query, options, gpu, kernel):
    given = {"mask": None, "is_causal": False} | options
    taken = attention_backend(
        query, query, query, given["mask"],
        is_causal=given["is_causal"], enable_gqa=False, gpu=GpuShape.of(find_gpu(gpu)),
    )  # fmt: skip
    assert taken == kernel


LABELS = torch.zeros(4, dtype=torch.long)
DTYPES_OF_AUTOCAST = [
    (lambda x: F.nll_loss(F.log_softmax(x, 1, dtype=torch.float32), LABELS), torch.float32),
    (lambda x: F.layer_norm(x, (8,)), torch.float32),
    (F.relu, torch.bfloat16),
    (lambda x: torch.mv(torch.zeros(3, 8), x[0]), torch.bfloat16),
    # What the CPU computes in float32, and CUDA does not; the CPU has no kernel for pooling in lower precision.
    (lambda x: F.avg_pool3d(x.view(1, 1, 1, 4, 8), (1, 2, 2)), torch.float32),
    (lambda x: F.pad(x, (1, 1), mode="reflect"), torch.bfloat16),
    # The widest type among the inputs.
    (lambda x: torch.zeros(8).scatter_add(0, torch.zeros(8, dtype=torch.long), x[0]), torch.float32),
    (lambda x: torch.atan2(x, x), torch.bfloat16),
    (lambda x: torch.cat([x, x.float()]), torch.float32),
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
        "aten::_addmm_activation", "aten::_native_multi_head_attention", "aten::mkldnn_rnn_layer", "aten::avg_pool3d",
        "aten::conv1d.padding", "aten::conv2d.padding", "aten::conv3d.padding",
    }  # fmt: skip
    assert ours - passed_on - cudas <= in_lower_precision
    assert listed("AutocastCPU") == cpus_own


# Kind, layers, both ways, hidden, time steps times batch, dtype, dropout, bytes of workspace and of reserve space.
MEASURED = [
    ("lstm", 1, False, 512, 2048, torch.float32, 0.0, 38404608, 20971776),
    ("lstm", 3, True, 100, 350, torch.float32, 0.0, 57061184, 4760256),
    ("gru", 2, False, 100, 350, torch.float16, 0.0, 18364512, 910272),
    ("rnn", 2, False, 32, 200, torch.bfloat16, 0.0, 16842656, 38656),
    ("gru", 3, True, 1024, 1600, torch.float32, 0.0, 327025024, 262144256),
]


@pytest.mark.parametrize("measured", MEASURED)
def test_the_reserve_space_is_the_measured_one_and_the_workspace_is_near(measured):
    kind, layers, both, hidden, places, dtype, dropout, work, kept = measured
    source = torch.empty(places, 1, 16, dtype=dtype, device="meta")
    mode = {"rnn": 1, "lstm": 2, "gru": 3}[kind]
    spaces = cudnn_spaces((mode, hidden, 0, layers, False, dropout, True, both), source)
    assert spaces[1] == kept
    assert spaces[0] == pytest.approx(work, rel=0.35)
