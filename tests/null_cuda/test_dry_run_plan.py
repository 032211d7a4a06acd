"""`memtools dry-run --advise` lists what makes a script fit, and each line that it gives makes it fit in a dry run."""

from __future__ import annotations

import json

import pytest

from lightning_memtools.cli.main import main
from lightning_memtools.null_cuda.dry_run.api import dry_run
from tests.null_cuda.dry_run_scripts import command

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


def test_each_line_for_checkpointing_makes_the_script_fit(script):
    path = script(DEEP.replace("SIZE", "160"))
    done = command("--advise", "--gpu", "RTX 4090", "--json", str(path))
    assert done.returncode == 3, done.stderr
    advice = json.loads(done.stdout)["advice"]
    codes = [one["code"] for one in advice if one["fits"] and one["code"].startswith("GradientCheckpointing(")]
    assert codes
    assert all(one["peak_bytes"] <= 24 * 2**30 for one in advice if one["fits"] and one["peak_bytes"] is not None)
    assert any(one["code"].startswith('Trainer(strategy="fsdp"') for one in advice)
    assert any(one["code"].startswith("DataLoader(batch_size=") for one in advice)
    for code in codes:
        assert dry_run(path, [code], gpu="RTX 4090").fits, code


@pytest.mark.parametrize(("options", "said"), [((), "RTX 4090"), (("--gpu", "RTX 4091"), "RTX 4091")])
def test_plan_is_the_same_command_and_needs_a_gpu_that_is_known(script, options, said, capsys):
    assert main(["plan", *options, str(script("print()"))]) == 2
    assert said in capsys.readouterr().err
