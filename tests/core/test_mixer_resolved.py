"""Test how a backend of layers with a state is chosen, only for models with such layers and by the operations that these need, and that the
store keeps states.

.venv/bin/python -m pytest -q tests/core/test_mixer_resolved.py
"""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.cli.explain import _grid
from dovetail.errors import ConfigError, ResolutionError
from dovetail.interfaces.cache import CacheGroup
from dovetail.interfaces.features import Feature
from dovetail.interfaces.mixer_shapes import SSD_NEEDS, StateShape
from dovetail.registry import ComponentKind, resolve
from dovetail.registry.machine import Machine
from dovetail.registry.resolution import Resolved

CPU, H100 = Machine.assume("cpu"), Machine("cuda", (9, 0), "H100", "cuda:0", num_devices=1)
STATES = (CacheGroup(2, 2, 64), CacheGroup.of_states(2, (StateShape((4, 8, 8), "float32"),)))
STATELESS = frozenset({Feature.STORE_FULL, Feature.STORE_SLABS})
ALL = SSD_NEEDS | {Feature.MIXER_DRAFTS, Feature.MIXER_GRAPH}
ATTENTION = frozenset(
    {Feature.ATTN_EXTEND, Feature.ATTN_DECODE, Feature.ATTN_MIXED, Feature.ATTN_GRAPH, Feature.ATTN_VERIFY}
)


def run(
    fakes: Any, *sets: str, backends: dict[str, frozenset[Feature]], machine: Machine = CPU, **model: Any
) -> Resolved:
    """Resolve a model with these backends, the first of which has the highest priority."""
    model = {"cache_groups": STATES, "needs": SSD_NEEDS, **model}
    kinds = (ComponentKind.MODEL, ComponentKind.ATTENTION, ComponentKind.CACHE, ComponentKind.MIXER)
    others = [spec for spec in fakes.basics() if spec.kind not in kinds]
    others.append(fakes.spec(ComponentKind.STORE, "stateless", offers=STATELESS, priority=1))
    others.append(fakes.spec(ComponentKind.ATTENTION, "plain", offers=ATTENTION, api=(1, 4)))
    others.append(fakes.spec(ComponentKind.CACHE, "tree", offers=frozenset({Feature.CACHE_GROUPS}), api=(2, 0)))
    others.append(fakes.spec(ComponentKind.DRAFTER, "chains", offers=frozenset({Feature.DRAFT_CHAIN})))
    for index, (name, offers) in enumerate(backends.items()):
        others.append(fakes.spec(ComponentKind.MIXER, name, offers=offers, priority=-index))
    registry = fakes.registry(fakes.model(**model), *others, basics=False)
    return resolve(fakes.config(registry, *sets), registry, machine)


def shown(resolved: Resolved) -> list[str]:
    """Return the parts that ``dovetail explain`` lists."""
    return [str(cell) for cell in _grid(resolved, narrow=False).columns[0].cells]


def test_a_model_without_states_has_no_backend(fakes: Any) -> None:
    plain: dict[str, Any] = {"cache_groups": STATES[:1], "needs": frozenset()}
    found = run(fakes, backends={"mine": ALL}, **plain)
    assert found.mixer is None
    assert "mixer" not in shown(found)
    with pytest.raises(ConfigError, match=r"mixer is mine, and FakeForCausalLM has no use.*allowed for it: auto, none"):
        run(fakes, "mixer=mine", backends={"mine": ALL}, **plain)


def test_a_model_with_states_has_the_backend_that_computes_them(fakes: Any) -> None:
    found = run(fakes, backends={"first": frozenset({Feature.MIXER_SHORT_CONV}), "second": ALL})
    assert found.mixer is not None
    assert found.mixer.name == "second"
    assert "mixer" in shown(found)
    with pytest.raises(ResolutionError, match=r"needs mixer\.ssd; mixer is 'first'.*\n(.*\n)*.*- mixer: second"):
        run(fakes, "mixer=first", backends={"first": frozenset({Feature.MIXER_SHORT_CONV}), "second": ALL})


def test_a_model_with_states_needs_one(fakes: Any) -> None:
    needed = "has layers with a state and needs a backend of kind mixer; mixer is none"
    with pytest.raises(ResolutionError, match=needed):
        run(fakes, "mixer=none", backends={"mine": ALL})


def test_graphs_need_a_backend_that_can_be_captured(fakes: Any) -> None:
    both = {"captured": ALL, "waits": ALL - {Feature.MIXER_GRAPH}}
    assert run(fakes, backends=both, machine=H100).config.graphs.decode is True
    assert run(fakes, "mixer=waits", backends=both, machine=H100).config.graphs.decode is False
    with pytest.raises(ResolutionError, match=r"graphs\.decode needs mixer\.graph"):
        run(fakes, "mixer=waits", "graphs.decode=true", backends=both, machine=H100)


def test_drafts_need_a_backend_that_leaves_rejected_ones_out(fakes: Any) -> None:
    both = {"plain": ALL - {Feature.MIXER_DRAFTS}, "drafts": ALL}
    assert run(fakes, backends=both).mixer is not None
    found = run(fakes, "speculative=chains", backends=both)
    assert found.mixer is not None
    assert found.mixer.name == "drafts"
    with pytest.raises(ResolutionError, match=r"speculative 'chains' needs mixer\.drafts"):
        run(fakes, "speculative=chains", "mixer=plain", backends=both)


def test_a_model_with_states_needs_a_store_that_keeps_them(fakes: Any) -> None:
    """A store that does not offer this serves other models; for this one it is refused by name, with one that does."""
    without: dict[str, Any] = {"cache_groups": STATES[:1], "needs": frozenset()}
    assert run(fakes, backends={"mine": ALL}, **without).store.name == "stateless"
    found = run(fakes, backends={"mine": ALL})
    assert found.store.name == "pages"
    assert any("store.state" in str(cell) for column in _grid(found, narrow=False).columns for cell in column.cells)
    needed = r"needs store\.state \(it has groups of kind state\); store is 'stateless'.*\n(.*\n)*.*- store: pages"
    for groups in (STATES, STATES[1:]):
        with pytest.raises(ResolutionError, match=needed):
            run(fakes, "store=stateless", backends={"mine": ALL}, cache_groups=groups)
