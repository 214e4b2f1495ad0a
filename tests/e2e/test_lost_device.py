"""Test memory that runs out and a device that is lost, behind a server. tests/gpu/test_failures_gpu.py tests the same
on a GPU.

.venv/bin/python -m pytest -q tests/e2e/test_lost_device.py
"""

from pathlib import Path

import pytest
import torch
import troubled

from dovetail.engine.device import lost_device, out_of_memory

DEVICE = "device=cpu"


@pytest.mark.parametrize("overlap", [False, True])
def test_what_a_step_can_do_to_a_server(tmp_path: Path, overlap: bool):
    server = troubled.serve(tmp_path, DEVICE, f"scheduler.overlap={overlap}")
    with troubled.client_of(server) as client:
        troubled.check_illegal_requests(client)
        troubled.check_memory_errors(client, "can't allocate memory")
        troubled.check_lost_device(client, server, "wild decode" if overlap else "wild prompt")
        assert "illegal memory access" in server.log


def test_a_pool_that_does_not_fit(tmp_path: Path):
    """Memory that the system refuses is no wrong setting by itself; a size that fits no two pages is."""
    too_large = troubled.serve(tmp_path / "large", DEVICE, "memory.num_pages=2000000000")
    too_small = troubled.serve(tmp_path / "small", DEVICE, "memory.kv_gib=1e-9")
    texts = "too little memory to build the engine", "you tried to allocate", "memory.num_pages (2000000000)"
    troubled.check_start_up_failure(too_large, *texts)
    troubled.check_start_up_failure(too_small, "needs at least two pages", "raise memory.kv_gib (1e-09)", expected=2)


def test_a_wrong_setting_has_its_own_status(tmp_path: Path):
    server = troubled.serve(tmp_path, DEVICE, "memory.page_size=0")
    assert server.wait(troubled.START_SECONDS) == 2
    assert "memory.page_size" in server.log
    assert "Traceback" not in server.log


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            torch.AcceleratorError("CUDA error: unspecified launch failure\nadvice"),
            "CUDA error: unspecified launch failure",
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), None),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), None),
        (KeyboardInterrupt(), None),
    ],
)
def test_without_a_device_to_ask_the_type_of_an_error_tells(monkeypatch, error, expected):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert lost_device(error) == expected


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nadvice"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"),
        torch.OutOfMemoryError("CUDA out of memory"),
        KeyboardInterrupt(),
    ],
)
def test_a_device_is_asked_whatever_the_error(monkeypatch, error):
    """Calls of a lost device fail; those of a working device do not, whatever was raised before."""
    asked = []

    def synchronize(device):
        asked.append(device)
        if lost:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nadvice")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: int(device != 1))
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    lost = False
    assert lost_device(error) is None
    assert asked == [0, 2], "device 1 is not ours"
    lost = True
    reason = lost_device(error)
    assert reason is not None
    assert "an illegal memory access was encountered" in reason
    assert "advice" not in reason
    assert type(error).__name__ in reason or "illegal" in str(error)


def test_what_counts_as_too_little_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    assert out_of_memory(caught.value)
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not out_of_memory(RuntimeError("shapes do not match"))
