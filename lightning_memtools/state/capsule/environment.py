"""The machine, the switches and the code that a step ran with, and how to find them again."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.machinery
import importlib.util
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lightning_memtools.memory.user_code import owner_of, short_path
from lightning_memtools.state.capsule.capsule_file import CONTAINERS

_PACKAGES = ("lightning", "numpy", "lightning_memtools")


# Name to (function that reads it, function that sets it). All of them choose the kernel, and so the last bits.
_SWITCHES: dict[str, tuple[Any, Any]] = {
    "deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled, lambda on: torch.use_deterministic_algorithms(on, warn_only=True)
    ),
    "float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "cudnn.benchmark": (
        lambda: torch.backends.cudnn.benchmark, lambda on: setattr(torch.backends.cudnn, "benchmark", on)
    ),
    "cudnn.deterministic": (
        lambda: torch.backends.cudnn.deterministic, lambda on: setattr(torch.backends.cudnn, "deterministic", on)
    ),
    "cudnn.allow_tf32": (
        lambda: torch.backends.cudnn.allow_tf32, lambda on: setattr(torch.backends.cudnn, "allow_tf32", on)
    ),
    "flash attention": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "memory-efficient attention": (
        torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp
    ),
    "threads": (torch.get_num_threads, torch.set_num_threads),
}  # fmt: skip


def machine_now(device: str) -> dict[str, Any]:
    """Return what this process runs on: name to plain value. Where two machines differ in it, last bits may differ."""
    found: dict[str, Any] = {"python": platform.python_version(), "platform": f"{sys.platform} {platform.machine()}"}
    # torch's own version names the build too (2.13.0+cu130), which the installed package's version may not.
    found |= {"torch": str(torch.__version__)} | {package: _version(package) for package in _PACKAGES}
    found["CPU capability"] = torch.backends.cpu.get_cpu_capability()
    found["device"] = device
    if device.startswith("cuda") and torch.cuda.is_available():
        found |= {
            "GPU": torch.cuda.get_device_name(device),
            "CUDA": torch.version.cuda,
            "cuDNN": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        }
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def switches_now() -> dict[str, Any]:
    """Return the present settings of the switches."""
    return {name: read() for name, (read, _) in _SWITCHES.items()}


@contextmanager
def switched(switches: Mapping[str, Any]) -> Iterator[list[str]]:
    """Set the switches inside the context, and restore them on exit. Yield the names of those that cannot be set."""
    before = switches_now()
    failed: list[str] = []
    try:
        for name, value in switches.items():
            try:
                if name in before and before[name] != value:
                    _SWITCHES[name][1](value)
            except RuntimeError:
                failed.append(name)
        yield failed
    finally:
        for name, value in before.items():
            if _SWITCHES[name][0]() != value:
                _SWITCHES[name][1](value)


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what differs between two machines, such as "torch 2.11.0, was 2.13.0"."""
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return [f"{name} {now.get(name, 'missing')}, was {then.get(name, 'missing')}" for name in names]


GUARD = "if __name__ == '__main__':"


def origin_now() -> dict[str, Any]:
    """Return where this process's code is: the script that runs, its import folder, and digests of its files."""
    main: Any = sys.modules.get("__main__")
    script, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    return {
        "script": "" if script is None else str(Path(script).resolve()),
        # `python -m package.train`
        "name": "" if spec is None else spec.name,
        "folder": str(Path(sys.path[0]).resolve()) if sys.path else "",
        "files": _digests(_own_files()),
    }


def _own_files() -> Iterator[str]:
    """Yield the files of all modules that belong neither to an installed package nor to Python."""
    for module in list(sys.modules.values()):
        file = vars(module).get("__file__") if hasattr(module, "__dict__") else None
        if isinstance(file, str) and file.endswith(".py") and owner_of(str(Path(file).resolve())) == "user":
            yield str(Path(file).resolve())


def _digests(files: Iterable[str]) -> dict[str, str]:
    found = {}
    for file in files:
        with contextlib.suppress(OSError):
            if Path(file).is_file():  # a capsule may name a device that never ends
                found[file] = sha256(Path(file).read_bytes()).hexdigest()
    return found


