"""The cases of the sweep: models of torchvision, timm and transformers, and small modules that each isolate a kernel.

Sizes are those that the models were published with; configurations of transformers have fewer layers, whose repetition
would show nothing new. The settings are a covering design: every two values meet, and models take turns with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, product
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

Precision = Literal["32-true", "bf16-true", "bf16-mixed", "16-mixed"]
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=1e-3),
    "Adam": partial(torch.optim.Adam, lr=1e-4),
    "AdamW": partial(torch.optim.AdamW, lr=1e-4),
    "AdamW fused": partial(torch.optim.AdamW, lr=1e-4, fused=True),
}
PRECISIONS: tuple[Precision, ...] = ("32-true", "bf16-mixed", "16-mixed", "bf16-true")
Inputs = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, kw_only=True)
class TruthCase:
    """One run.

    Attributes:
        name: The model's.
        source: Where the model is from.
        build: Makes it, on meta where that is the current device.
        inputs: Shape and type of each tensor of a batch.
        optimizer: A name among `OPTIMIZERS`.
        precision: By Lightning's names.
        channels_last: Whether weights and images are in this memory format.
        stage: train or val.
        accumulate: Batches for each optimizer step.
        clip: The norm to clip gradients to.
        manual: Whether the step optimizes manually.
    """

    name: str
    source: str
    build: Callable[[], nn.Module]
    inputs: Inputs
    optimizer: str = "SGD"
    precision: Precision = "32-true"
    channels_last: bool = False
    stage: str = "train"
    accumulate: int = 1
    clip: float | None = None
    manual: bool = False

    @property
    def key(self) -> str:
        """Returns a name for the run."""
        parts = [self.name, self.precision]
        parts += [self.optimizer] if self.stage == "train" else ["validation"]
        parts += ["channels last"] if self.channels_last else []
        parts += [f"accumulate {self.accumulate}"] if self.accumulate > 1 else []
        parts += [f"clip {self.clip:g}"] if self.clip is not None else []
        parts += ["manual"] if self.manual else []
        return ", ".join(parts)

    def batch(self, device: str) -> dict[str, torch.Tensor]:
        """Returns a batch of zeros."""
        made = {name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in self.inputs.items()}
        if self.channels_last:
            made = {
                name: one.to(memory_format=torch.channels_last) if one.dim() == 4 else one for name, one in made.items()
            }
        return made


def step(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns a loss: cross entropy where there are labels, the mean of squares otherwise."""
    rest = dict(batch)
    target = rest.pop("target", None)
    out = model(*rest.values()) if set(rest) <= {"x", "y"} else model(**rest)
    for name in ("logits", "last_hidden_state", "out"):
        if isinstance(out, dict) and name in out:
            out = out[name]
            break
    if isinstance(out, (tuple, list)):
        out = out[0]
    if target is None:
        mean: torch.Tensor = out.float().square().mean()
        return mean
    if out.dim() == 3:
        out = out.flatten(0, 1)
    return functional.cross_entropy(out, target.flatten() if out.dim() == 2 else target)


F32, INT = torch.float32, torch.int64


def images(n: int, size: int, n_classes: bool = True) -> Inputs:
    found: Inputs = {"x": ((n, 3, size, size), F32)}
    return {**found, "target": ((n,), INT)} if n_classes else found


def tokens(n: int, length: int) -> Inputs:
    return {"input_ids": ((n, length), INT), "target": ((n, length), INT)}


# --- torchvision

_VISION = [
    "alexnet", "vgg11", "vgg16_bn", "resnet18", "resnet34", "resnet50", "resnext50_32x4d", "wide_resnet50_2",
    "densenet121", "mnasnet1_0", "mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large", "regnet_x_400mf",
    "regnet_y_400mf", "shufflenet_v2_x1_0", "squeezenet1_0", "squeezenet1_1", "efficientnet_b0", "efficientnet_v2_s",
    "convnext_tiny", "vit_b_16", "swin_t", "swin_v2_t", "maxvit_t", "googlenet", "inception_v3",
]  # fmt: skip


def _torchvision() -> Iterator[TruthCase]:
    from torchvision import models  # noqa: PLC0415, the operator cases need it not

    for name in _VISION:
        options = {"init_weights": False} if name in {"googlenet", "inception_v3"} else {}
        size = 299 if name == "inception_v3" else 224
        yield TruthCase(
            name=name, source="torchvision", build=partial(models.get_model, name, **options), inputs=images(4, size)
        )
    for name in ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"):
        build = partial(models.get_model, name, weights=None, weights_backbone=None)
        inputs: Inputs = {"x": ((4, 3, 192, 192), F32), "target": ((4, 192, 192), INT)}
        yield TruthCase(name=name, source="torchvision", build=build, inputs=inputs)
    video: Inputs = {"x": ((2, 3, 8, 112, 112), F32), "target": ((2,), INT)}
    yield TruthCase(name="r3d_18", source="torchvision", build=partial(models.get_model, "r3d_18"), inputs=video)


