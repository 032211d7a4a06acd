"""Runs Python on CUDA devices that account for memory and compute nothing.

    python -m lightning_memtools.null_cuda [--gpu NAME] [--capacity SIZE] [--devices N] PROGRAM ...

PROGRAM is what follows `python`: a script, or `-m` and a module, with its arguments. It runs unchanged and to its end.
`memtools dry-run` is made for training scripts.
"""

from __future__ import annotations

import argparse
import os
import sys

from lightning_memtools.null_cuda.launch import environment, null_devices
from lightning_memtools.null_cuda.stubs import DryRunError

_OPTIONS = ("--gpu", "--capacity", "--devices", "--help", "-h")


def main(arguments: list[str]) -> None:
    """Parse the command line, and replace this process with the user's program, which sees simulated CUDA devices."""
    parser = argparse.ArgumentParser(
        prog="python -m lightning_memtools.null_cuda",
        description="Run Python on CUDA devices that account for memory and compute nothing.",
    )
    parser.add_argument("--gpu", help="the GPU that the devices are like, such as 'RTX 4090'")
    parser.add_argument("--capacity", help="bytes of each device, such as 24GiB")
    parser.add_argument("--devices", type=int, default=1, help="how many devices there are")
    parser.add_argument("program", nargs="*", help="what follows `python`")
    # argparse would take the program's own options for ours: ours end where an argument is none of them.
    end = 0
    while end < len(arguments) and arguments[end].partition("=")[0] in _OPTIONS:
        end += 1 if "=" in arguments[end] else 2
    options = parser.parse_args(arguments[:end])
    try:
        found = environment(null_devices(options.gpu, options.capacity, count=options.devices))
    except (DryRunError, ValueError) as error:
        parser.exit(2, f"{error}\n")
    os.execve(sys.executable, [sys.executable, *arguments[end:]], found)  # noqa: S606, the user's own program


if __name__ == "__main__":
    main(sys.argv[1:])
