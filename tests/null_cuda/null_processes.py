"""Processes on the null device."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import lightning as L
import torch
from torch import nn


def null_python(*options: str, **environment: str) -> dict[str, Any]:
    """The arguments with which `subprocess` starts a fresh Python on null devices."""
    clean = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"} | environment
    return {"args": [sys.executable, "-m", "lightning_memtools.null_cuda", *options], "env": clean, "text": True}


# Imports torch once, which takes seconds, and runs each piece of code in a process forked from there.
FORKS = """
import json, os, sys, torch
for code in map(json.loads, sys.stdin):
    readable, writable = os.pipe()
    if not (child := os.fork()):
        os.dup2(writable, 1)
        exec(code, {})
        sys.stdout.flush()
        os._exit(0)
    os.close(writable)
    text = open(readable).read()
    assert os.waitpid(child, 0)[1] == 0
    print(json.dumps(text), flush=True)
"""


class Classifier(L.LightningModule):
    """A model of torchvision with AdamW."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


TARGETS = """
import torch
from torch import nn

def large():
    with torch.device("meta"):
        model = nn.Linear(2**15, 2**17, bias=False)
    return model, torch.zeros(4, 2**15, device="meta"), lambda model, x: model(x).sum()

def divides():
    return nn.Linear(3, 3), torch.ones(2, 3), lambda model, x: model(x).sum() * (1 / model(x).sum().cpu().item())
"""


def command(folder, *arguments):
    """What `memtools estimate` prints where no device of a dry run was prepared."""
    (folder / "my_targets.py").write_text(TARGETS)
    clean = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD" and name[:9] != "NULL_CUDA"}
    return subprocess.run(
        [sys.executable, "-m", "lightning_memtools.cli.main", "estimate", *arguments],
        capture_output=True, text=True, check=False, timeout=300, cwd=folder, env=clean | {"COLUMNS": "200"},
    )  # fmt: skip
