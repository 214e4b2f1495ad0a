"""Test the pool of states, and what a state group says of its size.

Run: python -m pytest tests/core/test_state_pool.py
"""

from __future__ import annotations

import re
import struct
import zlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dovetail.engine.declared import check_declared
from dovetail.errors import PageFormatError, PluginLoadError
from dovetail.interfaces.attention import AttentionLayer
from dovetail.interfaces.cache import CacheGroup, CacheGroupKind
from dovetail.interfaces.features import Feature
from dovetail.interfaces.mesh import SINGLE
from dovetail.interfaces.mixer_shapes import CONV_NEEDS, StateShape
from dovetail.layers.attention import AttentionShape, SelfAttention
from dovetail.layers.short_conv import GatedShortConv
from dovetail.memory.state_pool import StatePool, bytes_per_slot

CONV = StateShape((6, 3), None, ((2, 2), (1, 2)))
RULE = StateShape((2, 4, 5), "float32", ((2, 1),))
GROUP = CacheGroup.of_states(2, (CONV, RULE, StateShape((7,)), RULE))
CONV_OF_MODEL = StateShape((8, 2), None, ((8, 1),))
SLOT = 2 * (2 * 160 + (18 + 7) * 2)


def test_every_layer_has_states_of_its_own_with_contiguous_slots() -> None:
    memory = torch.zeros(4, SLOT + 44, dtype=torch.uint8)  # a slot may be larger than what it holds
    pool = StatePool(GROUP, memory, torch.bfloat16)
    states = [state for layer in pool.memory for state in layer]
    assert [tuple(state.shape) for state in states] == [(4, 6, 3), (4, 2, 4, 5), (4, 7), (4, 2, 4, 5)] * 2
    assert [state.dtype for state in states] == [torch.bfloat16, torch.float32] * 4
    assert all(state[1].is_contiguous() for state in states)
    for number, state in enumerate(states):
        state.fill_(number)
    assert all((state == number).all() for number, state in enumerate(states))


def test_a_copy_reads_all_slots_before_it_writes_any() -> None:
    pool = random_pool(5, dtype=torch.float32)
    before = [state.clone() for state in flat(pool)]
    pool.copy(torch.tensor([1, 2, 1]), torch.tensor([2, 1, 4]))
    assert all(state.equal(was[[0, 2, 1, 3, 1]]) for state, was in zip(flat(pool), before, strict=True))


def test_the_bytes_of_a_slot_hold_all_states() -> None:
    assert SLOT <= bytes_per_slot(GROUP, torch.bfloat16) < SLOT + 16
    assert bytes_per_slot(GROUP, torch.bfloat16) % 16 == 0
    assert bytes_per_slot(GROUP.share(2), torch.float32) == 480  # CONV has 2 + 2 channels, 472 bytes


def test_a_fill_reaches_every_state() -> None:
    pool = random_pool(3)
    before = [state[0].clone() for state in flat(pool)]
    pool.fill(float("nan"), [1, 2])
    assert all(state[1:].isnan().all() for state in flat(pool))
    assert all(state[0].equal(first) for state, first in zip(flat(pool), before, strict=True))


def random_pool(
    num_slots: int, more: int = 0, dtype: torch.dtype = torch.bfloat16, group: CacheGroup = GROUP
) -> StatePool:
    memory = torch.zeros(num_slots, bytes_per_slot(group, dtype) + more, dtype=torch.uint8)
    pool = StatePool(group, memory, dtype)
    for state in flat(pool):
        state.copy_(torch.randn(state.shape))
    return pool


def flat(pool: StatePool) -> list[torch.Tensor]:
    return [state for layer in pool.memory for state in layer]


def test_exported_slots_give_another_pool_the_same_states() -> None:
    """The slots of the other pool have another distance. Only the named slots change."""
    source, target = random_pool(5), random_pool(4, more=64)
    before = [state.clone() for state in flat(target)]
    target.import_slots(source.export_slots([4, 2]), [1, 3])
    for own, theirs, old in zip(flat(target), flat(source), before, strict=True):
        assert own.equal(torch.stack([old[0], theirs[4], old[2], theirs[2]]))
    target.import_slots(source.export_slots([]), [])


