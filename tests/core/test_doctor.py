"""Test ``dovetail doctor`` over machines that are made up, and that it reads the real one.

Run: pytest tests/core/test_doctor.py
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.cli import doctor_facts, main
from dovetail.cli.doctor_checks import machine_findings, runs_on
from dovetail.cli.doctor_facts import CacheFacts, GpuFacts, HostFacts, TorchFacts, read_machine
from dovetail.cli.plugins_doctor import Finding

GIB = 1 << 30
HOPPER = GpuFacts("NVIDIA H200", (9, 0), 139 * GIB)
CUDA_TORCH = TorchFacts("2.13.0", (13, 0), ("sm_75", "sm_80", "sm_90", "sm_100", "compute_120"), (HOPPER,))
PLAIN = HostFacts(
    python=(3, 12, 1),
    executable="/venv/bin/python",
    torch=TorchFacts("2.13.0+cpu"),
    tools={"g++": "/none/g++", "gcc": "/none/gcc"},
    memory=32 * GIB,
    available=30 * GIB,
    descriptors=(1024, 65536),
    shared_memory=64 << 20,
    temporary="/tmp",
)
"""A machine without a GPU that lacks nothing."""
WITH_GPU = dataclasses.replace(
    PLAIN,
    torch=CUDA_TORCH,
    devices=1,
    driver="580.65.06",
    driver_cuda=(13, 0),
    packages={"triton": "3.7.1", "flashinfer-python": "0.6.15", "sglang-kernel": "0.4.8", "huggingface-hub": "1.0"},
    tools={name: f"/none/{name}" for name in ("g++", "gcc", "nvcc", "ninja")},
)
"""A machine with a GPU that lacks nothing."""


def judged(facts: HostFacts, **changes: object) -> dict[str, Finding]:
    return {finding.what: finding for finding in machine_findings(dataclasses.replace(facts, **changes))}


def lacks(findings: dict[str, Finding]) -> dict[str, str]:
    return {what: f.status for what, f in findings.items() if f.status not in ("ready", "unneeded")}


def test_a_machine_that_lacks_nothing_is_ready():
    for facts in (PLAIN, WITH_GPU):
        assert lacks(judged(facts)) == {}
    assert judged(PLAIN)["GPU"].status == "unneeded"
    assert not {"nvcc", "ninja", "C compiler", "flashinfer-python"} & set(judged(PLAIN)), "they are for GPUs"
    assert "NVIDIA H200, compute capability 9.0, 139.0 GiB" in judged(WITH_GPU)["GPU cuda:0"].why


def gpus(*found: GpuFacts) -> TorchFacts:
    return dataclasses.replace(CUDA_TORCH, gpus=found)


BLIND = dataclasses.replace(CUDA_TORCH, gpus=(), error="No CUDA GPUs are available")
OLD = GpuFacts("Tesla T4", (7, 5), 16 * GIB)
OLDER = GpuFacts("Tesla P100", (6, 0), 16 * GIB)


@pytest.mark.parametrize(
    ("changes", "what", "status", "why", "fix"),
    [
        ({"torch": TorchFacts(error="OSError: libcudart.so.13")}, "torch", "failed", "libcudart.so.13", "pip install"),
        ({"torch": TorchFacts("2.13.0+cpu")}, "torch", "failed", "built for CPUs, but there is", "reinstall torch"),
        ({"driver_cuda": (12, 8)}, "torch", "failed", "supports CUDA up to 12.8", "driver to 580 or newer"),
        ({"driver_cuda": (12, 8)}, "torch", "failed", "built for CUDA 13.0", "install torch for CUDA 12"),
        ({"torch": BLIND}, "torch", "failed", "sees no GPU: No CUDA GPUs", "--gpus all"),
        ({"torch": BLIND, "driver_cuda": None}, "torch", "failed", "sees no GPU", "nvidia-smi"),
        ({"torch": gpus(OLD)}, "GPU cuda:0", "low", "only attention torch_native", "Ampere"),
        ({"torch": gpus(HOPPER, OLDER)}, "GPU cuda:1", "failed", "has no kernels for it", "device: cpu"),
        ({"packages": {}}, "triton", "missing", "Dovetail's own kernels", "pip install triton"),
        ({"packages": {}}, "flashinfer-python", "missing", "flashinfer", "pip install flashinfer-python"),
        ({"packages": {}}, "FlashAttention-3", "missing", "flash_attn", "'sglang-kernel>=0.4.7' 'torch==2.13.0'"),
        ({"tools": {"gcc": "/none/gcc"}}, "C++ compiler", "missing", "no g++", "apt install g++"),
        ({"tools": {"gcc": "/none/gcc"}}, "nvcc", "missing", "FlashInfer", "CUDA toolkit"),
        ({"tools": {"gcc": "/none/gcc"}}, "ninja", "missing", "FlashInfer", "pip install ninja"),
        ({"tools": {}}, "C compiler", "failed", "no gcc, clang or cc", "apt install gcc"),
        ({"headers": False}, "C compiler", "failed", "Python's headers", "python3-dev"),
        ({"memory_limit": GIB}, "memory", "low", "limit of the container 1.0 GiB", "raise the limit"),
        ({"descriptors": (1024, 1024)}, "file descriptors", "low", "limit 1024", "nofile=65536"),
        ({"torch": gpus(HOPPER, HOPPER)}, "/dev/shm", "low", "64 MiB", "--shm-size"),
        ({"temporary": ""}, "temporary files", "failed", "cannot be written", "TMPDIR"),
        ({"python": (3, 10, 1)}, "Python", "failed", "needs 3.11 or newer", "Python 3.11"),
    ],
)
def test_what_a_machine_with_a_gpu_lacks(changes, what, status, why, fix):
    found = judged(WITH_GPU, **changes)
    assert (found[what].status, found[what].broken) == (status, status == "failed")
    assert why in found[what].why
    assert fix in found[what].fix


def test_a_gpu_that_torch_cannot_use_is_listed():
    found = judged(WITH_GPU, torch=TorchFacts("2.13.0+cpu"))["GPU"]
    assert found.status == "unusable"
    assert "1 device file, driver 580.65.06" in found.why


def test_a_newer_minor_version_of_cuda_runs_on_the_driver():
    assert judged(WITH_GPU, torch=dataclasses.replace(CUDA_TORCH, cuda=(13, 2)))["torch"].status == "ready"


def test_no_compiler_on_a_machine_without_a_gpu_breaks_nothing():
    found = judged(PLAIN, tools={})
    assert lacks(found) == {"C++ compiler": "missing"}
    assert "slower torch operations" in found["C++ compiler"].why


def test_code_runs_on_its_generation_and_ptx_on_all_later_ones():
    assert runs_on(("sm", (8, 0)), (8, 6))
    assert not runs_on(("sm", (8, 6)), (8, 0))
    assert not runs_on(("sm", (8, 0)), (9, 0))
    assert runs_on(("compute", (8, 0)), (9, 0))


@pytest.mark.parametrize(
    ("cache", "status", "why"),
    [
        (CacheFacts("CPU", Path("/c"), 3, 2 << 20, 9 * GIB), "ready", "/c: 3 kernels, 2 MiB"),
        (CacheFacts("Triton", Path("/c"), free=9 * GIB), "ready", "empty; filled by the first start"),
        (CacheFacts("Triton", Path("/c"), free=9 * GIB, writable=False), "low", "compiled again at each start"),
        (CacheFacts("Triton", Path("/c"), free=1 << 20), "low", "1 MiB are free"),
    ],
)
def test_kernel_caches(cache, status, why):
    found = judged(PLAIN, caches=(cache,))[f"{cache.what} kernel cache"]
    assert found.status == status
    assert why in found.why
    assert ("XDG_CACHE_HOME" in found.fix) == (status == "low")


# -- reading ---------------------------------------------------------------------------------------------------------------


def test_this_machine_is_read(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    folder = tmp_path / "cache" / "dovetail"
    (folder / "triton" / "hash").mkdir(parents=True)
    (folder / "kernels-1.so").write_bytes(b"x" * 100)
    (folder / "triton" / "hash" / "k.cubin").write_bytes(b"x" * 1000)
    facts = read_machine()
    assert facts.python == sys.version_info[:3]
    assert facts.torch.version == torch.__version__
    assert (facts.torch.cuda is None) == (torch.version.cuda is None)
    assert len(facts.torch.gpus) == torch.cuda.device_count()
    caches = {cache.what: (cache.path, cache.kernels, cache.size, cache.writable) for cache in facts.caches}
    assert caches["CPU"] == (folder, 1, 100, True)
    if "triton" in facts.packages:
        assert caches["Triton"] == (folder / "triton", 1, 1000, True)
    assert facts.cores >= 1
    assert facts.descriptors[0] > 0
    if sys.platform == "linux":
        assert facts.memory is not None
        assert facts.available is not None
        assert 0 < facts.available <= facts.memory


def test_torch_that_cannot_be_imported_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    facts = doctor_facts._torch()
    assert facts.version == ""
    assert "torch" in facts.error


@pytest.mark.parametrize(
    "module", ["Open Kernel Module for x86_64  580.95.05  Release", "x86_64 Kernel Module  535.54  Wed"]
)
def test_the_driver_is_read(monkeypatch, tmp_path, module):
    (tmp_path / "version").write_text(f"NVRM version: NVIDIA UNIX {module}\nGCC version:  gcc version 12.3.0\n")
    assert doctor_facts.driver_version(tmp_path / "version") in ("580.95.05", "535.54")
    assert doctor_facts.driver_version(tmp_path / "none") == ""

    class Library:
        def __init__(self, name: str) -> None:
            assert name == "libcuda.so.1"

        def cuDriverGetVersion(self, pointer: Any) -> int:
            pointer._obj.value = 12080
            return 0

    monkeypatch.setattr(doctor_facts.ctypes, "CDLL", Library)
    assert doctor_facts._driver_cuda() == (12, 8)


def test_a_torch_that_finds_no_device_is_read(monkeypatch):
    def fail() -> None:
        raise RuntimeError("No CUDA GPUs are available\nmore")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", fail)
    facts = doctor_facts._torch()
    assert (facts.cuda, facts.gpus, facts.error) == ((13, 0), (), "No CUDA GPUs are available")


def test_tools_are_found_where_their_callers_look(monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert doctor_facts._tool("nvcc") == str(nvcc)
    assert "release 13.0" in doctor_facts.compiler_version(str(nvcc))
    assert doctor_facts.compiler_version("/no/such/program") == ""
    monkeypatch.setenv("PATH", "")
    assert doctor_facts._tool("gcc") == ""


# -- the command -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def call(monkeypatch, capsys):
    """Run ``dovetail doctor`` on a machine that is made up; return (exit status, stdout)."""
    monkeypatch.setenv("COLUMNS", "200")
    for name in [n for n in os.environ if n.startswith("DOVETAIL_")]:
        monkeypatch.delenv(name)

    def run(facts: HostFacts, *words: str) -> tuple[int, str]:
        monkeypatch.setattr(doctor_facts, "read_machine", lambda: facts)
        status = 0
        try:
            main(["doctor", *words])
        except SystemExit as stop:
            status = int(stop.code or 0)
        return status, capsys.readouterr().out

    return run


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_the_command_on_a_machine_without_a_gpu(call):
    status, out = call(PLAIN)
    assert status == 0
    assert "`dovetail serve` runs tiny on cpu with attention torch_native" in out
    assert "Nothing is missing." in out
    status, out = call(PLAIN, "--json")
    assert status == 0
    data = json.loads(out)
    assert set(data) == {"summary", "machine", "components", "plugins", "broken"}
    found = {row["what"]: row["status"] for row in data["components"]}
    assert found["attention/torch_native"] == found["grammar/xgrammar"] == found["executor/local"] == "ready"
    assert found["attention/triton"] == found["attention/flash_attn"] == "unneeded"


@pytest.mark.usefixtures("no_gpu")
def test_the_command_says_what_is_broken(call):
    status, out = call(dataclasses.replace(WITH_GPU, driver_cuda=(12, 8)))
    assert status == 1
    assert "update the NVIDIA driver to 580 or newer" in out
    assert "1 broken" in out
    status, out = call(PLAIN, "--attention-backend", "flashinfer", "--json")
    assert status == 1
    (config,) = json.loads(out)["components"]
    assert config["what"] == "config"
    assert "flashinfer" in config["why"]


def test_without_torch_only_the_machine_is_looked_at(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    status, out = call(dataclasses.replace(PLAIN, torch=doctor_facts._torch()), "--json")
    data = json.loads(out)
    assert (status, data["components"], data["plugins"]) == (1, [], [])
    assert [row["what"] for row in data["machine"] if row["broken"]] == ["torch"]


@pytest.mark.usefixtures("no_gpu")
def test_a_config_file_and_flags_are_taken_as_by_serve(call, tmp_path):
    (tmp_path / "server.yaml").write_text("grammar: outlines\n")
    status, out = call(PLAIN, str(tmp_path / "server.yaml"), "--tp", "2")
    assert status == 0
    assert "grammar outlines" in out
    assert "executor workers" in out


MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
MAMBA2 = {
    "architectures": ["Mamba2ForCausalLM"], "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8,
    "head_dim": 8, "state_size": 16, "n_groups": 1, "conv_kernel": 4, "expand": 2, "layer_norm_epsilon": 1e-5,
}  # fmt: skip


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(("kind", "model"), [("experts", MIXTRAL), ("mixer", MAMBA2)])
def test_backends_that_only_some_models_have(call, tmp_path, kind, model):
    """Backends of experts and of layers with a state are shown for models that have these layers."""
    (tmp_path / "config.json").write_text(json.dumps(model))
    status, out = call(PLAIN, str(tmp_path), "--json")
    data = json.loads(out)
    assert status == 0, data
    found = {row["what"]: row["status"] for row in data["components"]}
    assert (found[f"{kind}/torch_native"], found[f"{kind}/triton"]) == ("ready", "unneeded")
    assert f", {kind} torch_native" in data["summary"]
    others = {"experts", "mixer"} - {kind}
    assert not others & {what.partition("/")[0] for what in found}


@pytest.mark.usefixtures("no_gpu")
def test_the_quantization_is_named(call):
    status, out = call(PLAIN, "--quantization", "fp8")
    assert status == 0
    assert "quantization fp8" in out
