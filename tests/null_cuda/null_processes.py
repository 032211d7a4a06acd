"""Processes on the null device."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import torch
from torch import nn


def null_python(*options: str) -> dict[str, Any]:
    """The arguments with which `subprocess` starts a fresh Python on null devices."""
    clean = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
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


@contextlib.contextmanager
def forks(*options: str) -> Iterator[Callable[[str], str]]:
    """Run pieces of code, which must succeed, each in a process of its own, and return what it printed."""
    with subprocess.Popen(
        **null_python(*options, "-c", FORKS), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        asked, answered = process.stdin, process.stdout
        assert asked is not None
        assert answered is not None

        def run(code: str) -> str:
            asked.write(json.dumps(textwrap.dedent(code)) + "\n")
            asked.flush()
            return str(json.loads(answered.readline())).strip()

        yield run
        asked.close()


class Classifier(L.LightningModule):
    """A model of torchvision with AdamW."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
