"""Read what ``dovetail doctor`` reports about this machine. Nothing is judged here; see ``doctor_checks``."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from dovetail.host_memory import meminfo, memory_limit

Version = tuple[int, int]

PACKAGES = ("triton", "flashinfer-python", "flash-attn-3", "sglang-kernel", "vllm", "huggingface-hub")
"""The optional distributions whose versions are read."""

TOOLS = ("g++", "gcc", "clang", "cc", "nvcc", "ninja")


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """Describe a CUDA device that torch sees. ``memory`` is in bytes."""

    name: str
    capability: Version
    memory: int


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """Describe the installed torch. ``cuda`` is the version of CUDA that it was built for, None in a build for CPUs;
    ``architectures`` are those of its kernels (``sm_90``). ``error`` says why it cannot be imported, or why it sees
    no device."""

    version: str = ""
    cuda: Version | None = None
    architectures: tuple[str, ...] = ()
    gpus: tuple[GpuFacts, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """Describe a directory of compiled kernels. ``kernels`` is how many it holds, ``size`` its bytes, ``free`` the bytes
    that are free on its file system."""

    what: str
    path: Path
    kernels: int = 0
    size: int = 0
    free: int = 0
    writable: bool = True


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Hold what was read from the machine. ``devices`` counts NVIDIA device files, also those that torch cannot use;
    ``driver_cuda`` is the newest version of CUDA that the driver supports. Memory is in bytes; None is unknown or, for
    limits, unlimited. ``headers`` is True if Python's C headers are installed."""

    python: tuple[int, int, int]
    executable: str
    torch: TorchFacts
    devices: int = 0
    driver: str = ""
    driver_cuda: Version | None = None
    packages: dict[str, str] = field(default_factory=dict)
    tools: dict[str, str] = field(default_factory=dict)
    headers: bool = True
    caches: tuple[CacheFacts, ...] = ()
    cores: int = 1
    memory: int | None = None
    available: int | None = None
    memory_limit: int | None = None
    descriptors: tuple[int, int | None] = (1024, None)
    shared_memory: int | None = None
    temporary: str = ""


def read_machine() -> HostFacts:
    """Return the facts of this machine. Imports torch; never raises for what is missing."""
    memory = meminfo()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return HostFacts(
        python=sys.version_info[:3],
        executable=sys.executable,
        torch=_torch(),
        devices=len(list(Path("/dev").glob("nvidia[0-9]*"))),
        driver=driver_version(Path("/proc/driver/nvidia/version")),
        driver_cuda=_driver_cuda(),
        packages={name: version for name in PACKAGES if (version := _version(name))},
        tools={name: path for name in TOOLS if (path := _tool(name))},
        headers=Path(sysconfig.get_path("include"), "Python.h").is_file(),
        caches=tuple(_caches()),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=memory.get("MemTotal"),
        available=memory.get("MemAvailable"),
        memory_limit=memory_limit(),
        descriptors=(soft, None if hard == resource.RLIM_INFINITY else hard),
        shared_memory=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        temporary=tempfile.gettempdir() if _is_writable(Path(os.environ.get("TMPDIR") or "/tmp")) else "",
    )


def _torch() -> TorchFacts:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library that it loads is missing
        return TorchFacts(error=f"{type(error).__name__}: {error}")
    cuda = _pair(torch.version.cuda or "")
    if cuda is None:
        return TorchFacts(torch.__version__)
    gpus, error = [], ""
    try:
        torch.cuda.init()
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            gpus.append(GpuFacts(found.name, (found.major, found.minor), found.total_memory))
    except (RuntimeError, AssertionError) as problem:
        error = str(problem).partition("\n")[0]
    return TorchFacts(torch.__version__, cuda, tuple(torch.cuda.get_arch_list()), tuple(gpus), error)


def _pair(text: str) -> Version | None:
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def driver_version(file: Path) -> str:
    """Return the version of NVIDIA's kernel module, which it writes into ``file``; empty if there is none."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else ""


def _driver_cuda() -> Version | None:
    """Return the newest CUDA that NVIDIA's driver library supports; it need not be initialized for that."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _tool(name: str) -> str:
    """Return the path of a program. nvcc and ninja are also looked for where those who call them look."""
    places = [os.environ.get("PATH", os.defpath)]
    if name == "nvcc":
        homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
        places = [*(f"{home}/bin" for home in homes if home), *places]
    if name == "ninja":  # a wheel puts it beside Python
        places.append(str(Path(sys.executable).parent))
    return shutil.which(name, path=os.pathsep.join(places)) or ""


def _caches() -> list[CacheFacts]:
    from dovetail.ops.cpu.library import cache_dir

    found = [read_cache("CPU", cache_dir(), "kernels-*.so")]
    if importlib.util.find_spec("triton"):
        from dovetail.ops.triton.kernel_cache import cache_directory

        found.append(read_cache("Triton", cache_directory(), "*/*.cubin"))
    if importlib.util.find_spec("flashinfer"):
        base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home())
        found.append(read_cache("FlashInfer", base / ".cache" / "flashinfer", "*/*/cached_ops/*/*.so"))
    return found


def read_cache(what: str, path: Path, kernels: str) -> CacheFacts:
    """Read the directory ``path``, which need not exist. Only files that ``kernels`` matches are counted as kernels."""
    base = next(folder for folder in (path, *path.parents) if folder.exists())
    size = 0
    for folder, _, names in os.walk(path):
        if what == "CPU" and Path(folder) != path:
            continue  # the caches of others may be below it
        size += sum(_size(Path(folder, name)) for name in names)
    return CacheFacts(what, path, len(list(path.glob(kernels))), size, shutil.disk_usage(base).free, _is_writable(base))


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # it was removed meanwhile
        return 0


def _is_writable(folder: Path) -> bool:
    """Return True if a file can be made in ``folder``; permissions do not tell that for root or a read-only mount."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def compiler_version(path: str) -> str:
    """Return the first line of what ``path --version`` prints; for nvcc, the line with its release."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    lines = done.stdout.strip().splitlines()
    return next((line for line in lines if "release" in line), lines[0] if lines else "")
