"""Builds the stubs that stand in for NVIDIA's libraries, once for each installed torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_SOURCES = Path(__file__).parent / "sources"
# Libraries of torch that call NVIDIA's; their own names begin so.
_TORCH_LIBRARIES = ("libtorch*.so", "libc10*.so", "libcaffe2*.so")
# The name of a library without "lib" and version, and what the names of its functions begin with. The first that
# matches a function has it.
_PREFIXES = {
    "cudart": r"cuda|__cuda",
    "cublasLt": r"cublasLt",
    "cublas": r"cublas",
    "cudnn": r"cudnn",
    "cufft": r"cufft",
    "cusolver": r"cusolver",
    "cusparseLt": r"cusparseLt",
    "cusparse": r"cusparse",
    "curand": r"curand",
    "nvrtc": r"nvrtc",
    "nvshmem_host": r"nvshmem",
    "nccl": r"nccl|pnccl",
    "cufile": r"cuFile",
    "cupti": r"cupti",
    "nvToolsExt": r"nvtx",
    "cuda": r"cu[A-Z]",
}
# Opened by name at run time, so that no library of torch lists them as needed.
_OPENED_BY_NAME = ("libcuda.so.1", "libnvidia-ml.so.1")


class DryRunError(RuntimeError):
    """Raised if a dry run is impossible on this machine. The message says why, and what to do instead."""


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """An installed torch that was built for CUDA.

    Attributes:
        folder: The folder with its shared libraries.
        version: The version of its package, such as "2.13.0".
        cuda: The major version of CUDA that it was built for.
        architectures: The compute capabilities of its compiled kernels, in ascending order; 86 stands for 8.6.
    """

    folder: Path
    version: str
    cuda: int
    architectures: tuple[int, ...]


def installed_torch() -> TorchBuild:
    """Find the torch that is installed in this environment, without importing it.

    Raises:
        DryRunError: This is not Linux, torch is missing, or it was built for the CPU only.
    """
    if sys.platform != "linux":
        raise DryRunError(
            f"A dry run needs Linux, and this is {sys.platform}. VirtualDevice and `memtools estimate` work everywhere."
        )
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise DryRunError("torch is not installed in this environment.")
    root, version = Path(spec.origin).parent, importlib.metadata.version("torch")
    if not (root / "lib" / "libtorch_cuda.so").exists():
        public = version.partition("+")[0]
        raise DryRunError(
            f"torch {version} is a build for the CPU, and a dry run needs one for CUDA: it executes PyTorch's own CUDA "
            f"code. Install it into an environment of its own: pip install --no-deps 'torch==={public}' "
            "and then torch's dependencies without NVIDIA's packages. VirtualDevice and `memtools estimate` work with "
            "this build."
        )
    # version.py holds plain assignments; importing torch would load NVIDIA's libraries.
    text = (root / "version.py").read_text(encoding="utf-8")
    cuda = re.search(r"^cuda[^=\n]*= *'(\d+)", text, re.MULTILINE)
    if cuda is None:
        raise DryRunError(f"{root / 'version.py'} does not say which CUDA this torch was built for.")
    # The text that torch.cuda.get_arch_list() splits.
    flags = re.search(rb"sm_\d+(?: (?:sm|compute)_\d+)*", (root / "lib" / "libtorch_python.so").read_bytes())
    architectures = sorted({int(one) for one in re.findall(rb"sm_(\d+)", flags.group() if flags else b"")})
    return TorchBuild(root / "lib", version, int(cuda.group(1)), tuple(architectures))


def stub_libraries(build: TorchBuild, cache: Path | None = None) -> list[Path]:
    """Return stubs of NVIDIA's libraries for a build of torch, in preload order. Build them if they are not cached yet.

    Args:
        build: The installed torch.
        cache: The folder in which to cache the stubs, by default ``$XDG_CACHE_HOME/lightning_memtools``.

    Raises:
        DryRunError: There is no C compiler, or it failed.
    """
    folder = (cache or _default_cache()) / f"null-cuda-{build.version}-{_digest(build)}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Built apart and then renamed, so that nobody ever sees half of the stubs.
        work = Path(tempfile.mkdtemp(dir=folder.parent, prefix="building-"))
        try:
            _build(build, work)
            work.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    # The devices come first: all other stubs call them.
    return sorted(folder.iterdir(), key=lambda path: (not path.name.startswith("libnull_device"), path.name))


def _default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_memtools"


def _digest(build: TorchBuild) -> str:
    digest = hashlib.sha256(str(build.folder).encode())
    for source in (*sorted(_SOURCES.iterdir()), Path(__file__)):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


def _build(build: TorchBuild, folder: Path) -> None:
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or shutil.which("nm") is None or shutil.which("readelf") is None:
        raise DryRunError(
            "A dry run needs a C compiler and binutils (cc, nm, readelf) to build stubs once, and they are not on "
            "PATH. Debian and Ubuntu: apt-get install gcc. VirtualDevice and `memtools estimate` need none."
        )
    asked = _asked_functions(build.folder)
    flags = ["-shared", "-fPIC", "-O1", "-w", f"-DCUDA_MAJOR={build.cuda}", f"-I{_SOURCES}"]
    flags.append(f"-DARCHITECTURES={','.join(map(str, build.architectures)) or '0'}")
    with tempfile.TemporaryDirectory() as scratch:
        _run(compiler, *flags, "-o", folder / "libnull_device.so", _SOURCES / "null_device.c", "-lpthread")
        for library in sorted(_needed_libraries(build.folder) | set(_OPENED_BY_NAME)):
            stem = library.removeprefix("lib").partition(".so")[0]
            functions = {name: version for name, version in asked.items() if _library_of(name) == stem}
            source = _SOURCES / f"{stem}.c"
            defined = _defined_functions(compiler, flags, source, Path(scratch)) if source.exists() else set()
            empty = Path(scratch) / f"{stem}_stubs.c"
            # Any other function does nothing and reports success, which is 0 in all of these libraries.
            empty.write_text(
                "".join(f"long {name}(void) {{ return 0; }}\n" for name in functions if name not in defined)
            )
            options = [f"-Wl,-soname,{library}"]
            versions = {version for version in functions.values() if version}
            if versions:  # torch asks for these functions by a version of the library, which then has to define it
                script = Path(scratch) / f"{stem}.map"
                script.write_text("".join(f"{version} {{ global: *; }};\n" for version in versions))
                options.append(f"-Wl,--version-script={script}")
            _run(compiler, *flags, *options, "-o", folder / library, *([source] if source.exists() else []), empty)


def _library_of(function: str) -> str | None:
    return next((stem for stem, prefix in _PREFIXES.items() if re.match(prefix, function)), None)


def _torch_libraries(folder: Path) -> Iterable[Path]:
    return sorted({path for pattern in _TORCH_LIBRARIES for path in folder.glob(pattern)})


def _asked_functions(folder: Path) -> dict[str, str]:
    """Return a dict from each function that torch's libraries import to its symbol version ("" for none)."""
    found: dict[str, str] = {}
    for path in _torch_libraries(folder):
        for line in _run("nm", "-D", "--undefined-only", path).splitlines():
            name, _, version = line.split()[-1].partition("@")
            found.setdefault(name, version)
    return found


def _needed_libraries(folder: Path) -> set[str]:
    """Return the file names of the NVIDIA libraries that torch's libraries depend on."""
    needed = {
        name
        for path in _torch_libraries(folder)
        for name in re.findall(r"\(NEEDED\).*\[(.+?)\]", _run("readelf", "-d", path))
    }
    return {name for name in needed if name.removeprefix("lib").partition(".so")[0] in _PREFIXES}


def _defined_functions(compiler: str, flags: list[str], source: Path, scratch: Path) -> set[str]:
    made = scratch / f"{source.stem}.o"
    _run(compiler, *(flag for flag in flags if flag != "-shared"), "-c", "-o", made, source)
    return {line.split()[-1] for line in _run("nm", "--defined-only", made).splitlines()}


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise DryRunError(f"{command[0]} failed while the stubs of a dry run were built: {done.stderr.strip()[-2000:]}")
    return done.stdout