# --- timm

_TIMM = [
    "resnet26d", "resnetv2_50", "seresnext26d_32x4d", "dla34", "dpn68", "mixer_s32_224", "vit_tiny_patch16_224",
    "vit_small_patch16_224", "deit_tiny_distilled_patch16_224", "deit3_small_patch16_224",
    "swin_tiny_patch4_window7_224", "cait_xxs24_224", "beit_base_patch16_224", "convnext_atto", "convnextv2_atto",
    "convmixer_768_32", "coat_tiny", "crossvit_tiny_240", "edgenext_xx_small", "efficientformer_l1", "efficientvit_b0",
    "fastvit_t8", "focalnet_tiny_srf", "gcresnext26ts", "gernet_s", "ghostnet_100", "gmixer_24_224", "gmlp_s16_224",
    "hardcorenas_a", "hrnet_w18_small", "inception_next_tiny", "lambda_resnet26t", "lcnet_050", "levit_128s",
    "mobileone_s0", "mobilevit_xxs", "mobilevitv2_050", "nf_regnet_b0", "pit_ti_224", "poolformer_s12", "pvt_v2_b0",
    "rexnet_100", "repvgg_a0", "res2net50_26w_4s", "resmlp_12_224", "skresnet18", "selecsls42b", "tinynet_a",
    "tf_efficientnetv2_b0", "twins_pcpvt_small", "visformer_tiny", "volo_d1_224", "xcit_nano_12_p16_224",
    "eva02_tiny_patch14_224", "mvitv2_tiny", "davit_tiny", "tiny_vit_5m_224",
]  # fmt: skip
_SIZES = {"crossvit_tiny_240": 240}


def _timm() -> Iterator[TruthCase]:
    import timm  # noqa: PLC0415

    for name in _TIMM:
        yield TruthCase(
            name=name, source="timm", build=partial(timm.create_model, name), inputs=images(4, _SIZES.get(name, 224))
        )


# --- transformers


