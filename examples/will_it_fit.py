"""Will a language model of 7 billion parameters train on my card? Answered on any machine, without memory for it.

    python examples/will_it_fit.py [--layers 32] [--width 4096]

For 8 GPUs with FSDP, `memtools dry-run --devices 8 SCRIPT` runs one that calls `fully_shard` (page "Dry run").
"""

from __future__ import annotations

import argparse
from typing import Literal

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_memtools import estimate_memory


def main() -> None:
    """Estimate AdamW in mixed precision, then SGD in bfloat16, and list the GPUs that each fits on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=1024)
    args = parser.parse_args()
    config = LlamaConfig(
        hidden_size=args.width,
        intermediate_size=args.width * 43 // 16,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 128,
        use_cache=False,
    )
    with torch.device("meta"):  # no memory is taken
        model = LlamaForCausalLM(config)
        batch = torch.zeros(1, args.tokens, dtype=torch.long)
    print(f"{sum(one.numel() for one in model.parameters()) / 1e9:.2f} billion parameters, 1 x {args.tokens} tokens")
    choices: tuple[tuple[type[torch.optim.Optimizer], Literal["bf16-mixed", "bf16-true"]], ...] = (
        (torch.optim.AdamW, "bf16-mixed"),
        (torch.optim.SGD, "bf16-true"),
    )
    for optimizer, precision in choices:
        estimate = estimate_memory(
            model,
            batch,
            step=lambda model, tokens: model(input_ids=tokens, labels=tokens).loss,
            optimizer=optimizer,
            precision=precision,
        )
        fits = next((name for name, fits in estimate.fitting_gpus() if fits), "no GPU of the list")
        peak = estimate.peak_reserved / 2**30
        print(f"{optimizer.__name__}, {precision}: {peak:.1f} GiB reserved at the peak. Smallest GPU: {fits}")


if __name__ == "__main__":
    main()
