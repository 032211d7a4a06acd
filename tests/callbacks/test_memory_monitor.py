from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader, TensorDataset

from lightning_memtools import LossCurves, MemoryMonitor, VirtualDevice
from lightning_memtools.callbacks.memory_monitor import _IS_FIRST_WITHOUT_PEAKS
from lightning_memtools.memory.readers import AcceleratorReader, CudaReader
from lightning_memtools.memory.sizes import MIB
from lightning_memtools.reporting.memory_run import MemoryRun
from tests.callbacks.memory_models import Wide, gib
from tests.event_files import scalars
from tests.lightning_models import Regression, loader, trainer


def test_a_spike_of_one_step_is_seen_at_the_point_that_follows_it(tmp_path):
    with VirtualDevice("1GiB"):
        run = trainer(tmp_path, MemoryMonitor(every_n_steps=11))
        run.fit(Wide({"train": [0, 50, 0, 0, 0, 0, 0, 0, 0, 100, 0, 0]}), loader(96, 8))
    peaks = dict(scalars(run.log_dir)["memory/train/peak_allocated_gib"])
    assert sorted(peaks) == [0, 1, 2, 4, 8, 10, 11]
    assert gib(50) < peaks[1] < gib(54)
    assert gib(100) < peaks[10] < gib(104)
    assert max(peaks[step] for step in (0, 2, 4, 8, 11)) < gib(8)


def test_a_validation_run_neither_hides_nor_fakes_a_training_peak(tmp_path):
    model = Wide({"train": [60, 0, 0, 30], "val": [0, 200]})
    with VirtualDevice("1GiB"):
        run = trainer(tmp_path, MemoryMonitor(every_n_steps=100), val_check_interval=2)
        run.fit(model, loader(32, 8), loader(8, 8))
    curves = scalars(run.log_dir)
    first, *others = (peak for _, peak in curves["memory/train/peak_allocated_gib"])
    assert gib(60) < first < gib(66)
    assert gib(30) < max(others) < gib(34)
    (first, second) = curves["memory/val/peak_allocated_gib"]
    assert (first[0], second[0]) == (1, 3)
    assert first[1] < gib(8)
    assert gib(200) < second[1] < gib(204)


def test_every_stage_has_its_tags_and_the_composition_adds_up_to_the_peak(tmp_path):
    model = Wide({"test": [64], "predict": [32]})
    with VirtualDevice("1GiB", used_by_others="100MiB"):
        run = trainer(tmp_path, MemoryMonitor(phases=True))
        run.fit(model, loader(), loader(8))
        run.test(model, loader(8), verbose=False)
        run.predict(model, loader(8))
    curves = scalars(run.log_dir)
    for stage in ("train", "val", "test", "predict"):
        for figure in ("allocated_gib", "reserved_gib", "peak_allocated_gib", "peak_reserved_gib", "peak_used_pct",
                       "fragmentation_pct"):  # fmt: skip
            assert f"memory/{stage}/{figure}" in curves, (stage, figure)
    assert curves["memory/capacity_gib"][0][1] == 1.0
    used, reserved = curves["memory/device_used_gib"][-1][1], curves["memory/predict/reserved_gib"][-1][1]
    assert used == pytest.approx(reserved + gib(100))
    assert curves["memory/alloc_retries"][-1][1] == 0
    assert len(curves["time/step_ms"]) == 4
    peak = dict(curves["memory/train/peak_allocated_gib"])
    parts = [dict(points) for tag, points in curves.items() if tag.startswith("memory/composition/")]
    assert len(parts) == 6
    for step in range(4):
        assert sum(part[step] for part in parts) == pytest.approx(peak[step])
    assert dict(curves["memory/composition/parameters_gib"])[2] == gib(1)
    assert dict(curves["memory/composition/gradients_gib"])[2] in {0.0, gib(1)}
    phases = {phase: curves[f"memory/train/peak_{phase}_gib"][-1][1] for phase in ("forward", "backward", "optimizer")}
    assert max(phases.values()) == pytest.approx(peak[3])
    assert phases["backward"] > phases["optimizer"] >= gib(2)  # weights and their gradients