def _transformers() -> Iterator[TruthCase]:
    import transformers  # noqa: PLC0415

    hf: Any = transformers

    small = {"num_hidden_layers": 3}
    masked, causal = "AutoModelForMaskedLM", "AutoModelForCausalLM"
    wide = {**small, "hidden_size": 1024, "num_attention_heads": 16}
    medium = {**small, "hidden_size": 768, "num_attention_heads": 12}
    local = {"hidden_size": 768, "num_layers": 2, "num_heads": 12, "attention_types": [[["global", "local"], 1]]}
    qwen = {**small, "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 32000}
    gemma = {**small, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 1, "vocab_size": 32000}
    texts: dict[str, tuple[str, str, dict[str, Any]]] = {
        "bert": ("BertConfig", masked, small),
        "roberta": ("RobertaConfig", masked, small),
        "albert": ("AlbertConfig", masked, medium),
        "electra": ("ElectraConfig", masked, small),
        "distilbert": ("DistilBertConfig", masked, {"n_layers": 3}),
        "deberta_v2": ("DebertaV2Config", masked, {**medium, "intermediate_size": 3072}),
        "gpt2": ("GPT2Config", causal, {"n_layer": 3}),
        "gpt_neo": ("GPTNeoConfig", causal, local),
        "gpt_neox": ("GPTNeoXConfig", causal, {**wide, "intermediate_size": 4096}),
        "opt": ("OPTConfig", causal, small),
        "bloom": ("BloomConfig", causal, {"hidden_size": 512, "n_layer": 3, "n_head": 8}),
        "llama": ("LlamaConfig", causal, {**wide, "intermediate_size": 2816, "num_key_value_heads": 4}),
        "mistral": ("MistralConfig", causal, {**wide, "intermediate_size": 3584, "num_key_value_heads": 4}),
        "qwen2": ("Qwen2Config", causal, {**qwen, "intermediate_size": 4864}),
        "gemma": ("GemmaConfig", causal, {**gemma, "intermediate_size": 2048, "head_dim": 64}),
        "phi": ("PhiConfig", causal, {**wide, "intermediate_size": 4096}),
        "xlnet": ("XLNetConfig", causal, {"d_model": 512, "n_layer": 3, "n_head": 8, "d_inner": 2048}),
    }

    def language_model(config: str, kind: str, options: dict[str, Any]) -> nn.Module:
        made = getattr(hf, config)(**options)
        made.use_cache = False
        model: nn.Module = getattr(hf, kind).from_config(made)
        return model

    for name, (config, kind, options) in texts.items():
        yield TruthCase(
            name=name, source="transformers", build=partial(language_model, config, kind, options),
            inputs=tokens(4, 256),
        )  # fmt: skip

    def image_model(config: str, options: dict[str, Any]) -> nn.Module:
        # By its own name: the automatic class cannot find DeiT's.
        kind = getattr(hf, config.replace("Config", "ForImageClassification"))
        model: nn.Module = kind(getattr(hf, config)(**options, num_labels=1000))
        return model

    pictures: Inputs = {"pixel_values": ((8, 3, 224, 224), F32), "target": ((8,), INT)}
    for name, config, options in (
        ("hf_vit", "ViTConfig", small), ("hf_deit", "DeiTConfig", small), ("hf_convnext", "ConvNextConfig", {}),
        ("hf_swin", "SwinConfig", {"depths": [1, 1, 2, 1]}), ("hf_resnet", "ResNetConfig", {}),
    ):  # fmt: skip
        yield TruthCase(name=name, source="transformers", build=partial(image_model, config, options), inputs=pictures)
    t5 = {"num_layers": 2, "num_decoder_layers": 2}
    inputs: Inputs = {
        "input_ids": ((4, 128), INT), "decoder_input_ids": ((4, 128), INT), "target": ((4, 128), INT)
    }  # fmt: skip
    yield TruthCase(
        name="t5", source="transformers", inputs=inputs,
        build=lambda: hf.T5ForConditionalGeneration(hf.T5Config(**t5, use_cache=False)),
    )  # fmt: skip
    bart = {"encoder_layers": 2, "decoder_layers": 2, "d_model": 512, "use_cache": False}
    yield TruthCase(
        name="bart", source="transformers", inputs=inputs,
        build=lambda: hf.BartForConditionalGeneration(hf.BartConfig(**bart)),
    )  # fmt: skip


# --- single operators


class Apply(nn.Module):
    """A function of a parameter and the input."""

    def __init__(self, function: Callable[..., torch.Tensor], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(self.weight, *inputs)


class Repeated(nn.Module):
    """A module that is applied several times, with the same weights."""

    def __init__(self, module: nn.Module, times: int) -> None:
        super().__init__()
        self.module, self.times = module, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = self.module(x).relu()
        return x


class Take(nn.Module):
    """The first output of a module that returns several."""

    def __init__(self, module: nn.Module, *, thrice: bool = False) -> None:
        super().__init__()
        self.module, self.thrice = module, thrice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (self.module(x, x, x) if self.thrice else self.module(x))[0]
        return out


def _operators() -> Iterator[TruthCase]:  # noqa: PLR0915, a list
    def case(name: str, build: Callable[[], nn.Module], *shape: int, dtype: torch.dtype = F32) -> TruthCase:
        return TruthCase(name=name, source="operator", build=build, inputs={"x": (shape, dtype)})

    def of(name: str, function: Callable[..., torch.Tensor], *shape: int) -> TruthCase:
        """Applies a function to an input times a parameter of one element for each of the last dimension."""
        return case(name, partial(Apply, lambda w, x: function(x * w), shape[-1]), *shape)

    for n_rows, n_in, n_out in ((2048, 1024, 4096), (64, 1024, 10), (100_000, 64, 64), (8, 4096, 1000)):
        yield case(f"linear {n_rows}x{n_in}x{n_out}", partial(nn.Linear, n_in, n_out), n_rows, n_in)
    yield case("linear without bias", partial(nn.Linear, 512, 512, bias=False), 4096, 512)
    yield case("layer norm", partial(nn.LayerNorm, 768), 8, 512, 768)
    yield case("group norm", partial(nn.GroupNorm, 8, 64), 8, 64, 56, 56)
    yield case("batch norm", partial(nn.BatchNorm2d, 64), 8, 64, 56, 56)
    yield case("batch norm 1d", partial(nn.BatchNorm1d, 512), 4096, 512)
    yield case("instance norm", partial(nn.InstanceNorm2d, 64, affine=True), 8, 64, 56, 56)
    yield case("rms norm", partial(nn.RMSNorm, 768), 8, 512, 768)
    yield case("embedding few", partial(nn.Embedding, 1000, 256), 4, 256, dtype=INT)
    yield case("embedding many", partial(nn.Embedding, 50000, 256), 32, 512, dtype=INT)
    yield case("embedding bag", partial(nn.EmbeddingBag, 5000, 128), 256, 32, dtype=INT)
    yield case("convolution 1d", partial(nn.Conv1d, 64, 128, 3), 16, 64, 1000)
    yield case("convolution 2d", partial(nn.Conv2d, 64, 128, 3), 8, 64, 56, 56)
    yield case("convolution 3d", partial(nn.Conv3d, 16, 32, 3), 2, 16, 16, 56, 56)
    yield case("convolution depthwise", partial(nn.Conv2d, 64, 64, 3, groups=64), 8, 64, 56, 56)
    yield case("convolution transposed", partial(nn.ConvTranspose2d, 64, 32, 2, 2), 8, 64, 56, 56)
    yield case("lstm", lambda: Take(nn.LSTM(256, 512, 2, batch_first=True)), 32, 64, 256)
    yield case("gru", lambda: Take(nn.GRU(256, 512)), 64, 32, 256)
    yield case("multi-head attention", lambda: Take(nn.MultiheadAttention(512, 8, batch_first=True), thrice=True),
               8, 256, 512)  # fmt: skip
    yield case("transformer encoder layer", partial(nn.TransformerEncoderLayer, 512, 8, batch_first=True), 8, 256, 512)
    yield case("prelu", partial(nn.PReLU, 64), 8, 64, 56, 56)
    yield case("bilinear", lambda: Apply(lambda w, x: functional.bilinear(x, x, w), 32, 64, 64), 256, 64)
    yield of("dropout", partial(functional.dropout, p=0.1), 4096, 1024)
    yield of("softmax", partial(torch.softmax, dim=-1), 4096, 1024)
    yield of("log softmax", partial(torch.log_softmax, dim=-1), 4096, 1024)
    yield of("logsumexp", partial(torch.logsumexp, dim=-1), 4096, 1024)
    yield of("gelu", functional.gelu, 4096, 1024)
    yield of("silu", functional.silu, 4096, 1024)
    yield of("glu", functional.glu, 4096, 1024)
    yield of("sum of rows", lambda x: x.sum(0), 8192, 1024)
    yield of("sum of columns", lambda x: x.sum(1), 1024, 8192)
    yield of("sum of all", torch.sum, 8192, 1024)
    yield of("mean of all", torch.mean, 8192, 1024)
    yield of("variance", lambda x: x.var(0), 8192, 512)
    yield of("norm", lambda x: torch.linalg.vector_norm(x), 8192, 512)  # noqa: PLW0108, named for the trace
    yield of("maximum", lambda x: x.amax(0), 8192, 512)
    yield of("max with indices", lambda x: x.max(0).values, 8192, 512)
    yield of("cumsum", partial(torch.cumsum, dim=0), 4096, 512)
    yield of("sort", lambda x: x.sort(dim=-1).values, 512, 4096)
    yield of("topk", lambda x: x.topk(10, dim=-1).values, 512, 4096)
    yield of("max pool", partial(functional.max_pool2d, kernel_size=3, stride=2), 8, 64, 56, 56)
    yield of("average pool", partial(functional.avg_pool2d, kernel_size=2), 8, 64, 56, 56)
    yield of("adaptive average pool", partial(functional.adaptive_avg_pool2d, output_size=7), 8, 64, 56, 56)
    yield of("interpolate nearest", partial(functional.interpolate, scale_factor=2), 8, 64, 28, 28)
    yield of("interpolate bilinear", partial(functional.interpolate, scale_factor=2, mode="bilinear"), 8, 64, 28, 28)
    yield of("interpolate bicubic", partial(functional.interpolate, scale_factor=2, mode="bicubic"), 4, 32, 28, 28)
    yield of("pixel shuffle", partial(functional.pixel_shuffle, upscale_factor=2), 8, 64, 56, 56)
    yield of("unfold", partial(functional.unfold, kernel_size=3), 4, 32, 28, 28)
    yield of("pad reflect", partial(functional.pad, pad=(1, 1, 1, 1), mode="reflect"), 8, 64, 28, 28)
    yield of("concatenate", lambda x: torch.cat([x, x.relu()], -1), 4096, 512)
    yield of("roll", partial(torch.roll, shifts=3, dims=0), 4096, 512)
    yield of("einsum", lambda x: torch.einsum("bij,bkj->bik", x, x), 16, 256, 128)
    yield of("cdist", lambda x: torch.cdist(x, x), 4, 256, 64)
    yield of("attention math mask", lambda x: functional.scaled_dot_product_attention(x, x, x), 4, 8, 200, 64)
    yield of("attention causal", partial(lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True)),
             4, 8, 256, 64)  # fmt: skip
    yield of("smooth l1", lambda x: functional.smooth_l1_loss(x, x.detach() * 0), 4096, 512)
    yield of("binary cross entropy", lambda x: functional.binary_cross_entropy_with_logits(x, x.detach()), 4096, 512)
    yield of("index select", lambda x: x[:, torch.arange(0, 512, 2, device=x.device)], 4096, 512)
    yield of("rfft", lambda x: torch.fft.rfft(x).abs(), 1024, 512)
    yield case("linear used 12 times", lambda: Repeated(nn.Linear(1024, 1024), 12), 256, 1024)
    block = partial(nn.TransformerEncoderLayer, 256, 4, batch_first=True)
    yield case("block used 6 times", lambda: Repeated(block(), 6), 8, 128, 256)
    perceptron: Inputs = {"x": ((256, 1024), F32), "target": ((256,), INT)}
    yield TruthCase(
        name="perceptron", source="operator", inputs=perceptron,
        build=lambda: nn.Sequential(
            nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)
        ),
    )  # fmt: skip
    labels: Inputs = {"x": ((512, 256), F32), "target": ((512,), INT)}
    yield TruthCase(name="cross entropy", source="operator", build=partial(nn.Linear, 256, 50000), inputs=labels)


