"""Test config: sources, precedence, merging, errors, round trip.

Run: pytest tests/core/test_config_load.py
"""

from __future__ import annotations

import json
import pickle
import textwrap

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from dovetail.config import Config, config_hash, dump, load_config, plugins_section, read
from dovetail.config.kinds import BUILT_IN
from dovetail.config.longform import combine, long_form
from dovetail.errors import ConfigError
from dovetail.registry import ComponentKind, PluginStatus, setup
from dovetail.registry.builtin import KINDS


@pytest.fixture
def registry(fakes):
    fast = {"workspace_mib": (int, Field(default=64, ge=1)), "mode": (str, "a")}
    return fakes.registry(
        fakes.spec(ComponentKind.ATTENTION, "fast", fast, aliases=("quick",)),
        fakes.spec(ComponentKind.GRAMMAR, "gram"),
        fakes.spec(ComponentKind.DRAFTER, "draft", {"depth": (int, 3)}),
    )


def load(registry, *sets, files=(), env=None):
    return load_config(files, sets, env or {}, registry)


def problems(registry, *sets, files=(), env=None):
    with pytest.raises(ConfigError) as caught:
        load(registry, *sets, files=files, env=env)
    return str(caught.value)


def test_plugin_sections_are_the_kinds_of_the_control_plane():
    keys = {section.key for section in BUILT_IN}
    assert keys == {kind.kind for kind in KINDS} - {ComponentKind.MODEL}
    assert set(Config.model_fields) >= keys


def test_nothing_given_is_the_defaults(registry):
    assert load(registry) == Config()


def test_suffix_decides_the_format_and_all_say_the_same(registry, tmp_path):
    tree = {"model": "x", "scheduler": {"max_running": 3}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "c.json").write_text(json.dumps(tree))
    (tmp_path / "c.toml").write_text('model = "x"\n[scheduler]\nmax_running = 3\n')
    configs = [load(registry, files=[tmp_path / f"c.{suffix}"]) for suffix in ("yaml", "json", "toml")]
    assert configs[0] == configs[1] == configs[2]
    assert configs[0].model.path == "x"
    assert configs[0].scheduler.max_running == 3


def test_precedence_defaults_files_environment_set(registry, tmp_path):
    for name, value in (("zero", 10), ("one", 11), ("two", 12)):
        (tmp_path / f"{name}.yaml").write_text(f"scheduler: {{max_running: {value}, chunk_size: {value}}}")
    zero, one, two = (tmp_path / f"{name}.yaml" for name in ("zero", "one", "two"))
    env = {"DOVETAIL_CONFIG": str(zero), "HOME": "ignored"}

    def running(*sets, files=(), **more):
        return load(registry, *sets, files=files, env={**env, **more}).scheduler.max_running

    assert running() == 10
    assert running(files=[one]) == 11
    assert running(files=[one, two]) == 12
    assert running(files=[two, one]) == 11
    assert running(files=[one], DOVETAIL_SCHEDULER__MAX_RUNNING="13") == 13
    assert running("scheduler.max_running=14", files=[one], DOVETAIL_SCHEDULER__MAX_RUNNING="13") == 14
    assert running("scheduler.max_running=14", "scheduler.max_running=15") == 15
    kept = load(registry, "scheduler.max_running=14", files=[one], env=env)
    assert kept.scheduler.chunk_size == 11  # merging is deep: other keys of the section stay


def test_values_of_environment_and_set_are_yaml(registry):
    config = load(
        registry,
        "model.overrides={num_hidden_layers: 2}",
        env={
            "DOVETAIL_SCHEDULER__MIXED": "false",
            "DOVETAIL_PLUGINS__DENY": "a, b",
            "DOVETAIL_MEMORY__NUM_PAGES": "null",
        },
    )
    assert config.model.overrides == {"num_hidden_layers": 2}
    assert config.scheduler.mixed is False
    assert config.plugins.deny == ("a", "b")
    assert config.memory.num_pages is None


