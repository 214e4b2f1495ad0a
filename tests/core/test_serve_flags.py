"""Test that each flag of ``dovetail serve`` sets its config key, or says what to use instead.

Run: pytest tests/core/test_serve_flags.py
"""

from __future__ import annotations

import json
import os
import random
import shlex
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from dovetail.cli import EXIT_STATUS, main
from dovetail.cli.serve_docs import cli_docs
from dovetail.cli.serve_flags import ALWAYS, FLAGS, ServeFlag
from dovetail.cli.serve_refused import INSTEAD, REFUSED
from dovetail.cli.serve_values import KEYS_VARIABLE, settings_of
from dovetail.config import config_hash, dump
from dovetail.config.tenants import KeyFile, key_digest, load_keys
from dovetail.errors import ConfigError, EngineDeadError, EngineError
from dovetail.interfaces.api import ApiRequest, Prompt
from dovetail.interfaces.features import Feature
from dovetail.registry import loader
from dovetail.registry.hookspecs import hookimpl
from dovetail.registry.specs import ComponentKind, ComponentSpec
from dovetail.sampling_params import SamplingParams
from dovetail.server.expansion import messages
from dovetail.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
SPECULATION_NEEDS = {
    "--speculative-draft-model-path": ("--speculative-algorithm", "STANDALONE"),
    "--speculative-num-steps": ("--speculative-algorithm", "EAGLE"),
    "--speculative-eagle-topk": ("--speculative-algorithm", "EAGLE"),
    "--speculative-num-draft-tokens": ("--speculative-algorithm", "NGRAM"),
}


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    for name in [n for n in os.environ if n.startswith(("DOVETAIL_", "_DOVETAIL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(KEYS_VARIABLE, "")  # so that it is restored
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "template.jinja").write_text("{{ messages }}")


def run(monkeypatch, capsys, *words: str) -> tuple[int, Any, str]:
    """Return the exit status, the config with which the server would start, and what is printed to stderr."""
    seen: list[Any] = []
    monkeypatch.setattr("dovetail.server.launch.serve", lambda config, registry, prepare: seen.append(config))
    status = 0
    try:
        main(["serve", *words])
    except SystemExit as stop:
        status = int(stop.code or 0)
    return status, seen[0] if seen else None, capsys.readouterr().err


def value_of(config: Any, key: str) -> Any:
    return reduce(lambda tree, part: tree[part], key.split("."), dump(config))


def kind_of(value: Any) -> Any:
    return value["kind"] if isinstance(value, dict) and "kind" in value else value


def expected(flag: ServeFlag, key: str) -> Any:
    if flag.type is bool:
        return flag.sets[key]
    known: dict[str, Any] = {
        "server.keys": f"env:{KEYS_VARIABLE}",
        "speculative": "ngram",
        "adapters.modules": ["embedding"],
    }
    if key == "adapters.load":
        return {flag.example.partition("=")[0]: "/adapters/mine"}
    known["speculative.num_draft_tokens"] = 7  # the flag counts the token before the drafts
    if flag.json and key not in known:
        return json.loads(flag.example)
    return known.get(key, flag.values.get(flag.example, flag.example))


def test_modules_of_adapters_have_the_names_of_sglang(monkeypatch, capsys) -> None:
    for names, kinds in (
        (("q_proj", "down_proj", "lm_head"), ["linear", "head"]),
        (("all",), ["linear", "experts", "embedding", "head"]),
        (("experts", "embed_tokens"), ["experts", "embedding"]),
    ):
        words = [word for name in names for word in ("--lora-target-modules", name)]
        status, config, error = run(monkeypatch, capsys, *words)
        assert (status, error) == (0, "")
        assert config.adapters.modules == kinds


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.names[0])
def test_each_flag_sets_its_key_under_each_of_its_names(flag: ServeFlag, monkeypatch, capsys) -> None:
    for name in flag.names:
        for spelled in {name, "--" + name[2:].replace("-", "_")} if name.startswith("--") else {name}:
            value = [] if flag.type is bool else [str(flag.example)]
            words = [*SPECULATION_NEEDS.get(flag.names[0], ()), spelled, *value]
            status, config, error = run(monkeypatch, capsys, *words)
            assert (status, error) == (0, ""), words
            for key in flag.key.split(", ") if flag.key else ():
                assert kind_of(value_of(config, key)) == expected(flag, key), (words, key)
            assert bool(flag.key) == (flag.group != ALWAYS)


def test_other_commands_take_the_arguments_of_serve(monkeypatch, capsys, tmp_path) -> None:
    (tmp_path / "server.yaml").write_text("scheduler: {max_running: 3}\n")
    words = ["tiny", "server.yaml", "--max_model_len", "512", "--set", "policy=fcfs", "--port", "1"]
    config = run(monkeypatch, capsys, *words)[1]
    shown = []
    for command in (["config", "show", "--json"], ["explain", "--json", "--assume", "cpu"], ["config", "hash"]):
        with pytest.raises(SystemExit) as stop:
            main([*command, *words])
        assert stop.value.code == 0
        shown.append(capsys.readouterr().out)
        with pytest.raises(SystemExit) as stop:
            main([*command, "tiny", "--trust-remote-code"])
        assert (stop.value.code, capsys.readouterr().err) == (
            2,
            f"error: --trust-remote-code: {REFUSED['--trust-remote-code']}\n",
        )
    assert json.loads(shown[0]) == dump(config)
    explained = json.loads(shown[1])["config"]
    assert [explained["model"]["context_len"], explained["scheduler"]["max_running"]] == [512, 3]
    assert shown[2].strip() == config_hash(config)


def test_keys_of_flags_are_not_left_in_the_environment(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["config", "show", "tiny", "--api-key", "key-1"])
    shown = capsys.readouterr().out
    assert f"keys: env:{KEYS_VARIABLE}" in shown
    assert "key-1" not in shown
    assert not os.environ[KEYS_VARIABLE]


@pytest.mark.parametrize(
    ("flag", "names"),
    [
        ("--tool-call-parser", {"qwen25": "hermes", "llama3": "llama3_json", "deepseekv3": "deepseek", "deepseek_v3": "deepseek",
                                "gpt-oss": "gpt_oss", "openai": "gpt_oss"}),
        ("--reasoning-parser", {"deepseek-r1": "deepseek_r1", "gpt-oss": "gpt_oss", "openai_gptoss": "gpt_oss"}),
    ],
)  # fmt: skip
def test_parsers_have_the_names_of_sglang_and_vllm(flag: str, names: dict[str, str], monkeypatch, capsys) -> None:
    (key,) = (known.key for known in FLAGS if flag in known.names)
    found = {name: kind_of(value_of(run(monkeypatch, capsys, "tiny", flag, name)[1], key)) for name in names}
    assert found == names


@pytest.mark.parametrize(
    ("flag", "name", "value"),
    [
        ("--quantization", "awq", "integer"),
        ("--quantization", "gptq_marlin", "integer"),
        ("--quantization", "fbgemm_fp8", "fp8"),
        ("--quantization", "compressed-tensors", "auto"),
        ("--load-format", "gguf", "safetensors"),
        ("--load-format", "auto", "safetensors"),
    ],
)
def test_formats_have_the_names_of_sglang_and_vllm(flag: str, name: str, value: str, monkeypatch, capsys) -> None:
    (key,) = (known.key for known in FLAGS if flag in known.names)
    status, config, error = run(monkeypatch, capsys, "tiny", flag, name)
    assert (status, error) == (0, "")
    assert kind_of(value_of(config, key)) == value


def test_names_are_not_given_twice() -> None:
    names = [name for flag in FLAGS for name in flag.names]
    assert len(names) == len(set(names))
    assert not set(names) & set(REFUSED)
    assert len(REFUSED) == sum(map(len, INSTEAD.values()))
    assert len({flag.parameter for flag in FLAGS}) == len(FLAGS)


@pytest.mark.parametrize("name", [names[0] for names in INSTEAD.values()])
def test_other_flags_say_what_to_use_instead(name: str, monkeypatch, capsys) -> None:
    for words in ([name, "x"], [f"{name}=x"], ["--" + name[2:].replace("-", "_")]):
        status, config, error = run(monkeypatch, capsys, "tiny", *words)
        assert (status, config) == (2, None)
        assert error == f"error: {name}: {REFUSED[name]}\n"


def test_unknown_flags_are_refused(monkeypatch, capsys) -> None:
    status, config, error = run(monkeypatch, capsys, "tiny", "--max-modle-len", "3")
    assert (status, config) == (2, None)
    assert "--max-model-len" in error


@pytest.mark.parametrize(
    ("line", "section"),
    [
        ("--speculative-algorithm NGRAM --speculative-num-draft-tokens 12", {"kind": "ngram", "num_draft_tokens": 11}),
        (
            "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16",
            {"kind": "eagle", "depth": 3, "topk": 4, "num_draft_tokens": 15},
        ),
        (
            "--speculative-algorithm EAGLE3 --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
            {"kind": "eagle3", "num_draft_tokens": 3},
        ),
        (
            "--speculative-algorithm EAGLE3 --speculative-num-steps 5 --speculative-eagle-topk 8 --speculative-num-draft-tokens 32",
            {"kind": "eagle3_tree", "depth": 5, "topk": 8, "num_draft_tokens": 31},
        ),
        ("--speculative-algorithm NEXTN --speculative-num-steps 2", {"kind": "mtp", "num_draft_tokens": 2}),
        (
            """--speculative-config '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 2}'""",
            {"kind": "ngram", "num_draft_tokens": 5, "max_ngram": 3, "min_ngram": 2},
        ),
        (
            """--speculative-config '{"method": "eagle", "model": "x", "num_speculative_tokens": 5}'""",
            {"kind": "eagle", "path": "x", "depth": 5, "topk": 1, "num_draft_tokens": 5},
        ),
        (
            """--speculative-config '{"model": "x", "num_speculative_tokens": 5}'""",
            {"kind": "draft_model", "path": "x", "num_draft_tokens": 5},
        ),
    ],
)
def test_drafters_of_sglang_and_vllm(line: str, section: dict[str, Any], monkeypatch, capsys) -> None:
    status, config, error = run(monkeypatch, capsys, *shlex.split(line))
    assert (status, error) == (0, "")
    assert dump(config)["speculative"].items() >= section.items()


@pytest.mark.parametrize(
    ("flags", "section"),
    [
        ({"num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 16}, {"depth": 3, "topk": 4, "num_draft_tokens": 15}),
        ({"num_draft_tokens": 16}, {"num_draft_tokens": 15}),
    ],
)
def test_drafters_of_other_plugins_say_what_they_draft(flags, section, monkeypatch) -> None:
    """Their specs have the names of other engines, and whether they draft trees; plugins that config denies are not loaded."""
    loaded: list[str] = []

    def spec(name: str, *aliases: str, offers: Feature) -> ComponentSpec:
        return ComponentSpec(ComponentKind.DRAFTER, name, "a:A", "a:B", "", offers=frozenset({offers}), aliases=aliases)

    class Entry:
        value, dist = "here:Drafters", None

        def __init__(self, name: str, *specs: ComponentSpec) -> None:
            self.name, self.specs = name, specs

        def load(self) -> object:
            loaded.append(self.name)
            return self

        @hookimpl
        def register_components(self) -> Sequence[ComponentSpec]:
            return self.specs

    trees = spec("medusa_tree", "medusa", offers=Feature.DRAFT_TREE)
    entries = [Entry("medusae", spec("medusa", "heads", offers=Feature.DRAFT_CHAIN), trees), Entry("denied")]
    monkeypatch.setattr(loader, "installed_plugins", lambda: entries)
    given = {f"speculative_{name}": value for name, value in flags.items()}
    for algorithm in ("MEDUSA", "medusa"):
        found = settings_of({"speculative_algorithm": algorithm, **given}, sets=["plugins.deny=[denied]"])
        kind = "medusa_tree" if "eagle_topk" in flags else "medusa"
        assert found["speculative"] == {"kind": kind, **section}
    assert settings_of({"speculative_algorithm": "HEADS"})["speculative"] == "medusa"
    assert loaded[:2] == ["medusae", "medusae"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tiny other", "'tiny' and 'other' are two models"),
        ("tiny --model other", "the model is given twice, as 'tiny' and as 'other'"),
        ("--served-model-name a b tiny", "'b' and 'tiny' are two models"),
        ("absent.yaml", "cannot be read"),
        ("template.jinja", "has suffix '.jinja'"),
        ("--speculative-num-steps 3", "need --speculative-algorithm"),
        ("--speculative-algorithm NGRAM --speculative-eagle-topk 3", "topk"),
        ("--speculative-algorithm MEDUSA", "medusa"),
        ("--speculative-config {", "is not JSON"),
        ("--speculative-config {} --speculative-num-steps 3", "leave out the other"),
        ("""--speculative-config '{"method": "ngram", "quant": 1}'""", "has the key 'quant'"),
        ("--speculative-config 3", "is no object"),
        ("--enable-prefix-caching --disable-radix-cache", "contradict each other: both set cache"),
        ("--mem-fraction-static 2", "memory.fraction"),
        ("--attention-backend nope", "no attention component is called 'nope'"),
        ("--api-key ''", "--api-key is empty"),
        ("--api-key x --set server.keys=y --chunked-prefill-size -1", "scheduler.chunk_size"),
    ],
)
def test_wrong_command_lines_are_one_error(line: str, message: str, monkeypatch, capsys) -> None:
    status, config, error = run(monkeypatch, capsys, *shlex.split(line))
    assert (status, config) == (2, None)
    assert error.startswith("error: ")
    assert error.count("error: ") == 1
    assert message in error
    assert "Traceback" not in error


def test_a_model_and_files_are_arguments(monkeypatch, capsys, tmp_path) -> None:
    (tmp_path / "server.yaml").write_text("model: other\nserver: {port: 1}\nscheduler: {max_running: 3}\n")
    (tmp_path / "models").mkdir()
    for model in ("tiny", "models", "org/name", str(tmp_path / "models")):
        words = [model, "server.yaml", "--set", "server.port=2", "--port", "3"]
        config = run(monkeypatch, capsys, *words)[1]
        assert (config.model.path, config.server.port, config.scheduler.max_running) == (model, 3, 3)
    config = run(monkeypatch, capsys, "--served-model-name", "a", "--served-model-name", "b", "--", "tiny")[1]
    assert config.model.names == ("a", "b")


def test_an_api_key_becomes_the_digest_of_an_admin(monkeypatch, capsys) -> None:
    config = run(monkeypatch, capsys, "--api-key", "key-1", "--api-key", "key-2")[1]
    keys = load_keys(config.server.keys, os.environ)
    assert isinstance(keys, KeyFile)
    assert [entry.hash for entry in keys.admins["api-key"].keys] == [key_digest(b"key-1"), key_digest(b"key-2")]
    assert "key-1" not in str(dump(config)) + os.environ[KEYS_VARIABLE]


def test_help_shows_each_flag_with_its_key(monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for flag in FLAGS:
        assert flag.group in shown
        for name in flag.names:
            assert name in shown
        if flag.key:
            assert f"({flag.key})" in shown


def test_the_page_of_the_command_line_is_current() -> None:
    assert (ROOT / "docs/cli.md").read_text() == cli_docs(), "run: python -m dovetail.cli.serve_docs > docs/cli.md"


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, 0), (EngineError("x"), 1), (ConfigError("x"), 2), (EngineDeadError("x"), 70), (KeyboardInterrupt(), 130)],
)
def test_exit_status_is_as_documented(error: BaseException | None, status: int, monkeypatch, capsys) -> None:
    def serve(config: Any, registry: Any, prepare: Any) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr("dovetail.server.launch.serve", serve)
    code = 0
    try:
        main(["serve", "tiny"])
    except SystemExit as stop:
        code = int(stop.code or 0)
    assert code == status
    assert status in EXIT_STATUS
    if status in (1, 2):
        assert capsys.readouterr().err == "error: x\n"


