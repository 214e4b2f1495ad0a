"""Test the commands over plugins made in memory.

Run: pytest tests/core/test_cli_commands.py
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import subprocess
import sys

import pytest
import typer
import yaml

from dovetail import LLM
from dovetail.cli import main
from dovetail.cli.serve import read_arguments
from dovetail.engine.kernel_set import kernel_set
from dovetail.interfaces.cache import CacheGroup, CacheGroupKind
from dovetail.interfaces.features import Feature
from dovetail.interfaces.mixer_shapes import StateShape
from dovetail.ops.triton.kernel_cache import mark_file
from dovetail.registry import ComponentKind, Machine, Requirement, resolve
from dovetail.registry import loader as loader_module

K = ComponentKind


@pytest.fixture
def cli(fakes, monkeypatch, capsys):
    """Run ``dovetail ...``; return (exit status, stdout, stderr)."""
    missing = Requirement("no-such-dist", ">=2", "pip install no-such-dist[fast]")
    specs = [
        *fakes.basics(),
        fakes.spec(K.ATTENTION, "fast", {"depth": (int, 3)}, requires=(missing,), priority=9),
        fakes.spec(K.DRAFTER, "ngram", offers=frozenset({Feature.DRAFT_CHAIN})),
    ]
    entries = [fakes.entry("fakes", specs), fakes.broken("bad", RuntimeError("boom [red]"))]
    monkeypatch.setattr(loader_module, "installed_plugins", lambda: entries)
    monkeypatch.setenv("COLUMNS", "160")
    for name in [n for n in os.environ if n.startswith("DOVETAIL_")]:
        monkeypatch.delenv(name)

    def run(*words):
        status = 0
        try:
            main(list(words))
        except SystemExit as stop:
            status = int(stop.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    run.entries = entries
    return run


def test_plugins_list(cli):
    status, out, _ = cli("plugins", "list")
    assert status == 0
    assert [w for w in ("attention", "cache", "policy", "model", "speculative") if w not in out] == []
    assert "RuntimeError: boom [red]" in out  # shown as it is, not as markup
    data = json.loads(cli("plugins", "list", "--json")[1])
    assert {c["name"] for c in data["components"] if c["kind"] == "cache"} == {"tree", "none"}
    assert {p["name"]: p["status"] for p in data["plugins"]} == {"bad": "failed", "fakes": "loaded"}


def test_plugins_list_obeys_the_policy_and_reports_it(cli):
    status, out, _ = cli("plugins", "list", "--set", "plugins.deny=[bad]")
    assert status == 0
    assert "blocked" in out
    assert "plugins.deny names it" in out


def test_plugins_doctor_says_what_mends_it(cli):
    status, out, _ = cli("plugins", "doctor")
    assert status == 1
    assert "pip install no-such-dist[fast]" in out
    assert "plugins.deny: [bad]" in out
    assert "Traceback" in out
    assert cli("plugins", "doctor", "--set", "plugins.deny=bad")[0] == 0


def test_plugins_show(cli):
    status, out, _ = cli("plugins", "show", "attention/fast")
    assert status == 0
    assert "no-such-dist>=2" in out
    assert "depth: 3" in out
    status, _, err = cli("plugins", "show", "fats")
    assert status == 2
    assert "no component is called 'fats'; installed: attention/fast, attention/plain" in err
    assert "did you mean 'fast'?" in err


def test_explain_shows_every_candidate_and_its_verdict(cli, fakes):
    status, out, _ = cli("explain", "--model", str(fakes.directory), "--assume", "sm90")
    assert status == 0
    assert "FakeForCausalLM" in out
    assert "KV bfloat16 (1,024 bytes per token)" in out
    assert "needs no-such-dist>=2; no-such-dist is not installed" in out
    assert "config names none" in out
    assert "sampling defaults: each API's (the model's generation_config.json has none)" in out
    (fakes.directory / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    _, out, _ = cli("explain", "--model", str(fakes.directory), "--assume", "sm90")
    assert "sampling defaults: temperature 0.6, top_k 20 (the model's generation_config.json)" in out
    tree = json.loads(cli("explain", "--model", str(fakes.directory), "--assume", "sm90", "--json")[1])
    assert tree["sampling_defaults"] == {"temperature": 0.6, "top_k": 20}
    assert tree["chosen"]["attention.decode"]["name"] == "plain"
    assert tree["config"]["model"]["dtype"] == "bfloat16"
    assert tree["machine"]["compute_capability"] == [9, 0]
    fakes.model(cache_groups=(CacheGroup(2, 2, 64), CacheGroup(3, 2, 64, CacheGroupKind.SLIDING, 8)))
    _, out, _ = cli("explain", "--model", str(fakes.directory), "--assume", "sm90")
    assert "KV bfloat16 (2,560 bytes per token, 1,536 in layers with a window)" in out
    tree = json.loads(cli("explain", "--model", str(fakes.directory), "--assume", "sm90", "--json")[1])
    assert tree["cache_groups"][1] == {"kind": "sliding", "layers": 3, "window": 8, "bytes_per_token": 1536}


def test_explain_shows_the_bytes_of_states(cli, fakes):
    states = StateShape((8, 3), None, ((4, 2),)), StateShape((4, 16, 32), "float32", ((4, 1),))
    fakes.model(cache_groups=(CacheGroup(2, 2, 64), CacheGroup.of_states(3, states)))
    given, size = ("--model", str(fakes.directory), "--assume", "sm90"), 3 * (8 * 3 * 2 + 4 * 16 * 32 * 4)
    _, out, _ = cli("explain", *given)
    assert f"1,024 bytes per token, states of {size:,} bytes per request and snapshot" in out
    tree = json.loads(cli("explain", *given, "--json")[1])
    assert tree["cache_groups"][1] == {"kind": "state", "layers": 3, "bytes_per_snapshot": size}


def test_explain_shows_what_fits(cli, fakes):
    given = ("--model", str(fakes.directory), "--assume", "sm90")
    fakes.model(cache_groups=(CacheGroup(2, 2, 64),))  # 1,024 bytes for a token, page 0 of 16 tokens
    assert "each GiB of memory holds 1,048,576 tokens" in cli("explain", *given)[1]
    assert f"2.00 GiB of memory hold {2**21 - 16:,} tokens" in cli("explain", *given, "--set", "memory.kv_gib=2")[1]
    fakes.model(cache_groups=(CacheGroup(2, 2, 64), CacheGroup.of_states(3, (StateShape((8, 3), None, ((4, 2),)),))))
    out = cli("explain", *given)[1]
    assert " tokens in all layers; alone " in out
    assert " tokens in layers of kind full, or " in out
    assert " states or snapshots" in out
    memory = json.loads(cli("explain", *given, "--json")[1])["memory"]
    assert (memory["per_gib"], memory["bytes"], memory["groups"][0]["most_tokens"]) == (True, 2**30, 2**20)


def test_explain_shows_what_an_engine_has(capsys):
    """With a size in the config, the numbers are those of the engine that starts with it."""
    given = ["tiny", "--set", "grammar=none", "--set", "memory.kv_gib=0.125", "--set", "device=cpu"]
    with pytest.raises(SystemExit, match="0"):
        main(["explain", *given, "--json"])
    memory = json.loads(capsys.readouterr().out)["memory"]
    with LLM("tiny", grammar="none", device="cpu", memory={"kv_gib": 0.125}) as llm:
        (group,) = llm.loop.executor.describe()["cache_groups"]
        assert memory["groups"] == [{"kind": "full", "most_tokens": group["most_tokens"]}]
        assert memory["tokens"] == group["most_tokens"]


def test_explain_shows_the_kernel_cache_and_whether_a_start_finds_it_filled(cli, fakes, tmp_path, monkeypatch):
    """An engine leaves the file of ``mark_file`` once its kernels are compiled; see ``KernelsAhead``."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    arguments = ["explain", "--model", str(fakes.directory), "--assume", "sm90"]

    def shown():
        return " ".join(cli(*arguments)[1].split())

    assert "0 kernels, 0.0 MiB; not filled for this config on compute capability 9.0 with Triton" in shown()
    kernel = tmp_path / "cache" / "HASH" / "kernel.cubin"
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(b"x" * 2**20)
    config, registry = read_arguments((str(fakes.directory),), (), {}, dict(os.environ))
    file = mark_file(90, kernel_set(resolve(config, registry, Machine.assume("sm90"))))
    file.parent.mkdir()
    file.touch()
    assert "1 kernels, 1.0 MiB; filled for this config" in shown()
    found = json.loads(cli(*arguments, "--json")[1])["kernel_cache"]
    assert (found["path"], found["kernels"], found["filled"]) == (str(tmp_path / "cache"), 1, True)
    assert not json.loads(cli(*arguments, "--json", "--dtype", "float16")[1])["kernel_cache"]["filled"]
    assert json.loads(cli(*arguments[:-1], "sm80", "--json")[1])["kernel_cache"]["filled"] is False
    assert json.loads(cli(*arguments[:-1], "cpu", "--json")[1])["kernel_cache"] is None


