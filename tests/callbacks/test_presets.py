"""default_callbacks(): which callbacks it returns, and with which arguments."""

from types import MappingProxyType

import pytest
import yaml

from lightning_memtools import VirtualDevice, default_callbacks
from tests.lightning_models import Regression, loader, trainer

NAMES = ["MemoryMonitor", "LossCurves", "EmptyCache", "OOMReport", "HaltOnNaN", "TrainingDoctor"]


def names_of(callbacks):
    return [type(callback).__name__ for callback in callbacks]


def test_the_callbacks_that_watch_and_protect_are_returned():
    assert names_of(default_callbacks()) == NAMES


def test_a_default_run_says_little(tmp_path, capsys):
    with VirtualDevice("1GiB"):
        trainer(tmp_path, *default_callbacks(), max_epochs=3).fit(Regression(), loader(320, 8), loader(16))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert len(lines) <= 25


def test_plain_values_as_in_a_yaml_file_give_arguments_and_leave_callbacks_out():
    options = yaml.safe_load("""
        MemoryMonitor: {every_n_steps: 7, phases: true}
        HaltOnNaN: {max_skips: 3}
        LossCurves: true
        TrainingDoctor: false
        EmptyCache: {}
    """)
    options["LossCurves"] = MappingProxyType({})  # as a config of Hydra is no dict
    found = default_callbacks(**options)
    assert names_of(found) == [name for name in NAMES if name != "TrainingDoctor"]
    monitor, halt = found[0], found[4]
    assert (monitor.every_n_steps, monitor.phases, halt.max_skips) == (7, True, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"GradientCheckpointing": {}}, r"no GradientCheckpointing; it returns MemoryMonitor, .* Add others by name"),
        ({"HaltOnNaN": 3}, "HaltOnNaN=3 is neither a mapping of its arguments nor a bool"),
        ({"HaltOnNaN": {"skips": 3}}, "skips"),
    ],
)
def test_what_is_no_option_is_refused(options, message):
    with pytest.raises(TypeError, match=message):
        default_callbacks(**options)
