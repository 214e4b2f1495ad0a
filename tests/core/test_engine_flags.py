"""Test that commands which run a model take the flags of ``dovetail serve``, with the same meaning.

.venv/bin/python -m pytest -q -p no:xdist tests/core/test_engine_flags.py
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from dovetail.cli import main
from dovetail.cli.serve_flags import FLAGS, SERVER, ServeFlag
from dovetail.cli.serve_refused import REFUSED
from dovetail.config import dump

NEEDS = {
    "--speculative-draft-model-path": ("--speculative-algorithm", "STANDALONE"),
    "--speculative-num-steps": ("--speculative-algorithm", "EAGLE"),
    "--speculative-eagle-topk": ("--speculative-algorithm", "EAGLE"),
    "--speculative-num-draft-tokens": ("--speculative-algorithm", "NGRAM"),
}
ENGINE = [flag for flag in FLAGS if flag.group != SERVER and flag.names[0] != "--seed"]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in [n for n in os.environ if n.startswith(("DOVETAIL_", "_DOVETAIL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "template.jinja").write_text("{{ messages }}")


def run(*words: str) -> int:
    try:
        main([*words])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list of the configs with which an engine or a server would have been started."""
    seen: list[Any] = []

    def note(config: Any, *_: object, **__: object) -> None:
        seen.append(dump(config))
        raise SystemExit(0)

    monkeypatch.setattr("dovetail.llm.LLM", note)
    monkeypatch.setattr("dovetail.server.launch.serve", note)
    monkeypatch.setattr("dovetail.bench.own_server.own_server", note)
    monkeypatch.setattr("dovetail.bench.session.bench_offline", note)
    return seen


def words_of(flag: ServeFlag, name: str) -> list[str]:
    value = [] if flag.type is bool else [str(flag.example)]
    return [*NEEDS.get(flag.names[0], ()), name, *value]


@pytest.mark.parametrize("flag", ENGINE, ids=lambda flag: flag.names[0])
def test_a_flag_means_what_it_means_to_serve(flag: ServeFlag, configs: list[Any]) -> None:
    words = words_of(flag, flag.names[-1])
    assert run("serve", *words) == run("generate", "a text", *words) == 0
    assert configs[0] == configs[1]


@pytest.mark.parametrize("command", [("chat",), ("bench", "offline"), ("bench", "serve")])
def test_other_commands_take_them_too(command: tuple[str, ...], configs: list[Any]) -> None:
    assert run(*command, "--max_model_len=512", "--tensor-parallel-size", "2", "--enforce-eager") == 0
    (config,) = configs
    assert (config["model"]["context_len"], config["parallel"]["tp"], config["graphs"]["decode"]) == (512, 2, False)


def test_an_option_of_the_command_goes_before_a_flag_of_the_same_name(configs: list[Any]) -> None:
    assert run("generate", "a", "--seed", "3", "--model-path", "tiny", "--tp-size=1", "--", ) == 0  # fmt: skip
    assert configs[0]["server"]["seed"] is None
    assert (configs[0]["model"]["path"], configs[0]["parallel"]["tp"]) == ("tiny", 1)


def test_words_after_two_dashes_are_no_flags(configs: list[Any]) -> None:
    assert run("generate", "--", "--port") == 0
    assert len(configs) == 1


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("generate", "a", "--enable-eplb"), f"--enable-eplb: {REFUSED['--enable-eplb']}"),
        (("generate", "a", "--port", "1"), "--port configures a server, and `dovetail generate` starts none; leave it out"),
        (("bench", "serve", "--host", "a"), "--host is a flag of `dovetail serve`; here, use --set server.host=..."),
        (("generate", "a", "--max-num-seqs", "x"), "--max-num-seqs is 'x'; allowed: an integer"),
        (("generate", "a", "--dtype"), "--dtype needs a value"),
        (("generate", "a", "-q", "absent"), 'quantization.kind: no quantization component is called \'absent\'; installed: '),
        (("chat", "--url", "http://a", "-q", "fp8"), "--url names a running server, which has its own config; leave out --config, --set, --model and the other flags of the model and the engine"),
    ],
)  # fmt: skip
def test_errors_name_the_flag_and_what_to_do(words: tuple[str, ...], error: str, capsys: Any) -> None:
    assert run(*words) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {error}")
    assert printed.count("\n") == 1
