from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_memtools import VirtualDevice
from lightning_memtools.callbacks.empty_cache import EmptyCache
from lightning_memtools.memory.sizes import MIB
from tests.callbacks import memory_models
from tests.lightning_models import Regression, loader, trainer
from tests.list_logger import ListLogger

pytestmark = pytest.mark.usefixtures("quick_collections")


def quiet(root: Path, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    return trainer(root, *callbacks, **({"logger": ListLogger()} | options))


class Wide(memory_models.Wide):
    """512 bytes of weights, in a small segment of 2 MiB; takes what it is told to in each step."""

    def __init__(self, **mib: list[list[int]]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 1, bias=False))
        self.mib = mib

    def take(self, stage):
        """Holds all sizes of the step at once, as a forward pass holds its activations."""
        steps = self.mib.get(stage, [[]])
        sizes = steps[self.n_steps[stage] % len(steps)]
        self.n_steps[stage] += 1
        return [torch.empty(mib * MIB, dtype=torch.uint8, device=self.device) for mib in sizes]

    def training_step(self, batch, batch_idx):
        held = self.take("train")
        loss = self.loss(batch)
        del held
        return loss

    def validation_step(self, batch, batch_idx):
        self.take("val")


class Reserved(L.Callback):
    """Notes what is reserved in every validation batch, in MiB."""

    def __init__(self) -> None:
        self.mib: list[float] = []

    def on_validation_batch_end(self, *args):
        device = VirtualDevice.current()
        self.mib.append((device.stats().reserved or 0) / MIB)


def in_mib(curves, tag):
    return [(step, gib * 1024) for step, gib in curves[tag]]


@pytest.mark.parametrize("with_it", [True, False])
def test_batches_small_large_small_with_validation_between(with_it, tmp_path):
    model = Wide(train=[[10], [100], [10]], val=[[12]])
    reserved = Reserved()
    with VirtualDevice("200MiB"):
        callbacks = [EmptyCache(), reserved] if with_it else [reserved]
        run = quiet(tmp_path, *callbacks, val_check_interval=1, num_sanity_val_steps=0)
        run.fit(model, loader(24, 8), loader(8, 8))
    # The small segment of 2 MiB; without EmptyCache the training's segments stay as well.
    assert reserved.mib == ([14, 14, 14] if with_it else [24, 124, 124])
    if with_it:
        # At the start of an evaluation what training had, 10 or 100; at its end validation's 12. Training begins,
        # and fit ends, with nothing to give.
        assert in_mib(run.logger.curves, "memory/cache/freed_gib") == [
            (0, 0), (0, 10), (1, 12), (1, 100), (2, 12), (2, 10), (3, 12), (3, 0),
        ]  # fmt: skip


def pinned(root, *callbacks):
    """Validation needs 20 + 190 + 190 MiB after training had 200 + 200, of 520."""
    model = Wide(train=[[200, 200]], val=[[20, 190, 190]])
    with VirtualDevice("520MiB") as device:
        run = quiet(root, *callbacks, num_sanity_val_steps=0, logger=False)
        try:
            run.fit(model, loader(8, 8), loader(8, 8))
        finally:
            stats = device.stats()
    return model, stats


def test_validation_at_another_shape_passes_only_when_the_cache_is_emptied(tmp_path):
    """Without it, a live tensor pins a segment, and the allocator's own retry does not help."""
    seen = []

    class Note(L.Callback):
        def on_exception(self, trainer, pl_module, exception):
            stats = VirtualDevice.current().stats()
            seen.append((stats.alloc_retries, stats.ooms))

    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        pinned(tmp_path, Note())
    assert seen == [(1, 1)]
    model, stats = pinned(tmp_path, EmptyCache())
    assert model.n_steps["val"] == 1
    assert stats.alloc_retries == 0


@pytest.mark.parametrize(
    ("arguments", "capacity", "reserved", "freed"),
    [
        ({"min_reclaimable": 0.15}, "200MiB", 24, [0, 0, 0, 0]),
        ({"min_reclaimable": 0}, "1GiB", 2, [0, 10, 12, 0]),
        ({}, "1GiB", 24, [0, 0, 0, 0]),  # less than 51 MiB
        ({"min_reclaimable": 22 / 24}, None, 2, [0, 0, 22, 0]),  # without a capacity, a share of what is reserved
        ({"min_reclaimable": 22.1 / 24}, None, 24, [0, 0, 0, 0]),
    ],
)
def test_at_every_boundary_all_is_released_or_less_than_the_minimum_stays(
    arguments, capacity, reserved, freed, tmp_path
):
    model = Wide(train=[[10]], val=[[12]])
    with VirtualDevice(capacity) as device:
        run = quiet(tmp_path, EmptyCache(**arguments), num_sanity_val_steps=0)
        run.fit(model, loader(8, 8), loader(8, 8))
        assert device.stats().reserved == reserved * MIB
    assert [mib for _, mib in in_mib(run.logger.curves, "memory/cache/freed_gib")] == freed


