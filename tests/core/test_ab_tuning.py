"""Test tuning records: what an experiment records, which records count, and how `auto` and `explain` use them.

Run: pytest tests/core/test_ab_tuning.py
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dovetail.cli import main
from dovetail.errors import ConfigError
from dovetail.experiment.arms import make_arm
from dovetail.experiment.result import (
    ArmRecord,
    Comparison,
    DecisionPlan,
    ExperimentRecord,
    GateRecord,
    WorkloadSummary,
)
from dovetail.experiment.tuning import tuning_records
from dovetail.interfaces.features import Feature
from dovetail.registry import ComponentKind, Machine, resolve
from dovetail.registry.measured import (
    MeasuredPart,
    MeasuredRecord,
    add_records,
    best_first,
    device_key,
    model_key,
    read_records,
    tuning_file,
)
from dovetail.registry.resolution import ChoiceRule

K = ComponentKind
CPU = Machine("cpu", None, "cpu", "cpu")


def record(slot="cache", winner="a", loser="b", **given):
    def part(name):
        return MeasuredPart(name=name, distribution="fakes-dist", version="1.0")

    fields = {
        "device": device_key(CPU),
        "model": "",
        "workload": "chat",
        "shape": "8 calls",
        "metric": "Throughput",
        "ratio": 1.5,
        "low": 1.4,
        "high": 1.6,
        "measured": "2026-11-21T10:00:00+00:00",
    }
    return MeasuredRecord(slot=slot, winner=part(winner), loser=part(loser), **{**fields, **given})


class TuningSetup:
    """Register two caches, three attention and three grammar backends of equal priority, and name the file that holds the records."""

    def __init__(self, fakes, folder):
        self.file = folder / "tuning.json"
        self.fakes = fakes
        names = [(K.CACHE, "a"), (K.CACHE, "b"), *((K.ATTENTION, n) for n in ("x", "y", "z"))]
        names += [(K.GRAMMAR, n) for n in ("g", "h", "i")]
        self.registry = fakes.registry(*(fakes.spec(kind, name, priority=20) for kind, name in names))
        plain = self.resolve()
        self.model = model_key(plain.model_info, "float32", "float32")

    def resolve(self, *sets):
        return resolve(self.fakes.config(self.registry, f"tuning.path={self.file}", *sets), self.registry, CPU)

    def keep(self, *records):
        add_records(self.file, [r if r.model else r.model_copy(update={"model": self.model}) for r in records])

    def cache(self, *sets):
        return self.resolve(*sets).resolution("cache")


@pytest.fixture
def tuned(fakes, tmp_path):
    return TuningSetup(fakes, tmp_path)


# which records count


def test_auto_follows_a_record_and_explain_reports_it(tuned):
    assert tuned.cache().chosen == "a"
    tuned.keep(record(winner="b", loser="a"))
    found = tuned.cache()
    assert (found.chosen, found.rule) == ("b", ChoiceRule.TUNING)
    assert found.note == "1.50x (1.40 to 1.60) as fast as a by Throughput on chat, measured 2026-11-21"
    assert found.unused == ()
    explicit = tuned.cache("cache=a")
    assert (explicit.chosen, explicit.rule) == ("a", ChoiceRule.EXPLICIT)
    assert tuned.cache("tuning.use=false").chosen == "a"
    assert found.to_json()["unused_tuning_records"] == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "NVIDIA H200"}, "foreign: measured on NVIDIA H200, this is "),
        (
            {"model": "GptForCausalLM, 2 layers"},
            "foreign: measured with GptForCausalLM, 2 layers, this is FakeForCausalLM",
        ),
        (
            {"winner": MeasuredPart(name="b", distribution="fakes-dist", version="0.9")},
            "stale: measured with b (fakes-dist 0.9), installed is b (fakes-dist 1.0); measure again",
        ),
        (
            {"loser": MeasuredPart(name="a", distribution="other-dist", version="1.0")},
            "stale: measured with a (other-dist 1.0), installed is a (fakes-dist 1.0); measure again",
        ),
        (
            {"winner": MeasuredPart(name="gone", distribution="gone-dist", version="2.0")},
            "stale: gone (gone-dist 2.0) is not installed",
        ),
    ],
)
def test_a_record_that_does_not_count_is_passed_over_with_the_reason(tuned, change, reason):
    tuned.keep(record(winner="b", loser="a").model_copy(update=change))
    found = tuned.cache()
    assert (found.chosen, found.rule) == ("a", ChoiceRule.PRIORITY)
    (text,) = found.unused
    assert reason in text
    assert "of 2026-11-21" in text
    assert tuned.resolve().resolution("policy").unused == ()


def test_another_dtype_is_another_model(tuned):
    tuned.keep(record(winner="b", loser="a"))
    assert tuned.cache("memory.kv_dtype=bfloat16").chosen == "a"


def test_the_newest_counts_or_that_of_the_workload_that_config_names(tuned):
    tuned.keep(record(winner="b", loser="a", workload="json", measured="2026-01-01T00:00:00+00:00"))
    tuned.keep(record(winner="a", loser="b", workload="chat", measured="2026-02-01T00:00:00+00:00"))
    assert tuned.cache().chosen == "a"
    assert tuned.cache("tuning.workload=json").chosen == "b"


def test_winners_are_ordered_by_who_beat_whom(tuned):
    for pairs in itertools.permutations([("x", "y"), ("y", "z")]):
        records = [record("attention.decode", *pair, measured=f"2026-0{i + 1}-01") for i, pair in enumerate(pairs)]
        assert best_first(reversed(records), "attention.decode") == ["x", "y"]
    assert best_first([], "cache") == []


def test_grammar_backends_are_asked_in_the_order_of_the_records(tuned):
    """All grammar backends serve requests, so a record changes the order of the list and its default."""

    def order(*sets):
        return [chosen.name for chosen in tuned.resolve(*sets).grammars][:3]

    assert order() == ["g", "h", "i"]
    tuned.keep(record("grammar", winner="i", loser="h"))
    assert order() == ["i", "g", "h"]
    assert tuned.resolve().resolution("grammar").rule == ChoiceRule.TUNING
    assert order("grammar=[h, g]")[:2] == ["h", "g"]
    assert order("tuning.use=false") == ["g", "h", "i"]


def test_a_winner_that_cannot_be_used_here_is_passed_over(tuned):
    tuned.keep(record(winner="b", loser="a"))
    found = tuned.cache("policy=fcfs", "cache=[a, b]")
    assert (found.chosen, found.rule) == ("a", ChoiceRule.EXPLICIT)


def test_the_same_question_asked_again_replaces_its_answer(tuned):
    tuned.keep(record(winner="a", loser="b"), record("attention.decode", "x", "y"))
    tuned.keep(record(winner="b", loser="a", measured="2026-12-01T00:00:00+00:00"))
    tuned.keep(record(winner="b", loser="a", shape="9 calls"))
    kept = [(r.slot, r.winner.name, r.shape) for r in read_records(tuned.file)]
    assert kept == [("attention.decode", "x", "8 calls"), ("cache", "b", "8 calls"), ("cache", "b", "9 calls")]


def test_a_file_without_records_stops_with_what_to_do(tuned):
    tuned.file.write_text("{]")
    with pytest.raises(ConfigError, match=r"holds no tuning records.*Delete it"):
        tuned.resolve()
    assert tuned.resolve("tuning.use=false").cache.name == "a"
    tuned.file.write_bytes(b"\x1f\x8b\xff")
    with pytest.raises(ConfigError, match=r"holds no tuning records.*can't decode.*Delete it"):
        tuned.resolve()
    tuned.file.write_text(json.dumps({"schema_version": 2, "records": []}))
    with pytest.raises(ConfigError, match="schema version 1"):
        tuned.resolve()


def test_records_are_in_the_data_folder_unless_config_sets_another(tuned, monkeypatch, tmp_path):
    config = tuned.fakes.config(tuned.registry)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert tuning_file(config) == tmp_path / "data" / "dovetail" / "tuning.json"
    monkeypatch.delenv("XDG_DATA_HOME")
    assert tuning_file(config).parts[-4:] == (".local", "share", "dovetail", "tuning.json")
    assert tuning_file(tuned.fakes.config(tuned.registry, f"tuning.path={tuned.file}")) == tuned.file


def test_the_command_shows_records_that_count_and_those_that_do_not(tmp_path, capsys):
    arm = make_arm("a", (), ("device=cpu",), ("cache=none",), {})
    info = arm.resolved.model_info
    mine = {"model": model_key(info, "float32", "float32"), "device": device_key(arm.resolved.machine)}

    def part(name):
        return MeasuredPart(name=name, distribution="dovetail", version=arm.resolved.cache.component.version)

    good = record(**mine).model_copy(update={"winner": part("none"), "loser": part("radix")})
    foreign = good.model_copy(update={"device": "NVIDIA H200"})
    add_records(tmp_path / "tuning.json", [good, foreign])
    with pytest.raises(SystemExit) as ended:
        main(["explain", "--set", "device=cpu", "--set", f"tuning.path={tmp_path / 'tuning.json'}"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "tuning record; 1.50x (1.40 to" in text
    assert "tuning record not used: cache none over radix of 2026-11-21: foreign: measured on NVIDIA H200" in text


# what an experiment records


def comparison(metric, verdict, ratio, better="lower"):
    return Comparison(
        metric=metric, label=metric, unit="ms", better=better, a=1.0, b=ratio, ratio=ratio, low=ratio * 0.9,
        high=ratio * 1.1, p=0.001, p_adjusted=0.001, verdict=verdict, blocks=4,
    )  # fmt: skip


def experiment(*comparisons, outcome="passed"):
    arm = ArmRecord(name="x", config={}, config_hash="0")
    asked = WorkloadSummary(
        name="chat", requests=8, clusters=8, prompt_tokens=10.0, output_tokens=5.0, arrivals="at once", content_hash="0"
    )
    return ExperimentRecord(
        dovetail_version="0", title="", started=datetime(2026, 11, 21, tzinfo=UTC), seconds=1.0, command="", a=arm, b=arm,
        workload=asked, gate=GateRecord(outcome=outcome, reason=""), comparisons=comparisons,
        plan=DecisionPlan(primary=tuple(c.metric for c in comparisons), max_blocks=4),
    )  # fmt: skip


def taught(a, b, *comparisons, outcome="passed"):
    arms = [make_arm(name, (), ("device=cpu",), given, {}) for name, given in (("a", a), ("b", b))]
    return tuning_records(arms[0], arms[1], experiment(*comparisons, outcome=outcome))


@pytest.mark.parametrize(
    ("verdict", "ratio", "better", "winner"),
    [
        ("faster", 0.5, "lower", "none"),
        ("slower", 2.0, "lower", "radix"),
        ("faster", 2.0, "higher", "none"),
        ("slower", 0.5, "higher", "radix"),
    ],
)
def test_the_faster_part_is_kept_with_how_much_faster_it_was(verdict, ratio, better, winner):
    (found,), reasons = taught(["cache=radix"], ["cache=none"], comparison("throughput", verdict, ratio, better))
    assert not reasons
    assert (found.slot, found.winner.name) == ("cache", winner)
    assert found.ratio == pytest.approx(2)
    assert found.low is not None
    assert found.high is not None
    assert 1 < found.low < 2 < found.high
    assert found.model.startswith("LlamaForCausalLM, 4 layers")
    assert found.shape == "8 calls, on average 10 prompt and 5 output tokens, arrivals at once"


@pytest.mark.parametrize(
    ("a", "b", "comparisons", "outcome", "reason"),
    [
        ([], ["cache=none"], [("ttft_p50", "faster", 0.5)], "allowed", "the outputs differ"),
        ([], [], [("ttft_p50", "faster", 0.5)], "passed", "the arms have the same ones"),
        ([], ["scheduler.chunk_size=8"], [("ttft_p50", "faster", 0.5)], "passed", "the arms have the same ones"),
        ([], ["cache=none", "threads=2"], [("ttft_p50", "faster", 0.5)], "passed", "also differ in threads"),
        ([], ["cache=none"], [("ttft_p50", "equivalent", 1.0)], "passed", "no winner: ttft_p50 is equivalent"),
        ([], ["cache=none"], [("ttft_p50", "faster", 0.5), ("tpot_mean", "slower", 2.0)], "passed",
         "B is faster in ttft_p50 and slower in tpot_mean"),
        (["cache=none"], ["cache={kind: radix, eviction: lfu}"], [("ttft_p50", "faster", 0.5)], "passed",
         "was faster with its own settings"),
        ([], ["speculative=ngram"], [("ttft_p50", "faster", 0.5)], "passed", "one arm has no component there"),
    ],
)  # fmt: skip
def test_what_teaches_nothing_says_why(a, b, comparisons, outcome, reason):
    records, (text,) = taught(a, b, *(comparison(*given) for given in comparisons), outcome=outcome)
    assert not records
    assert reason in text


def with_experts(fakes, setting, file):
    """Return the resolution of a model with experts that two ranks divide."""
    features = frozenset({Feature.MODEL_TENSOR_PARALLEL})
    sizes = (("num_experts", 8), ("moe_intermediate_size", 18))
    others = [spec for spec in fakes.basics() if spec.kind != K.MODEL]
    others.append(fakes.spec(K.EXPERTS, "grouped", offers=frozenset({Feature.EXPERTS_PLAIN})))
    model = fakes.model(num_heads=12, num_kv_heads=12, expert_sizes=sizes, offers=features)
    registry = fakes.registry(model, *others, basics=False)
    config = fakes.config(registry, "parallel.tp=2", f"parallel.experts={setting}", f"tuning.path={file}")
    return resolve(config, registry, CPU)


def test_how_ranks_divide_experts_is_recorded_and_used(fakes, tmp_path):
    file = tmp_path / "tuning.json"
    assert with_experts(fakes, "auto", file).config.parallel.experts == "tp"
    base = make_arm("a", (), ("device=cpu",), (), {})
    arms = [replace(base, name=way, resolved=with_experts(fakes, way, file)) for way in ("tp", "ep")]
    (found,), reasons = tuning_records(*arms, experiment(comparison("throughput", "faster", 2.0, "higher")))
    assert not reasons
    assert (found.slot, found.winner.name, found.loser.name) == ("parallel.experts", "ep", "tp")
    assert found.model.endswith(", 2 ranks")
    add_records(file, [found])
    chosen = with_experts(fakes, "auto", file)
    assert chosen.config.parallel.experts == "ep"
    assert chosen.resolution("experts").note.startswith("parallel.experts is ep, 2.00x (1.80 to 2.20) as fast as tp")
    old = found.model_copy(update={"winner": found.winner.model_copy(update={"version": "0.0"})})
    file.unlink()
    add_records(file, [old])
    chosen = with_experts(fakes, "auto", file)
    assert chosen.config.parallel.experts == "tp"
    (unused,) = chosen.resolution("experts").unused
    assert "stale: measured with ep (dovetail 0.0)" in unused


def test_prompts_and_decode_are_judged_by_their_own_metric(fakes):
    """A backend that is faster for prompts and slower for decode wins one slot and loses the other."""
    registry = fakes.registry(*(fakes.spec(K.ATTENTION, name) for name in ("one", "two")))

    def arm(name, kind):
        resolved = resolve(fakes.config(registry, f"attention={kind}"), registry, CPU)
        base = make_arm(name, (), ("device=cpu",), (f"attention={'torch_native'}",), {})
        return replace(base, resolved=resolved)

    found, _ = tuning_records(
        arm("a", "one"),
        arm("b", "two"),
        experiment(comparison("ttft_p50", "faster", 0.5), comparison("tpot_mean", "slower", 3.0)),
    )
    assert {r.slot: (r.winner.name, r.ratio) for r in found} == {
        "attention.prefill": ("two", pytest.approx(2)),
        "attention.decode": ("one", pytest.approx(3)),
    }


def test_the_record_in_the_documentation_is_one():
    """``dovetail ab --write-tuning`` wrote this record on a GPU."""
    records = read_records(Path(__file__).parents[2] / "docs" / "tuning" / "h200-llama-3b.json")
    assert [(r.slot, r.winner.name, r.loser.name) for r in records] == [
        ("attention.prefill", "flash_attn", "flashinfer"),
        ("attention.prefill", "flashinfer", "triton"),
        ("attention.decode", "flash_attn", "flashinfer"),
        ("attention.decode", "triton", "flashinfer"),
    ]
    assert all(r.device == "NVIDIA H200" and 1 < r.low < r.ratio < r.high for r in records)
