"""Models that nobody here wrote, as small as they come: how to make each, and a batch for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memtools import GradientCheckpointing
from lightning_memtools.checkpointing.checkpoint_plan import CheckpointPlan
from lightning_memtools.checkpointing.key_value_caches import caches_off
from lightning_memtools.memory.virtual import VirtualDevice
from tests.zoo import timm, torchvision_models

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
"""Tested in every run of the suite."""


def _torchvision(name: str, size: int = 64, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        return getattr(torchvision_models(), name)(num_classes=4, **options), {"x": torch.randn(2, 3, size, size)}

    return make


def _segmenting(name: str, size: int = 64) -> Callable[[], Made]:
    def make() -> Made:
        found = getattr(torchvision_models().segmentation, name)(num_classes=4, weights_backbone=None)
        return _OutputOf(found), {"x": torch.randn(2, 3, size, size)}

    return make


_DECODER = _GPT | {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
_GROUPED = _DECODER | {"num_key_value_heads": 2, "attention_dropout": 0.1}
_BART = {
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "forced_eos_token_id": 2,
}
_CLASSES = torch.tensor([0, 1, 1, 0])
_DISTIL = {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 96}

MORE: dict[str, Callable[[], Made]] = {
    "distilbert": _text("DistilBertForMaskedLM", "DistilBertConfig", **_DISTIL),
    "roberta": _text("RobertaForMaskedLM", "RobertaConfig", **_BERT),
    "electra": _text("ElectraForSequenceClassification", "ElectraConfig", _CLASSES, embedding_size=32, **_BERT),
    "albert": _text("AlbertForSequenceClassification", "AlbertConfig", _CLASSES, embedding_size=16, **_BERT),
    "modernbert": _text("ModernBertForMaskedLM", "ModernBertConfig", **_GPT, **_BERT),
    "gpt_neox": _text("GPTNeoXForCausalLM", "GPTNeoXConfig", **_DECODER),
    "opt": _text("OPTForCausalLM", "OPTConfig", ffn_dim=96, word_embed_proj_dim=32, **_DECODER),
    "bloom": _text("BloomForCausalLM", "BloomConfig", hidden_size=32, n_layer=3, n_head=4, hidden_dropout=0.1, **_GPT),
    "mistral": _text("MistralForCausalLM", "MistralConfig", **_GROUPED),
    "qwen2": _text("Qwen2ForCausalLM", "Qwen2Config", **_GROUPED),
    "gemma": _text("GemmaForCausalLM", "GemmaConfig", head_dim=8, **_GROUPED),
    "phi": _text("PhiForCausalLM", "PhiConfig", resid_pdrop=0.1, **_DECODER),
    "bart": _text("BartForConditionalGeneration", "BartConfig", **_BART),
    "pegasus": _text("PegasusForConditionalGeneration", "PegasusConfig", **_BART),
    "deit": _pictures("DeiTForImageClassification", "DeiTConfig", **_VIT),
    "beit": _pictures("BeitForImageClassification", "BeitConfig", drop_path_rate=0.2, **_VIT),
    "dinov2": _pictures("Dinov2ForImageClassification", "Dinov2Config", drop_path_rate=0.2, **_VIT),
    "convnext": _pictures(
        "ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[8, 16, 32, 48], depths=[1, 1, 2, 1],
        drop_path_rate=0.2,
    ),
    "resnet": _pictures(
        "ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[16, 24, 32, 48],
        depths=[1, 1, 2, 1],
    ),
    "segformer": _pictures(
        "SegformerForImageClassification", "SegformerConfig", depths=[1, 1, 2, 1], hidden_sizes=[16, 16, 32, 32],
        num_attention_heads=[1, 2, 2, 4],
    ),
    "poolformer": _pictures(
        "PoolFormerForImageClassification", "PoolFormerConfig", depths=[1, 1, 2, 1], hidden_sizes=[8, 16, 32, 48],
        drop_path_rate=0.2,
    ),
    "timm_vit": _timm("vit_tiny_patch16_224", img_size=64, depth=4, drop_path_rate=0.2, proj_drop_rate=0.1),
    "timm_mixer": _timm("mixer_s32_224", img_size=64, drop_path_rate=0.2),
    "timm_regnety": _timm("regnety_002", drop_path_rate=0.1),
    "timm_efficientnet": _timm("efficientnet_b0", drop_rate=0.1, drop_path_rate=0.2),
    "timm_mobilenetv3": _timm("mobilenetv3_small_050", drop_rate=0.1),
    "timm_densenet": _timm("densenet121", drop_rate=0.1),
    "timm_pvt": _timm("pvt_v2_b0", drop_path_rate=0.1),
    "timm_xcit": _timm("xcit_nano_12_p16_224", img_size=64, depth=3, drop_path_rate=0.1),
    "timm_hrnet": _timm("hrnet_w18_small", drop_rate=0.1),
    "resnet18": _torchvision("resnet18"),
    "mobilenet_v2": _torchvision("mobilenet_v2"),
    "efficientnet_b0": _torchvision("efficientnet_b0"),
    "shufflenet_v2": _torchvision("shufflenet_v2_x0_5"),
    "squeezenet": _torchvision("squeezenet1_1"),
    "deeplabv3": _segmenting("deeplabv3_mobilenet_v3_large"),
    "lraspp": _segmenting("lraspp_mobilenet_v3_large"),
}  # fmt: skip
"""Tried with EVERY_MODEL=1 in the environment."""


def made(name: str) -> tuple[LossOf, dict[str, Tensor]]:
    """The model in training mode under a fixed seed, and its batch."""
    torch.manual_seed(0)
    model, batch = (FOREIGN | MORE)[name]()
    return LossOf(model).train(), batch


class _OutputOf(nn.Module):
    """A model of segmentation, and what its classifier returns."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Any:
        return self.net(x)["out"]


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


class _OfLightning(L.LightningModule):
    def __init__(self, net: LossOf) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.net(batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class _Recording(L.Callback):
    """Keeps losses and gradients. No hook of the module does: its copies of gradients would count as the step's own."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        del optimizer
        self.found |= _gradients(module.get_submodule("net"), trainer.global_step)

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        del trainer, module, batch
        self.found[f"loss {batch_idx}"] = outputs["loss"].detach()


def three_steps_of_lightning(
    model: LossOf, batch: dict[str, Tensor], *callbacks: L.Callback, bf16: bool
) -> dict[str, Tensor]:
    """The same with a Lightning Trainer, which plans by itself if GradientCheckpointing is among the callbacks."""
    torch.manual_seed(5)
    recording = _Recording()
    trainer = L.Trainer(
        max_steps=3, accelerator="cpu", devices=1, precision="bf16-mixed" if bf16 else "32-true", gradient_clip_val=1.0,
        callbacks=[recording, *callbacks], logger=False, barebones=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    batches: Any = [batch] * 3
    trainer.fit(_OfLightning(model), DataLoader(batches, batch_size=None))
    return recording.found | _state(model)


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


def trains_the_same_in_lightning(name: str, *, bf16: bool) -> dict[str, str]:
    """The same with a Trainer, whose callback makes the plan."""
    model, batch = made(name)
    other = copy.deepcopy(model)
    with caches_off(other):
        plain = three_steps_of_lightning(other, batch, bf16=bf16)
    callback = GradientCheckpointing(bn_dropout="recompute")
    planned = three_steps_of_lightning(model, batch, callback, bf16=bf16)
    unplanned = {} if callback.plan is not None and callback.plan.refused is None else {"plan": "none"}
    return _differences(plain, planned) | unplanned


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
