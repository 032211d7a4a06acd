"""The machine, the switches and the code that a step ran with, and how to find them again."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import platform
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lightning_memtools.memory.user_code import owner_of, short_path
from lightning_memtools.nonfinite.capsule.plain_values import NAMESPACES

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
    """Set the switches, and restore them at the end. Yields the names of those that could not be set."""
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


_GUARD = "if __name__ == '__main__':"


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


def _digests(files: Iterator[str] | Sequence[str]) -> dict[str, str]:
    found = {}
    for file in files:
        with contextlib.suppress(OSError):
            found[file] = sha256(Path(file).read_bytes()).hexdigest()
    return found


def changed_since(origin: Mapping[str, Any]) -> list[str]:
    """Return the files that have changed; files that do not exist here (on another machine) are left out."""
    now = _digests(list(origin["files"]))
    return [short_path(file) for file, digest in now.items() if digest != origin["files"][file]]


class UntrustedCodeError(ImportError):
    """Raised where a capsule names code that this process has not imported, and nobody has said that it may run."""


# Containers of batches and hyperparameters that are made without asking: their constructors only keep the values.
_CONTAINERS: dict[str, type] = {
    f"{kind.__module__}:{kind.__name__}": kind
    for kind in (dict, list, tuple, set, frozenset, OrderedDict, defaultdict, *NAMESPACES)
}


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
    folder, script = str(origin["folder"]), str(origin["script"])
    if module == "__main__":
        here: Any = sys.modules.get("__main__")
        file = getattr(here, "__file__", None)
        if not script or (file is not None and str(Path(file).resolve()) == script):
            return here
        _ask(module, script, trusts)
    elif module in sys.modules:
        return sys.modules[module]
    else:
        _ask(module, _place_of(module, [*sys.path, folder]), trusts)
    if folder and folder not in sys.path and Path(folder).is_dir():
        sys.path.append(folder)
    with _as_script(script if module == "__main__" else module):
        return _main(origin) if module == "__main__" else importlib.import_module(module)


def _place_of(module: str, folders: list[str]) -> str:
    """Return the place that a module, or the package around it, would be imported from; nothing is imported."""
    top = module.partition(".")[0]
    spec = importlib.machinery.PathFinder.find_spec(top, folders)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {top!r}")
    return spec.origin or ", ".join(spec.submodule_search_locations or [top])


def _ask(module: str, place: str, trusts: Callable[[str, str], bool]) -> None:
    if not trusts(module, place):
        raise UntrustedCodeError(
            f"importing {module} (from {place}) runs its code, and the capsule alone says so: if you trust it, use "
            "--trust on the command line or trust=True in Python, or import the module yourself first"
        )


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


def _main(origin: Mapping[str, Any]) -> Any:
    """Return the script that was run as a module, if importing it does not run the training."""
    here: Any = sys.modules.get("__main__")
    if not origin["script"]:  # a notebook or console, which may be this one
        return here
    path = Path(origin["script"])
    file = getattr(here, "__file__", None)
    if file is not None and Path(file).resolve() == path:
        return here
    if not path.is_file():
        raise ImportError(f"it is defined in the script {path}, which is not here")
    if not _has_guard(path):
        raise ImportError(f"it is defined in the script {path}, which has no `{_GUARD}` and would train")
    if origin["name"]:
        return importlib.import_module(origin["name"])
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"the script {path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _has_guard(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in tree.body)


def arguments_for(kind: Any, held: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the saved hyperparameters that a constructor takes, and the names of its arguments that are missing."""
    accepted = inspect.signature(kind).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in accepted.values())
    taken = {key: value for key, value in held.items() if takes_all or key in accepted}
    missing = [
        key
        for key, each in accepted.items()
        if each.default is each.empty and key not in held and each.kind not in {each.VAR_POSITIONAL, each.VAR_KEYWORD}
    ]
    return taken, missing


def needs_of(module: Any, unheld: Sequence[str]) -> list[str]:
    """Return what a user has to do before the module can be made again from a capsule; empty if nothing.

    Args:
        module: The module, in the process that made it.
        unheld: The names of its hyperparameters that a file cannot hold.
    """
    kind, needs = type(module), []
    if "<locals>" in kind.__qualname__:
        return [f"with --model package.function, which makes the module: {kind.__name__} was defined in a function"]
    if kind.__module__ == "__main__":
        file = getattr(sys.modules.get("__main__"), "__file__", None)
        is_guarded = True
        if file is None:
            return [f"by replay(path, model=my_module) in Python: {kind.__name__} was defined in a notebook or console"]
        with contextlib.suppress(OSError, SyntaxError):
            is_guarded = _has_guard(Path(file))
        if not is_guarded:
            needs.append(f"after moving what {Path(file).name} runs below `{_GUARD}`, so that it can be imported")
    taken, missing = arguments_for(kind, getattr(module, "hparams", {}))
    missing += [name for name in unheld if name in taken]
    if missing:
        needs.append(
            f"with --model package.function, which makes the module: its constructor takes {', '.join(missing)}, "
            "which save_hyperparameters() did not keep"
        )
    return needs
