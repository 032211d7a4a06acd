"""Models that nobody here wrote, as small as they come: how to make each, and a batch for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memtools.checkpointing.checkpoint_plan import CheckpointPlan
from lightning_memtools.checkpointing.key_value_caches import caches_off
from lightning_memtools.memory.virtual import VirtualDevice
from tests.zoo import timm

Made = tuple[nn.Module, dict[str, Tensor]]
N_WORDS = 200


class LossOf(nn.Module):
    """A model and the loss that it returns, or the mean of the squares of what it returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        out: Any = self.model(**batch)
        if hasattr(out, "loss"):
            loss: Tensor = out.loss
            return loss
        squared: Tensor = (out[0] if isinstance(out, (tuple, list)) else out).float().square().mean()
        return squared


def _text(model: str, config: str, *labels: Tensor, **options: Any) -> Callable[[], Made]:
    """A model of text, whose labels are the words if none are given."""

    def make() -> Made:
        library: Any = pytest.importorskip("transformers")
        words = torch.randint(3, N_WORDS, (4, 48))
        made = getattr(library, model)(getattr(library, config)(vocab_size=N_WORDS, **options))
        (known,) = labels or (words,)
        return made, {"input_ids": words, "labels": known, "attention_mask": torch.ones_like(words)}

    return make


def _pictures(model: str, config: str, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        library: Any = pytest.importorskip("transformers")
        made = getattr(library, model)(getattr(library, config)(num_labels=4, **options))
        return made, {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.tensor([0, 3])}

    return make


def _timm(name: str, size: int = 64, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        return timm().create_model(name, num_classes=4, **options), {"x": torch.randn(2, 3, size, size)}

    return make


_BERT = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
_VIT = _BERT | {"image_size": 64, "patch_size": 8, "hidden_dropout_prob": 0.1}
_GPT = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_LLAMA = _GPT | {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "attention_dropout": 0.1,
}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 96, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 0}

FOREIGN: dict[str, Callable[[], Made]] = {
    "gpt2": _text("GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=3, n_head=4, n_positions=64, **_GPT),
    "llama": _text("LlamaForCausalLM", "LlamaConfig", **_LLAMA),
    "bert": _text("BertForMaskedLM", "BertConfig", **_BERT),
    "t5": _text("T5ForConditionalGeneration", "T5Config", **_T5),
    "vit": _pictures("ViTForImageClassification", "ViTConfig", **_VIT),
    "swin": _pictures(
        "SwinForImageClassification", "SwinConfig", image_size=64, patch_size=4, window_size=4, embed_dim=16,
        depths=[1, 2], num_heads=[2, 4],
    ),
    "regnet": _pictures(
        "RegNetForImageClassification", "RegNetConfig", embedding_size=8, hidden_sizes=[16, 24, 32, 48],
        depths=[1, 1, 2, 1], groups_width=8,
    ),
    "timm_swin": _timm(
        "swin_tiny_patch4_window7_224", img_size=64, window_size=4, embed_dim=24, depths=(1, 1, 2, 1),
        num_heads=(1, 2, 4, 8),
    ),
    "timm_convnext": _timm("convnext_atto", dims=(8, 16, 32, 48), depths=(1, 1, 2, 1), drop_path_rate=0.2),
}  # fmt: skip


def made(name: str) -> tuple[LossOf, dict[str, Tensor]]:
    """The model in training mode under a fixed seed, and its batch."""
    torch.manual_seed(0)
    model, batch = FOREIGN[name]()
    return LossOf(model).train(), batch


def three_steps(model: LossOf, batch: dict[str, Tensor], *, bf16: bool) -> dict[str, Tensor]:
    """The losses, gradients, weights, buffers and random numbers of three steps."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    found: dict[str, Tensor] = {}
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        found |= {f"loss {step}": loss.detach()} | _gradients(model, step)
        optimizer.step()
    return found | _state(model)


def _gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {f"gradient {step} of {name}": one.grad.clone() for name, one in named if one.grad is not None}


def _state(model: LossOf) -> dict[str, Tensor]:
    return model.state_dict() | dict(model.named_buffers()) | {"random numbers": torch.get_rng_state()}


def trains_the_same(name: str, plan: CheckpointPlan, *, bf16: bool) -> dict[str, str]:
    """What differs between three plain and three planned steps.

    Caches of keys and values are off in both, as a plan turns them off: they make keys and values contiguous, and a
    product of matrices rounds otherwise then on some processors.
    """
    model, batch = made(name)
    other = copy.deepcopy(model)
    with caches_off(other):
        plain = three_steps(other, batch, bf16=bf16)
    with plan.apply(model):
        planned = three_steps(model, batch, bf16=bf16)
    return _differences(plain, planned)


def _differences(plain: dict[str, Tensor], planned: dict[str, Tensor]) -> dict[str, str]:
    differs = {key: "differs" for key, one in plain.items() if key not in planned or not torch.equal(one, planned[key])}
    return differs | dict.fromkeys(planned.keys() - plain.keys(), "is new")


def measured_peak(model: LossOf, batch: dict[str, Any], plan: CheckpointPlan | None) -> int:
    """The simulated allocator's peak over three real steps, after whose first everything was proved."""
    with VirtualDevice() as device, nullcontext() if plan is None else plan.apply(model):
        device.track(model, batch)
        for at in range(3):
            loss = model(batch)
            model.zero_grad()
            loss.backward()
            if at == 0:
                device.reset_peaks()
        peak = device.stats().peak_allocated
    assert peak is not None
    return peak
