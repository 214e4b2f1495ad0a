"""Judge what ``dovetail doctor`` has read from a machine: what is there, what is missing, and the command for it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dovetail.cli.doctor_facts import CacheFacts, HostFacts, Version, compiler_version
from dovetail.cli.plugins_doctor import Finding

if TYPE_CHECKING:
    from dovetail.cli.doctor_facts import GpuFacts

PYTHON = (3, 11)
DRIVERS = {11: 450, 12: 525, 13: 580}
"""The oldest driver for each major version of CUDA, from NVIDIA's table of CUDA minor version compatibility."""
KERNELS = (8, 0)
"""The compute capability from which on the attention backends for CUDA work."""
HOPPER = (9, 0)
FLASH_ATTENTION_3 = ("flash-attn-3", "sglang-kernel", "vllm")
"""The distributions that contain FlashAttention-3."""
MIB, GIB = 1 << 20, 1 << 30
FREE_MEMORY = 2 * GIB
FREE_DISK = GIB
DESCRIPTORS = 4096
SHARED_MEMORY = GIB
"""What NCCL may need in /dev/shm for the ranks of one host."""


def machine_findings(facts: HostFacts) -> Iterator[Finding]:
    """Yield what the machine has and what it lacks, most important first."""
    yield _python(facts)
    yield _torch(facts)
    yield from _gpus(facts)
    yield from _kernel_packages(facts)
    yield from _compilers(facts)
    for cache in facts.caches:
        yield _cache(cache)
    yield _memory(facts)
    yield _descriptors(facts)
    yield from _shared_memory(facts)
    yield _temporary(facts)
    yield _hub(facts)


