"""Test which numbers of ranks a model can have, and what is said about the others.

.venv/bin/python -m pytest -q tests/core/test_ranks_resolved.py
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.cli.explain import _headline, _ranks, _ranks_line
from dovetail.errors import ConfigError, ResolutionError
from dovetail.interfaces.cache import CacheGroup
from dovetail.interfaces.features import Feature
from dovetail.interfaces.model import ModelInfo
from dovetail.registry import ComponentKind, Machine, Resolved, resolve
from dovetail.registry.ranks import check_ranks, divisions, expert_division
from dovetail.registry.tuning import MeasuredDivision, TuningRecord, records

OFFERS = frozenset({Feature.MODEL_TENSOR_PARALLEL})
INFO = ModelInfo(
    "Fake", 100, 48, 2, 12, 4, 4, 64, (CacheGroup(2, 4, 4),), offers=OFFERS, split_sizes=(("intermediate_size", 36),)
)


@given(
    heads=st.integers(1, 12),
    group=st.integers(1, 4),
    intermediate=st.integers(1, 60),
    vocab=st.integers(1, 50),
    tp=st.integers(1, 60),
)
def test_a_division_gives_every_rank_its_share_and_no_more(
    heads: int, group: int, intermediate: int, vocab: int, tp: int
) -> None:
    info = dataclasses.replace(
        INFO,
        num_heads=heads * group,
        num_kv_heads=heads,
        vocab_size=vocab,
        split_sizes=(("intermediate_size", intermediate),),
    )
    whole_heads = (heads * group) % tp == 0 and intermediate % tp == 0
    of_kv = heads % tp == 0 or tp % heads == 0
    rows = -(-vocab // tp)
    every_rank_embeds = all(rank * rows < vocab for rank in range(tp))
    assert (tp in divisions(info)) == (tp == 1 or (whole_heads and of_kv and every_rank_embeds))


def test_only_models_that_say_so_are_divided() -> None:
    assert divisions(INFO) == [1, 2, 4, 12]
    assert divisions(dataclasses.replace(INFO, offers=frozenset())) == [1]
    large = dataclasses.replace(INFO, num_heads=128, num_kv_heads=128, vocab_size=1024, split_sizes=())
    assert divisions(large) == [1, 2, 4, 8, 16, 32, 64], "parallel.tp allows up to 64 ranks"
    check_ranks(INFO, 2, "the model")
    with pytest.raises(
        ConfigError, match=r"parallel.tp is 3.*multiple or a divisor of 3 as num_key_value_heads, and it"
    ):
        check_ranks(INFO, 3, "the drafter's model")
    with pytest.raises(ConfigError, match=r"parallel.tp is 2.*model.tensor_parallel, which it does not offer. Allowed"):
        check_ranks(dataclasses.replace(INFO, offers=frozenset()), 2, "the drafter's model")


EXPERTS = (("num_experts", 8), ("moe_intermediate_size", 18))


def test_ranks_divide_the_experts_or_each_of_them() -> None:
    info = dataclasses.replace(INFO, num_heads=48, num_kv_heads=48, split_sizes=(), expert_sizes=EXPERTS)
    assert divisions(info) == [1, 2, 3, 4, 6, 8]
    ways = [expert_division("auto", info, tp) for tp in divisions(info)]
    assert ways == ["tp", "tp", "tp", "ep", "tp", "ep"]
    assert [expert_division("ep", info, tp) for tp in (1, 2, 4)] == ["ep"] * 3
    with pytest.raises(ConfigError, match=r"4 as moe_intermediate_size; Fake has 18. Set parallel.experts: auto"):
        expert_division("tp", info, 4)
    with pytest.raises(ConfigError, match=r"16 as num_experts; Fake has 8. Set parallel.tp to a divisor of 8"):
        expert_division("ep", info, 16)
    with pytest.raises(ConfigError, match=r"has no experts; allowed for it: auto and tp"):
        expert_division("ep", INFO, 2)
    assert expert_division("auto", INFO, 2) == "tp"


def test_what_was_measured_to_be_faster_divides_the_experts_if_it_can() -> None:
    info = dataclasses.replace(INFO, num_heads=48, num_kv_heads=48, split_sizes=(), expert_sizes=EXPERTS)
    assert [expert_division("auto", info, tp, ["ep", "tp"]) for tp in divisions(info)] == [
        "ep",
        "ep",
        "tp",
        "ep",
        "tp",
        "ep",
    ]
    assert [expert_division("auto", info, tp, ["tp", "ep"]) for tp in (2, 4)] == ["tp", "ep"]
    assert expert_division("tp", info, 2, ["ep", "tp"]) == "tp"


def test_the_most_similar_measurement_of_the_device_counts(monkeypatch: pytest.MonkeyPatch, fakes: Any) -> None:
    def measured(ranks: int, experts: int, size: int, best: str) -> MeasuredDivision:
        other = "tp" if best == "ep" else "ep"
        return MeasuredDivision(ranks, experts, size, (best, other), f"{best} 2 ms, {other} 3", "2026-11-28, a command")

    divisions = measured(2, 8, 18, "ep"), measured(2, 8, 26, "tp"), measured(3, 8, 18, "ep")
    shipped = TuningRecord("H", (9, 0), {}, {}, divisions=divisions)
    monkeypatch.setattr("dovetail.registry.tuning.records", lambda: (shipped,))
    machine = Machine("cuda", (9, 0), "H", "cuda", num_devices=4)
    given = {"num_heads": 12, "num_kv_heads": 12, "offers": OFFERS}

    def chosen(tp: int, number: int, size: int, setting: str = "auto") -> tuple[str, str]:
        sizes = (("num_experts", number), ("moe_intermediate_size", size))
        found = resolved(fakes, tp, machine, setting, expert_sizes=sizes, **given)
        return found.config.parallel.experts, found.resolution("experts").note

    why = "parallel.experts is ep, measured on H, 2026-11-28, a command, 8 experts of 18, 2 ranks: ep 2 ms, tp 3"
    assert chosen(2, 8, 18) == ("ep", why)
    assert chosen(2, 12, 20)[0] == "ep"
    assert chosen(2, 8, 24)[0] == "tp"
    assert chosen(2, 8, 24)[1].startswith("parallel.experts is tp, measured on H")
    assert chosen(2, 64, 18) == ("tp", "")  # nothing similar was measured
    assert chosen(4, 8, 20) == ("tp", "")
    assert chosen(2, 7, 18)[0] == "tp"  # 7 experts cannot be divided
    assert chosen(2, 8, 18, "tp") == ("tp", "")


def test_shipped_measurements_name_both_ways() -> None:
    for record in records():
        for one in record.divisions:
            assert sorted(one.best_first) == ["ep", "tp"]
            assert one.ranks > 1


def resolved(fakes: Any, tp: int, machine: Machine | None = None, experts: str = "auto", **given: Any) -> Resolved:
    others = [spec for spec in fakes.basics() if spec.kind != ComponentKind.MODEL]
    others.append(fakes.spec(ComponentKind.EXPERTS, "grouped", offers=frozenset({Feature.EXPERTS_PLAIN})))
    registry = fakes.registry(fakes.model(**given), *others, basics=False)
    config = fakes.config(registry, f"parallel.tp={tp}", f"parallel.experts={experts}")
    return resolve(config, registry, machine or Machine.assume("cpu"))


def test_resolve_says_how_the_experts_are_divided(fakes: Any) -> None:
    given = {"num_heads": 12, "num_kv_heads": 4, "offers": OFFERS, "expert_sizes": EXPERTS}
    assert resolved(fakes, 2, **given).config.parallel.experts == "tp"
    found = resolved(fakes, 4, **given)
    assert found.config.parallel.experts == "ep"
    assert "x 4 (tensor parallel, experts ep)" in _headline(found)
    assert _ranks_line(found) == (
        "ranks on cpu, cpu, cpu, cpu; each has 3 of 12 heads, 1 of 4 KV heads, "
        f"{EXPERTS[0][1] // 4} of {EXPERTS[0][1]} experts, {EXPERTS[1][1]} of {EXPERTS[1][1]} channels of an expert; parallel.tp may be 1, 2, 4"
    )
    assert _ranks(resolved(fakes, 2, **given))["of_each"] == {
        "heads": [6, 12],
        "kv_heads": [2, 4],
        "experts": [EXPERTS[0][1]] * 2,
        "expert_size": [EXPERTS[1][1] // 2, EXPERTS[1][1]],
    }
    with pytest.raises(ConfigError, match=r"parallel.experts is tp and parallel.tp is 4"):
        resolved(fakes, 4, experts="tp", **given)
    with pytest.raises(ConfigError, match="has no experts"):
        resolved(fakes, 1, experts="ep")
    with pytest.raises(ResolutionError, match=r"a multiple of 12 as num_experts or as moe_intermediate_size"):
        resolved(fakes, 12, **given)


def test_resolve_refuses_ranks_that_do_not_divide_the_model(fakes: Any) -> None:
    given = {"vocab_size": 100, "num_heads": 12, "num_kv_heads": 4, "offers": OFFERS, "split_sizes": INFO.split_sizes}
    assert resolved(fakes, 4, **given).config.parallel.tp == 4
    with pytest.raises(ResolutionError) as caught:
        resolved(fakes, 8, **given)
    text = str(caught.value)
    assert "parallel.tp 8 needs a multiple of 8 as num_attention_heads; model 'FakeForCausalLM' has 12" in text
    assert "parallel.tp 8 needs a multiple of 8 as intermediate_size; model 'FakeForCausalLM' has 36" in text
    fixes = [line.strip() for line in text.splitlines() if "- parallel.tp:" in line]
    assert fixes == [f"- parallel.tp: {tp}" for tp in (1, 2, 4, 12)]


def test_resolve_refuses_models_that_cannot_be_divided(fakes: Any) -> None:
    with pytest.raises(ResolutionError, match=r"parallel.tp 2 needs model.tensor_parallel"):
        resolved(fakes, 2)


def test_resolve_refuses_more_ranks_than_devices(fakes: Any) -> None:
    machine = Machine("cuda", (9, 0), "H100", "cuda:1", num_devices=3)
    with pytest.raises(ConfigError, match=r"parallel.tp is 4 and device is cuda:1; the ranks need 4.*at most 2"):
        resolved(fakes, 4, machine, offers=OFFERS)
