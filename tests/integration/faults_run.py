"""Runs two ranks into a fault, without any callback of ours and with them; started by test_faults.py.

python faults_run.py FOLDER

"with" are the default callbacks, and "every" the others too: GradientCheckpointing, OOMRecovery and BatchSizeTuner.

Every rank is a fork of this process, which has imported everything: a run takes a second or two of a processor. Several
runs go on at once, because most of them sleep or wait for each other.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_memtools import BatchSizeTuner, GradientCheckpointing, OOMRecovery, VirtualDevice, default_callbacks
from tests.lightning_models import Regression, loader, trainer

LIMIT_S = {"without": 60, "with": 60, "every": 120}
"""A rank that runs longer is ended, and counts as hanging. A search of the batch size takes up to half a minute."""

AT_ONCE = 4
"""Pairs of ranks that run at the same time."""

SLOW_S = 7.0
"""Longer than our callbacks ever wait at the end of a run."""

LATE_S = 25.0
"""Longer than the process group's limit."""


class Faulty(Regression):
    """Calls the fault in each hook of rank 1. Its layers are worth recomputing, and its batch size can be tuned."""

    batch_size = 8

    def __init__(self, fault: Fault, n_batches: int, n_validation_batches: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(4, 4), nn.Tanh())), self.net)
        self.fault = fault
        self.n_samples = (8 * n_batches, 8 * n_validation_batches)

    def loss(self, batch: Any) -> Any:
        return super().loss([one.repeat(256, 1) for one in batch])

    def train_dataloader(self) -> Any:
        return loader(self.n_samples[0], self.batch_size, seed=self.global_rank)

    def val_dataloader(self) -> Any:
        return loader(self.n_samples[1], 8, seed=self.global_rank)

    def meet(self, moment: str) -> None:
        if self.global_rank == 1:
            self.fault(moment, self.trainer)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            self.meet("step")
        self.log("batch_idx", float(batch_idx))  # so that the logger has something to write without us too
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.meet("validation")

    def on_train_end(self) -> None:
        self.meet("train_end")

    def on_fit_end(self) -> None:
        self.meet("fit_end")

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            self.meet("test_step")
        return super().test_step(batch, batch_idx)

    def on_test_end(self) -> None:
        self.meet("test_end")


Fault = Callable[[str, L.Trainer], None]


class FaultError(Exception):
    """Raised by the code of a user."""


def at(moment: str, act: Callable[[L.Trainer], object]) -> Fault:
    def fault(now: str, trainer: L.Trainer) -> None:
        if now == moment:
            act(trainer)

    return fault


def fail(trainer: L.Trainer) -> None:
    raise FaultError("from the user's code")


def stop(trainer: L.Trainer) -> None:
    trainer.should_stop = True


def nothing(moment: str, trainer: L.Trainer) -> None:
    """Meet no fault here; the data or the file system has it."""


_ACTS: dict[str, tuple[Callable[[L.Trainer], object], tuple[str, ...]]] = {
    "slow": (lambda _: time.sleep(SLOW_S), ("validation", "train_end", "fit_end", "test_end")),
    "raises": (fail, ("step", "validation", "train_end", "fit_end", "test_end")),
    "dies": (lambda _: os.kill(os.getpid(), signal.SIGKILL), ("step", "train_end", "test_step")),
    "sigterm": (lambda _: os.kill(os.getpid(), signal.SIGTERM), ("step",)),
    "ctrl_c": (lambda _: os.kill(os.getpid(), signal.SIGINT), ("step",)),
}

LAST = {
    "raises_in_the_last_validation": at("validation", fail),
    "raises_in_the_last_hook": at("fit_end", fail),
    "late_in_the_last_hook": at("fit_end", lambda _: time.sleep(LATE_S)),
}
"""Their runs end with the fit, so that the other rank can succeed."""

FAULTS: dict[str, Fault] = {
    **dict.fromkeys(("none", "fewer_batches", "fewer_validation_batches", "disk_full", "log_directory_gone"), nothing),
    "stops_at_step": at("step", stop),
    **{f"{name}_at_{moment}": at(moment, act) for name, (act, moments) in _ACTS.items() for moment in moments},
    **LAST,
}
EVERY = ("none", "fewer_batches", "raises_at_step", "dies_at_step", "slow_at_fit_end", "ctrl_c_at_step")
"""Those that are met with all callbacks, too."""


