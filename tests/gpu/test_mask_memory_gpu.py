"""Test that bitmasks in memory of another process are pinned, and that the device copies from them directly.

Run on a machine with a GPU: python -m pytest tests/gpu/test_mask_memory_gpu.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dovetail.engine.masks import PinnedMappings, mask_logits
from dovetail.errors import EngineError
from dovetail.types import Masks
from dovetail_executors.workers.memory import AnonymousMemory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda:0")
VOCAB = 1000


def test_shared_memory_is_pinned_until_the_end() -> None:
    """Also after it has grown: both mappings are read. Afterwards they can be pinned again."""
    memory, pinned = AnonymousMemory.create(1 << 16), PinnedMappings(DEVICE)
    first = memory.bytes
    for _ in range(2):
        assert not torch.from_numpy(first).is_pinned()
        pinned.add(first)
        memory.grow(1 << 20)
        second = memory.bytes
        pinned.add(second)
        for mapping in (first, second):
            assert torch.from_numpy(mapping).is_pinned()
            assert torch.from_numpy(mapping[4096:8192]).is_pinned()
        pinned.close()
        for mapping in (first, second):
            assert not torch.from_numpy(mapping).is_pinned()
    pinned.close()
    memory.close()


def test_logits_are_masked_from_pinned_shared_memory() -> None:
    """The copy does not wait for the device: it is queued behind a kernel that runs for a while."""
    memory, pinned = AnonymousMemory.create(1 << 20), PinnedMappings(DEVICE)
    pinned.add(memory.bytes)
    rng, rows, width = np.random.default_rng(0), 5, -(-VOCAB // 32)
    bits = np.frombuffer(memory.view, np.int32, rows * width, 4096).reshape(rows, width)
    bits[:] = rng.integers(-(2**31), 2**31, bits.shape)
    logits = torch.zeros(rows + 2, VOCAB, device=DEVICE)
    logit_rows = np.array([6, 0, 2, 3, 5])
    mask_logits(logits.clone(), Masks(bits, logit_rows))  # compiles what it needs
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    mask_logits(logits, Masks(bits, logit_rows))
    event = torch.cuda.Event()
    event.record()
    assert not event.query(), "the host has waited for the device"
    torch.cuda.synchronize()
    allowed = np.ones((rows + 2, VOCAB), np.bool_)
    allowed[logit_rows] = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB].astype(np.bool_)
    np.testing.assert_array_equal(torch.isfinite(logits).cpu().numpy(), allowed)
    pinned.close()
    memory.close()


def test_an_error_of_the_driver_is_reported() -> None:
    memory, pinned = AnonymousMemory.create(1 << 16), PinnedMappings(DEVICE)
    pinned.add(memory.bytes)
    with pytest.raises(EngineError, match=r"cannot pin 65536 bytes of shared memory for grammar bitmasks: .*712"):
        pinned.add(memory.bytes)
    assert torch.ones(3, device=DEVICE).sum().item() == 3, "the error is reported once"
    pinned.close()
    memory.close()