class Slow(Regression):
    """Sleeps in each part of a step, and in validation."""

    def training_step(self, batch, batch_idx):
        time.sleep(0.02)
        loss = super().training_step(batch, batch_idx)
        loss.register_hook(lambda _: time.sleep(0.03))
        return loss

    def validation_step(self, batch, batch_idx):
        time.sleep(1)
        return super().validation_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        optimizer.register_step_post_hook(lambda *_: time.sleep(0.04))
        return optimizer


class SlowRows(TensorDataset):
    def __getitem__(self, index):
        time.sleep(0.01)
        return super().__getitem__(index)


@pytest.mark.parametrize("device", ["cpu", "virtual"])
def test_the_host_time_of_a_step_is_divided(device, tmp_path):
    rows = SlowRows(torch.randn(32, 4), torch.randn(32, 1))
    with VirtualDevice() if device == "virtual" else nullcontext():
        run = trainer(tmp_path, MemoryMonitor(phases=True), max_epochs=2)
        run.fit(Slow(), DataLoader(rows, batch_size=8), loader(8))
    curves = scalars(run.log_dir)
    times = {phase: dict(curves[f"time/{phase}_ms"]) for phase in ("step", "data", "forward", "backward", "optimizer")}
    least = {"data": 80, "forward": 20, "backward": 30, "optimizer": 40}
    for phase, milliseconds in least.items():
        # Lightning has fetched the last batch of an epoch before it runs the one before: it waits for no data there.
        waits = [step for step in range(8) if phase != "data" or step % 4 == 1]
        assert all(times[phase][step] >= milliseconds for step in waits), (phase, times[phase])
        assert max(times[phase].values()) < 1000, "validation is no part of a step"
    for step in range(8):
        assert sum(times[phase][step] for phase in least) <= times["step"][step] + 1


def test_the_summary_is_a_file_a_text_and_one_short_block_on_the_console(tmp_path, capsys):
    model = Wide({"train": [100], "test": [40]})
    with VirtualDevice("512MiB"):
        run = trainer(tmp_path, MemoryMonitor(), max_epochs=5)
        run.fit(model, loader(), loader(8))
        fit_says = capsys.readouterr().out
        run.test(model, loader(8), verbose=False)
    assert fit_says.count("Memory peaks on") == 1
    assert "simulated" in fit_says
    text = (Path(run.log_dir) / "memtools" / "memory_summary_fit.md").read_text()
    assert "| train | 10" in text
    assert "| val | " in text
    assert "parameters" in text
    assert "CUDA memory summary" not in text  # torch's table shows counters that the monitor has reset
    assert (Path(run.log_dir) / "memtools" / "memory_summary_test.md").exists()


def test_a_plain_cpu_gets_host_memory_and_one_line_that_says_how_to_see_more(tmp_path, capsys):
    _IS_FIRST_WITHOUT_PEAKS.said.clear()  # another test of this process may have had it printed
    run = trainer(tmp_path, MemoryMonitor())
    run.fit(Regression(), loader())
    curves = scalars(run.log_dir)
    tags = {tag for tag in curves if tag.startswith(("memory", "time")) and not tag.startswith("memory/host/")}
    assert tags == {"memory/host_rss_gib", "time/step_ms"}
    told = {tag.removeprefix("memory/host/") for tag in curves if tag.startswith("memory/host/")}
    assert told - {"shared_gib"} == {f"{name}_gib" for name in ("process", "unique", "workers", "used", "limit")}
    process, unique = curves["memory/host/process_gib"][0][1], curves["memory/host/unique_gib"][0][1]
    assert 0 < unique <= process <= curves["memory/host/used_gib"][0][1] + 1
    trainer(tmp_path, MemoryMonitor()).fit(Regression(), loader())
    said = capsys.readouterr().out
    assert (said.count("VirtualDevice"), said.count("Memory on cpu")) == (1, 1)
    assert "VirtualDevice" in (Path(run.log_dir) / "memtools" / "memory_summary_fit.md").read_text()