def test_config_show_saved_is_a_config_that_means_the_same(cli, tmp_path):
    sets = ["--set", "attention.prefill={kind: fast, depth: 5}", "--set", "scheduler.max_running=7"]
    status, out, _ = cli("config", "show", *sets)
    assert status == 0
    assert yaml.safe_load(out)["attention"]["prefill"] == {"kind": "fast", "depth": 5}
    file = tmp_path / "saved.yaml"
    file.write_text(out)
    assert cli("config", "hash", str(file))[1] == cli("config", "hash", *sets)[1]
    assert cli("config", "show", str(file))[1] == out
    assert yaml.safe_load(out) == json.loads(cli("config", "show", "--json", *sets)[1])


def test_environment_counts(cli, monkeypatch):
    monkeypatch.setenv("DOVETAIL_SCHEDULER__MAX_RUNNING", "8")
    assert yaml.safe_load(cli("config", "show")[1])["scheduler"]["max_running"] == 8


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["config", "show", "--set", "scheduler.mxied=true"], 2, "did you mean 'mixed'?"),
        (["config", "show", "absent.yaml"], 2, "cannot be read"),
        (["explain", "--model", "/no/such/dir", "--assume", "cpu"], 2, "which is not a directory"),
        (["explain", "--assume", "h100"], 2, "allowed: cpu, or sm and a compute capability"),
        (["serve", "--set", "attention=fst"], 2, "no attention component is called 'fst'"),
        (["generate", "hello", "--set", "cache={kind: tree, evict: 3}"], 2, "did you mean 'eviction'?"),
        (["chat", "--config", "absent.yaml"], 2, "cannot be read"),
        (["plugins", "list", "--set", "plugins.require=bad"], 2, "which is failed: RuntimeError: boom [red]"),
        (
            ["config", "show", "--set", "plugins.allow=absent"],
            2,
            "plugins.allow names 'absent', which is not installed",
        ),
    ],
)
def test_errors_are_one_message_on_stderr_and_exit_status_2(cli, words, status, message):
    got, out, err = cli(*words)
    assert got == status
    assert err.startswith("error: ")
    assert message in err
    assert "cli/__init__.py" not in err  # no traceback of Dovetail's own code
    assert out == ""


