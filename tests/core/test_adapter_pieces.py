"""Test that adapters are pinned in pieces, that their pieces fill a slot, and that weights are not copied on the stream of an engine.

.venv/bin/python -m pytest -q tests/core/test_adapter_pieces.py
"""

import itertools
from collections import defaultdict

import numpy as np
import torch

from dovetail.engine import adapter_files
from dovetail.engine.adapter_files import AdapterImage
from dovetail.engine.adapters import EngineAdapters
from dovetail.engine.device import EngineStream


def test_no_pinned_piece_is_larger_than_allowed_and_the_pieces_fill_a_slot(monkeypatch):
    """While the driver pins memory, other requests wait: a whole adapter of an 8B model takes as long as ten steps."""
    empty, pinned = torch.empty_like, []

    def empty_like(part, pin_memory=False):
        pinned.append(pin_memory)
        return empty(part)

    monkeypatch.setattr(torch, "empty_like", empty_like)
    monkeypatch.setattr(adapter_files, "PIECE_BYTES", 64)
    elements = torch.arange(100, dtype=torch.bfloat16)
    pieces = adapter_files._pinned(elements)
    assert [piece.nbytes for piece in pieces] == [64, 64, 64, 8]
    assert pinned == [True] * 4
    adapters = EngineAdapters.__new__(EngineAdapters)
    adapters._slots = torch.zeros(3, 100, dtype=torch.bfloat16)
    adapters._ranks, adapters._device_ranks = np.zeros((3, 2), np.int32), None
    adapters.install(AdapterImage(pieces, np.array([4, 8], np.int32)), 2)
    assert torch.equal(adapters._slots, torch.stack([torch.zeros(100), elements, torch.zeros(100)]).bfloat16())
    assert adapters._ranks.tolist() == [[0, 0], [4, 8], [0, 0]]


def test_weights_are_copied_on_a_stream_of_no_engine(monkeypatch):
    """As torch does, streams are given out in turns: 32 of each device and priority."""
    counts = defaultdict(itertools.count)

    def stream(device, priority=0):
        return device, priority, next(counts[device, priority]) % 32

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    adapter_files._copy_stream.cache_clear()
    devices = [torch.device("cuda", index) for index in (0, 1)]
    copies = {adapter_files._copy_stream(device) for device in devices}
    adapter_files._copy_stream.cache_clear()
    engines = {EngineStream(device)._stream for device in devices for _ in range(64)}
    assert len(copies) == 2
    assert not copies & engines
