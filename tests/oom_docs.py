"""The example in docs/oom-report.md, run as it stands there. As a program it writes docs/oom-report-example.md anew.

python -m tests.oom_docs
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from pathlib import Path

import torch

from lightning_memtools.oom import oom_reporter

DOCS = Path(__file__).parents[1] / "docs"
EXAMPLE = DOCS / "oom-report-example.md"


def code() -> str:
    """The page's first block of code."""
    found: list[str] = re.findall(r"```python\n(.*?)```", (DOCS / "oom-report.md").read_text("utf-8"), re.DOTALL)
    return found[0]


def report(folder: Path) -> str:
    """What the example writes, without what differs between machines and runs."""
    before, checks_s = Path.cwd(), oom_reporter.CHECKS_S
    os.chdir(folder)
    # What the page says must not depend on how busy this machine is.
    oom_reporter.CHECKS_S = 600.0
    try:
        with contextlib.suppress(torch.OutOfMemoryError):
            exec(compile(code(), "train.py", "exec"), {"__name__": "train"})  # noqa: S102, our own page
    finally:
        os.chdir(before)
        oom_reporter.CHECKS_S = checks_s
    text = next(folder.rglob("oom-*.md")).read_text(encoding="utf-8")
    text = text.replace(f"{folder}{os.sep}", "")
    return re.sub(r"This report took [\d.]+ s", "This report took ... s", text)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        EXAMPLE.write_text(report(Path(folder).resolve()), encoding="utf-8")


if __name__ == "__main__":
    main()