def test_traceback_on_request(cli):
    err = cli("--traceback", "config", "show", "absent.yaml")[2]
    assert "Traceback (most recent call last)" in err
    assert err.rstrip().splitlines()[-1].startswith("error: ")


def test_refusals_of_explain_are_exit_status_2(cli, fakes):
    status, _, err = cli("explain", "--model", str(fakes.directory), "--assume", "cpu", "--set", "attention=fast")
    assert status == 2
    assert "To fix it: pip install no-such-dist[fast]" in err


def test_serve_hands_over_config_and_registry(cli, monkeypatch):
    seen = []
    launch = pytest.importorskip("dovetail.server.launch")
    monkeypatch.setattr(launch, "serve", lambda config, registry, prepare: seen.append((config, registry)))
    assert cli("serve", "--port", "0", "--model", "x", "--host", "::1", "--set", "memory.page_size=1")[0] == 0
    ((config, registry),) = seen
    assert (config.server.port, config.model.path, config.server.host, config.memory.page_size) == (0, "x", "::1", 1)
    assert registry.names("cache") == ["none", "tree"]


class FakeLLM:
    """Repeat the prompt in two pieces."""

    closed = 0

    def __init__(self, config):
        self.config = config

    def stream(self, prompt, params):
        yield from (f"<{prompt}", f"|{params.max_new_tokens}>")

    def stream_chat_text(self, messages, params):
        yield from (m["content"] for m in messages if m["role"] == "user")

    def close(self):
        type(self).closed += 1


@pytest.fixture
def llm(monkeypatch):
    module = pytest.importorskip("dovetail.llm")
    FakeLLM.closed = 0
    monkeypatch.setattr(module, "LLM", FakeLLM)
    return FakeLLM


def test_generate_streams_text_and_closes(cli, llm):
    assert cli("generate", "hello", "-n", "7")[:2] == (0, "<hello|7>\n")
    assert llm.closed == 1


