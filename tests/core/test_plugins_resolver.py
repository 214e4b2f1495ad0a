"""Test the resolver: order of preference, stages, the model, the result, hooks, machines.

Run: pytest tests/core/test_plugins_resolver.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dovetail.config import Selection, dump
from dovetail.errors import ConfigError, PluginError, PluginLoadError, ResolutionError
from dovetail.interfaces.attention import AttentionBackend
from dovetail.registry import Constraints, Machine, Requirement, resolve
from dovetail.registry.resolution import CandidateVerdict, ChoiceRule, Stage

sys.path.insert(0, str(Path(__file__).parent))
from resolving import CPU, DRAFT, DRAFT_TREE, H100, VERIFY, K, reasons, refusal, run, verdicts

# order of preference


def test_priority_then_name(fakes):
    specs = [fakes.spec(K.ATTENTION, n, priority=p) for n, p in (("b", 5), ("a", 5), ("c", 1))]
    resolved = run(fakes, *specs)
    assert resolved.attention_decode.name == "a"
    assert resolved.resolution("attention.decode").rule is ChoiceRule.PRIORITY
    assert [c.spec.name for c in resolved.resolution("attention.decode").candidates] == ["a", "b", "c", "plain"]
    assert verdicts(resolved, "attention.decode")["b"] == (CandidateVerdict.PASSED_OVER, Stage.FEATURES)


def test_tuning_record_beats_priority_and_explicit_beats_both(fakes):
    specs = [fakes.spec(K.ATTENTION, "a", priority=9), fakes.spec(K.ATTENTION, "b"), fakes.spec(K.ATTENTION, "c")]
    tuning = {"attention.decode": ["c", "b"]}
    tuned = run(fakes, *specs, tuning=tuning)
    assert (tuned.attention_prefill.name, tuned.attention_decode.name) == ("a", "c")
    assert tuned.resolution("attention.decode").rule is ChoiceRule.TUNING
    explicit = run(fakes, *specs, sets=["attention=b"], tuning=tuning)
    assert explicit.attention_decode.name == "b"
    assert explicit.resolution("attention.decode").rule is ChoiceRule.EXPLICIT


def test_explicit_choice_never_falls_back(fakes):
    gone = fakes.spec(K.ATTENTION, "gone", requires=(Requirement("no-such-dist", ">=2", "pip install no-such-dist"),))
    text = refusal(fakes, gone, sets=["attention=gone"])
    assert "attention.prefill, attention.decode: cannot use what config names" in text
    assert (
        "attention 'gone' (fakes-dist 1.0), at stage requires: needs no-such-dist>=2; no-such-dist is not installed"
        in text
    )
    assert "To fix it: pip install no-such-dist" in text


def test_ordered_list_tries_in_order_and_records_why(fakes):
    gone = fakes.spec(K.ATTENTION, "gone", priority=99, requires=(Requirement("no-such-dist"),))
    resolved = run(fakes, gone, fakes.spec(K.ATTENTION, "other", priority=50), sets=["attention=[gone, plain]"])
    assert resolved.attention_decode.name == "plain"
    assert reasons(resolved, "attention.decode", "gone") == ["requires.missing"]
    assert verdicts(resolved, "attention.decode")["other"][0] is CandidateVerdict.PASSED_OVER


def test_auto_falls_to_the_next_usable(fakes):
    gone = fakes.spec(K.ATTENTION, "gone", priority=99, requires=(Requirement("no-such-dist"),))
    resolved = run(fakes, gone)
    assert resolved.attention_decode.name == "plain"
    assert verdicts(resolved, "attention.decode")["gone"] == (CandidateVerdict.REJECTED, Stage.REQUIRES)


# stages


def test_version_ranges_are_checked_against_what_is_installed(fakes):
    old = fakes.spec(K.ATTENTION, "old", requires=(Requirement("pluggy", ">=900"),))
    text = refusal(fakes, old, sets=["attention=old"])
    assert "needs pluggy>=900; pluggy 1." in text
    assert "pip install 'pluggy>=900'" in text
    assert run(fakes, fakes.spec(K.ATTENTION, "new", requires=(Requirement("pluggy", ">=1"),)), sets=["attention=new"])


def test_wrong_api_version_is_refused_with_both_versions(fakes):
    text = refusal(fakes, fakes.spec(K.CACHE, "ancient", api=(0, 1)), sets=["cache=ancient"])
    assert "at stage api: interface version 2.2; it was built for version 0.1 of the cache interface" in text


@pytest.mark.parametrize(
    ("constraints", "sets", "machine", "message"),
    [
        (Constraints(devices=("cuda",)), [], CPU, "allows device cuda; device is cpu. To fix it: device: cuda"),
        (
            Constraints(min_compute_capability=(10, 0)),
            [],
            H100,
            "needs compute capability at least 10.0; sm90 has 9.0",
        ),
        (
            Constraints(min_compute_capability=(8, 0), max_compute_capability=(8, 9)),
            [],
            H100,
            "needs compute capability at least 8.0 and at most 8.9; sm90 has 9.0",
        ),
        (
            Constraints(page_sizes=(64, 128)),
            ["memory.page_size=16"],
            CPU,
            "allows page_size 64, 128; page_size is 16. To fix it: memory.page_size: 64",
        ),
        (Constraints(head_dims=(128, 256)), [], CPU, "allows head_dim 128, 256; head_dim is 64"),
        (
            Constraints(dtypes=("bfloat16",)),
            [],
            CPU,
            "allows dtype bfloat16; dtype is float32. To fix it: model.dtype: bfloat16",
        ),
        (
            Constraints(kv_dtypes=("float16",)),
            ["memory.kv_dtype=bfloat16"],
            CPU,
            "allows kv_dtype float16; kv_dtype is bfloat16. To fix it: memory.kv_dtype: float16",
        ),
    ],
)
def test_constraints_say_what_is_allowed_what_was_given_and_what_mends_it(fakes, constraints, sets, machine, message):
    picky = fakes.spec(K.ATTENTION, "picky", constraints=constraints)
    text = refusal(fakes, picky, sets=["attention=picky", *sets], machine=machine)
    assert f"at stage constraints: {message}" in text
    assert run(fakes, picky, sets=sets, machine=machine).attention_decode.name == "plain"


def test_a_pool_of_8_bits_passes_over_who_does_not_read_it(fakes):
    sixteen = fakes.spec(K.ATTENTION, "sixteen", constraints=Constraints(kv_dtypes=("bfloat16",)), priority=9)
    reads = fakes.spec(K.ATTENTION, "reads", constraints=Constraints(kv_dtypes=("bfloat16", "fp8_e4m3")), priority=1)
    sets = ["memory.kv_dtype=fp8_e4m3", "model.dtype=bfloat16"]
    resolved = run(fakes, sixteen, reads, sets=sets, machine=H100)
    assert resolved.attention_prefill.name == resolved.attention_decode.name == "reads"
    assert reasons(resolved, "attention.decode", "sixteen") == ["constraints.kv_dtype"]
    text = refusal(fakes, sixteen, reads, sets=[*sets, "attention=sixteen"], machine=H100)
    assert "allows kv_dtype bfloat16; kv_dtype is fp8_e4m3. To fix it: memory.kv_dtype: bfloat16" in text
    with pytest.raises(ConfigError, match=r"needs compute capability 8\.9.*fp8_e5m2"):
        run(fakes, reads, sets=sets, machine=Machine.assume("sm80"))


def test_constraints_that_are_met_do_not_reject(fakes):
    constraints = Constraints(("cuda",), (9, 0), (9, 0), ("bfloat16",), ("bfloat16",), (64,), (16,))
    resolved = run(fakes, fakes.spec(K.ATTENTION, "picky", constraints=constraints, priority=1), machine=H100)
    assert resolved.attention_decode.name == "picky"


def test_every_empty_slot_is_reported_at_once(fakes):
    gone = Requirement("no-such-dist")
    specs = [fakes.spec(K.ATTENTION, "x", requires=(gone,)), fakes.spec(K.POLICY, "y", requires=(gone,))]
    text = refusal(fakes, *specs, sets=["attention=x", "policy=y"])
    assert "attention.prefill, attention.decode: cannot use" in text
    assert "policy: cannot use" in text


def test_probe_runs_last_and_only_for_what_would_be_chosen(fakes, monkeypatch):
    probed = []
    here = Machine("cpu", None, "cpu", "cpu")

    def probing(name, answer):
        def ask():
            probed.append(name)
            return answer

        return fakes.put(f"probe_{name}", ask)

    specs = [
        fakes.spec(K.CACHE, "first", priority=30, probe=probing("first", "its kernel does not run")),
        fakes.spec(K.CACHE, "second", priority=20, probe=probing("second", None)),
        fakes.spec(K.CACHE, "third", priority=15, probe=probing("third", None)),
    ]
    resolved = run(fakes, *specs, machine=here)
    assert resolved.cache.name == "second"
    assert probed == ["first", "second"]
    assert verdicts(resolved, "cache")["first"] == (CandidateVerdict.REJECTED, Stage.PROBE)
    assert verdicts(resolved, "cache")["second"] == (CandidateVerdict.CHOSEN, Stage.PROBE)
    assert "got" in resolved.resolution("cache").candidates[0].to_json()["reasons"][0]
    assert "its kernel does not run" in refusal(fakes, *specs, sets=["cache=first"], machine=here)
    probed.clear()
    assert run(fakes, *specs, machine=CPU).cache.name == "first"  # an assumed machine is not probed
    assert probed == []


def test_a_probe_is_handed_what_it_names(fakes):
    here = Machine("cpu", None, "cpu", "cpu")
    seen = []

    def ask(config, section):
        seen.append((config.memory.page_size, section.kind))

    spec = fakes.spec(K.CACHE, "asks", priority=30, probe=fakes.put("asking", ask))
    run(fakes, spec, sets=["memory.page_size=64"], machine=here)
    assert seen == [(64, "asks")]


def test_a_probe_that_raises_is_a_reason(fakes):
    spec = fakes.spec(K.CACHE, "x", priority=99, probe=fakes.put("raising", lambda: 1 / 0))
    resolved = run(fakes, spec, machine=Machine("cpu", None, "cpu", "cpu"))
    assert resolved.cache.name == "tree"
    assert "ZeroDivisionError" in str(resolved.resolution("cache").candidates[0].reasons[0])


def test_a_config_module_that_breaks_rejects_only_its_component(fakes):
    resolved = run(fakes, fakes.spec(K.CACHE, "x", priority=99, config="no_such_module:C"))
    assert resolved.cache.name == "tree"
    assert reasons(resolved, "cache", "x") == ["config"]


# the model


def test_architecture_that_no_plugin_implements(fakes):
    (fakes.directory / "config.json").write_text(json.dumps({"architectures": ["OtherForCausalLM"]}))
    text = refusal(fakes)
    assert "has architectures ['OtherForCausalLM'], which no installed model component implements" in text
    assert "implemented: nearest of 1: FakeForCausalLM" in text
    (fakes.directory / "config.json").write_text(json.dumps({"architectures": ["Zzz"]}))
    assert "implemented: FakeForCausalLM. Install" in refusal(fakes)  # nothing is like it: all are listed
    assert run(fakes, sets=["model.arch=fake"]).model.name == "fake"


def test_overrides_reach_describe_and_describe_errors_are_reported(fakes):
    registry = fakes.registry()
    config = fakes.config(registry, "model.overrides={hidden_act: relu}")
    assert resolve(config, registry, CPU).model_info.config == {
        "architectures": ["FakeForCausalLM"],
        "hidden_act": "relu",
    }
    fakes.put("describe", lambda checkpoint: checkpoint["hidden_size"])
    with pytest.raises(
        ResolutionError, match=r"model 'fake' \(fakes-dist 1.0\): can read this config.json; KeyError: 'hidden_size'"
    ):
        resolve(config, registry, CPU)


def test_a_model_directory_without_config_json(fakes, tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        run(fakes, sets=[f"model={tmp_path}"])


def test_context_len_is_bounded_by_the_model(fakes):
    assert run(fakes).config.model.context_len == 2048
    assert run(fakes, sets=["model.context_len=100"]).config.model.context_len == 100
    with pytest.raises(ConfigError, match=r"model\.context_len is 4096; allowed: at most 2048"):
        run(fakes, sets=["model.context_len=4096"])


# the result


def test_config_of_the_result_is_new_and_concrete(fakes):
    registry = fakes.registry()
    config = fakes.config(registry)
    resolved = resolve(config, registry, H100)
    assert config.scheduler.overlap == "auto"
    concrete = resolved.config
    assert concrete.model.dtype == concrete.memory.kv_dtype == "bfloat16"
    assert (concrete.device, concrete.scheduler.overlap, concrete.model.arch) == ("cuda:0", True, "fake")
    assert concrete.model.served_name == "fake-model"
    assert concrete.speculative == Selection(disabled=True)
    tree = {k: v for k, v in dump(concrete).items() if k != "plugins"}
    assert tree["model"].pop("generation_config") == "auto", "a file is named, or found beside the weights"
    assert tree["parallel"].pop("experts") == "tp"
    assert "auto" not in json.dumps(tree)
    assert resolve(config, registry, CPU).config.model.dtype == "float32"


def test_resolving_the_result_again_changes_nothing(fakes):
    ngram = fakes.spec(K.DRAFTER, "ngram", {"depth": (int, 3)}, offers=DRAFT)
    registry = fakes.registry(ngram)
    config = fakes.config(registry, "speculative={kind: ngram, depth: 5}")
    first = resolve(config, registry, H100)
    second = resolve(first.config, registry, H100)
    assert second.config == first.config
    assert second.chosen == first.chosen


def test_to_json_is_json_and_holds_every_candidate(fakes):
    resolved = run(fakes, fakes.spec(K.ATTENTION, "gone", requires=(Requirement("no-such-dist"),)))
    tree = json.loads(json.dumps(resolved.to_json()))
    slots = {r["slot"]: r for r in tree["resolutions"]}
    assert set(tree["chosen"]) == {
        "model",
        "attention.prefill",
        "attention.decode",
        "cache",
        "policy",
        "grammar",
        "speculative",
        "tool_parser",
        "reasoning_parser",
        "executor",
        "quantization",
        "experts",
        "mixer",
        "store",
    }
    assert set(slots) == {*tree["chosen"], "api", "logits_processor"}
    assert tree["apis"] == []
    assert {c["name"] for c in slots["attention.decode"]["candidates"]} == {"plain", "gone"}
    assert slots["attention.decode"]["chosen"] == "plain"
    assert len(tree["config_hash"]) == 64


def test_one_info_line_per_part(fakes, caplog):
    caplog.set_level("INFO", logger="dovetail.registry")
    run(fakes, sets=["cache=none"])
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 14  # every slot
    assert "cache: none, explicit" in lines
    assert "grammar: none, priority; nothing installed can be used" in lines


# hooks


def test_adjust_candidates_may_reorder_and_veto(fakes):
    seen = []

    def adjust(kind, request, candidates):
        seen.append((kind, request.phase))
        if kind == K.CACHE:
            candidates.reverse()
        for candidate in candidates:
            if candidate.spec.name == "fcfs":
                candidate.veto("not on Sundays")

    specs = [fakes.spec(K.POLICY, "late")]
    resolved = run(fakes, *specs, entries=[fakes.entry("adjuster", adjust_candidates=adjust)])
    assert resolved.cache.name == "none"
    assert resolved.resolution("cache").rule is ChoiceRule.ADJUSTED
    assert resolved.policy.name == "late"
    assert verdicts(resolved, "policy")["fcfs"] == (CandidateVerdict.REJECTED, Stage.POLICY)
    assert (K.ATTENTION, "prefill") in seen
    assert (K.CACHE, None) in seen
    text = refusal(fakes, *specs, sets=["policy=fcfs"], entries=[fakes.entry("adjuster", adjust_candidates=adjust)])
    assert "at stage policy: no plugin objects; not on Sundays" in text


def test_adjust_candidates_cannot_reorder_an_explicit_list(fakes):
    def adjust(kind, request, candidates):
        candidates.reverse()

    resolved = run(fakes, sets=["cache=[tree, none]"], entries=[fakes.entry("adjuster", adjust_candidates=adjust)])
    assert resolved.cache.name == "tree"


def test_adjust_candidates_may_not_remove_and_its_errors_are_plugin_errors(fakes):
    def removes(kind, request, candidates):
        candidates.clear()

    def raises(kind, request, candidates):
        raise KeyError("oops")

    with pytest.raises(PluginError, match=r"added or removed candidates for attention\.prefill.*bad-dist:bad"):
        run(fakes, entries=[fakes.entry("bad", adjust_candidates=removes)])
    with pytest.raises(
        PluginError, match=r"adjust_candidates of plugin 'bad' of bad-dist 1\.0 raised KeyError: 'oops'"
    ):
        run(fakes, entries=[fakes.entry("bad", adjust_candidates=raises)])


def test_on_resolved_is_called_with_the_result(fakes):
    seen = []
    resolved = run(fakes, entries=[fakes.entry("watcher", on_resolved=lambda resolved: seen.append(resolved))])
    assert seen == [resolved]


# building


def test_chosen_builds_its_class_with_its_own_config(fakes):
    class Backend(AttentionBackend):
        def __init__(self, config, context):
            self.given = (config, context)

        def plan(self, batch): ...

        def forward(self, q, layer, batch): ...

    spec = fakes.spec(K.ATTENTION, "real", {"x": (int, 1)}, target=fakes.put("Backend", Backend))
    chosen = run(fakes, spec, sets=["attention={kind: real, x: 7}"]).attention_decode
    built = chosen.build("context")
    assert isinstance(built, Backend)
    assert built.given[0].x == 7
    assert built.given[1] == "context"


def test_target_that_cannot_be_imported_chains_its_cause(fakes):
    chosen = run(
        fakes, fakes.spec(K.ATTENTION, "real", target="no_such_module:X"), sets=["attention=real"]
    ).attention_decode
    with pytest.raises(
        PluginLoadError, match=r"attention 'real' \(fakes-dist 1.0\): 'no_such_module:X' cannot be imported"
    ) as caught:
        chosen.load()
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_target_of_the_wrong_interface_shows_both_sides(fakes):
    spec = fakes.spec(K.ATTENTION, "real", target=fakes.put("NotABackend", dict))
    chosen = run(fakes, spec, sets=["attention=real"]).attention_decode
    with pytest.raises(PluginLoadError, match=r"is <class 'dict'>; expected a subclass of .*AttentionBackend"):
        chosen.load()


# machines


def test_machines():
    assert Machine.assume("sm90") == Machine("cuda", (9, 0), "sm90", "cuda:0", True)
    assert Machine.assume("SM_100").compute_capability == (10, 0)
    assert Machine.assume("cpu").device_type == "cpu"
    with pytest.raises(ConfigError, match="--assume is 'h100'; allowed: cpu, or sm and a compute capability"):
        Machine.assume("h100")
    assert Machine.detect("cpu") == Machine("cpu", None, "cpu", "cpu")


def test_a_cuda_device_that_does_not_exist():
    with pytest.raises(ConfigError, match=r"device is 'cuda:99', but torch .* sees only cpu"):
        Machine.detect("cuda:99")


@pytest.mark.parametrize("setting", ["graphs.decode=true", "graphs.piecewise_tokens=64"])
def test_graphs_are_refused_on_a_device_that_has_none(fakes, setting):
    with pytest.raises(ConfigError, match=setting.split("=")[0]):
        run(fakes, sets=[setting])
    run(fakes, sets=["graphs.decode=auto", "graphs.piecewise_tokens=0"])


def test_plugins_that_did_not_load_are_named_when_nothing_fits(fakes):
    broken = fakes.broken("lost", RuntimeError("no such library"))
    gone = fakes.spec(K.CACHE, "x", requires=(Requirement("no-such-dist"),))
    unusable = refusal(fakes, gone, sets=["cache=x"], entries=[broken])
    specs = [fakes.spec(K.ATTENTION, "chains", offers=VERIFY), fakes.spec(K.DRAFTER, "eagle", offers=DRAFT_TREE)]
    misfit = refusal(fakes, *specs, sets=["attention=chains", "speculative=eagle"], entries=[broken])
    for text, first in ((unusable, "cache: cannot use"), (misfit, "the chosen parts do not fit together")):
        assert text.startswith(first)
        assert "plugins that did not load, one of which may have what is missing:" in text
        assert "  - lost of lost-dist (failed: RuntimeError: no such library)" in text
    assert "did not load" not in refusal(fakes, gone, sets=["cache=x"])
