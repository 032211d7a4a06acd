"""Will a language model of 7 billion parameters train on my card, or on 8 of them? Answered without any of them.

    python examples/will_it_fit.py [--gpu "RTX 4090"] [--ranks 8] [--layers 32] [--width 4096]

The part for several GPUs is a dry run of this script itself, which needs a CUDA build of PyTorch (and still no GPU).
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_memtools import DryRunError, dry_run, estimate_memory


class Llama(L.LightningModule):
    """One rank of a training with FSDP 2: a shard of everything, and one layer at a time in whole."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config

    def configure_model(self) -> None:
        """Shard the model before it has values."""
        with torch.device("meta"):
            self.model = LlamaForCausalLM(self.config)
        assert self.device_mesh is not None
        options: dict[str, Any] = {"mesh": self.device_mesh["data_parallel"]}
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16)
        for layer in self.model.model.layers:
            fully_shard(layer, **options)
        fully_shard(self.model, **options)
        self.model.to_empty(device="cuda")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # noqa: ARG002, Lightning passes it
        """The language model's loss."""
        return self.model(input_ids=batch, labels=batch).loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def on_one(config: LlamaConfig, tokens: int) -> None:
    """Estimate AdamW in mixed precision, then SGD in bfloat16, and name the smallest GPU that each fits on."""
    with torch.device("meta"):  # no memory is taken
        model, batch = LlamaForCausalLM(config), torch.zeros(1, tokens, dtype=torch.long)
    print(f"{sum(one.numel() for one in model.parameters()) / 1e9:.2f} billion parameters, 1 x {tokens} tokens")
    choices: tuple[tuple[type[torch.optim.Optimizer], Literal["bf16-mixed", "bf16-true"]], ...] = (
        (torch.optim.AdamW, "bf16-mixed"),
        (torch.optim.SGD, "bf16-true"),
    )
    for optimizer, precision in choices:
        found = estimate_memory(
            model, batch, step=lambda model, tokens: model(input_ids=tokens, labels=tokens).loss,
            optimizer=optimizer, precision=precision,
        )  # fmt: skip
        fits = next((name for name, fits in found.fitting_gpus() if fits), "no GPU of the list")
        peak = found.peak_reserved / 2**30
        print(f"{optimizer.__name__}, {precision}: {peak:.1f} GiB reserved at the peak. Smallest GPU: {fits}")


def main() -> None:
    """Answer for one GPU, and then for several."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 32), ("width", 4096), ("tokens", 1024), ("ranks", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--gpu", default="RTX 4090")
    parser.add_argument("--train", action="store_true", help="train, as each rank of the dry run does")
    args = parser.parse_args()
    config = LlamaConfig(hidden_size=args.width, intermediate_size=args.width * 43 // 16, num_hidden_layers=args.layers,
                         num_attention_heads=args.width // 128, use_cache=False)  # fmt: skip
    if args.train:
        strategy = ModelParallelStrategy(data_parallel_size=args.ranks, tensor_parallel_size=1)
        rows: Any = torch.zeros(1000, args.tokens, dtype=torch.long)
        L.Trainer(devices=args.ranks, strategy=strategy, logger=False).fit(Llama(config), DataLoader(rows))
        return
    on_one(config, args.tokens)
    try:
        result = dry_run(__file__, [*sys.argv[1:], "--train"], gpu=args.gpu, devices=args.ranks, output=sys.stderr)
    except DryRunError as error:
        print(f"On {args.ranks} of {args.gpu}: not tried. {error}")
        return
    peaks = ", ".join(f"{one.peak_reserved_bytes / 2**30:.1f} GiB reserved at the peak" for one in result.stages)
    print(f"AdamW, FSDP 2 on {args.ranks} of {args.gpu}: {'fits' if result.fits else 'does not fit'}, {peaks}")


if __name__ == "__main__":
    main()
