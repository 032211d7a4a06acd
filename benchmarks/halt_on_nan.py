"""What HaltOnNaN costs in a training step, beside other checks for NaN, on a transformer of 25 million parameters.

One real run of the Trainer for each batch size; the checks take turns from step to step, so that a slow moment of the
machine hits all of them. Each figure is over the mean of the bare steps before and after: the time inside the check's
own hooks (on a CPU that is all it adds, but for what it does to caches), and what the whole step takes longer; on the
wall, and in processor time, which other work on the machine disturbs less. On a GPU only the whole step on the wall
means anything, and each step ends with a synchronisation.

    python benchmarks/halt_on_nan.py

What it adds to a small step, where Lightning's calls of hooks count, is in step_cost.py.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.callbacks.spike import SpikeDetection
from machine import save, spread
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_memtools.callbacks.halt_on_nan import HaltOnNaN

WORDS, WIDTH, LAYERS = 8192, 512, 8
SHAPES = {"4x64": (4, 64), "1x16": (1, 16)}
ROUNDS, WARM_UP = 8, 1


class Transformer(L.LightningModule):
    """A language model with 101 parameter tensors."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 8, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.zeros(64, WIDTH))
        self.body = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.fused = fused

    def training_step(self, batch: Tensor) -> Tensor:
        x = self.words(batch) + self.places[: batch.shape[1]]
        return F.cross_entropy(self.head(self.body(x))[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=self.fused)


class Check(Callback):
    """A check made of functions, each in the place of a hook."""

    def __init__(self, **hooks: Callable[..., object]) -> None:
        for name, function in hooks.items():
            setattr(self, name, function)


def is_nan(loss: Tensor) -> bool:
    return bool(torch.isnan(loss).item())


def are_finite(module: nn.Module) -> bool:
    return all(torch.isfinite(p.grad).all().item() for p in module.parameters() if p.grad is not None)


def cases(root: str) -> dict[str, Callback]:
    return {
        "HaltOnNaN": HaltOnNaN(),
        "isnan of the loss": Check(on_before_backward=lambda _trainer, _module, loss: is_nan(loss)),
        "clip_grad_norm_": Check(
            on_before_optimizer_step=lambda _trainer, module, _optimizer: nn.utils.clip_grad_norm_(
                module.parameters(), 1e6
            )
        ),
        "isfinite of each parameter": Check(
            on_before_optimizer_step=lambda _trainer, module, _optimizer: are_finite(module)
        ),
        "SpikeDetection": SpikeDetection(
            finite_only=False, atol=1e9, exclude_batches_path=str(Path(root) / "skip.json")
        ),
        "detect_anomaly": Check(
            on_train_batch_start=lambda *_: torch.autograd.set_detect_anomaly(True),
            on_train_batch_end=lambda *_: torch.autograd.set_detect_anomaly(False),
        ),
    }


class Clock:
    """Adds up seconds: on the wall, and of this process on all cores."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def start(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        self.wall += time.perf_counter() - self._began[0]
        self.cpu += time.process_time() - self._began[1]


class TakeTurns(Callback):
    """Lets one of the callbacks act in each step, and times it; every second step is bare."""

    def __init__(self, cases: dict[str, Callback]) -> None:
        self.cases = cases
        names = list(cases)
        self.order: list[str | None] = [name for each in names for name in (each, None)]
        self.steps: list[tuple[str | None, Clock, Clock]] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for callback in self.cases.values():
            callback.setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for callback in self.cases.values():
            callback.on_train_start(trainer, pl_module)

    def on_train_batch_start(self, *args: Any) -> None:
        self.name = self.order[args[-1] % len(self.order)]
        self.inside = Clock()
        self.whole = Clock()
        self.whole.start()
        self._act("on_train_batch_start", *args)

    def on_before_backward(self, *args: Any) -> None:
        self._act("on_before_backward", *args)

    def on_before_optimizer_step(self, *args: Any) -> None:
        self._act("on_before_optimizer_step", *args)

    def on_train_batch_end(self, *args: Any) -> None:
        self._act("on_train_batch_end", *args)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.whole.stop()
        self.steps.append((self.name, self.whole, self.inside))

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for callback in self.cases.values():
            callback.teardown(trainer, pl_module, stage)

    def _act(self, hook: str, *args: Any) -> None:
        if self.name is None:
            return
        self.inside.start()
        getattr(self.cases[self.name], hook)(*args)
        self.inside.stop()


def measure(shape: tuple[int, int], *, fused: bool, root: str) -> dict[str, Any]:
    torch.manual_seed(0)
    turns = TakeTurns(cases(root))
    n_steps = len(turns.order) * (WARM_UP + ROUNDS) + 1
    batches: Any = [torch.randint(0, WORDS, shape) for _ in range(n_steps)]
    model = Transformer(fused=fused)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        L.Trainer(
            accelerator="auto", devices=1, default_root_dir=root, max_epochs=1, logger=False, callbacks=[turns],
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ).fit(model, DataLoader(batches, batch_size=None))  # fmt: skip
    steps = turns.steps[len(turns.order) * WARM_UP :]
    found: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tensors": len(list(model.parameters())),
        "bare_step_ms": spread([1e3 * whole.wall for name, whole, _ in steps if name is None]),
    }
    for case in turns.cases:
        found[case] = {}
        for time_of in ("cpu", "wall"):
            inside, added = [], []
            for before, (name, whole, within), after in zip(steps, steps[1:], steps[2:], strict=False):
                if name == case:
                    bare = (getattr(before[1], time_of) + getattr(after[1], time_of)) / 2
                    inside.append(getattr(within, time_of) / bare)
                    added.append(getattr(whole, time_of) / bare - 1)
            found[case][f"inside_its_hooks_{time_of}"] = spread(inside)
            found[case][f"whole_step_{time_of}"] = spread(added)
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        save("halt_on_nan", {
            optimizer: {name: measure(shape, fused=bool(fused), root=root) for name, shape in SHAPES.items()}
            for fused, optimizer in enumerate(("AdamW", "AdamW(fused=True)"))
        })  # fmt: skip


if __name__ == "__main__":
    main()
