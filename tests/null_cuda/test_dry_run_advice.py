"""Sizes that are found or advised on a dry run fit, and larger ones do not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lightning_memtools.cli.main import main
from lightning_memtools.null_cuda.dry_run.api import dry_run
from tests.null_cuda.dry_run_scripts import command

pytestmark = pytest.mark.cuda_memory


def test_the_smallest_gpu_it_fits_really_fits_and_the_next_smaller_does_not(script):
    path = script("import torch\nx = torch.empty(10 * 2**30, dtype=torch.uint8, device='cuda')\n")
    too_small, enough = dry_run(path).smallest_fitting
    assert enough is not None
    assert too_small is not None
    assert dry_run(path, gpu=enough).fits
    assert dry_run(path, gpu=too_small).status == 3


WIDE = """
    import gc
    import sys
    import lightning as L
    import torch
    from lightning_memtools import BatchSizeTuner
    from torch import nn
    from torch.utils.data import DataLoader

    class Wide(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 2**16), nn.Tanh(), nn.Linear(2**16, 8))
        def training_step(self, batch, _):
            return self.net(batch).sum()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters())

    def trains(rows, size, callbacks=()):
        trainer = L.Trainer(callbacks=[*callbacks], logger=False, enable_checkpointing=False)
        trainer.fit(Wide(), DataLoader(torch.zeros(1).expand(10**8, rows, 8), batch_size=size))
        return trainer.train_dataloader.batch_size

    def fits(rows, size):
        try:
            trains(rows, size)
        except torch.OutOfMemoryError:
            pass
        else:
            return True
        return False

    def emptied():
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        assert torch.cuda.memory_allocated() == 0
        torch.cuda.empty_cache()
"""
TRAINS = """
    for size in map(int, sys.argv[1:]):
        trains(1, size)
        open("trained", "a").write(f"{size} ")
        emptied()
"""
SEARCHES = """
    with open("found", "w") as file:
        for rows in map(int, sys.argv[1:]):
            found = trains(rows, 2, [BatchSizeTuner(stages=("train",), margin=0.0)])
            emptied()
            for size in (found, found + 1, found * 100 // 95 + 1):
                print(rows, size, int(fits(rows, size)), file=file)
                emptied()
"""


def test_the_batch_size_found_for_a_gpu_fits_it_and_the_next_does_not(script):
    """Below 50 samples the size is exact; above, it is at most five percent below the largest."""
    assert dry_run(script(WIDE + SEARCHES), ["1", "1024"], gpu="T4").error is None
    lines = [tuple(map(int, line.split())) for line in Path("found").read_text().splitlines()]
    of_small, of_large = lines[:3], lines[3:]
    small, large = of_small[0][1], of_large[0][1]
    assert small > 1000
    assert 10 < large < 50
    assert (of_small[0], of_small[2]) == ((1, small, 1), (1, small * 100 // 95 + 1, 0))
    assert of_large[:2] == [(1024, large, 1), (1024, large + 1, 0)]


def test_what_the_report_of_a_run_out_of_memory_advises_fits_and_one_sample_more_does_not(script):
    path = script(WIDE + TRAINS)
    failed = dry_run(path, ["40000"], gpu="RTX 3060")
    assert failed.status == 3
    assert failed.report is not None
    advice = re.search(r"batches of (\d+) instead of 40000", Path(failed.report).read_text())
    assert advice is not None
    size = int(advice[1])
    assert dry_run(path, [str(size), str(size + 1)], gpu="RTX 3060").status == 3
    assert Path("trained").read_text() == f"{size} "


DEEP = """
    import sys
    import lightning as L
    import torch
    from lightning_memtools import GradientCheckpointing
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader

    class Words(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(32000, 256)
            self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
                                          for _ in range(8)])
            self.head = nn.Linear(256, 32000)
        def training_step(self, batch, _):
            return F.cross_entropy(self.head(self.blocks(self.words(batch))).flatten(0, 1), batch.flatten())
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    if __name__ == "__main__":
        callbacks = [eval(sys.argv[1])] if len(sys.argv) > 1 else []
        trainer = L.Trainer(callbacks=callbacks, logger=False, enable_checkpointing=False, max_steps=3)
        trainer.fit(Words(), DataLoader(torch.randint(32000, (4 * SIZE, 512)), batch_size=SIZE))
"""


def test_each_line_for_checkpointing_makes_the_script_fit(script):
    path = script(DEEP.replace("SIZE", "160"))
    done = command("--advise", "--gpu", "RTX 4090", "--json", str(path))
    assert done.returncode == 3, done.stderr
    advice = json.loads(done.stdout)["advice"]
    codes = [one["code"] for one in advice if one["fits"] and one["code"].startswith("GradientCheckpointing(")]
    assert codes
    assert all(one["peak_bytes"] <= 24 * 2**30 for one in advice if one["fits"] and one["peak_bytes"] is not None)
    assert any(one["code"].startswith("DataLoader(batch_size=") for one in advice)
    for code in codes:
        assert dry_run(path, [code], gpu="RTX 4090").fits, code


@pytest.mark.parametrize(("options", "said"), [((), "RTX 4090"), (("--gpu", "RTX 4091"), "RTX 4091")])
def test_plan_is_the_same_command_and_needs_a_gpu_that_is_known(script, options, said, capsys):
    assert main(["plan", *options, str(script("print()"))]) == 2
    assert said in capsys.readouterr().err