def test_forms_of_a_plugin_section(registry):
    def names(*sets):
        attention = load(registry, *sets).attention
        return [[c.kind for c in phase.candidates] for phase in (attention.prefill, attention.decode)]

    assert names("attention=auto") == [[], []]
    assert names("attention={kind: auto}") == [[], []]
    assert names("attention=fast") == [["fast"], ["fast"]]
    assert names("attention={kind: fast, workspace_mib: 3}") == [["fast"], ["fast"]]
    assert names("attention=[fast, {kind: plain}]") == [["fast", "plain"], ["fast", "plain"]]
    assert names("attention={prefill: fast, decode: [plain, fast]}") == [["fast"], ["plain", "fast"]]
    assert names("attention.prefill=fast") == [["fast"], []]
    assert names("attention=plain", "attention.decode=fast") == [["plain"], ["fast"]]
    assert names("attention.decode=fast", "attention=plain") == [["plain"], ["plain"]]
    assert names("attention=quick") == [["fast"], ["fast"]]


def test_forms_of_the_grammar_section(registry):
    def read(*sets):
        section = load(registry, *sets).grammar
        return [c.kind for c in section.candidates], section.disabled, section.timeout, section.isolation

    assert (
        read()
        == read("grammar=auto")
        == read("grammar={backend: auto}")
        == read("grammar={}")
        == ([], False, 10, "process")
    )
    assert read("grammar=gram") == read("grammar={kind: gram}") == read("grammar={backend: {kind: gram}}")
    assert read("grammar={backend: [gram], timeout: 3}") == (["gram"], False, 3, "process")
    assert (
        read("grammar=gram", "grammar.timeout=3")
        == read("grammar.timeout=3", "grammar=gram")
        == (["gram"], False, 3, "process")
    )
    assert read("grammar=gram", "grammar.isolation=thread", "grammar=none") == ([], True, 10, "thread")
    assert read("grammar.backend=gram", "grammar={timeout: 4}") == (["gram"], False, 4, "process")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("grammar={backend: gram, tiemout: 3}", "grammar.tiemout is not a key of grammar; allowed: backend, isolation"),
        ("grammar={backend: gram, timeout: 0}", "grammar.timeout is 0; allowed: a number greater than 0"),
        ("grammar.isolation=jail", "grammar.isolation is 'jail'; allowed: 'process' or 'thread'"),
        ("grammar={threads: 3}", "grammar.backend has no `kind`"),
        ("grammar={backend: {backend: gram}}", "grammar.backend has no `kind`"),
        ("grammar=gramm", "grammar.backend.kind: no grammar component is called 'gramm'"),
    ],
)
def test_errors_in_the_grammar_section_name_the_key(registry, given, message):
    assert message in problems(registry, given)


def test_pages_have_numbers_of_32_bits(registry):
    assert "allowed: a number less than or equal to 2147483647" in problems(
        registry, "memory.num_pages=4611686018427387904"
    )


@pytest.mark.parametrize("key", ["memory.kv_gib", "adapters.host_gib"])
@pytest.mark.parametrize("given", [".inf", ".nan", "1.0e+308"])
def test_memory_is_a_number_of_bytes(registry, key, given):
    assert "allowed: a number less than or equal to 1048576" in problems(registry, f"{key}={given}")


def test_settings_before_the_name_of_their_component_are_kept(registry):
    (drafter,) = load(registry, "speculative.depth=9", "speculative=draft").speculative.candidates
    assert drafter.depth == 9
    assert "speculative.width is not a key" in problems(registry, "speculative.width=9", "speculative=draft")
    (other,) = load(registry, "cache={kind: tree, eviction: lfu}", "cache=none").cache.candidates
    assert other.kind == "none", "another name replaces the section"


def test_optional_sections_can_be_switched_off_and_a_component_may_be_called_none(registry):
    config = load(registry, "grammar=none", "cache=none", "speculative=auto")
    assert config.grammar.disabled
    assert [c.kind for c in config.cache.candidates] == ["none"]
    assert config.speculative.is_auto
    assert load(registry).speculative.disabled
    assert {section.key for section in BUILT_IN if section.optional} == {
        "grammar",
        "quantization",
        "experts",
        "mixer",
        "speculative",
        "tool_parser",
        "reasoning_parser",
        "api",
        "logits_processor",
    }


def test_another_kind_replaces_a_section_and_the_same_kind_adds_to_it(registry):
    fast = "attention={kind: fast, workspace_mib: 3}"
    assert load(registry, fast, "attention.mode=b").attention.decode.candidates[0].model_dump() == {
        "kind": "fast",
        "workspace_mib": 3,
        "mode": "b",
    }
    assert load(registry, fast, "attention=plain").attention.decode.candidates[0].model_dump() == {"kind": "plain"}