# --- all of them


@dataclass(frozen=True)
class SweepSetting:
    """How a model runs."""

    optimizer: str
    precision: Precision
    channels_last: bool
    way: str

    def pairs(self) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
        """Returns every pair of its values."""
        values = [(name, getattr(self, name)) for name in self.__dataclass_fields__]
        return set(combinations(values, 2))


_WAYS: dict[str, dict[str, Any]] = {
    "training": {}, "manual": {"manual": True}, "validation": {"stage": "val"}, "accumulation": {"accumulate": 2},
    "clipping": {"clip": 1.0},
}  # fmt: skip


def settings() -> list[SweepSetting]:
    """Returns settings in which every two values of different kinds meet, few of them."""
    every = [SweepSetting(*one) for one in product(OPTIMIZERS, PRECISIONS, (False, True), _WAYS)]
    missing = set[Any]().union(*(one.pairs() for one in every))
    found: list[SweepSetting] = []
    while missing:
        best = max(every, key=lambda one: (len(one.pairs() & missing), -every.index(one)))
        found.append(best)
        missing -= best.pairs()
    return found


# Runs in which the estimate once differed most.
_ALSO: dict[str, tuple[Precision, ...]] = {
    "mixer_s32_224": ("32-true",),
    "dla34": ("bf16-mixed", "bf16-true"),
    "dpn68": ("bf16-mixed", "bf16-true"),
    "vit_small_patch16_224": ("bf16-mixed", "bf16-true"),
    "perceptron": ("32-true", "bf16-mixed"),
}


