"""Test how a backend of experts is chosen: only for models with experts, and by what it offers.

.venv/bin/python -m pytest -q tests/core/test_experts_resolved.py
"""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.cli.explain import _grid
from dovetail.errors import ConfigError, ResolutionError
from dovetail.interfaces.features import Feature
from dovetail.registry import ComponentKind, resolve, rules
from dovetail.registry.machine import Machine
from dovetail.registry.resolution import Resolved

CPU, H100 = Machine.assume("cpu"), Machine("cuda", (9, 0), "H100", "cuda:0", num_devices=1)
SIZES = (("num_experts", 8), ("moe_intermediate_size", 16))
NONE: list[Any] = []
PLAIN, GRAPH = frozenset({Feature.EXPERTS_PLAIN}), frozenset({Feature.EXPERTS_PLAIN, Feature.EXPERTS_GRAPH})
ALL_ATTENTION = frozenset(
    {
        Feature.ATTN_EXTEND,
        Feature.ATTN_DECODE,
        Feature.ATTN_MIXED,
        Feature.ATTN_GRAPH,
        Feature.ATTN_BATCH_INVARIANT,
        Feature.ATTN_VERIFY,
    }
)


def run(
    fakes: Any,
    *sets: str,
    backends: dict[str, frozenset[Feature]],
    machine: Machine = CPU,
    more: list[Any] = NONE,
    **model: Any,
) -> Resolved:
    """Resolve a model with these backends, the first of which has the highest priority."""
    model = {"expert_sizes": SIZES, "offers": frozenset({Feature.MODEL_BATCH_INVARIANT}), **model}
    kinds = (ComponentKind.MODEL, ComponentKind.ATTENTION)
    others = [spec for spec in fakes.basics() if spec.kind not in kinds]
    others.append(fakes.spec(ComponentKind.ATTENTION, "plain", offers=ALL_ATTENTION, api=(1, 3)))
    for index, (name, offers) in enumerate(backends.items()):
        others.append(fakes.spec(ComponentKind.EXPERTS, name, offers=offers, priority=-index))
    registry = fakes.registry(fakes.model(**model), *others, *more, basics=False)
    return resolve(fakes.config(registry, *sets), registry, machine)


def shown(resolved: Resolved) -> list[str]:
    """Return the parts that ``dovetail explain`` lists."""
    return [str(cell) for cell in _grid(resolved, narrow=False).columns[0].cells]


def test_a_model_without_experts_has_no_backend(fakes: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="dovetail.registry")
    for sets in ((), ("experts=none",)):
        dense = run(fakes, *sets, backends={"mine": PLAIN}, expert_sizes=None)
        assert dense.experts is None
        assert dense.to_json()["chosen"]["experts"] is None
        assert "experts" not in shown(dense)
    assert not any(record.getMessage().startswith("experts") for record in caplog.records)
    with pytest.raises(
        ConfigError, match=r"experts is mine, and FakeForCausalLM has no use.*allowed for it: auto, none"
    ):
        run(fakes, "experts=mine", backends={"mine": PLAIN}, expert_sizes=None)


def test_a_model_with_experts_has_the_backend_that_fits(fakes: Any) -> None:
    found = run(fakes, backends={"first": PLAIN, "second": PLAIN})
    assert found.experts is not None
    assert found.experts.name == "first"
    assert "experts" in shown(found)
    named = run(fakes, "experts=second", backends={"first": PLAIN, "second": PLAIN})
    assert named.to_json()["chosen"]["experts"]["name"] == "second"
    needs = frozenset({Feature.EXPERTS_BIAS})
    able = run(fakes, backends={"first": PLAIN, "second": PLAIN | needs}, needs=needs)
    assert able.experts is not None
    assert able.experts.name == "second"
    with pytest.raises(ResolutionError, match=r"needs experts\.bias; experts is 'first'.*\n(.*\n)*.*- experts: second"):
        run(fakes, "experts=first", backends={"first": PLAIN, "second": PLAIN | needs}, needs=needs)


def test_a_model_with_experts_needs_one(fakes: Any) -> None:
    with pytest.raises(ResolutionError, match="has experts and needs a backend of kind experts; experts is none"):
        run(fakes, "experts=none", backends={"mine": PLAIN})
    with pytest.raises(ResolutionError, match="experts: cannot use any installed component\n  - none is installed"):
        run(fakes, backends={})


def test_other_formats_than_plain_are_no_substitute(fakes: Any) -> None:
    with pytest.raises(ResolutionError, match=r"needs experts\.plain \(its experts are not quantized\)"):
        run(fakes, "experts=mine", backends={"mine": frozenset()})


