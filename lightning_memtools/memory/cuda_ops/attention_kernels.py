"""The memory of attention's fused kernels, flash and efficient (transformers/cuda/)."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from lightning_memtools._torch import EFFICIENT_ATTENTION_GROUPS, EFFICIENT_ATTENTION_MAKES_SEEDS
from lightning_memtools.memory.cuda_ops.kernels import (
    HALF,
    Run,
    Workspace,
    copy_bytes,
    instead_of,
    instead_of_on_gpu,
    nbytes,
)
from lightning_memtools.memory.sizes import GpuShape

aten = torch.ops.aten
# The CPU's only fused kernel, which stands for the one that CUDA takes.
ATTENTION_OF_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
ATTENTION_OF_CPU_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_FLASH_MAX_HEAD = 256
_AMPERE, _VOLTA = (8, 0), (7, 0)
_NARROW, _WIDE = 64, 128  # heads for which kernels differ


def attention_backend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
    enable_gqa: bool,
    gpu: GpuShape,
) -> str:
    """Return the kernel that scaled_dot_product_attention takes on CUDA: "flash", "efficient" or "math".

    The conditions are those of use_flash_attention and use_mem_efficient_attention in
    transformers/cuda/sdp_utils.cpp, in their order of priority; kernels that the user has switched off in
    torch.backends.cuda are left out. cuDNN's kernel, which newer versions prefer on Hopper, takes as much memory as
    "flash".
    """
    backends = torch.backends.cuda
    if any(tensor.dim() != 4 for tensor in (query, key, value)):  # noqa: PLR2004, batch, heads, length, head
        return "math"
    same_heads = query.shape[1] == key.shape[1] == value.shape[1]
    same_batch = query.shape[0] == key.shape[0] == value.shape[0]
    # For causal attention of different lengths, torch aligns the mask at another corner than flash does.
    square = not is_causal or query.shape[2] == key.shape[2]
    if (
        backends.flash_sdp_enabled()  # type: ignore[no-untyped-call]
        and gpu.compute_capability >= _AMPERE
        and mask is None
        and query.dtype in HALF
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= _FLASH_MAX_HEAD
        and same_batch
        and (same_heads or enable_gqa)
        and square
        and _last_is_dense(query, key, value)
    ):
        return "flash"
    is_ampere, is_volta = gpu.compute_capability >= _AMPERE, gpu.compute_capability >= _VOLTA
    # minimum_gemm_alignment: what tensor cores take.
    aligned = (8 if is_volta else 1) if query.dtype in HALF else 4 if is_ampere else 1
    if (
        backends.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
        and query.dtype in ({*HALF, torch.float32} if is_ampere else {torch.float16, torch.float32})
        and query.shape[-1] == key.shape[-1]
        and query.shape[-1] % aligned == 0
        and value.shape[-1] % aligned == 0
        and same_batch
        and (same_heads or (enable_gqa and EFFICIENT_ATTENTION_GROUPS))
        and _last_is_dense(query, key, value)
    ):
        return "efficient"
    return "math"


def efficient_mask(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return the mask that the efficient kernel takes: of the query's type, aligned, and one for each head."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        # 0 where a query attends to a key, -inf elsewhere
        mask = torch.where(mask, torch.zeros((), dtype=query.dtype), float("-inf")).to(query.dtype)
    if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
        # The kernel copies the mask into rows whose length is a multiple of 8, and uses a part of them (pad_bias,
        # which adds 8 elements even where none is missing).
        length = mask.shape[-1]
        mask = torch.nn.functional.pad(mask, (0, 8 - length % 8))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _last_is_dense(*tensors: torch.Tensor) -> bool:
    return all(tensor.stride(-1) == 1 for tensor in tensors)


def _head(head: int) -> int:
    """Return flash's head_size_rounded."""
    step = 32 if head <= _WIDE else 64
    return -(-head // step) * step


@instead_of_on_gpu(aten._scaled_dot_product_flash_attention.default)
def flash(
    ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, gpu: GpuShape
) -> Any:
    """Keys are split over more blocks if few would run, each with a sum in float32 (mha_fwd of flash_api.cpp)."""
    query, key = args[:2]
    batch, heads, length, head = query.shape
    dropout = args[3] if len(args) > 3 else 0.0  # noqa: PLR2004
    n_keys = -(-key.shape[2] // (256 if head <= _NARROW else 128 if head <= _WIDE else 64))
    splits = 1 if dropout else _splits(batch * heads * -(-length // 64), 2 * gpu.multiprocessors, n_keys)
    found = list(func(*args, **kwargs))  # on the host: for the sizes and strides

    def on_device(one: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = run(
            aten.empty_strided.default, one.shape, one.stride(), dtype=one.dtype, device=torch.device("cpu")
        )
        return made

    found[:2] = map(on_device, found[:2])  # output and logarithms
    sums = 4 * splits * batch * heads * length if splits > 1 else 0
    with ledger.workspace(sums, sums * _head(head)):
        found[6:8] = map(on_device, found[6:8])  # the state of dropout
        ledger.work_with(16 if dropout else 0)
    return tuple(found)


def _splits(n_blocks: int, n_places: int, n_keys: int) -> int:
    """Return flash's num_splits_heuristic: the least number of splits that fills the GPU nearly as well as the best."""
    if n_blocks >= 0.8 * n_places:
        return 1
    eligible = [
        n for n in range(1, min(128, n_places, n_keys) + 1) if n == 1 or -(-n_keys // n) != -(-n_keys // (n - 1))
    ]
    filled = {n: (n_blocks * n / n_places) / -(-n_blocks * n // n_places) for n in eligible}
    return next(n for n in eligible if filled[n] >= 0.85 * max(filled.values()))


@instead_of(aten._scaled_dot_product_flash_attention_backward.default)
def flash_backward(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sums the query's gradient in float32, sequence and head rounded up (mha_bwd of flash_api.cpp).

    Gradient and output are copied unless they lie as batch, length, heads, head.
    """
    gradient, query, key, _, out = args[:5]
    batch, heads, length, head = query.shape
    with ledger.workspace(*(copy_bytes(one.transpose(1, 2)) for one in (gradient, out))):
        made = run(func, *args, **kwargs)
        rows = 4 * batch * heads * -(-length // 128) * 128
        with ledger.workspace(rows, rows * _head(head)):
            if key.shape[1] != heads:  # grouped queries: gradients of key and value are made per query head first
                expanded = batch * key.shape[2] * heads * head * query.element_size()
                ledger.work_with(expanded, expanded)
    return made


@instead_of(aten._scaled_dot_product_efficient_attention.default)
def efficient(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Allocate the output, the log-sum-exp, and the workspace of heads above 128, whose halves are summed in float32.

    Seed and offset of dropout stay on the host.
    """
    del func, kwargs
    query, key, value, _, wants_sums, dropout = (*args, 0.0)[:6]
    del key
    batch, heads, length, _ = query.shape
    options = {"device": torch.device("cpu")}
    if EFFICIENT_ATTENTION_MAKES_SEEDS and not dropout:
        seed, offset = (run(aten.empty.memory_format, [], dtype=torch.int64, **options) for _ in range(2))
    else:
        seed, offset = (torch.empty((), dtype=torch.int64) for _ in range(2))
    shape = [batch, length, heads, value.shape[-1]]
    out = run(aten.empty.memory_format, shape, dtype=query.dtype, **options).transpose(1, 2)
    rows = -(-length // 32) * 32 if wants_sums else 0
    sums = run(aten.empty.memory_format, [batch, heads, rows], dtype=torch.float32, **options)
    if query.dtype in HALF and value.shape[-1] > _WIDE:
        ledger.work_with(4 * out.numel())
    return out, sums, seed, offset


@instead_of(aten._scaled_dot_product_efficient_attention_backward.default)
def efficient_backward(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Allocate the products of gradient and output, and the gradients' float32 sums, beside the results.

    Source: attention_backward.cu and kernel_backward.h.
    """
    gradient, query, key, value, _, out = args[:6]
    batch, heads, length, _ = query.shape
    with ledger.workspace(copy_bytes(gradient.transpose(1, 2))):
        made = run(func, *args, **kwargs)
        sums, is_half = 4 * batch * heads * length, query.dtype in HALF
        with ExitStack() as delta:
            if not is_half:
                one_row = heads == 1 or length == 1  # then the sums need no copy to lie by heads
                with ledger.workspace(nbytes(out), 0 if one_row else sums):
                    delta.enter_context(ledger.workspace(sums))
            else:
                delta.enter_context(ledger.workspace(sums))
            ledger.work_with(4 * batch * heads * _gradient_sums(batch * heads, query, key, value, is_half=is_half))
    return made


def _gradient_sums(n_heads: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_half: bool) -> int:
    """Return the floats of a head's workspace: tiles of the query's gradient; for wide halves key's and value's too."""
    head = query.shape[-1]
    rows = 128 if is_half and head > _WIDE else 64
    tiles = -(-query.shape[2] // rows) * -(-head // 64)
    floats = tiles * (rows * 64 + 4)
    if is_half and head > _NARROW:
        splits = -(-key.shape[2] // 64)
        if n_heads >= 256 and splits <= 2:  # noqa: PLR2004, there are enough blocks without
            splits = 1
        splits = max(1, min(splits, 200 // n_heads))
        floats += splits * 64 * sum(-(-one.shape[-1] // rows) * rows for one in (query, value))
    return floats


@instead_of(aten._safe_softmax.default)
def safe_softmax(ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The softmax of unfused attention, with zeros for rows that are all -inf (_safe_softmax of SoftMax.cpp)."""
    del ledger, func, kwargs
    source, dim = args[:2]
    out = run(aten._softmax.default, source, dim, False)  # noqa: FBT003, half to float
    masked = run(aten.isneginf.default, source)
    rows = run(aten.all.dim, masked, dim, True)  # noqa: FBT003, keepdim
    zero = run(aten.scalar_tensor.default, 0.0, dtype=source.dtype, device=source.device)
    del masked, rows, zero  # not before: the zeros are written into the softmax
    return out


@instead_of_on_gpu(ATTENTION_OF_CPU)
def attention_of_cpu(
    ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, gpu: GpuShape
) -> Any:
    """CUDA's kernel also keeps the state of dropout."""
    query, key, value, dropout, is_causal = (*args, 0.0, False)[:5]
    mask, scale = kwargs.get("attn_mask"), kwargs.get("scale")
    backend = _backend_for(query, key, value, mask, is_causal=is_causal, gpu=gpu)
    if backend == "flash":
        op = aten._scaled_dot_product_flash_attention.default
        out, logarithms, *rest = flash(
            ledger, run, op, (query, key, value, dropout, is_causal), {"scale": scale}, gpu=gpu
        )
        return out, logarithms, rest[4], rest[5]
    if backend == "efficient":
        return efficient(ledger, run, None, (query, key, value, mask, torch.is_grad_enabled(), dropout), {})
    return run(func, *args, **kwargs)


@instead_of_on_gpu(ATTENTION_OF_CPU_BACKWARD)
def attention_of_cpu_backward(
    ledger: Workspace, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, gpu: GpuShape
) -> Any:
    """As `attention_of_cpu`."""
    _, query, key, value, _, _, dropout, is_causal = args
    mask, scale = kwargs.get("attn_mask"), kwargs.get("scale")
    backend = _backend_for(query, key, value, mask, is_causal=is_causal, gpu=gpu)
    seed, offset = (torch.empty((), dtype=torch.int64) for _ in range(2))  # on the host
    if backend == "flash":
        lengths = (None, None, query.shape[2], key.shape[2])
        given: tuple[Any, ...] = (*args[:6], *lengths, dropout, is_causal, seed, offset)
        op = aten._scaled_dot_product_flash_attention_backward.default
        return flash_backward(ledger, run, op, given, {"scale": scale})
    if backend == "efficient":
        given = (*args[:4], mask, *args[4:6], seed, offset, dropout, [True, True, True, False], is_causal)
        op = aten._scaled_dot_product_efficient_attention_backward.default
        return efficient_backward(ledger, run, op, given, {"scale": scale})
    return run(func, *args, **kwargs)


def _backend_for(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
    gpu: GpuShape,
) -> str:
    grouped = query.shape[1] != key.shape[1]
    return attention_backend(query, key, value, mask, is_causal=is_causal, enable_gqa=grouped, gpu=gpu)
