from __future__ import annotations

import torch

from lightning_memtools.memory.peaks import PhaseWatch, StageWatch, peak_counter
from tests.memory.scripted import ScriptedDevice


def test_a_validation_run_inside_training_neither_hides_nor_fakes_a_training_peak():
    device = ScriptedDevice()
    watch = StageWatch(peak_counter(device))
    watch.enter("train")
    device.use(100, 40)
    watch.enter("val")
    device.use(500, 40)
    assert watch.point("val").peak_allocated == 500
    watch.leave("val")
    device.use(60, 40)
    train = watch.point("train")
    assert train.peak_allocated == 100
    assert train.stats.allocated == 40
    assert train.peak_reserved == 500  # what validation reserved stays reserved during training
    device.use(50, 45)
    assert watch.point("train").peak_allocated == 50
    watch.close()
    assert watch.peaks["train"].allocated == 100
    assert watch.peaks["val"].allocated == 500


def test_memory_after_the_last_point_still_counts_in_the_maximum():
    device = ScriptedDevice()
    watch = StageWatch(peak_counter(device))
    watch.enter("train")
    watch.point("train")
    device.use(70, 0)
    watch.close()
    watch.close()
    assert watch.peaks["train"].allocated == 70


def test_closing_takes_the_windows_off_the_counter():
    device = ScriptedDevice()
    counter = peak_counter(device)
    watch, phases = StageWatch(counter), PhaseWatch(counter)
    watch.enter("train")
    phases.switch("forward")
    watch.close()
    phases.close()
    assert not counter.running


def test_each_phase_has_the_peak_of_its_own_time():
    device = ScriptedDevice()
    phases = PhaseWatch(peak_counter(device))
    for forward, backward, optimizer in [(30, 45, 20), (35, 40, 25)]:
        phases.switch("forward")
        device.use(forward, 28)
        phases.switch("backward")
        device.use(backward, 15)
        phases.switch(None)
        device.use(99, 15)  # between phases: nobody's
        phases.switch("optimizer")
        device.use(optimizer, 15)
        phases.switch(None)
    assert phases.point() == {"forward": 35, "backward": 45, "optimizer": 25}
    assert phases.point() == {}


def test_the_optimizer_phase_ends_when_the_step_returns_and_the_hook_comes_off():
    device = ScriptedDevice()
    phases = PhaseWatch(peak_counter(device), between="forward")
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    phases.follow([optimizer])
    phases.switch("optimizer")
    device.use(20, 10)
    optimizer.step()
    device.use(80, 10)  # the next forward of a manual optimization
    phases.switch(None)
    assert phases.point() == {"forward": 80, "optimizer": 20}
    phases.close()
    assert not optimizer._optimizer_step_post_hooks
