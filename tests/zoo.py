"""Real models that nobody here wrote: torchvision and timm, made importable on a CPU build of torch.

They are installed in `.venv/zoo`, apart from everything else: torchvision's compiled operators do not load on a CPU
build of torch, and while it can be imported torchmetrics tries to, so that `import lightning` fails.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

_ROOT = Path(__file__).parents[1]
_TOOLS = _ROOT.parent / "shared" / "tools"


def torchvision_models() -> ModuleType:
    """The module torchvision.models; skips the test where torchvision cannot be had."""
    _make_importable()
    return importlib.import_module("torchvision.models")


def timm() -> ModuleType:
    """The module timm; skips the test where it cannot be had."""
    _make_importable()
    return importlib.import_module("timm")


def _make_importable() -> None:
    importlib.import_module("lightning.pytorch")  # before torchvision can be found, see above
    import torch  # noqa: PLC0415, only tests of real models need it here

    # Asked first: a torchvision that can be found and not imported would take transformers with it.
    if torch.version.cuda is None and not _TOOLS.is_dir():
        pytest.skip("shared/tools, which makes torchvision importable on a CPU build of torch, is not here")
    zoo = Path(sys.prefix) / "zoo"
    if zoo.is_dir() and str(zoo) not in sys.path:
        sys.path.append(str(zoo))
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    if torch.version.cuda is None:
        sys.path.insert(0, str(_TOOLS))
        importlib.import_module("torchvision_cpu").declare_operators()