COMPLETED = (
    ("dovetail ser", "serve"),
    ("dovetail serve --quantization x --max-mo", "--max-model-len"),
    ("dovetail serve tiny --context-l", "--context-length"),
    ("dovetail config show --gpu-mem", "--gpu-memory-utilization"),
    ("dovetail explain --tensor", "--tensor-parallel-size"),
)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_flags(shell: str, monkeypatch, capsys) -> None:
    monkeypatch.setenv("_DOVETAIL_COMPLETE", f"source_{shell}")
    with pytest.raises(SystemExit):
        main([])
    assert "_DOVETAIL_COMPLETE=complete_" in capsys.readouterr().out
    monkeypatch.setenv("_DOVETAIL_COMPLETE", f"complete_{shell}")
    for line, answer in COMPLETED:
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
        monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
        with pytest.raises(SystemExit):
            main([])
        assert answer in capsys.readouterr().out, line


def test_the_chat_template_of_the_flag_is_used(monkeypatch, capsys) -> None:
    config = run(monkeypatch, capsys, "tiny", "--chat-template", "template.jinja")[1]
    assert load_tokenizer(config).chat_template == "{{ messages }}"
    config = run(monkeypatch, capsys, "tiny", "--chat-template", "absent.jinja")[1]
    with pytest.raises(ConfigError, match=r"model\.chat_template is 'absent\.jinja', which cannot be read"):
        load_tokenizer(config)


def test_the_seed_of_the_server_fixes_the_seeds_of_requests_without_one() -> None:
    request = ApiRequest("r", (Prompt([1], SamplingParams()), Prompt([2], SamplingParams(seed=5))))
    first, again, other = (
        [msg.seed for _ in range(3) for part in messages(request, seeds=seeds) for msg in part]
        for seeds in (random.Random(7), random.Random(7), random.Random(8))
    )
    assert first == again
    assert first[1::2] == [5, 5, 5]
    assert len({*first[::2], *other[::2]}) == 6
