"""Test that adapters are pinned in pieces, and that their pieces fill a slot.

.venv/bin/python -m pytest -q tests/core/test_adapter_pieces.py
"""

import numpy as np
import torch

from dovetail.engine import adapter_files
from dovetail.engine.adapter_files import AdapterImage
from dovetail.engine.adapters import EngineAdapters


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
