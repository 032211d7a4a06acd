"""Every example runs as its first lines say, and prints what docs/examples.md shows of it."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.integration.shown_outputs import not_printed

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/examples.md").read_text("utf-8")
SHOWN = dict(re.findall(r"\npython examples/(\w+\.py).*?\n```\n\n```text\n(.*?)```", PAGE, re.DOTALL))


def test_every_script_is_on_the_page_and_short():
    scripts = {path.name: path.read_text("utf-8") for path in (ROOT / "examples").glob("*.py")}
    assert set(scripts) == set(SHOWN) | {"digits.py"}  # that one is in the tutorial: test_tutorial.py
    for name, text in scripts.items():
        assert len(text.splitlines()) < 100, name


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_an_example_prints_what_the_page_shows(name, tmp_path):
    here = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    line = [sys.executable, str(ROOT / "examples" / name)]
    done = subprocess.run(line, cwd=tmp_path, env=here, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    if name == "memory_budget.py" and not version("torch").startswith("2.13."):
        pytest.skip("The budget that it compares with, and the page, are of torch 2.13")
    assert not_printed(SHOWN[name], done.stdout + done.stderr) == []


def test_the_notebook_runs_and_gets_its_memory_back(tmp_path):
    notebook = nbformat.read(ROOT / "examples/notebook.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute(cwd=str(tmp_path))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert {output.output_type for output in outputs} == {"stream"}  # no empty page beside what is printed
    printed = [
        "".join(output.text for output in cell.outputs if output.name == "stdout")
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    estimated, failed, left, plan, fits = (printed[i] for i in (1, 2, 3, 4, 5))
    assert estimated == "82 MiB reserved at the peak\n"
    assert "CUDA out of memory." in failed
    assert "Activations take 31.0 MiB" in failed
    assert left == "0 MiB allocated\n"
    assert re.search(r"^Recompute 0-6\.0-2, .*; keep the others\.$", plan, re.MULTILINE)
    assert "- predicted peak (simulated): 44.5 MiB before, 16.0 MiB after" in plan
    assert re.search(r"^fits, with a peak of (3[0-9]|4[0-7]) MiB reserved$", fits, re.MULTILINE)
