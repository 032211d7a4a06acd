"""The variables that functions can reach besides their arguments."""

from __future__ import annotations

from functools import partial

from torch import nn

from lightning_memtools.memory.reachable_variables import names_in, variables_named_by, variables_of_hooks

SEEN: list[int] = []


def note_globally(*_args: object) -> None:
    def inner() -> None:
        SEEN.append(1)

    inner()


def test_globals_and_variables_of_a_closure_are_found_also_where_an_inner_function_names_them():
    count = 0

    def outer() -> None:
        def inner() -> None:
            nonlocal count
            count += len(SEEN)

        inner()

    found = {each.name: each for each in variables_named_by(outer)}
    assert set(found) == {"count", "SEEN"}
    assert [isinstance(found[name].holder, dict) for name in ("count", "SEEN")] == [False, True]
    found["count"].put(7)
    assert count == found["count"].value == 7
    assert "SEEN" in names_in(outer.__code__)
    assert "len" in names_in(outer.__code__)


def test_a_hook_reaches_closures_globals_and_objects_each_once():
    class Counter:
        def __init__(self) -> None:
            self.total = 0

        def count(self, *_args: object) -> None:
            self.total += 1

    module, counter, steps = nn.Linear(1, 1), Counter(), [0]
    module.register_forward_hook(counter.count)
    module.register_forward_hook(note_globally)
    module.register_forward_hook(partial(lambda *_args: steps.append(counter.total)))
    found = [each.name for each in variables_of_hooks(module)]
    assert sorted(found) == ["SEEN", "counter", "steps", "total"]
