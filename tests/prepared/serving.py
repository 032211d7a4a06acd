"""Imports Lightning, and forks for each script that it is asked to run: see starting.py."""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import importlib
import json
import multiprocessing.spawn
import os
import runpy
import select
import signal
import socket
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn

# What a fresh Python reads when it starts, and libraries when they are imported.
_READ_AT_THE_START = ("PYTHON", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "TORCH", "CUDA", "LD_", "MALLOC_", "COVERAGE")
_LONGEST_REQUEST = 1 << 17
_SPARE = 400  # files with this number or a higher one are of no script


def serve(address: str, program: str) -> None:
    """Import Lightning; return in forks only, each of which has run a script then."""
    given = dict(os.environ)
    for name in ("lightning.pytorch", "torch.utils.tensorboard"):
        importlib.import_module(name)
    if len([*Path("/proc/self/task").iterdir()]) > 1:
        raise RuntimeError("A fork would lack the other threads.")
    added = {name: value for name, value in os.environ.items() if name not in given}
    request = _next_request(address, given)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(added | request["environment"])
    _import_again()
    _run(program, request["argv"])


def _next_request(address: str, given: dict[str, str]) -> dict[str, Any]:
    """Return, in a fork, what it is to do."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(address)
        listening.listen(64)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to everyone
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that supervise
        print("ready", flush=True)  # noqa: T201
        while True:
            if 0 in select.select([0, listening.fileno()], [], [])[0]:  # the tests have ended
                os._exit(0)
            asking, _ = listening.accept()
            with asking:
                message, files, _, _ = socket.recv_fds(asking, _LONGEST_REQUEST, _SPARE)
                request: dict[str, Any] = json.loads(message)
                if _begins_with(request["environment"]) == _begins_with(given) and os.fork() == 0:
                    listening.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    script = os.fork()
                    if script != 0:
                        _supervise(script, asking)
                    asking.close()
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    _renumber(dict(zip(files, request["files"], strict=True)))
                    return request
                for file in files:
                    os.close(file)


def _begins_with(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_THE_START)}


def _supervise(script: int, asking: socket.socket) -> NoReturn:
    """Pass signals on, and say how the script ended, which does not outlive who asked for it."""
    ended = os.pidfd_open(script)
    while ended not in select.select([asking.fileno(), ended], [], [])[0]:
        number = asking.recv(1)
        os.kill(script, number[0] if number else signal.SIGKILL)
    _, status = os.waitpid(script, 0)
    with contextlib.suppress(OSError):
        asking.send(str(status).encode())
    os._exit(0)


def _renumber(files: dict[int, int]) -> None:
    """Give files the numbers that they had where they come from, and close all others."""
    spare = {fcntl.fcntl(file, fcntl.F_DUPFD, _SPARE): number for file, number in files.items()}
    os.closerange(3, _SPARE)
    for file, number in spare.items():
        os.dup2(file, number)
        os.close(file)


def _import_again() -> None:
    """Repeat what imports do that is another thing in each process."""
    importlib.import_module("numpy").random.seed()
    importlib.import_module("torch").default_generator.seed()
    rank_zero: Any = importlib.import_module("lightning.fabric.utilities.rank_zero")
    rank_zero.rank_zero_only.rank = rank_zero._get_rank() or 0
    importlib.invalidate_caches()


def _run(program: str, argv: list[str]) -> None:
    """Run a script, or what follows -c or -m, as Python does."""
    sys.executable = program
    multiprocessing.spawn.set_executable(program)
    sys.orig_argv[:] = [program, *argv]
    names = sys.modules["__main__"].__dict__
    names.clear()
    names |= {"__name__": "__main__", "__builtins__": builtins, "__annotations__": {}}
    names |= dict.fromkeys(("__doc__", "__loader__", "__package__", "__spec__"))
    try:
        if argv[0] == "-m":
            sys.argv[:] = argv[1:]
            sys.path[0] = str(Path.cwd())
            runpy._run_module_as_main(argv[1])  # type: ignore[attr-defined]
        elif argv[0] == "-c":
            sys.argv[:] = ["-c", *argv[2:]]
            sys.path[0] = ""
            exec(argv[1], names)  # noqa: S102
        else:
            sys.argv[:] = argv
            sys.path[0] = str(Path(argv[0]).resolve().parent)
            names |= {"__file__": argv[0], "__cached__": None, "__loader__": SourceFileLoader("__main__", argv[0])}
            exec(compile(Path(argv[0]).read_bytes(), argv[0], "exec"), names)  # noqa: S102
    except Exception as error:  # noqa: BLE001
        sys.excepthook(type(error), error, error.__traceback__ and error.__traceback__.tb_next)  # without this function
        sys.exit(1)
