"""Dry runs of one rank of several."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_memtools.null_cuda.dry_run.api import dry_run
from tests.null_cuda.dry_run_scripts import TRAINER, command

pytestmark = pytest.mark.cuda_memory

ROOT = Path(__file__).parents[2]

SPLIT = """
    import lightning as L
    import torch
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch import nn
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.utils.data import DataLoader

    class Model(L.LightningModule):
        def configure_model(self):
            wide, narrow = nn.Linear(1024, 8192, bias=False), nn.Linear(8192, 1024, bias=False)
            self.net = nn.Sequential(wide, nn.ReLU(), narrow)
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
        def training_step(self, batch, _):
            return self.net(batch).sum()
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=4)
    L.Trainer(devices=4, strategy=strategy).fit(Model(), DataLoader(torch.randn(16, 1024), batch_size=1))
"""


def test_a_rank_holds_its_quarter_under_tensor_parallel(script):
    result = dry_run(script(SPLIT), devices=4, rank=3)
    assert result.status == 0, result.error
    train = next(one for one in result.stages if one.stage == "train")
    quarter = 2 * 1024 * 8192 * 4 // 4
    assert train.bytes_by_category["parameters"] == quarter
    assert train.bytes_by_category["optimizer"] == 2 * quarter
    assert 0 < train.bytes_by_category["gradients"] <= quarter  # at a peak in backward, not all layers have theirs
    assert "What NCCL allocates for itself is not counted." in result.notes


PLANNED = """
    import sys
    from pathlib import Path

    import lightning as L
    import torch
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader

    from lightning_memtools import GradientCheckpointing
    from tests.integration.two_ranks import Gathers

    class Model(L.LightningModule):
        def __init__(self):
            super().__init__()
            blocks = (nn.TransformerEncoderLayer(256, 4, 1024, 0.1, batch_first=True) for _ in range(8))
            self.net = nn.Sequential(*blocks)
        def configure_model(self):
            for layer in (*self.net, self.net):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        def training_step(self, batch, _):
            return self.net(batch).sum()
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    trainer = L.Trainer(
        devices=8, strategy=ModelParallelStrategy(data_parallel_size=8, tensor_parallel_size=1), max_steps=3,
        callbacks=[GradientCheckpointing(bn_dropout="recompute")] if {planned} else [],
    )
    with Gathers() as gathers:
        trainer.fit(Model(), DataLoader(torch.randn(8 * 3 * 16, 128, 256), batch_size=16))
    plan = trainer.callbacks[0].plan if {planned} else None
    saved = 0 if plan is None else plan.plain.activation_bytes - plan.planned.activation_bytes
    Path(__file__).with_suffix(".txt").write_text(f"{{gathers.number}} {{saved}}")
"""


def test_a_plan_lowers_the_peak_of_one_of_eight_ranks_of_fsdp_2_and_gathers_no_more_often(script):
    peaks, gathered, saved = [], [], 0
    for planned in (False, True):
        path = script(PLANNED.format(planned=planned))
        result = dry_run(path, devices=8, rank=3)
        assert result.status == 0, result.error
        peaks.append(next(one.peak_allocated_bytes for one in result.stages if one.stage == "train"))
        number, saved = map(int, path.with_suffix(".txt").read_text().split())
        gathered.append(number)
    assert gathered[0] == gathered[1] > 0
    # A little less than of one device: beside the highest of the plan's step are parameters that were gathered.
    assert 0.9 * saved < peaks[0] - peaks[1] <= saved
    assert peaks[1] < 0.5 * peaks[0], peaks


def test_data_parallel_ranks_hold_the_whole_model_and_its_buckets(trained, script):
    path = script(TRAINER.replace("log_every_n_steps=1", "log_every_n_steps=1, devices=2, strategy='ddp'"))
    result = dry_run(path, devices=2)
    assert result.status == 0, result.error
    two, one = (next(s for s in r.stages if s.stage == "train") for r in (result, trained))
    assert two.bytes_by_category["parameters"] == one.bytes_by_category["parameters"]
    # The buckets hold every gradient once more; each starts at a multiple of 512 bytes.
    buckets = 4 * (1024 * 4096 + 4096 + 4096 * 10 + 10)
    assert 0 <= two.peak_allocated_bytes - one.peak_allocated_bytes - buckets <= 16 * 512


PREPARES = """
    import lightning as L
    import torch
    from tests.null_cuda.dry_run_models import Resumed
    from torch.utils.data import DataLoader

    class Data(L.LightningDataModule):
        def prepare_data(self):
            print("prepared")
        def train_dataloader(self):
            return DataLoader(torch.zeros(16, 100), batch_size=4)

    L.Trainer(devices=100, strategy="ddp").fit(Resumed(), Data())
"""


def test_a_barrier_around_what_one_rank_prepares_does_not_wait(script):
    done = command("--devices", "100", str(script(PREPARES)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prepared" in done.stdout


def test_the_example_answers_for_one_card_and_for_8_of_them():
    """A smaller model than the page's, for time."""
    example = ROOT / "examples" / "will_it_fit.py"
    small = ("--layers", "2", "--width", "512", "--tokens", "256")
    done = subprocess.run([sys.executable, str(example), *small], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    one, of_eight = done.stdout.splitlines()[1], done.stdout.splitlines()[-1]
    gib = r"(\d+\.\d) GiB reserved at the peak"
    alone = re.fullmatch(rf"AdamW, bf16-mixed: {gib}\. Smallest GPU: .+", one)
    shard = re.fullmatch(rf"AdamW, FSDP 2 on 8 of RTX 4090: fits, {gib}", of_eight)
    assert alone, done.stdout
    assert shard, done.stdout
    assert float(shard[1]) < float(alone[1])


def test_the_script_of_the_page_on_estimates_shows_one_rank_of_fsdp_2(tmp_path):
    page = (ROOT / "docs" / "estimate-memory.md").read_text("utf-8")
    path = tmp_path / "rank.py"
    path.write_text(re.search(r"```python\n(# rank\.py.*?)```", page, re.DOTALL)[1])
    result = dry_run(path, devices=8, gpu="RTX 4090")
    assert result.fits
    (stage,) = result.stages
    # Eight layers of 1024 x 1024 float32: this rank keeps an eighth of the weights, and of Adam's two moments.
    eighth = 8 * 1024 * 1025 * 4 // 8
    assert stage.bytes_by_category["parameters"] == pytest.approx(eighth, rel=0.01)
    assert stage.bytes_by_category["optimizer"] == pytest.approx(2 * eighth, rel=0.01)
