"""Plans beside what users have for the models they train: the models' own switches, and policies applied by hand.

For each model in its usual size: the peak, FLOPs and operations of the plain step; of the plan by default, with the
processor time of planning; of the lowest plan with at most a third more FLOPs; of each switch; and of the lowest plan
with no more operations than that switch. Everything is traced on fake tensors in the simulated allocator, with CUDA's
operators and AdamW. Names on the command line measure these models only.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import known, save
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning_memtools.checkpointing.checkpoint_options import CheckpointOptions, LossHead
from lightning_memtools.checkpointing.checkpoint_plan import CheckpointPlan
from lightning_memtools.checkpointing.key_value_caches import caches_off
from lightning_memtools.checkpointing.planning import MOST_OPERATIONS, BudgetTooSmallError, StepPlanner, predict
from lightning_memtools.simulation.tracer import StepCost, StepRequest
from tests.checkpointing.foreign_models import LossOf
from tests.zoo import timm, torchvision_models

Switch = Callable[[], Any]
aten = torch.ops.aten
# What torchtitan's selective policy saves, besides every second matrix product.
_SAVED = {
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
}
_PRODUCTS = {aten.mm.default, aten.addmm.default}


class Case:
    """A model, a batch for it, and its blocks, which the policies take one by one.

    Args:
        model: The model; its loss is what it returns as such, or the mean of the squares of what it returns.
        batch: The batch.
        blocks: The blocks.
        switch: The name of the model's own switch, and what turns it on and off.
    """

    def __init__(self, model: nn.Module, batch: Any, blocks: Any, switch: tuple[str, Switch, Switch] | None) -> None:
        self.model = LossOf(model).train() if isinstance(batch, dict) else model.train()
        self.batch = batch
        self.blocks = list(blocks)
        self.switch = switch
        self.optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW

    def step(self) -> StepRequest:
        optimizer = self.optimizer(self.model.parameters())
        return StepRequest(model=self.model, batch=self.batch, step=loss_of, optimizer=optimizer)


def loss_of(model: Any, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(batch)
    out = model(batch)
    return (out["out"] if isinstance(out, dict) else out).float().square().mean()


@contextmanager
def checkpointed(blocks: list[nn.Module], context: Any = None) -> Iterator[None]:
    """Blocks are recomputed one by one, as torchtitan's policies and FSDP's checkpoint_wrapper do."""
    for block in blocks:
        plain = block.forward
        options = {} if context is None else {"context_fn": context}
        vars(block)["forward"] = partial(checkpoint, plain, use_reentrant=False, **options)
    try:
        yield
    finally:
        for block in blocks:
            del vars(block)["forward"]


@contextmanager
def in_segments(case: Case) -> Iterator[bool]:
    """Sequentials of the blocks run as `checkpoint_sequential` runs them, in about the square root of their number."""
    known = set(map(id, case.blocks))
    parents = [
        one
        for one in case.model.modules()
        if type(one).forward is nn.Sequential.forward and sum(id(child) in known for child in one.children()) > 1
    ]
    for parent in parents:
        number = round(len(parent) ** 0.5)  # type: ignore[arg-type]
        vars(parent)["forward"] = partial(checkpoint_sequential, list(parent), number, use_reentrant=False)  # type: ignore[call-overload]
    try:
        yield bool(parents)
    finally:
        for parent in parents:
            del vars(parent)["forward"]


def selective() -> Any:
    """The selective policy of torchtitan, by operator: attention and every second matrix product are kept."""
    counts = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *_args: Any, **_options: Any) -> CheckpointPolicy:
        again = bool(context.is_recompute)
        if operator in _PRODUCTS:
            counts[again] += 1
            return CheckpointPolicy.MUST_SAVE if counts[again] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if operator in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


@contextmanager
def switched(turn_on: Switch, turn_off: Switch) -> Iterator[None]:
    """A model's own switch is on."""
    turn_on()
    try:
        yield
    finally:
        turn_off()


