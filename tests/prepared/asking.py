"""Is started in place of Python: asks a process that has imported Lightning for a fork, and ends as the fork does.

It is started for each script, and imports only what it needs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import NoReturn

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


def ask(address: str, python: str) -> NoReturn:
    """Have a fork of the server run what this process was started for, with all that it was given."""
    if sys.argv[1].startswith("-") and sys.argv[1] not in ("-c", "-m"):  # options that Python reads at its start
        os.execv(python, [python, *sys.argv[1:]])  # noqa: S606
    files = [number for number in map(int, os.listdir("/proc/self/fd")) if _is_given(number)]  # noqa: PTH208
    request = {"argv": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ), "files": files}  # noqa: PTH109
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(address)
        socket.send_fds(server, [json.dumps(request).encode()], files)
        for number in FORWARDED:
            signal.signal(number, lambda number, _: server.send(bytes([number])))
        answer = server.recv(16)
        for number in FORWARDED:
            signal.signal(number, signal.SIG_DFL)
    if not answer:  # in this environment a fresh Python would have begun otherwise
        os.execv(python, [python, *sys.argv[1:]])  # noqa: S606
    status = os.waitstatus_to_exitcode(int(answer))
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status)


def _is_given(file: int) -> bool:
    try:
        return os.get_inheritable(file)
    except OSError:  # the listing itself, which has been closed
        return False