def test_unknown_key_of_the_core_is_named_with_close_match_and_origin(registry, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("scheduler:\n  max_runing: 8\n")
    text = problems(registry, files=[file])
    assert text.startswith(
        "scheduler.max_runing is not a key of scheduler; allowed: max_running, max_waiting, chunk_size"
    )
    assert "did you mean 'max_running'?" in text
    assert text.endswith(f"[{file}]")


def test_unknown_section(registry):
    text = problems(registry, "schedular.mixed=true")
    assert text.startswith(
        "schedular is not a key of the config; allowed: model, device, threads, batch_invariant, attention"
    )
    assert "did you mean 'scheduler'?" in text
    assert "[--set schedular.mixed=true]" in text


def test_environment_variable_that_is_no_setting_is_named(registry):
    text = problems(registry, env={"DOVETAIL_MAX_RUNNING": "3"})
    assert "max_running is not a key of the config" in text
    assert "[environment variable DOVETAIL_MAX_RUNNING]" in text


def test_unknown_key_in_a_plugins_own_section_names_plugin_and_keys(registry):
    text = problems(registry, "attention={kind: fast, workspace: 3}")
    assert text.startswith(
        "attention.workspace is not a key of attention 'fast' (fakes-dist 1.0); allowed: workspace_mib, mode"
    )
    assert "did you mean 'workspace_mib'?" in text
    assert "it has no settings" in problems(registry, "grammar={kind: gram, x: 1}")


def test_unknown_component_lists_installed_and_close_match(registry):
    text = problems(registry, "attention.decode=fastt")
    assert text.startswith("attention.decode.kind: no attention component is called 'fastt'; installed: fast, plain")
    assert "did you mean 'fast'?" in text


def test_wrong_values_say_what_was_given_and_what_is_allowed(registry):
    assert problems(registry, "scheduler.max_running=0").startswith(
        "scheduler.max_running is 0; allowed: a number greater than or equal to 1"
    )
    assert problems(registry, "model.dtype=bfloat").startswith(
        "model.dtype is 'bfloat'; allowed: 'auto', 'float32', 'bfloat16' or 'float16'; did you mean 'bfloat16'?"
    )
    assert problems(registry, "scheduler.overlap=maybe").startswith(
        "scheduler.overlap is 'maybe'; allowed: 'auto' or a valid boolean"
    )
    assert problems(registry, "device=gpu").startswith("device is 'gpu'; ")
    assert problems(registry, "scheduler=3").startswith("scheduler is 3; ")
    assert problems(registry, "attention={kind: fast, workspace_mib: 0}").startswith("attention.workspace_mib is 0; ")


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("cache=3", "cache is 3; allowed: one of auto, none, tree"),
        ("cache=[]", "cache is an empty list"),
        ("cache=[tree, 3]", "cache[1] is 3"),
        ("cache=[tree, auto]", "cache[1].kind is 'auto', which stands alone"),
        ("cache={eviction: lfu}", "cache has no `kind`"),
        ("cache={kind: auto, eviction: lfu}", "cache.kind is 'auto', which stands alone and takes no settings"),
        ("cache={kind: tree, eviction: lifo}", "cache.eviction is 'lifo'; allowed: 'lru' or 'lfu'"),
        ("attention={prefill: fast, decod: plain}", "attention.decod is not a key of attention by phase"),
        ("attention.prefill=none", "attention.prefill.kind: no attention component is called 'none'"),
    ],
)
def test_malformed_plugin_sections(registry, given, path):
    assert problems(registry, given).startswith(path)


def test_all_problems_are_reported_at_once(registry):
    text = problems(
        registry, "scheduler.max_running=0", "attention=nope", "memory.pagesize=3", "cache=[tree, {kind: no}]"
    )
    assert text.startswith("4 settings are wrong:")
    for key in ("scheduler.max_running", "attention.kind", "memory.pagesize", "cache[1].kind"):
        assert f"  - {key}" in text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.ini", "", "has suffix '.ini'; allowed: .yaml, .yml, .toml, .json"),
        ("c.yaml", "a: [", "cannot be parsed"),
        ("c.json", "{", "cannot be parsed"),
        ("c.toml", "a = ", "cannot be parsed"),
        ("c.yaml", "- a", "holds list"),
        ("c.yaml", "device: cpu\ndevice: cuda\n", "key 'device' is given twice"),
        ("c.json", '{"device": "cpu", "device": "cuda"}', "key 'device' is given twice"),
    ],
)
def test_files_that_cannot_be_read(registry, tmp_path, name, content, message):
    file = tmp_path / name
    file.write_text(content)
    text = problems(registry, files=[file])
    assert str(file) in text
    assert message in text