def test_chat_keeps_the_conversation_until_an_empty_line(cli, llm, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n\nnot reached\n"))
    assert cli("chat", "--system", "s")[:2] == (0, "one\nonetwo\n")
    assert llm.closed == 1


def test_plugins_may_add_commands(cli, fakes):
    def register_cli(app):
        @app.command()
        def hello():
            typer.echo("hello from a plugin")

    cli.entries.append(fakes.entry("greeter", register_cli=register_cli))
    assert cli("hello")[:2] == (0, "hello from a plugin\n")
    assert "hello" in cli("--help")[1]
    status, _, err = cli("helo")
    assert status == 2
    assert "No such command" in err


def test_version(cli):
    import dovetail

    assert cli("--version")[1].strip() == dovetail.__version__


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rate", "0"), "--rate is 0; allowed: calls per second"),
        (("--rate", "inf"), "--rate is inf; allowed"),
        (("--arrivals", "{kind: poisson, rate: .inf}"), "poisson.rate"),
        (("--sweep", ","), "--sweep is ','; allowed"),
        (("--sweep", "1,nan"), "allowed: rates in calls per second"),
        (("--sweep", "1,2", "--rate", "3"), "leave out --rate"),
        (
            ("--sweep", "1,2", "--find-rate", "--goodput", "ttft:1"),
            "leave out --rate and --find-rate, or leave out --sweep",
        ),
        (("-w", "{kind: random, input: 100000000000}"), "less than or equal to"),
        (("--save", "/dev/null/x.json"), "--save: /dev/null/x.json cannot be written"),
        (("--html", "/dev"), "--html: /dev cannot be written"),
    ],
)
def test_bench_refuses_before_it_measures(cli, words, said):
    status, out, err = cli("bench", "serve", "--url", "http://127.0.0.1:9", *words)
    assert (status, out) == (2, "")
    assert said in err


def test_checking_a_file_leaves_nothing_behind(cli, tmp_path):
    old = tmp_path / "old.json"
    old.write_text("mine")
    for file in (old, tmp_path / "new" / "run.json"):
        cli("bench", "serve", "--url", "http://127.0.0.1:9", "--rate", "1", "--save", str(file))
    assert old.read_text() == "mine"
    assert list((tmp_path / "new").iterdir()) == []


def test_explain_shows_whole_reasons_on_a_narrow_terminal(cli, fakes, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = cli("explain", "--model", str(fakes.directory), "--assume", "sm90")
    assert "stage" not in out
    assert "would fit; another is preferred" in out  # in one line
    assert max(map(len, out.splitlines()[2:])) <= 80


def test_the_table_of_rates_fits_80_columns(monkeypatch, capsys):
    from dovetail.bench.metrics import SLO
    from dovetail.bench.records import ClientLag, MachineFacts, Measurement, RunRecord
    from dovetail.bench.report import BenchReport
    from dovetail.bench.sweep import point_of
    from dovetail.cli.bench_tables import print_report

    monkeypatch.setenv("COLUMNS", "80")
    machine = MachineFacts(host_cpu="x", cpus=1, memory_gib=1, device="cpu", platform="x", python="3")
    times = (12.345, 12.5)
    call = Measurement(id="a", group="a", ok=True, due=0, sent=0, end=12.5, token_times=times, output_tokens=2)
    fields = {"kind": "serve", "workload": "w", "workload_hash": "h", "machine": machine, "started": "", "seconds": 1}
    record = RunRecord(**fields, measurements=(call,), lag=ClientLag(cpu_share=0.99))
    points = tuple(point_of(rate, record, SLO(ttft_ms=99_999), 0.9) for rate in (0.00391, 1234.5))
    print_report(BenchReport(title="t", workload={}, slo=SLO(ttft_ms=99_999), points=points))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[3:5]] == ["0.00391", "1.23e+03"]
    assert lines[3].rstrip().endswith("100.0% yes")


def test_the_package_runs_as_a_module(tmp_path):
    commands = [
        [sys.executable, "-m", "dovetail", "--version"],
        [sys.executable, "-m", "dovetail", "config", "no_such"],
    ]
    version, wrong = (subprocess.run(c, capture_output=True, text=True, cwd=tmp_path, check=False) for c in commands)
    assert (version.returncode, version.stdout.strip()) == (0, importlib.metadata.version("dovetail"))
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("Usage: dovetail config")