def test_a_quantization_says_in_which_format_it_stores_experts(fakes: Any) -> None:
    quantization = fakes.spec(
        ComponentKind.QUANTIZATION,
        "fp8",
        describe=fakes.put("accept", lambda checkpoint, config: None),
        expert_format=fakes.put("format", lambda checkpoint, config: "fp8_blocks"),
        offers=frozenset({Feature.QUANTIZATION_EXPERTS}),
        api=(1, 1),
    )
    blocks = frozenset({Feature.EXPERTS_FP8_BLOCKS})
    found = run(fakes, "quantization=fp8", backends={"first": PLAIN, "second": blocks}, more=[quantization])
    assert found.experts is not None
    assert found.experts.name == "second"
    assert run(fakes, backends={"first": PLAIN, "second": blocks}, more=[quantization]).experts.name == "first"  # type: ignore[union-attr]
    with pytest.raises(ResolutionError, match=r"needs experts\.fp8_blocks \(quantization fp8 stores its experts so\)"):
        run(fakes, "quantization=fp8", backends={"first": PLAIN}, more=[quantization])


def test_adapters_of_experts_in_formats_without_such_kernels_are_refused_on_cuda(
    fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantization = fakes.spec(
        ComponentKind.QUANTIZATION,
        "int",
        describe=fakes.put("accept", lambda checkpoint, config: None),
        expert_format=fakes.put("format", lambda checkpoint, config: "int4"),
        offers=frozenset({Feature.QUANTIZATION_EXPERTS}),
        api=(1, 1),
    )
    both, given = {"all": GRAPH | {Feature.EXPERTS_INT4, Feature.EXPERTS_ADAPTERS}}, "quantization=int"
    adapted = ("adapters.enabled=true", "adapters.modules=[linear, experts]")
    run(fakes, given, *adapted, backends=both, machine=H100, more=[quantization])
    monkeypatch.setattr(rules, "ADAPTED_ON_CUDA", ("plain", "int8"))
    with pytest.raises(ConfigError, match=r"modules has experts, and quantization int stores those of \w+ as int4"):
        run(fakes, given, *adapted, backends=both, machine=H100, more=[quantization])
    run(fakes, given, *adapted, backends=both, more=[quantization])  # on a CPU
    run(fakes, *adapted, backends=both, machine=H100, more=[quantization])  # not quantized
    run(fakes, given, *adapted, backends={}, machine=H100, more=[quantization], expert_sizes=None)
    run(fakes, given, adapted[0], "adapters.modules=[linear]", backends=both, machine=H100, more=[quantization])


def test_adapters_of_experts_are_refused_with_a_backend_in_whose_place_they_may_not_be_computed(fakes: Any) -> None:
    given = "adapters.enabled=true", "adapters.modules=[linear, experts]"
    backends = {"first": PLAIN, "second": PLAIN | {Feature.EXPERTS_ADAPTERS}}
    with pytest.raises(ConfigError, match=r"adapters of experts, and experts 'first' does not offer experts\.adapters"):
        run(fakes, *given, backends=backends)
    run(fakes, *given, "experts=second", backends=backends)
    run(fakes, given[0], backends=backends)  # what adapters there are is known later
    run(fakes, given[0], "adapters.modules=[linear]", backends=backends)
    run(fakes, *given, backends=backends, expert_sizes=None)


def test_graphs_need_a_backend_that_can_be_captured(fakes: Any) -> None:
    both = {"captured": GRAPH, "waits": PLAIN}
    found = run(fakes, backends=both, machine=H100)
    assert found.experts is not None
    assert found.experts.name == "captured"
    assert found.config.graphs.decode is True
    assert run(fakes, "experts=waits", backends=both, machine=H100).config.graphs.decode is False
    with pytest.raises(ResolutionError, match=r"graphs\.decode needs experts\.graph"):
        run(fakes, "experts=waits", "graphs.decode=true", backends=both, machine=H100)
    with pytest.raises(ConfigError, match=r"piecewise_tokens is 64, and experts 'waits' does not offer experts\.graph"):
        run(fakes, "experts=waits", "graphs.piecewise_tokens=64", backends=both, machine=H100)


def test_batch_invariance_needs_a_backend_that_is(fakes: Any) -> None:
    invariant = GRAPH | {Feature.EXPERTS_BATCH_INVARIANT}
    found = run(fakes, "batch_invariant=true", backends={"first": GRAPH, "second": invariant}, machine=H100)
    assert found.experts is not None
    assert found.experts.name == "second"
    with pytest.raises(ResolutionError, match=r"batch_invariant needs experts\.batch_invariant"):
        run(fakes, "batch_invariant=true", "experts=first", backends={"first": GRAPH}, machine=H100)