def test_standalone_runs_release_the_cache_at_their_start_and_end(tmp_path):
    with VirtualDevice("200MiB") as device:
        model = Wide(val=[[50]], test=[[60]], predict=[[70]])
        torch.empty(30 * MIB, dtype=torch.uint8)
        run = quiet(tmp_path, EmptyCache())
        run.validate(model, loader(8, 8), verbose=False)
        run.test(model, loader(8, 8), verbose=False)
        run.predict(model, loader(8, 8))
        assert device.stats().reserved == 2 * MIB
    assert [mib for _, mib in in_mib(run.logger.curves, "memory/cache/freed_gib")] == [30, 50, 0, 60, 0, 70]


def test_what_stays_is_the_model_and_its_optimizer_by_arithmetic(tmp_path):
    class Model(Wide):
        def __init__(self):
            super().__init__()
            self.wide = nn.Linear(1024, 1024, bias=False)  # 4 MiB

        def training_step(self, batch, batch_idx):
            return self.wide(torch.ones(1, 1024)).mean()

        def configure_optimizers(self):
            return torch.optim.Adam([self.wide.weight])

    with VirtualDevice("1GiB"):
        run = quiet(tmp_path, EmptyCache(), max_epochs=2, num_sanity_val_steps=0)
        run.fit(Model(), loader(8, 8), loader(8, 8))
    curves = run.logger.curves
    small = 512 / MIB
    parameters = 4 + small
    optimizer = 8 + small  # two moments and a step count
    assert in_mib(curves, "memory/retained/parameters_gib") == [(step, parameters) for step in (0, 0, 1, 1, 2, 2)]
    assert in_mib(curves, "memory/retained/optimizer_gib")[0] == (0, 0)
    assert in_mib(curves, "memory/retained/optimizer_gib")[1:] == [(step, optimizer) for step in (0, 1, 1, 2, 2)]
    assert in_mib(curves, "memory/retained/gradients_gib")[:5] == [(step, 0) for step in (0, 0, 1, 1, 2)]
    for tag in ("retained_gib", "retained/other_gib"):
        assert len(curves[f"memory/{tag}"]) == 6
    for whole, *parts in zip(*(in_mib(curves, f"memory/retained{part}_gib") for part in ("", *PARTS)), strict=True):
        assert whole[1] == pytest.approx(sum(mib for _, mib in parts))


PARTS = ("/parameters", "/gradients", "/optimizer", "/other")


def test_a_device_without_a_cache_gives_one_warning_and_training_continues(tmp_path, caplog):
    callback = EmptyCache()
    with caplog.at_level(logging.INFO, logger="lightning_memtools"):
        run = quiet(tmp_path, callback)
        model = Regression()
        run.fit(model, loader(), loader(16))
        run.test(model, loader(16), verbose=False)
    (said,) = [record.getMessage() for record in caplog.records if "EmptyCache" in record.getMessage()]
    assert "cpu keeps no cache" in said
    assert run.global_step == 4
    assert not [tag for tag in run.logger.curves if tag.startswith("memory")]


@pytest.mark.parametrize(
    ("arguments", "accepted"),
    [
        *(({"min_reclaimable": value}, "from 0 to 1") for value in (1.5, -0.1, "half", None)),
        *(({"warn_after": count}, "whole number of 1 or more") for count in (0, 2.5, None)),
    ],
)
def test_bad_arguments_are_refused_with_those_that_are_accepted(arguments, accepted):
    with pytest.raises(ValueError, match=accepted) as error:
        EmptyCache(**arguments)
    ((name, value),) = arguments.items()
    assert str(error.value).startswith(f"{name}={value!r} ")


@pytest.mark.cuda_memory
def test_on_cuda_memory_goes_back_and_what_stays_is_the_model(tmp_path):
    torch.cuda.empty_cache()
    # cuBLAS takes its workspaces in the first step: out of a temporary's segment, which could not go back then.
    model = Wide(train=[[], [300], [300]], val=[[500]])
    run = quiet(tmp_path, EmptyCache(min_reclaimable=0.024), accelerator="cuda", devices=1, max_epochs=3)
    run.fit(model, loader(8, 8), loader(8, 8))
    curves = run.logger.curves
    freed = [mib for _, mib in in_mib(curves, "memory/cache/freed_gib")]
    # Sanity check and training: start; three epochs: start, end; the end of fit. Small segments may go back
    # along with them.
    assert [round(mib / 100) for mib in freed] == [0, 5, 0, 5, 3, 5, 3, 5, 0]
    retained = [mib for _, mib in in_mib(curves, "memory/retained_gib")]
    assert retained[3] == retained[5] == retained[7] > 0
    assert in_mib(curves, "memory/retained/parameters_gib")[3][1] == 512 / MIB
