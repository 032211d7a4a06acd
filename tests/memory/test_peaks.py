from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_memtools.memory.peaks import peak_counter
from lightning_memtools.memory.readers import accelerator_reader
from tests.memory.scripted import ScriptedDevice


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


@pytest.mark.cuda_memory
def test_a_device_with_and_without_its_index_has_one_owner_of_its_peaks():
    index = torch.cuda.current_device()
    readers = {accelerator_reader(device) for device in (torch.device("cuda"), torch.device("cuda", index))}
    assert len({peak_counter(reader) for reader in readers}) == 1
