from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_memtools.memory.peaks import PhaseWatch, StageWatch, peak_counter
from lightning_memtools.memory.readers import accelerator_reader
from lightning_memtools.memory.stats import MemoryStats


class ScriptedDevice:
    """A device with one resettable peak per figure, as real ones have, whose memory goes where the test says.

    Allocated goes to what `use` says; reserved follows it upwards and never falls.
    """

    name = "scripted:0"
    simulated = True

    def __init__(self) -> None:
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._at_peak = 0

    def use(self, *levels: int) -> None:
        """Let allocated pass through these levels, in bytes."""
        for level in levels:
            self.allocated = level
            self.reserved = max(self.reserved, level)
            if level > self.peak_allocated:
                self.peak_allocated = self._at_peak = level
            self.peak_reserved = max(self.peak_reserved, self.reserved)

    def stats(self) -> MemoryStats:
        return MemoryStats(
            allocated=self.allocated,
            reserved=self.reserved,
            peak_allocated=self.peak_allocated,
            peak_reserved=self.peak_reserved,
        )

    def reset_peaks(self) -> None:
        self.peak_allocated = self._at_peak = self.allocated
        self.peak_reserved = self.reserved

    def composition_at_peak(self) -> Mapping[str, int]:
        return {"parameters": self._at_peak}


def test_a_forgotten_peak_belongs_to_no_window():
    device = ScriptedDevice()
    counter = peak_counter(device)
    window = counter.open()
    window.resume()
    device.use(30, 10)
    counter.fold()
    device.use(90, 10)
    counter.forget()
    device.use(20, 10)
    counter.fold()
    assert window.allocated == 30


def test_every_caller_gets_the_same_owner_and_nothing_outlives_the_device():
    device = ScriptedDevice()
    counter = peak_counter(device)
    assert peak_counter(device) is counter
    assert peak_counter(ScriptedDevice()) is not counter
    gone = weakref.ref(device)
    del device
    gc.collect()
    assert gone() is None
    with pytest.raises(ReferenceError, match="no longer exists"):
        counter.fold()


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("use"), st.integers(0, 1000)),
        st.tuples(st.sampled_from(["resume", "pause", "restart"]), st.integers(0, 2)),
        st.tuples(st.just("fold"), st.just(0)),
    ),
    max_size=60,
)


@given(ACTIONS)
def test_three_windows_agree_with_a_full_record_of_events(actions):
    """Brute force: keep every level that was passed while each window was running."""
    device = ScriptedDevice()
    counter = peak_counter(device)
    windows = [counter.open() for _ in range(3)]
    running = [False] * 3
    seen = [[], [], []]
    for action, value in actions:
        if action == "use":
            device.use(value)
            for i in range(3):
                if running[i]:
                    seen[i].append(value)
        elif action == "fold":
            counter.fold()
        elif action == "resume":
            windows[value].resume()
            if not running[value]:
                seen[value].append(device.allocated)
            running[value] = True
        elif action == "pause":
            windows[value].pause()
            running[value] = False
        else:
            counter.fold()
            windows[value].restart()
            seen[value] = [device.allocated] if running[value] else []
    counter.fold()
    for i in range(3):
        expected = max(seen[i], default=None)
        assert windows[i].allocated == expected


def test_memory_after_the_last_point_still_counts_in_the_maximum():
    device = ScriptedDevice()
    watch = StageWatch(peak_counter(device))
    watch.enter("train")
    watch.point("train")
    device.use(70, 0)
    watch.close()
    watch.close()
    assert watch.peaks["train"].allocated == 70


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


@pytest.mark.cuda_memory
def test_a_device_with_and_without_its_index_has_one_owner_of_its_peaks():
    index = torch.cuda.current_device()
    readers = {accelerator_reader(device) for device in (torch.device("cuda"), torch.device("cuda", index))}
    assert len({peak_counter(reader) for reader in readers}) == 1
