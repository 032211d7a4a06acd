from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing import resource_sharer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_memtools import OOMReport
from lightning_memtools.memory.oom_errors import worker_out_of_memory
from tests.lightning_models import Regression, trainer


class EndsItself(Dataset[list[torch.Tensor]]):
    """Ends the worker that reads sample 20 with a signal, as the kernel does."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        if index == 20:
            time.sleep(2)  # until its first batch has been received: torch says "connection reset" for one on its way
            os.kill(os.getpid(), self.number)
        return [torch.zeros(4), torch.zeros(1)]


class EndsWithABatchOnItsWay(EndsItself):
    """Ends the worker when its first batch is asked for: its connections are closed before its parent is told."""

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        sharer: Any = resource_sharer._resource_sharer  # type: ignore[attr-defined]
        sharer._serve = self.end
        return [torch.zeros(4), torch.zeros(1)]

    def end(self) -> None:
        resource_sharer._resource_sharer._listener.accept().close()  # type: ignore[attr-defined]
        time.sleep(0.1)
        os.kill(os.getpid(), self.number)


def test_a_worker_killed_with_a_batch_on_its_way_gets_the_same_page(tmp_path):
    loader = DataLoader(EndsWithABatchOnItsWay(signal.SIGKILL), 8, num_workers=1, multiprocessing_context="fork")
    run = trainer(tmp_path, OOMReport())
    with pytest.raises((OSError, EOFError)) as raised:
        run.fit(Regression(), loader)
    assert "host memory ran out" in raised.value.__notes__[-1]
    (page,) = (Path(run.log_dir) / "memtools").glob("oom-worker-train-step*.md")
    text = page.read_text()
    assert f"{type(raised.value).__name__}: " in text
    assert "(Killed)" in text


def test_an_error_of_the_users_files_is_no_dead_worker():
    for error in (FileNotFoundError("data.bin"), ConnectionResetError(104, "Connection reset by peer")):
        assert not worker_out_of_memory(error)


@pytest.mark.parametrize(
    ("number", "headline", "action"),
    [
        (signal.SIGKILL, "host memory ran out", "Use fewer workers"),
        (signal.SIGBUS, "the shared memory of loader workers (/dev/shm) ran out", "--shm-size"),
    ],
)
def test_a_worker_that_the_kernel_killed_gets_a_page_on_host_memory(number, headline, action, tmp_path, capsys):
    loader = DataLoader(EndsItself(number), 8, num_workers=2, multiprocessing_context="fork")
    run = trainer(tmp_path, OOMReport())
    with pytest.raises(RuntimeError, match="DataLoader worker") as raised:
        run.fit(Regression(), loader)
    assert headline in raised.value.__notes__[-1]
    assert headline in capsys.readouterr().out.replace("\n", " ")
    for worker in multiprocessing.active_children():  # the other one waits for as long as the error is alive
        worker.terminate()
        worker.join()
    (page,) = (Path(run.log_dir) / "memtools").glob("oom-worker-train-step*.md")
    text = page.read_text()
    assert text.splitlines()[0].endswith(headline)
    for words in (action, "Host memory now, after the worker's end: this process"):
        assert words in text
    assert "```" not in text  # a block of code does not wrap in TensorBoard
    assert ("Bus error" if number == signal.SIGBUS else "Killed") in text


def test_a_worker_that_crashed_is_another_matter():
    crashed = RuntimeError("DataLoader worker (pid 12) is killed by signal: Segmentation fault.")
    assert not worker_out_of_memory(crashed)
    assert worker_out_of_memory(RuntimeError("DataLoader worker (pid(s) 12) is killed by signal: Killed. "))
