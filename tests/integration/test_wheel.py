"""The wheel, installed in an environment that does not know the source."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
from importlib.metadata import entry_points
from pathlib import Path
import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel
import lightning_memtools
from lightning_memtools import VirtualDevice, default_callbacks
print(Path(lightning_memtools.__file__).parent)
(tab,) = entry_points(group="tensorboard_plugins", name="lightning_memtools")
print(tab.load().plugin_name)
with VirtualDevice("16MiB"):
    L.Trainer(max_epochs=1, limit_train_batches=4, limit_val_batches=2, accelerator="cpu", enable_progress_bar=False,
              callbacks=default_callbacks()).fit(BoringModel())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    root = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(root), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (path,) = root.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel):
    """The folder of programs of an environment that has the wheel, and everything else from this one."""
    home = wheel.parent / "environment"
    venv.create(home, with_pip=False)
    python = home / "bin/python"
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()
    # A path in a .pth file brings the packages, but not the .pth file that leads to the source of this one.
    Path(packages, "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    command = [*pip, "install", "--quiet", "--no-deps", "--force-reinstall", "--prefix", str(home), str(wheel)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return home / "bin"


def run(installed, folder, *command):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(installed / command[0]), *command[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_the_package_and_what_it_reads(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    files = (path for path in (ROOT / "lightning_memtools").rglob("*") if path.is_file())
    tracked = {str(path.relative_to(ROOT)) for path in files if path.suffix != ".pyc"}
    assert tracked <= held  # the tab's page and scripts and the C sources of the null device among them
    assert {name.split("/")[0] for name in held - tracked} == {f"{wheel.name.split('-py3')[0]}.dist-info"}


def test_a_run_and_the_commands_work_away_from_the_source(installed, tmp_path):
    printed = run(installed, tmp_path, "python", "-c", SCRIPT).splitlines()
    assert any(Path(line).is_relative_to(installed.parent) for line in printed if line.startswith("/"))
    assert "lightning_memtools" in printed
    assert [path.name for path in tmp_path.rglob("memory_summary_*.md")] == ["memory_summary_fit.md"]
    version = run(installed, tmp_path, "memtools", "--version").split()[-1]
    assert version in zipfile.Path(next(installed.parent.parent.glob("*.whl"))).root.filename
    run(installed, tmp_path, "memtools", "report", "lightning_logs", "-o", "page.html")
    assert "<html" in (tmp_path / "page.html").read_text("utf-8")
