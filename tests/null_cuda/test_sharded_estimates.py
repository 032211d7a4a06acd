"""`estimate_memory(strategy=..., devices=...)`: one rank of DDP, FSDP 1 and FSDP 2, beside scripts that train so."""

from __future__ import annotations

import textwrap

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_memtools import estimate_memory
from lightning_memtools.null_cuda.dry_run.api import dry_run

pytestmark = pytest.mark.cuda_memory

RANKS = 8
SIZES = {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 5000}
WRAPS = {
    "fsdp2": """
        mesh = init_device_mesh("cuda", (8,))
        for block in model.transformer.h:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to("cuda")
    """,
    "fsdp": """
        model = FullyShardedDataParallel(
            model, device_id=0, use_orig_params=True, auto_wrap_policy=ModuleWrapPolicy({GPT2Block}),
            mixed_precision=MixedPrecision(torch.float32, torch.float32, torch.float32),
        )
    """,
    "ddp": "model = nn.parallel.DistributedDataParallel(model.to('cuda'), device_ids=[0])",
}
SCRIPT = """
    import torch
    from torch import distributed, nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    distributed.init_process_group("nccl")
    model = GPT2LMHeadModel(GPT2Config({sizes}))
    {wrap}
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        words = torch.zeros(4, 256, dtype=torch.long).to("cuda")
        loss = model(input_ids=words, labels=words).loss
        optimizer.zero_grad()
        scaled = loss / 1  # as Lightning divides by the number of batches that are accumulated
        scaled.backward()
        loss = loss.detach()
        del scaled
        del words
        optimizer.step()
"""


def gpt(device="cpu"):
    with torch.device(device):
        return GPT2LMHeadModel(GPT2Config(**SIZES))


def loss_of(model, words):
    return model(input_ids=words, labels=words).loss


WORDS = torch.zeros(4, 256, dtype=torch.long)
SETTINGS = {"step": loss_of, "optimizer": torch.optim.AdamW, "devices": RANKS}


@pytest.mark.parametrize("strategy", WRAPS)
def test_one_rank_takes_what_a_script_of_its_own_takes_to_the_byte(strategy, script):
    code = textwrap.dedent(SCRIPT).format(
        sizes=", ".join(f"{name}={value}" for name, value in SIZES.items()), wrap=textwrap.dedent(WRAPS[strategy])
    )
    real = dry_run(script(code), devices=RANKS)
    assert real.status == 0, real.error
    (stage,) = real.stages
    estimate = estimate_memory(gpt(), WORDS, strategy=strategy, engine="cuda", **SETTINGS)
    assert (estimate.peak_allocated, estimate.peak_reserved) == (stage.peak_allocated, stage.peak_reserved)
    assert sum(estimate.composition.values()) == estimate.peak_allocated
    assert estimate.engine == "cuda"
