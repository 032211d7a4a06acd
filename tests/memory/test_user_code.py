from __future__ import annotations

import inspect
import json
import sysconfig

import pytest
import torch

import lightning_memtools
from lightning_memtools.memory.user_code import line_on_stack, owner_of, user_line_of

INSTALLED = sysconfig.get_paths()["purelib"]


@pytest.mark.parametrize(
    ("file", "owner"),
    [
        (__file__, "user"),
        (lightning_memtools.__file__, "ours"),
        (torch.nn.functional.__file__, "passing"),
        (f"{INSTALLED}/lightning/pytorch/trainer/call.py", "passing"),
        (f"{INSTALLED}/timm/layers/norm.py", "installed"),
        (f"{INSTALLED}/torchvision/ops/misc.py", "installed"),
        ("/usr/lib/python3/dist-packages/timm/layers/norm.py", "installed"),
        (json.__file__, "passing"),
        ("<string>", "passing"),
    ],
)
def test_each_file_has_an_owner(file, owner):
    assert owner_of(file) == owner


def test_the_innermost_line_of_the_user_in_a_traceback():
    def fail():
        return torch.nn.functional.linear(torch.ones(2), torch.ones(3, 3))  # torch fails here

    with pytest.raises(RuntimeError) as caught:
        fail()
    line = user_line_of(caught.value)
    assert (line.file, line.function) == (__file__, "fail")
    assert line.source.endswith("# torch fails here")


def called_by_a_library(file):
    """Call `line_on_stack` from a file that is not there."""
    names = {"line_on_stack": line_on_stack}
    exec(compile("\n\ndef forward():\n    return line_on_stack()\n", file, "exec"), names)  # noqa: S102
    return names["forward"]()


def test_the_line_on_the_stack_is_the_users_own():
    line, number = line_on_stack(), inspect.currentframe().f_lineno
    assert (line.file, line.line, line.caller) == (__file__, number, None)


def test_a_line_of_an_installed_library_names_the_user_who_called_it():
    file = f"{INSTALLED}/timm/layers/norm.py"
    line = called_by_a_library(file)
    assert (line.file, line.line, line.function) == (file, 4, "forward")
    assert line.caller[0] == __file__
    assert str(line).startswith("timm/layers/norm.py:4, called from ")