def test_damaged_exports_are_refused_before_anything_is_written() -> None:
    pool = random_pool(4)
    before = [state.clone() for state in flat(pool)]
    data = pool.export_slots([1, 2])
    others = [random_pool(4, dtype=torch.float32), random_pool(4, group=CacheGroup.of_states(3, GROUP.states))]
    others.append(random_pool(4, group=CacheGroup.of_states(2, GROUP.states[:3])))
    cases = {"truncated": data[:-1], "checksum": data[:-1] + bytes([data[-1] ^ 1]), "magic": b"x" + data[1:]}
    for fault, damaged in cases.items():
        with pytest.raises(PageFormatError) as caught:
            pool.import_slots(damaged, [1, 3])
        assert caught.value.fault == fault
    with pytest.raises(PageFormatError, match="the export has 2 pages; 1 are to be written"):
        pool.import_slots(data, [1])
    for other in others:
        with pytest.raises(PageFormatError) as caught:
            pool.import_slots(other.export_slots([1, 2]), [1, 3])
        assert caught.value.fault == "layout"
    assert all(state.equal(old) for state, old in zip(flat(pool), before, strict=True))


def test_a_header_of_any_json_is_refused() -> None:
    """The checksum is right: a client can compute it as well."""
    pool = random_pool(4)
    for header in (b"[" * 9, b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"layout":1}', b'"\xff"', b""):
        start = struct.pack("<4sHIIQ", b"DTKV", 1, len(header), zlib.crc32(header), 0)
        with pytest.raises(PageFormatError) as caught:
            pool.import_slots(start + header, [1])
        assert caught.value.fault == "header"


def test_groups_of_states_have_no_heads_and_others_no_states() -> None:
    for values in ((1, 1, CacheGroupKind.STATE), (0, 0, CacheGroupKind.STATE), (1, 8, CacheGroupKind.FULL)):
        heads, head_dim, kind = values
        states = (CONV,) if heads else ()
        with pytest.raises(ValueError, match="with kind state one or more states"):
            CacheGroup(2, heads, head_dim, kind, states=states)


def test_a_model_whose_layers_keep_other_states_than_it_declares_is_refused() -> None:
    model = nn.ModuleList([GatedShortConv(8, 3, layer, SINGLE) for layer in range(2)])
    info: Any = SimpleNamespace(architecture="Fake", needs=frozenset(), cache_groups=())
    for declared, message in (
        ((), "declares 0 layers with states (none), and its layers with the state ids [0, 1] keep [8, 2]"),
        ((CacheGroup.of_states(1, (CONV_OF_MODEL,)),), "declares 1 layers"),
        ((CacheGroup.of_states(2, (StateShape((8, 3)),)),), "[8, 3] of the dtype of the model"),
        ((CacheGroup.of_states(2, (StateShape((8, 2), "float32"),)),), "[8, 2] float32"),
    ):
        info.cache_groups = declared
        with pytest.raises(PluginLoadError, match=re.escape(message)):
            check_declared(model, info, 1)
    info.cache_groups = (CacheGroup.of_states(2, (CONV_OF_MODEL,)),)
    needed = r"does not declare mixer\.short_conv, which its layer 0 needs; add GatedShortConv\.needs to the needs"
    with pytest.raises(PluginLoadError, match=needed):
        check_declared(model, info, 1)
    info.needs = CONV_NEEDS
    check_declared(model, info, 1)


def test_an_attention_layer_whose_place_its_group_does_not_have_is_refused() -> None:
    layer = SelfAttention(AttentionShape(8, 2, 1, 4), AttentionLayer(2, 0.5), SINGLE)
    groups = (CacheGroup(2, 1, 4), CacheGroup(1, 1, 4))
    info: Any = SimpleNamespace(architecture="Fake", needs=frozenset(), cache_groups=groups)
    model = nn.ModuleList([layer])
    for place in ((0, 2), (1, 1), (2, 0)):
        layer.set_place(*place)
        message = f"layer 0 is number {place[1]} of cache group {place[0]}, and the cache groups of the ModelInfo have [2, 1] layers"
        with pytest.raises(PluginLoadError, match=re.escape(message)):
            check_declared(model, info, 1)
    layer.set_place(1, 0)
    check_declared(model, info, 1)


def test_a_layer_with_a_window_is_in_a_sliding_group_if_there_is_one() -> None:
    """Layers of the first group may read shared prefixes once, which layers with a window cannot."""
    layer = SelfAttention(AttentionShape(8, 2, 1, 4), AttentionLayer(0, 0.5, window=16), SINGLE)
    model, full, slides = nn.ModuleList([layer]), CacheGroup(1, 1, 4), CacheGroup(1, 1, 4, CacheGroupKind.SLIDING, 16)
    info: Any = SimpleNamespace(
        architecture="Fake", needs=frozenset({Feature.ATTN_SLIDING_WINDOW}), cache_groups=(full, slides)
    )
    message = "layer 0 has a window of 16 tokens, and its cache group 0 is of kind full; the kinds of all groups are full, sliding"
    with pytest.raises(PluginLoadError, match=message):
        check_declared(model, info, 1)
    layer.set_place(1, 0)
    check_declared(model, info, 1)
    layer.set_place(0, 0)
    info.cache_groups = (full,)
    check_declared(model, info, 1)