def test_a_device_without_statistics_is_named_once_and_other_tags_are_logged(tmp_path):
    class AnyAccelerator(CPUAccelerator):
        def setup_device(self, device):
            pass

    # No device without statistics is here but "meta", on which a Trainer cannot run: the hook and the core are called.
    strategy = SingleDeviceStrategy(device="meta", accelerator=AnyAccelerator())
    monitor = MemoryMonitor()
    with pytest.warns(UserWarning, match="meta keeps no memory statistics") as caught:
        monitor.setup(trainer(tmp_path, monitor, strategy=strategy, accelerator="auto"), Regression(), "fit")
    assert len([w for w in caught if "statistics" in str(w.message)]) == 1
    points: list[set[str]] = []
    run = MemoryRun(torch.device("meta"), None, lambda scalars, step: points.append(set(scalars)), call="fit")
    run.begin_training(0, [], between_phases=None)
    run.add_point("train", 0, Regression(), [])
    assert {tag for tag in points[0] if not tag.startswith("memory/host")} == {"time/step_ms"}
    assert "meta keeps no memory statistics" in run.summary(waits_for_ranks=False).markdown()


@pytest.mark.parametrize("made", [MemoryMonitor, LossCurves])
@pytest.mark.parametrize("bad", [0, -1])
def test_an_interval_below_one_is_refused_with_its_value(made, bad):
    with pytest.raises(ValueError, match=f"every_n_steps={bad} "):
        made(every_n_steps=bad)


@pytest.mark.cuda_memory
@pytest.mark.parametrize("kind", [CudaReader, AcceleratorReader])
def test_the_reader_says_what_torch_cuda_says(kind):
    device = torch.device("cuda", 0)
    kept = torch.empty(3 * MIB + 1, dtype=torch.uint8, device=device)
    torch.empty(50 * MIB, dtype=torch.uint8, device=device)
    stats = kind(device).stats()
    assert stats.allocated == torch.cuda.memory_allocated()
    assert stats.reserved == torch.cuda.memory_reserved()
    assert stats.peak_allocated == torch.cuda.max_memory_allocated()
    assert stats.peak_reserved == torch.cuda.max_memory_reserved()
    flat = torch.cuda.memory_stats()
    assert stats.active == flat["active_bytes.all.current"]
    assert stats.inactive_split == flat["inactive_split_bytes.all.current"]
    assert stats.requested == flat["requested_bytes.all.current"]
    assert (stats.alloc_retries, stats.ooms) == (flat["num_alloc_retries"], flat["num_ooms"])
    assert stats.capacity == torch.cuda.mem_get_info()[1]
    assert stats.device_used >= stats.reserved
    del kept


@pytest.mark.cuda_memory
def test_no_step_waits_for_cuda(tmp_path):
    class NoWaiting(L.Callback):
        """Makes everything between the first step's end and the epoch's end raise if it synchronises."""

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            torch.cuda.set_sync_debug_mode("error" if batch_idx < 30 else "default")

    class Plain(Regression):
        def training_step(self, batch, batch_idx):
            return self.loss(batch)  # without the test's own float()

        def on_train_epoch_end(self):
            torch.cuda.set_sync_debug_mode("default")

    def resident():
        for _ in range(32):
            yield [torch.randn(8, 4, device="cuda"), torch.randn(8, 1, device="cuda")]

    try:
        run = trainer(
            tmp_path, MemoryMonitor(phases=True), LossCurves(), NoWaiting(), accelerator="gpu", devices=1,
            logger=L.pytorch.loggers.CSVLogger(tmp_path), limit_train_batches=32,
        )  # fmt: skip
        run.fit(Plain(), resident())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert run.global_step == 32


def test_the_last_point_of_a_run_that_fails_shows_why(tmp_path):
    with VirtualDevice("64MiB"):
        run = trainer(tmp_path, MemoryMonitor(every_n_steps=2))
        with pytest.raises(torch.OutOfMemoryError):
            run.fit(Wide({"train": [1, 1, 1, 1, 1, 1, 2, 100]}), loader(80, 8))
    logged = scalars(run.log_dir)
    assert logged["memory/ooms"] == [*((step, 0.0) for step in (0, 1, 2, 3, 4, 5)), (7, 1.0)]
    assert dict(logged["memory/train/peak_allocated_gib"])[7] >= gib(3)  # the step that was not due for a point counts
