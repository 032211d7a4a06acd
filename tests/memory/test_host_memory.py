from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_memtools import MemoryMonitor
from lightning_memtools.memory.host_memory import HostMemory, HostWatch, ProcessMemory, read_host_memory
from lightning_memtools.memory.shared_memory import container_use
from lightning_memtools.memory.sizes import GIB, MIB
from lightning_memtools.reporting import memory_run
from tests.lightning_models import Regression, trainer

N = 500_000


class Lists(Dataset[float]):
    def __init__(self):
        self.items = [f"{i:0150d}" for i in range(N)]  # 200 bytes each, as Python objects

    def __len__(self):
        return N

    def __getitem__(self, index):
        return float(len(self.items[index]))


class Array(Lists):
    def __init__(self):
        self.items = np.arange(25 * N, dtype=float)  # as large

    def __getitem__(self, index):
        return float(self.items[25 * index])


def in_fresh_process(expression):
    """Return the value of a list of texts, from a process without what earlier tests hold.

    Growth is judged beside all that a run holds.
    """
    code = f"import json; from {__name__} import *; print(json.dumps({expression}))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def batch_of_four(_):
    return [torch.zeros(8, 4), torch.zeros(8, 1)]


def warnings_of_a_run(dataset, root) -> list[str]:
    """What a fit with the monitor warns of, while two real workers read a data set."""
    data = DataLoader(
        dataset, 1000, shuffle=True, num_workers=2, multiprocessing_context="fork", collate_fn=batch_of_four
    )
    often = partial(HostWatch, share=1.0)  # a run of seconds is too short for the usual share
    with warnings.catch_warnings(record=True) as said, patch.object(memory_run, "HostWatch", often):
        warnings.simplefilter("always")
        trainer(root, MemoryMonitor(every_n_steps=10)).fit(Regression(), data)
    return [str(one.message) for one in said]


def test_workers_that_copy_a_list_of_objects_are_named(tmp_path):
    said = "\n".join(in_fresh_process(f"warnings_of_a_run(Lists(), {str(tmp_path)!r})"))
    assert re.search(r"2 loader workers has grown by .* NumPy array", said)


def test_workers_that_share_an_array_are_not_named(tmp_path):
    assert "loader workers" not in "\n".join(in_fresh_process(f"warnings_of_a_run(Array(), {str(tmp_path)!r})"))


def test_the_figures_are_those_of_psutil():
    now = read_host_memory()
    full = psutil.Process().memory_full_info()
    assert now.process.proportional == pytest.approx(full.pss, rel=0.1)
    assert now.process.unique == pytest.approx(full.uss, rel=0.1)
    assert now.workers == ()
    assert now.pinned is None or torch.cuda.is_available()
    assert 0 < now.used <= now.limit


FAKE = HostMemory(ProcessMemory(1, GIB, GIB), (), None, 2 * GIB, 8 * GIB, in_container=True, shared=0)


def looked(sizes):
    """The warnings of each look at a process of these sizes in MiB, one look per epoch."""
    read = iter([replace(FAKE, process=ProcessMemory(1, size * MIB, 0)) for size in sizes])
    watch = HostWatch(share=1e9, read=lambda: next(read))
    return [watch.look(epoch=epoch)[1] for epoch in range(len(sizes))]


def test_growth_over_three_epochs_is_said_once_and_a_first_epoch_does_not_count():
    *before, said, after = looked([1000, 2000, 2500, 3000, 3500, 4000])
    assert before == [[], [], [], []]
    assert "2.44 GiB, 2.93 GiB" in said[0]
    assert after == []
    assert looked([1000, 2000, 2000, 2000, 2000]) == [[]] * 5


def test_a_nearly_full_container_is_said_with_its_parts():
    full = replace(FAKE, used=int(7.5 * GIB), workers=(ProcessMemory(2, GIB, GIB),), pinned=512 * MIB)
    ((said,),) = [HostWatch(read=lambda: full).look()[1]]
    for words in (
        "nearly full",
        "loader worker(s) 1.00 GiB",
        "pinned 512 MiB",
        "7.50 GiB of the container's limit of 8.00 GiB",
    ):
        assert words in said


def test_looking_takes_no_more_than_its_share_of_the_time():
    watch = HostWatch(share=1e-6, read=lambda: FAKE)
    assert watch.look()[0] is FAKE
    assert watch.look() == (None, [])


def test_both_versions_of_cgroups(tmp_path):
    two, one = tmp_path / "two", tmp_path / "one"
    for place, names in ((two, ("memory.max", "memory.current", "inactive_file")),
                         (one, ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))):  # fmt: skip
        place.mkdir()
        (place / names[0]).write_text("1000\n")
        (place / names[1]).write_text("300\n")
        (place / "memory.stat").write_text(f"cache 120\n{names[2]} 100\n")
        assert container_use(place) == (200, 1000)
    (one / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert container_use(one) is None