def switches(case: Case) -> Iterator[tuple[str, Any]]:
    """What each switch or policy costs, or why it does not run.

    Caches of keys and values are off, as transformers' own switch turns them off: blocks that run twice add to them.
    """
    ways = {
        "every block": checkpointed(case.blocks),
        "every second block": checkpointed(case.blocks[::2]),
        "every block, selective by operator": checkpointed(case.blocks, selective),
        "checkpoint_sequential": in_segments(case),
    }
    if case.switch is not None:
        name, turn_on, turn_off = case.switch
        ways[name] = switched(turn_on, turn_off)
    for name, way in ways.items():
        with caches_off(case.model), way as applies:
            if applies is False:
                continue
            found = _or_why(lambda: predict(case.step(), ()))
        yield name, found  # outside of it, so that plans beside it are made of the plain model


def _or_why(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as error:  # noqa: BLE001, a switch may fail on a model in any way
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def figures(cost: StepCost) -> dict[str, int]:
    return {
        "peak_bytes": cost.peak_bytes,
        "static_bytes": cost.static_bytes,
        "operations": cost.operations,
        "flops": cost.flops,
    }


def measured(name: str) -> dict[str, Any]:
    case, planner, default, seconds = planned(name)
    assert default.plain is not None
    assert default.planned is not None
    plain = default.plain
    found: dict[str, Any] = {
        "plain": figures(plain),
        "default": {**figures(default.planned), "processor_seconds": seconds},
        "switches": {},
        "failed": {},
    }
    lowest = lowest_within(planner, plain.peak_bytes, lambda cost: cost.flops <= MOST_OPERATIONS * plain.flops, default)
    assert lowest is not None
    found["a third more flops"] = None if lowest.planned is None else figures(lowest.planned)
    for other, cost in switches(case):
        print(" ", other, cost, flush=True)
        if isinstance(cost, StepCost):
            best = lowest_within(planner, cost.peak_bytes, partial(_needs_no_more, cost), default)
            ours = None if best is None or best.planned is None else figures(best.planned)
            found["switches"][other] = {**figures(cost), "ours": ours}
        else:
            found["failed"][other] = cost
    return found


def planned(name: str) -> tuple[Case, StepPlanner, CheckpointPlan, float]:
    """A case, its planner, the plan by default, and the processor's seconds that it took."""
    torch.manual_seed(0)
    case = MODELS[name]()
    begin = time.process_time()
    planner = StepPlanner(case.step())
    default = planner.plan(_options())
    return case, planner, default, round(time.process_time() - begin, 2)


def _options(budget: str | None = None, loss_head: LossHead = "keep") -> CheckpointOptions:
    # Switches and policies only recompute, so that beside them a plan does no more.
    return CheckpointOptions.parse(bn_dropout="recompute", memory_budget=budget, loss_head=loss_head)


def _needs_no_more(other: StepCost, cost: StepCost) -> bool:
    # To a hundredth of a percent: which additions at the end of blocks run again makes less of a difference.
    return cost.operations <= 1.0001 * other.operations


def lowest_within(
    planner: StepPlanner,
    peak: int,
    accepted: Callable[[StepCost], bool],
    default: CheckpointPlan,
    loss_head: LossHead = "keep",
) -> CheckpointPlan | None:
    """The lowest accepted plan that was found, at a peak, then by halving between 0.2 and 1.1 of it, to 1%."""
    assert default.planned is not None
    best = default if accepted(default.planned) else None
    low, high, limit = 0.2 * peak, 1.1 * peak, float(peak)
    while high - low > 0.01 * high:
        try:
            plan = planner.plan(_options(f"{int(limit)}B", loss_head))
        except BudgetTooSmallError as error:
            low = max(limit, error.reachable_bytes)
        else:
            assert plan.planned is not None
            if not accepted(plan.planned):
                low = limit
            else:
                high = min(limit, plan.planned.peak_bytes)
                if best is None or best.planned is None or plan.planned.peak_bytes < best.planned.peak_bytes:
                    best = plan
        limit = (low + high) / 2
    return best


# --- the models


def _words(vocabulary: int, batch: int, length: int) -> dict[str, Tensor]:
    words = torch.randint(3, vocabulary, (batch, length))
    return {"input_ids": words, "labels": words}


def _of_transformers(model: str, config: str, blocks: str, batch: Callable[[Any], Any], **options: Any) -> Case:
    import transformers  # noqa: PLC0415, slow to import

    made = getattr(transformers, model)(getattr(transformers, config)(**options))
    turn_on = partial(made.gradient_checkpointing_enable, gradient_checkpointing_kwargs={"use_reentrant": False})
    found = [one for path in blocks.split(",") for one in made.get_submodule(path)]
    switch = ("gradient_checkpointing_enable()", turn_on, made.gradient_checkpointing_disable)
    return Case(made, batch(made.config), found, switch)


def _picture(batch: int, size: int = 224) -> Callable[[Any], Any]:
    return lambda _config: {"pixel_values": torch.empty(batch, 3, size, size), "labels": torch.zeros(batch).long()}


def _of_timm(name: str, blocks: Callable[[Any], Any], batch: int = 32, size: int = 224, **options: Any) -> Case:
    made = timm().create_model(name, **options)
    turn = made.set_grad_checkpointing
    switch = ("set_grad_checkpointing()", turn, partial(turn, enable=False))
    return Case(made, torch.empty(batch, 3, size, size), blocks(made), switch)


def _of_torchvision(name: str, blocks: Callable[[Any], Any], batch: int = 32, size: int = 224, **options: Any) -> Case:
    zoo = torchvision_models()
    made = getattr(zoo.segmentation if "deeplab" in name else zoo, name)(**options)
    return Case(made, torch.empty(batch, 3, size, size), blocks(made), None)


def _blocks_of_stages(stages: Any) -> Any:
    return [block for stage in stages for block in stage.blocks]


class _Double(nn.Sequential):
    def __init__(self, before: int, after: int) -> None:
        layers: list[nn.Module] = []
        for width in (before, after):
            layers += [nn.Conv2d(width, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
        super().__init__(*layers)


class UNet(nn.Module):
    """The U-Net of Ronneberger et al. (2015) with padding and BatchNorm: four levels, 64 to 1024 channels."""

    def __init__(self) -> None:
        super().__init__()
        widths = [64, 128, 256, 512, 1024]
        self.down = nn.ModuleList([_Double(a, b) for a, b in zip([3, *widths[:-1]], widths, strict=True)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(b, a, 2, 2) for a, b in itertools.pairwise(widths)])
        self.joined = nn.ModuleList([_Double(2 * a, a) for a in widths[:-1]])
        self.head = nn.Conv2d(64, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for level in self.down:
            x = level(x if not skips else nn.functional.max_pool2d(x, 2))
            skips.append(x)
        for at in range(len(self.up) - 1, -1, -1):
            x = self.joined[at](torch.cat([skips[at], self.up[at](x)], dim=1))
        out: Tensor = self.head(x)
        return out


def _unet() -> Case:
    made = UNet()
    return Case(made, torch.empty(8, 3, 256, 256), [*made.down, *made.joined], None)


_LLAMA = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}

# Llama 3.2 1B.
_LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}

MODELS: dict[str, Callable[[], Case]] = {
    "GPT-2 small": lambda: _of_transformers(
        "GPT2LMHeadModel", "GPT2Config", "transformer.h", lambda c: _words(c.vocab_size, 8, 512)
    ),
    "BERT base": lambda: _of_transformers(
        "BertForMaskedLM", "BertConfig", "bert.encoder.layer", lambda c: _words(c.vocab_size, 16, 512)
    ),
    "Llama 0.25B": lambda: _of_transformers(
        "LlamaForCausalLM", "LlamaConfig", "model.layers", lambda c: _words(c.vocab_size, 4, 1024), **_LLAMA
    ),
    "T5 small": lambda: _of_transformers(
        "T5ForConditionalGeneration",
        "T5Config",
        "encoder.block,decoder.block",
        lambda c: _words(c.vocab_size, 16, 256),
        decoder_start_token_id=0,
    ),
    "ViT-B/16 (transformers)": lambda: _of_transformers(
        "ViTForImageClassification", "ViTConfig", "vit.layers", _picture(32)
    ),
    "Swin-T (transformers)": lambda: _of_transformers(
        "SwinForImageClassification",
        "SwinConfig",
        ",".join(f"swin.encoder.layers.{at}.blocks" for at in range(4)),
        _picture(32),
    ),
    "ViT-B/16 (timm)": lambda: _of_timm("vit_base_patch16_224", lambda m: m.blocks),
    "Swin-T (timm)": lambda: _of_timm("swin_tiny_patch4_window7_224", lambda m: _blocks_of_stages(m.layers)),
    "ConvNeXt-T (timm)": lambda: _of_timm("convnext_tiny", lambda m: _blocks_of_stages(m.stages)),
    "EfficientNet-B0 (timm)": lambda: _of_timm(
        "efficientnet_b0", lambda m: [block for stage in m.blocks for block in stage]
    ),
    "RegNetY-4GF (timm)": lambda: _of_timm(
        "regnety_040", lambda m: [block for stage in (m.s1, m.s2, m.s3, m.s4) for block in stage.children()]
    ),
    "DenseNet-121 (timm)": lambda: _of_timm(
        "densenet121",
        lambda m: [layer for part in m.features.children() if hasattr(part, "items") for layer in part.values()],
    ),
    "HRNet-W48 (timm)": lambda: Case(
        (made := timm().create_model("hrnet_w48")),
        torch.empty(16, 3, 224, 224),
        [block for name, block in made.named_modules() if type(block).__name__ in {"BasicBlock", "Bottleneck"}],
        None,
    ),
    "ResNet-50": lambda: _of_torchvision("resnet50", lambda m: [*m.layer1, *m.layer2, *m.layer3, *m.layer4]),
    "DeepLabV3 (ResNet-50)": lambda: _of_torchvision(
        "deeplabv3_resnet50",
        lambda m: [block for name in ("layer1", "layer2", "layer3", "layer4") for block in m.backbone[name]],
        batch=8,
        size=256,
        weights_backbone=None,
    ),
    "U-Net": _unet,
}


def llama_1b(batch: int) -> Case:
    """Llama 3.2 1B with its own vocabulary. AdamW is fused: otherwise its step takes more than activations do."""
    case = _of_transformers(
        "LlamaForCausalLM", "LlamaConfig", "model.layers", lambda c: _words(c.vocab_size, batch, 1024), **_LLAMA_1B
    )
    case.optimizer = partial(torch.optim.AdamW, fused=True)
    return case


def in_mib(model: dict[str, Any]) -> dict[str, Any]:
    """Return the summary of a model: peaks in MiB, and operations as a multiple of the plain step's."""
    plain, third = model["plain"], model["a third more flops"]

    def cost(one: dict[str, Any]) -> dict[str, float]:
        return {"mib": mib(one), "operations": round(one["operations"] / plain["operations"], 3)}

    return {
        "plain": mib(plain),
        "default": cost(model["default"]) | {"planning_seconds": model["default"]["processor_seconds"]},
        "a third more flops": cost(third) | {"activations_divided_by": divided(plain, third)},
        "switches": {
            name: cost(one) | {"plan_mib": mib(one["ours"]) if one["ours"] else None}
            for name, one in model["switches"].items()
        },
        "failed": list(model["failed"]),
    }


def mib(one: dict[str, Any]) -> float:
    """Return a step's peak."""
    return round(float(one["peak_bytes"]) / 2**20, 1)


def divided(plain: dict[str, Any], planned: dict[str, Any]) -> float:
    """Return how many times less activation memory a plan has."""
    less, more = (one["peak_bytes"] - one["static_bytes"] for one in (planned, plain))
    return round(float(more / less), 2)


def summary(models: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the summaries of models, and how plans compare with all switches."""
    ran = [one for model in models.values() for one in model["switches"].values()]
    ratios = [one["plan_mib"] / one["mib"] for one in ran if one["plan_mib"] is not None]
    return {
        "switches": len(ran),
        "failed": sum(len(model["failed"]) for model in models.values()),
        "plan_no_higher": sum(one <= 1 for one in ratios),
        "plan_15_pct_lower": sum(one <= 0.85 for one in ratios),
        "median_plan_over_switch": round(statistics.median(ratios), 3),
        "models": models,
    }


def main() -> None:
    """Measure the models named on the command line, or all; the others keep what the file has of them."""
    for name in sys.argv[1:] or MODELS:
        print(name, flush=True)
        models = known("checkpointing_switches").get("switches", {}).get("models", {}) | {name: in_mib(measured(name))}
        ordered = {one: models[one] for one in MODELS if one in models}
        save("checkpointing_switches", summary(ordered), section="switches")


if __name__ == "__main__":
    main()
