"""Models that nobody here wrote, as small as they come: how to make each, and a batch for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


def _text(model: str, config: str, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        library: Any = pytest.importorskip("transformers")
        words = torch.randint(3, N_WORDS, (4, 48))
        made = getattr(library, model)(getattr(library, config)(vocab_size=N_WORDS, **options))
        return made, {"input_ids": words, "labels": words, "attention_mask": torch.ones_like(words)}

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

TRANSFORMERS: dict[str, Callable[[], Made]] = {
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
}  # fmt: skip
TIMM: dict[str, Callable[[], Made]] = {
    "timm_swin": _timm(
        "swin_tiny_patch4_window7_224", img_size=64, window_size=4, embed_dim=24, depths=(1, 1, 2, 1),
        num_heads=(1, 2, 4, 8),
    ),
    "timm_convnext": _timm("convnext_atto", dims=(8, 16, 32, 48), depths=(1, 1, 2, 1), drop_path_rate=0.2),
}  # fmt: skip
FOREIGN = TRANSFORMERS | TIMM


def made(name: str) -> tuple[LossOf, dict[str, Tensor]]:
    """The model in training mode under a fixed seed, and its batch."""
    torch.manual_seed(0)
    model, batch = FOREIGN[name]()
    if isinstance(batch.get("x"), Tensor):
        return LossOf(_FirstArgument(model)).train(), batch
    return LossOf(model).train(), batch


class _FirstArgument(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Any:
        return self.net(x)
