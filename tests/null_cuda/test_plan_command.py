"""`memtools plan` lists what makes a script fit, and each line that it gives makes it fit in a dry run."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from lightning_memtools.cli.dry_run import dry_run

pytestmark = pytest.mark.cuda_memory

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


def planned(path, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "lightning_memtools.cli.main", "plan", *arguments, str(path)],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip


def test_each_line_for_checkpointing_makes_the_script_fit(script):
    path = script(DEEP.replace("SIZE", "160"))
    done = planned(path, "--gpu", "RTX 4090", "--json")
    assert done.returncode == 3, done.stderr
    advice = json.loads(done.stdout)["advice"]
    codes = [one["code"] for one in advice if one["fits"] and one["code"].startswith("GradientCheckpointing(")]
    assert codes
    assert all(one["peak"] <= 24 * 2**30 for one in advice if one["fits"] and one["peak"] is not None)
    assert any(one["code"].startswith("DataLoader(batch_size=") for one in advice)
    for code in codes:
        assert dry_run(path, [code], gpu="RTX 4090").fits, code


def test_a_gpu_that_nobody_knows_is_status_2(script):
    done = planned(script("print()"), "--gpu", "RTX 4091")
    assert done.returncode == 2
    assert "RTX 4091" in done.stderr
