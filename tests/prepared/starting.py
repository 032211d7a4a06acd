"""A Python that has imported Lightning: scripts that tests start with it begin at once.

`import lightning` takes three seconds of a processor, and tests start more than a hundred scripts which do that first.
Here one process does it (serving.py) and forks for each of them: a process of its own, with its own arguments,
environment, folder, open files and exit status, that has no past but these imports. What is started in place of
`sys.executable` (asking.py) hands all that over, forwards signals and ends as the fork does.

Two of them share what two fresh Pythons do not: the seed of hashes, and where in memory lies what was imported. Tests
of what is imported, of the memory of a whole process, and of terminals start `sys.executable`.
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.prepared import asking, serving

_started = ExitStack()
atexit.register(_started.close)


@functools.cache
def prepared_python() -> str:
    """Return the path of a program to start in place of `sys.executable`: that one itself while coverage is taken."""
    if not hasattr(os, "pidfd_open") or any(name.startswith("COVERAGE") for name in os.environ):
        return sys.executable
    return _started.enter_context(_server())


@contextmanager
def _server() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="prepared") as folder:
        address, program = Path(folder, "socket"), Path(folder, "python")
        program.write_text(f"#!{sys.executable} -IS\n{_calls(asking)}.ask({str(address)!r}, {sys.executable!r})\n")
        program.chmod(0o700)
        code = f"{_calls(serving)}.serve({str(address)!r}, {str(program)!r})"
        with subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,  # the server ends when it is closed
            stdout=subprocess.PIPE,
            text=True,
        ) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            yield str(program)


def _calls(module: object) -> str:
    """Return the beginning of a call of a function of a module, for a process that shall import little else."""
    path = Path(str(module.__file__))  # type: ignore[attr-defined]
    return f"import sys; sys.path.insert(0, {str(path.parent)!r}); import {path.stem}; del sys.path[0]; {path.stem}"