def cases() -> list[TruthCase]:
    """Returns the sweep's cases: each model under two of the settings, operators in float32 with SGD and under one."""
    found: list[TruthCase] = []
    covering = settings()
    for index, model in enumerate([*_torchvision(), *_timm(), *_transformers(), *_operators()]):
        has_images = any(len(shape) == 4 for shape, _ in model.inputs.values())
        is_operator = model.source == "operator"
        for turn in range(1 if is_operator else 2):
            way = covering[(index + turn * 7 + index // len(covering)) % len(covering)]
            found.append(
                replace(
                    model,
                    precision=way.precision,
                    optimizer=way.optimizer,
                    channels_last=has_images and way.channels_last,
                    **_WAYS[way.way],
                )
            )
        if is_operator:
            found.append(model)
        found += [replace(model, optimizer="AdamW", precision=one) for one in _ALSO.get(model.name, ())]
    return list({case.key: case for case in map(_allowed, found)}.values())


def _allowed(case: TruthCase) -> TruthCase:
    """Returns the case without what Lightning or torch refuses.

    Lightning does not clip the gradients of a fused optimizer in mixed precision; weights of five dimensions have no
    memory format for four.
    """
    if case.name == "lambda_resnet26t":
        case = replace(case, channels_last=False)
    is_refused = case.clip is not None and case.optimizer == "AdamW fused" and case.precision.endswith("mixed")
    return replace(case, optimizer="AdamW") if is_refused else case
