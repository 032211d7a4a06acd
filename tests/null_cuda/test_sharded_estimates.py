"""`estimate_memory(strategy=..., devices=...)`: one rank of DDP, FSDP 1 and FSDP 2, beside scripts that train so."""

from __future__ import annotations

import re
import textwrap

import lightning as L
import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_memtools import estimate_memory
from lightning_memtools.cli.dry_run import dry_run
from tests.null_cuda.null_processes import command

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


def test_a_rank_of_fsdp_2_holds_its_share_and_the_model_may_be_on_meta():
    whole = estimate_memory(gpt(), WORDS, engine="cuda", **SETTINGS | {"devices": 1})
    rank = estimate_memory(gpt("meta"), WORDS, strategy="fsdp2", **SETTINGS)
    assert rank.parameter_count == whole.parameter_count
    assert rank.gradient_count == whole.gradient_count
    assert rank.parameter_bytes == pytest.approx(whole.parameter_bytes / RANKS, rel=0.01)
    assert rank.composition["optimizer"] == pytest.approx(whole.composition["optimizer"] / RANKS, rel=0.01)
    assert rank.peak_allocated < 0.9 * whole.peak_allocated
    assert rank.notes == ("One of 8 ranks under FSDP 2: 4 GPT2Block sharded each by itself, the rest together.",)


@pytest.mark.parametrize("strategy", WRAPS)
def test_the_model_is_as_it_was_and_can_be_estimated_again(strategy):
    model = gpt()
    kinds = [type(one) for one in model.modules()]
    parameters = {name: (one, one.data_ptr()) for name, one in model.named_parameters()}
    collectives = distributed.init_process_group, nn.parallel.DistributedDataParallel.__init__
    first, second = (estimate_memory(model, WORDS, strategy=strategy, engine="cuda", **SETTINGS) for _ in range(2))
    assert (first.peak_allocated, first.peak_reserved) == (second.peak_allocated, second.peak_reserved)
    assert [type(one) for one in model.modules()] == kinds
    assert {name: (one, one.data_ptr()) for name, one in model.named_parameters()} == parameters
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    assert not distributed.is_initialized()
    assert collectives == (distributed.init_process_group, nn.parallel.DistributedDataParallel.__init__)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"accumulate": 2}], ids=str)
def test_ddp_takes_the_same_on_both_engines(options):
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    real, simulated = (
        estimate_memory(
            model, torch.zeros(64, 512), step=lambda model, x: model(x).square().mean(), optimizer=torch.optim.AdamW,
            strategy="ddp", devices=2, ddp_bucket_mb=2, engine=engine, **options,
        )
        for engine in ("cuda", "simulation")
    )  # fmt: skip
    assert (real.peak_allocated, real.peak_reserved) == (simulated.peak_allocated, simulated.peak_reserved)


class Sharded(L.LightningModule):
    """Shards itself, in bfloat16, as Lightning asks for it."""

    def configure_model(self):
        if hasattr(self, "net"):
            return
        self.net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
        mesh, policy = self.device_mesh["data_parallel"], MixedPrecisionPolicy(torch.bfloat16)
        for layer in self.net:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.net, mesh=mesh, mp_policy=policy)

    def training_step(self, batch, _):
        return self.net(batch).float().square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def test_a_lightning_module_is_sharded_by_its_own_configure_model():
    module = Sharded()
    estimate = estimate_memory(module, torch.zeros(16, 1024), strategy="fsdp2", devices=4)
    shard = 8 * 1024 * 1024 * 4 // 4
    assert estimate.parameter_bytes == shard
    assert estimate.composition["optimizer"] == pytest.approx(2 * shard, rel=0.01)
    assert estimate.notes == ("One of 4 ranks under FSDP 2, sharded by the model's configure_model.",)
    assert type(module) is Sharded
    assert not hasattr(module, "net")


class Plain(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))

    def training_step(self, batch, _):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1024, 1024, bias=False)

    def forward(self, x):
        return self.layer(x)


class Listed(Plain):
    """Calls the blocks of a ModuleList itself."""

    def __init__(self):
        super().__init__()
        self.net = nn.ModuleList(Block() for _ in range(8))

    def training_step(self, batch, _):
        for block in self.net:
            batch = block(batch)
        return batch.square().mean()


def test_the_blocks_that_a_lightning_module_calls_itself_are_sharded_once():
    estimate = estimate_memory(Listed(), torch.zeros(16, 1024), strategy="fsdp2", devices=4)
    assert estimate.parameter_bytes == 8 * 1024 * 1024 * 4 // 4
    assert estimate.notes[0].startswith("One of 4 ranks under FSDP 2: 8 Block sharded")


@pytest.mark.parametrize(("strategy", "share"), [("fsdp2", 4), ("fsdp", 4), ("ddp", 1)])
def test_the_step_of_a_lightning_module_runs_within_its_wrapper(strategy, share):
    module = Plain()
    estimate = estimate_memory(module, torch.zeros(16, 1024), strategy=strategy, devices=4, engine="cuda")
    bytes_of_rank = 8 * 1024 * 1024 * 4 // share
    assert estimate.composition["optimizer"] == pytest.approx(2 * bytes_of_rank, rel=0.01)
    assert estimate.parameter_bytes == pytest.approx(bytes_of_rank, rel=0.01)
    assert "training_step" not in vars(module)


def test_a_function_shards_as_the_training_does():
    seen = []

    def shard(model, mesh):
        seen.append((mesh.size(), mesh.mesh_dim_names))
        fully_shard(model, mesh=mesh)

    model = gpt()
    together = estimate_memory(model, WORDS, strategy="fsdp2", shard=shard, **SETTINGS)
    apart = estimate_memory(model, WORDS, strategy="fsdp2", **SETTINGS)
    assert seen == [(RANKS, ("data_parallel",))]
    assert together.peak_allocated > apart.peak_allocated
    assert not isinstance(model, FSDPModule)


def test_the_command_estimates_a_rank(tmp_path):
    options = ("--strategy", "fsdp2", "--devices", "8", "--optimizer", "AdamW")
    done = command(tmp_path, "my_targets:large", *options)
    assert done.returncode == 0, done.stderr
    assert re.search(r"at the peak: optimizer +4\.00 GiB", done.stdout)
    assert "One of 8 ranks under FSDP 2" in done.stdout


def test_the_first_foreach_step_on_shards_peaks_no_higher_than_later_ones():
    """The first step on DTensors was reported to need far more: it does not, and two steps show all."""
    # So many that the optimizer's temporaries are larger than the workspace of a product.
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(48)))
    made = estimate_memory(
        model, torch.zeros(8, 1024), step=lambda model, x: model(x).square().mean(), optimizer=torch.optim.AdamW,
        strategy="fsdp2", devices=4, steps=4,
    )  # fmt: skip
    assert made.peak_at.phase == "optimizer"
    assert len(set(made.step_peaks)) == 1