def has_gpu(facts: HostFacts) -> bool:
    """Return True if there is an NVIDIA GPU, also one that torch cannot use."""
    return bool(facts.torch.gpus or facts.devices or facts.driver_cuda)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _size(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _python(facts: HostFacts) -> Finding:
    text = f"{_dotted(facts.python)}, {facts.executable}"
    if facts.python >= PYTHON:
        return Finding("Python", "ready", text)
    why = f"{text}; Dovetail needs {_dotted(PYTHON)} or newer"
    return Finding("Python", "failed", why, f"make a virtual environment with Python {_dotted(PYTHON)}", broken=True)


def _torch(facts: HostFacts) -> Finding:
    torch = facts.torch
    if not torch.version:
        fix = "pip install --force-reinstall torch"
        return Finding("torch", "failed", f"cannot be imported: {torch.error}", fix, broken=True)
    text = f"{torch.version}, built for " + (f"CUDA {_dotted(torch.cuda)}" if torch.cuda else "CPUs")
    if not has_gpu(facts):
        note = "; runs on the CPU, as there is no NVIDIA GPU" if torch.cuda else ""
        return Finding("torch", "ready", text + note)
    if torch.cuda is None:
        why = f"{text}, but there is an NVIDIA GPU; the engine runs on the CPU"
        return Finding("torch", "failed", why, _torch_for(facts.driver_cuda), broken=True)
    if facts.driver_cuda is not None and torch.cuda[0] > facts.driver_cuda[0]:
        why = f"{text}, but the driver supports CUDA up to {_dotted(facts.driver_cuda)}"
        newer = f"update the NVIDIA driver to {DRIVERS.get(torch.cuda[0], 'the newest')} or newer"
        return Finding("torch", "failed", why, f"{newer}, or {_torch_for(facts.driver_cuda)}", broken=True)
    if not torch.gpus:
        why = f"{text}, but it sees no GPU" + (f": {torch.error}" if torch.error else "")
        fix = "see if nvidia-smi works, CUDA_VISIBLE_DEVICES names a GPU, and the container has it (docker run --gpus all)"
        return Finding("torch", "failed", why, fix, broken=True)
    limit = f"; the driver supports CUDA up to {_dotted(facts.driver_cuda)}" if facts.driver_cuda else ""
    return Finding("torch", "ready", text + limit)


def _torch_for(driver: Version | None) -> str:
    """Return how to install a torch that runs on this driver."""
    if driver is None or driver[0] >= max(DRIVERS):
        return "pip install --force-reinstall torch"
    return f"install torch for CUDA {driver[0]} from PyTorch's own index (docs/install.md)"


def _gpus(facts: HostFacts) -> Iterator[Finding]:
    driver = f"driver {facts.driver or 'of unknown version'}"
    if not facts.torch.gpus:
        if has_gpu(facts):
            many = _count(facts.devices, "device file") if facts.devices else "a driver library but no device"
            yield Finding("GPU", "unusable", f"{many}, {driver}; torch cannot use them (see torch)")
        else:
            yield Finding("GPU", "unneeded", "no NVIDIA GPU; the engine runs on the CPU")
    for index, gpu in enumerate(facts.torch.gpus):
        text = f"{gpu.name}, compute capability {_dotted(gpu.capability)}, {_size(gpu.memory)}, {driver}"
        yield _gpu(f"GPU cuda:{index}", text, gpu, facts)


def _gpu(what: str, text: str, gpu: GpuFacts, facts: HostFacts) -> Finding:
    known = [_capability(name) for name in facts.torch.architectures]
    if known and not any(runs_on(arch, gpu.capability) for arch in known if arch):
        built = ", ".join(facts.torch.architectures)
        why = f"{text}; torch {facts.torch.version} has no kernels for it ({built})"
        return Finding(what, "failed", why, "install another version of torch, or set device: cpu", broken=True)
    if gpu.capability < KERNELS:
        why = f"{text}; below {_dotted(KERNELS)} only attention torch_native works, which is slow"
        return Finding(what, "low", why, "use a GPU of the Ampere generation or later")
    return Finding(what, "ready", text)


def _capability(architecture: str) -> tuple[str, Version] | None:
    """Return the kind of code and the compute capability of ``sm_90``, ``sm_90a`` or ``compute_90``."""
    kind, _, digits = architecture.partition("_")
    digits = digits.rstrip("af")
    return (kind, (int(digits[:-1]), int(digits[-1]))) if len(digits) > 1 and digits.isdigit() else None


def runs_on(architecture: tuple[str, Version], capability: Version) -> bool:
    """Return True if code of this kind runs on a device: binaries on the same major version, PTX on all newer ones."""
    kind, built = architecture
    return built <= capability and (kind == "compute" or built[0] == capability[0])


def _kernel_packages(facts: HostFacts) -> Iterator[Finding]:
    """Yield the packages of kernels for GPUs. FlashAttention-3 is one of several packages and for Hopper only."""
    have = facts.packages
    for name, why in (("triton", "Dovetail's own kernels"), ("flashinfer-python", "attention flashinfer")):
        if name in have:
            yield Finding(name, "ready", f"{have[name]}, for {why}")
        elif has_gpu(facts):
            yield Finding(name, "missing", f"{why} need it", f"pip install {name}")
    found = [f"{name} {have[name]}" for name in FLASH_ATTENTION_3 if name in have]
    if any(gpu.capability == HOPPER for gpu in facts.torch.gpus):
        what = "FlashAttention-3"
        if found:
            yield Finding(what, "ready", f"in {', '.join(found)}; `dovetail explain` shows if it is used")
        else:
            fix = f"pip install 'sglang-kernel>=0.4.7' 'torch=={facts.torch.version.partition('+')[0]}'"
            why = "attention flash_attn needs it; if there is no wheel for this torch, see docs/install.md"
            yield Finding(what, "missing", why, fix)


def _compilers(facts: HostFacts) -> Iterator[Finding]:
    tools = facts.tools
    if "g++" in tools:
        yield Finding("C++ compiler", "ready", _tool(tools["g++"]))
    else:
        why = "no g++: the CPU kernels cannot be compiled, and slower torch operations are used"
        yield Finding("C++ compiler", "missing", why, "apt install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora)")
    if not has_gpu(facts):
        return
    compiler = next((tools[name] for name in ("gcc", "clang", "cc") if name in tools), "")
    if not compiler or not facts.headers:
        lack = "Python's headers are not installed" if compiler else "no gcc, clang or cc"
        fix = "apt install gcc python3-dev (Debian, Ubuntu), dnf install gcc python3-devel (Fedora)"
        why = f"{lack}: Triton cannot compile the code that launches its kernels"
        yield Finding("C compiler", "failed", why, fix, broken=True)
    else:
        yield Finding("C compiler", "ready", _tool(compiler))
    for name, fix in (
        (
            "nvcc",
            "install NVIDIA's CUDA toolkit and set CUDA_HOME (apt install cuda-toolkit, from NVIDIA's repository)",
        ),
        ("ninja", "pip install ninja"),
    ):
        if name in tools:
            yield Finding(name, "ready", _tool(tools[name]))
        elif "flashinfer-python" in facts.packages:
            why = "FlashInfer needs it to compile kernels that its wheels do not have"
            yield Finding(name, "missing", why, fix)


def _tool(path: str) -> str:
    version = compiler_version(path)
    return f"{path}, {version}" if version else path


def _cache(cache: CacheFacts) -> Finding:
    what = f"{cache.what} kernel cache"
    text = f"{cache.path}: "
    text += f"{cache.kernels} kernels, {_size(cache.size)}" if cache.kernels else "empty; filled by the first start"
    if not cache.writable:
        why = f"{text}; it cannot be written, so kernels are compiled again at each start"
        return Finding(what, "low", why, "set XDG_CACHE_HOME to a directory that can be written and is kept")
    if cache.free < FREE_DISK:
        why = f"{text}; {_size(cache.free)} are free on its file system"
        return Finding(what, "low", why, "free some space, or set XDG_CACHE_HOME to a larger file system")
    return Finding(what, "ready", text)


def _memory(facts: HostFacts) -> Finding:
    if facts.memory is None or facts.available is None:
        return Finding("memory", "ready", f"unknown; {_count(facts.cores, 'core')}")
    text = f"{_size(facts.memory)}, {_size(facts.available)} available, {_count(facts.cores, 'core')}"
    usable = facts.available
    if facts.memory_limit is not None:
        text += f", limit of the container {_size(facts.memory_limit)}"
        usable = min(usable, facts.memory_limit)
    if usable < FREE_MEMORY:
        fix = "end other programs, or raise the limit of the container"
        return Finding("memory", "low", f"{text}; the engine and its grammar processes take about 2 GiB", fix)
    return Finding("memory", "ready", text)


def _descriptors(facts: HostFacts) -> Finding:
    soft, hard = facts.descriptors
    text = f"limit {soft}, raised at start to at most {hard or 'any number'}"
    if hard is not None and hard < DESCRIPTORS:
        fix = "ulimit -Hn 65536, LimitNOFILE=65536 (systemd) or docker run --ulimit nofile=65536"
        return Finding("file descriptors", "low", f"{text}; each connection takes one", fix)
    return Finding("file descriptors", "ready", text)


def _shared_memory(facts: HostFacts) -> Iterator[Finding]:
    if facts.shared_memory is None:
        return
    several = len(facts.torch.gpus) > 1
    text = _size(facts.shared_memory)
    if several and facts.shared_memory < SHARED_MEMORY:
        why = f"{text}; NCCL may need {_size(SHARED_MEMORY)} when several GPUs share a model"
        yield Finding("/dev/shm", "low", why, "docker run --shm-size 2g, or an emptyDir of medium Memory (Kubernetes)")
    else:
        yield Finding("/dev/shm", "ready", text + ("" if several else "; used only with several GPUs"))


def _temporary(facts: HostFacts) -> Finding:
    if not facts.temporary:
        why = "TMPDIR (or /tmp) cannot be written; sockets between the server and the engine are made there"
        return Finding("temporary files", "failed", why, "set TMPDIR to a directory that can be written", broken=True)
    return Finding(
        "temporary files", "ready", f"{facts.temporary}, {_size(shutil.disk_usage(facts.temporary).free)} free"
    )


def _hub(facts: HostFacts) -> Finding:
    version = facts.packages.get("huggingface-hub")
    if version:
        return Finding("model downloads", "ready", f"huggingface-hub {version}")
    why = "models are read from local directories only; names of the hub need huggingface-hub"
    return Finding("model downloads", "unneeded", why, "pip install huggingface-hub")