def n_batches(name: str, rank: int, n: int) -> int:
    return n - 4 if "fewer" in name and rank == 1 else n


def callbacks(kind: str) -> list[L.Callback]:
    if kind == "without":
        return []
    tuner = BatchSizeTuner(stages=("train",), max_trials=2, max_val=8)
    others = [GradientCheckpointing(), OOMRecovery(loss="mean"), tuner]
    return [*default_callbacks(), *(others if kind == "every" else [])]


class LosesItsDirectory(L.Callback):
    """Deletes the log directory, or leaves no room for another file, when the first batch ends on rank 0."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_rank == 0 and args[-1] == 0:
            if self.name == "log_directory_gone":
                shutil.rmtree(str(trainer.log_dir))
            elif self.name == "disk_full":
                for logger in trainer.loggers:
                    logger.experiment.flush()  # type: ignore[attr-defined]
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def train(name: str, root: Path, rank: int, kind: str) -> None:
    """One fit and one test of one rank."""
    L.seed_everything(0, verbose=False)
    uneven_training = "fewer_validation" not in name
    model = Faulty(
        FAULTS[name], n_batches=n_batches(name if uneven_training else "", rank, 8),
        n_validation_batches=n_batches(name, rank, 6),
    )  # fmt: skip
    extra = [LosesItsDirectory(name)] if name in {"disk_full", "log_directory_gone"} else []
    run = trainer(
        root,
        *callbacks(kind),
        *extra,
        logger=TensorBoardLogger(root, name="", version="logs"),
        strategy=DDPStrategy(timeout=timedelta(seconds=20)),
        devices=2,
        use_distributed_sampler=False,
    )
    with VirtualDevice("1GiB"):
        run.fit(model)
        if name not in LAST:
            n_tested = n_batches(name if not uneven_training else "", rank, 6)
            run.test(model, loader(8 * n_tested, 8, seed=rank), verbose=False)


def rank_process(name: str, root: Path, rank: int, port: int, kind: str) -> None:
    # A process that a shell starts in the background ignores Ctrl-C, and its children do.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with (root / f"rank{rank}.txt").open("w", buffering=1) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        code = 1
        try:
            train(name, root, rank, kind)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:  # noqa: BLE001, the log tells
            with contextlib.suppress(OSError):
                traceback.print_exc()
        finally:
            os._exit(code)


class Run:
    """Two ranks that run; `seen` is what is known of how they ended."""

    def __init__(self, name: str, root: Path, kind: str) -> None:
        root.mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._limit_s = LIMIT_S[kind]
        self.seen: dict[str, Any] = {"exit": [None, None], "seconds": [self._limit_s] * 2}
        self._begin = time.monotonic()
        self._pids: dict[int, int] = {}
        for rank in (0, 1):
            pid = os.fork()
            if pid == 0:
                rank_process(name, root, rank, port, kind)
            self._pids[pid] = rank

    def is_over(self) -> bool:
        """Note which ranks have ended; end those that take too long."""
        seconds = round(time.monotonic() - self._begin, 1)
        for pid, rank in list(self._pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._pids[pid]
                self.seen["exit"][rank] = os.waitstatus_to_exitcode(status)
                self.seen["seconds"][rank] = seconds
            elif seconds > self._limit_s:
                del self._pids[pid]
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        return not self._pids


def main(root: Path, names: list[str], every: Collection[str]) -> dict[str, dict[str, Any]]:
    """Run faults; with all callbacks those that `every` names."""
    torch.set_num_threads(1)
    seen: dict[str, dict[str, Any]] = {name: {} for name in names}
    waiting = [(name, kind) for name in names for kind in ("without", "with", *(["every"] if name in every else []))]
    running: dict[tuple[str, str], Run] = {}
    while waiting or running:
        if waiting and len(running) < AT_ONCE:
            name, kind = waiting.pop(0)
            running[name, kind] = Run(name, root / name / kind, kind)
        for name, kind in [key for key, run in running.items() if run.is_over()]:
            seen[name][kind] = running.pop((name, kind)).seen
            print(name, kind, seen[name][kind], flush=True)  # noqa: T201, shown when the test fails
        time.sleep(0.02)
    (root / "seen.json").write_text(json.dumps(seen))
    return seen


if __name__ == "__main__":
    main(Path(sys.argv[1]), [*FAULTS], EVERY)