def test_a_missing_file_and_a_malformed_set(registry, tmp_path):
    assert "cannot be read: No such file" in problems(registry, files=[tmp_path / "absent.yaml"])
    for wrong in ("scheduler", "=3", "a..b=3"):
        assert "allowed: key.path=value" in problems(registry, wrong)
    assert "not valid YAML" in problems(registry, "a=[")


EXAMPLES = [
    (),
    ("attention=fast",),
    ("attention={prefill: {kind: fast, workspace_mib: 3}, decode: auto}",),
    ("attention=[fast, plain]", "cache={kind: tree, eviction: lfu}", "cache.eviction=lru"),
    ("grammar=none", "speculative={kind: draft, depth: 9}", "cache=none", "plugins.allow=[fakes]", "memory.kv_gib=0.5"),
    ("model={path: /x, overrides: {rope_scaling: {factor: 2.0, kind: [1, 2]}}}", "plugins.deny=a,b"),
]


@pytest.mark.parametrize("sets", EXAMPLES)
def test_dump_and_reload_is_the_identity(registry, tmp_path, sets):
    config = load(registry, *sets)
    for name, text in (("c.yaml", yaml.safe_dump(dump(config))), ("c.json", json.dumps(dump(config)))):
        (tmp_path / name).write_text(text)
        again = load(registry, files=[tmp_path / name])
        assert again == config
        assert config_hash(again) == config_hash(config)


def test_hash_tells_configs_apart_and_not_their_spelling(registry):
    hashes = {config_hash(load(registry, *sets)) for sets in EXAMPLES}
    assert len(hashes) == len(EXAMPLES)
    assert config_hash(load(registry, "cache=tree")) == config_hash(load(registry, "cache={kind: tree, eviction: lru}"))


def test_config_is_frozen(registry):
    config = load(registry)
    with pytest.raises(ValidationError):
        config.device = "cpu"
    with pytest.raises(ValidationError):
        config.scheduler.max_running = 3


def test_config_pickles(fakes, registry):
    config = load(registry, "scheduler.max_running=3", "plugins.deny=a")
    assert pickle.loads(pickle.dumps(config)) == config


def test_plugin_policy_is_read_before_the_rest_is_valid(fakes):
    entry = fakes.entry("extra", [fakes.spec(ComponentKind.CACHE, "tree")])
    config, registry = setup([], ["cache=tree"], {"DOVETAIL_PLUGINS__ALLOW": "extra"}, [entry, fakes.entry("other")])
    assert {p.name: p.status for p in registry.plugins}["other"] is PluginStatus.BLOCKED
    assert config.plugins.allow == ("extra",)
    with pytest.raises(ConfigError, match=r"^plugins\.alow is not a key of plugins"):
        plugins_section(read([], ["plugins.alow=x"], {}))


def test_arguments_from_python_win_over_everything(fakes):
    config, _ = setup([], ["device=cuda"], {}, [fakes.entry("a")], arguments={"device": "cpu", "model": "x"})
    assert (config.device, config.model.path) == ("cpu", "x")


KEYS = st.sampled_from(["a", "b", "c"])
TREES = st.dictionaries(
    KEYS, st.recursive(st.integers(), lambda inner: st.dictionaries(KEYS, inner, max_size=3), max_leaves=8), max_size=3
)


@given(TREES, TREES, TREES)
@settings(max_examples=200)
def test_merging_is_associative_has_an_identity_and_the_last_wins(x, y, z):
    assert combine(x, {}) == combine({}, x) == combine(x, x) == x
    leaves_kept = combine(combine(x, y), z)
    assert combine(leaves_kept, z) == leaves_kept
    for key, value in z.items():
        if not isinstance(value, dict):
            assert leaves_kept[key] == value


def test_long_form_leaves_what_it_does_not_know():
    assert long_form({"model": 3, "cache": None, "x": "y"}) == {"model": 3, "cache": None, "x": "y"}


def test_a_file_as_the_readme_writes_it(registry, tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text(
        textwrap.dedent(
            """
            model: tiny
            attention: {prefill: fast, decode: plain}
            speculative: none
            scheduler: {max_running: 64}
            """
        )
    )
    config = load(registry, files=[file])
    assert config.model.path == "tiny"
    assert config.scheduler.max_running == 64
