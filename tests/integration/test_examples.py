"""Every example runs as its first lines say, and prints what docs/examples.md shows of it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/examples.md").read_text("utf-8")
SHOWN = dict(re.findall(r"\npython examples/(\w+\.py).*?\n```\n\n```text\n(.*?)```", PAGE, re.DOTALL))


def test_every_script_is_on_the_page_and_short():
    scripts = {path.name: path.read_text("utf-8") for path in (ROOT / "examples").glob("*.py")}
    assert set(scripts) - {"digits.py"} == set(SHOWN)
    for name, text in scripts.items():
        assert name in {"digits.py", "demo.py"} or len(text.splitlines()) < 100, name


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_an_example_prints_what_the_page_shows(name, tmp_path):
    here = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": str(ROOT)}
    line = [sys.executable, str(ROOT / "examples" / name)]
    done = subprocess.run(line, cwd=tmp_path, env=here, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    printed = re.sub(r"\s+", " ", done.stdout + done.stderr)
    for shown in SHOWN[name].splitlines():
        if shown != "...":
            assert re.sub(r"\s+", " ", shown).strip() in printed, shown