def changed_since(origin: Mapping[str, Any]) -> list[str]:
    """Return the files that have changed; files that do not exist here (on another machine) are left out."""
    now = _digests(origin["files"])
    return [short_path(file) for file, digest in now.items() if digest != origin["files"][file]]


class UntrustedCodeError(ImportError):
    """Raised where a capsule names code that this process has not imported, and nobody has said that it may run."""


# Made without asking: nothing has to be imported.
_CONTAINERS = {f"{kind.__module__}:{kind.__name__}": kind for kind in CONTAINERS}


@contextmanager
def importing_from(
    origin: Mapping[str, Any], trusts: Callable[[str, str], bool] = lambda _name, _path: False
) -> Iterator[Callable[[str], Any]]:
    """Import as that process did while the context lasts. Yields a function that finds a class by ``"module:name"``.

    Whatever this process has imported already is found. Importing anything else runs code that a file names, which
    only `trusts` allows. The function raises ImportError or AttributeError if there is no such class.

    Args:
        origin: What `origin_now` returned.
        trusts: Called with the name of a module and the place where it would be imported from; returns whether it may
            be imported.
    """
    found: dict[str, Any] = {}
    folder = origin["folder"]

    def find(path: str) -> Any:
        module, _, name = path.partition(":")
        if path in _CONTAINERS:
            return _CONTAINERS[path]
        if module not in found:
            found[module] = _imported(module, origin, trusts)
        thing = found[module]
        for part in name.split("."):
            thing = getattr(thing, part)
        return thing

    added = len(sys.path)
    try:
        yield find
    finally:
        if folder in sys.path[added:]:
            sys.path.remove(folder)


def _imported(module: str, origin: Mapping[str, Any], trusts: Callable[[str, str], bool]) -> Any:
    folder, script, is_main = str(origin["folder"]), str(origin["script"]), module == "__main__"
    if is_main:
        here: Any = sys.modules.get("__main__")
        file = getattr(here, "__file__", None)
        # Without a script it was a notebook or console, which may be this one.
        if not script or (file is not None and str(Path(file).resolve()) == script):
            return here
        module = str(origin["name"]) or module
    if module in sys.modules and module != "__main__":
        return sys.modules[module]
    place = script if module == "__main__" else _place_of(module, [*sys.path, folder])
    if not trusts(module, place):
        raise UntrustedCodeError(
            f"the file names it, and importing {module} (from {place}) runs its code: if you trust that, use "
            "--trust on the command line or trust=True in Python, or import the module yourself first"
        )
    if is_main and not Path(script).is_file():
        raise ImportError(f"it is defined in the script {script}, which is not here")
    if is_main and not _has_guard(Path(script)):
        raise ImportError(f"it is defined in the script {script}, which has no `{GUARD}` and would train")
    if folder and folder not in sys.path and Path(folder).is_dir():
        sys.path.append(folder)
    with _as_script(script if is_main else module):
        return _run_as_module(Path(script)) if module == "__main__" else importlib.import_module(module)


def _place_of(module: str, folders: list[str]) -> str:
    """Return the place that a module, or the package around it, would be imported from; nothing is imported."""
    top = module.partition(".")[0]
    spec = importlib.machinery.PathFinder.find_spec(top, folders)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {top!r}")
    return spec.origin or ", ".join(spec.submodule_search_locations or [top])


@contextmanager
def _as_script(name: str) -> Iterator[None]:
    """Hide this process's own command line: a script may parse its arguments while it is imported."""
    before = sys.argv
    sys.argv = [name]
    try:
        yield
    except SystemExit as error:
        raise ImportError(
            f"{name} ended the process while it was imported (status {error.code}), as a script does whose arguments "
            "are missing"
        ) from error
    finally:
        sys.argv = before


def _run_as_module(script: Path) -> Any:
    spec = importlib.util.spec_from_file_location(script.stem, script)
    if spec is None or spec.loader is None:
        raise ImportError(f"the script {script} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(script.stem, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _has_guard(path: Path) -> bool:
    """Return whether a script keeps what it runs under a condition on `__name__`, so that it can be imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in tree.body)
