"""Test ``dovetail bench serve`` and ``offline`` on the embedded model: a running server, both APIs, and the engine in
this process.

Run: python -m pytest -q tests/e2e/test_bench_serve.py
"""

from __future__ import annotations

import json
import signal
from html.parser import HTMLParser

import jsonschema
import pytest

from dovetail.bench.client.http import open_client
from dovetail.bench.client.target import find_target
from dovetail.bench.metrics import e2e, itl, tpot, ttft
from dovetail.bench.offline import measure_offline
from dovetail.bench.report import BenchReport
from dovetail.bench.serve import measure_server, run
from dovetail.bench.specs import parse_arrivals, parse_workload
from dovetail.bench.workloads import PromptVocabulary, make_workload
from dovetail.cli import main
from dovetail.llm import LLM

AGENT = "{kind: agent, programs: 2, steps: 3, system: 64, task: 8, result: 8, output: [4, 8]}"
SHARED = "{kind: shared_prefix, groups: 2, per_group: 3, prefix: 64, suffix: 8, output: 6}"
JSON = "{kind: json, count: 3, output: 90}"
TEXT = "{kind: chat, conversations: 2, turns: 2, system: 8, user: 6, output: 12, content: text}"


@pytest.fixture(scope="module")
def llm():
    llm = LLM("tiny", threads=1)
    yield llm
    llm.close()


def served(url, text, arrivals="all_at_once", api="native"):
    async def measure():
        async with open_client(url, 60.0) as client:
            target = await find_target(client, api)
            given = target.vocabulary or PromptVocabulary.of_size(100)
            workload = make_workload(parse_workload(text), 0, given, parse_arrivals(arrivals))
            return workload, await measure_server(client, target, workload)

    return run(measure())


def check(workload, record):
    """Check what must hold for every run of this workload."""
    assert [m.id for m in record.measurements] == [call.id for call in workload.calls]
    assert [m.error for m in record.measurements] == [None] * len(workload.calls)
    for call, m in zip(workload.calls, record.measurements, strict=True):
        assert m.due <= m.sent < m.token_times[0] <= m.token_times[-1] <= m.end
        assert sorted(m.token_times) == list(m.token_times)
        assert 0 < ttft(m) <= e2e(m)
        assert 1 <= m.output_tokens <= call.max_tokens
        if call.sampling.ignore_eos:
            assert (m.output_tokens, m.finish_reason) == (call.max_tokens, "length")
        if m.output_ids is not None:
            assert len(m.output_ids) == len(m.token_times) == m.output_tokens
            assert m.output_tokens == 1 or sum(itl(m)) == pytest.approx(tpot(m) * (m.output_tokens - 1))
    before = {call.id: m for call, m in zip(workload.calls, record.measurements, strict=True)}
    for call in workload.calls:
        if call.parent is not None:
            assert before[call.id].sent >= before[call.parent].end + call.think


def test_ctrl_c_ends_an_offline_run_between_two_steps(monkeypatch):
    """In the middle of a step, Ctrl-C would leave the engine inconsistent and print a traceback on the terminal."""
    llm, ended = LLM("tiny", threads=1, grammar="none"), []
    forward, step = llm.loop.executor.rank.engine.model.forward, llm.loop.step

    def interrupted(batch):
        signal.raise_signal(signal.SIGINT)
        return forward(batch)

    def watched():
        answers = step()
        ended.append(True)
        return answers

    monkeypatch.setattr(llm.loop, "step", watched)
    monkeypatch.setattr(llm.loop.executor.rank.engine.model, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure_offline(llm, make_workload(parse_workload(SHARED), 0, PromptVocabulary.of(llm.tokenizer)))
    assert len(ended) == 2, "the one that empties the cache, and the one that was interrupted"
    llm.close()


@pytest.mark.parametrize("text", [AGENT, SHARED])
def test_server_and_engine_say_the_same_to_the_same_calls(tiny_url, llm, text):
    workload, record = served(tiny_url, text, "{kind: poisson, rate: 40}")
    check(workload, record)
    again = make_workload(parse_workload(text), 0, PromptVocabulary.of(llm.tokenizer), parse_arrivals("all_at_once"))
    offline = measure_offline(llm, again)
    check(again, offline)
    for there, here in zip(record.measurements, offline.measurements, strict=True):
        assert (there.output_ids, there.text) == (here.output_ids, here.text)
        assert (there.prompt_tokens, there.group) == (here.prompt_tokens, here.group)
    assert record.counter("generated_tokens") == sum(m.output_tokens for m in record.measurements)
    assert offline.counter("generated_tokens") == sum(m.output_tokens for m in offline.measurements)
    assert sum(m.cached_tokens for m in record.measurements) > 128, "prefixes are found"
    assert (record.kind, offline.kind, record.config["model"]["path"]) == ("serve", "offline", "tiny")
    assert record.lag is not None
    assert record.config_hash is not None
    assert {"cpu"} == {record.machine.device, offline.machine.device}
    assert offline.peak_memory_bytes > 2**26


def test_a_prompt_grows_by_the_answers_that_were_given(tiny_url):
    workload, record = served(tiny_url, AGENT)
    calls = {call.id: call for call in workload.calls}
    done = {m.id: m for m in record.measurements}
    for m in record.measurements:
        length, call = 0, calls[m.id]
        while True:
            length += len(call.token_ids)
            if call.parent is None:
                break
            call = calls[call.parent]
            length += done[call.id].output_tokens
        assert m.prompt_tokens == length


def test_openai_s_api_with_schemas_and_texts(tiny_url, llm):
    for api in ("native", "openai"):
        workload, record = served(tiny_url, JSON, "{kind: concurrency, limit: 2}", api)
        check(workload, record)
        for call, m in zip(workload.calls, record.measurements, strict=True):
            jsonschema.validate(json.loads(m.text), call.json_schema)
            assert m.output_ids is None
    check(*served(tiny_url, TEXT, api="openai"))
    check(*served(tiny_url, "{kind: random, count: 4, input: 8, output: 5}", api="openai"))
    tools, record = served(tiny_url, "{kind: questions, topic: tools, count: 2}")
    check(tools, record)
    assert all(m.text.startswith("get_weather{") for m in record.measurements)
    limited = make_workload(parse_workload(TEXT), 0, None, parse_arrivals("{kind: concurrency, limit: 1}"))
    offline = measure_offline(llm, limited)
    check(limited, offline)
    ends = {m.id: m.end for m in offline.measurements}
    assert ends["c0.1"] <= offline.measurements[2].sent, "one user has one conversation at a time"


def test_calls_that_are_refused_are_counted_with_their_reason(tiny_url, llm):
    text = "{kind: random, count: 2, input: 4000, output: 3}"
    for record in (
        served(tiny_url, text)[1],
        measure_offline(llm, make_workload(parse_workload(text), 0, PromptVocabulary.of(llm.tokenizer))),
    ):
        for m in record.measurements:
            assert not m.ok
            assert "the context holds 2048" in m.error


@pytest.fixture
def bench(capsys, monkeypatch):
    """Run ``dovetail bench ...``; return (exit status, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "160")

    def call(*words):
        status = 0
        try:
            main(["bench", *words])
        except SystemExit as stop:
            status = int(stop.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


class Tags(HTMLParser):
    """Count tags, and collect the resources that a page would fetch."""

    def __init__(self):
        super().__init__()
        self.count, self.fetched = {}, []

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        self.fetched += [value for name, value in attrs if name in ("src", "href")]


def test_a_run_as_table_json_and_page(bench, tiny_url, tmp_path):
    work = ("serve", "--url", tiny_url, "-w", "{kind: random, count: 6, input: 8, output: [1, 5]}", "--warmup", "1")
    saved, html = tmp_path / "run.json", tmp_path / "run.html"
    bounds = ("--goodput", "ttft:20000", "tpot:20000", "--rate", "50")
    status, out, _ = bench(*work, *bounds, "--save", str(saved), "--html", str(html))
    assert status == 0
    for words in (
        "6 in ",
        "tokens/s",
        "goodput",
        "100.0% of the calls within ttft:20000 tpot:20000",
        "event loop late",
    ):
        assert words in out
    rows = [line.split()[0] for line in out.splitlines() if line and line[0].isupper()]
    assert rows == ["TTFT", "TPOT", "ITL", "E2E"]
    report = BenchReport.model_validate_json(saved.read_text())
    (point,) = report.points
    assert (point.summary.completed, point.rate, point.meets, len(point.record.measurements)) == (6, 50.0, True, 6)
    assert point.record.warmup_calls == 1
    tags = Tags()
    tags.feed(html.read_text())
    assert tags.fetched == []
    assert (tags.count["svg"], tags.count["html"]) == (4, 1)
    status, out, _ = bench(*work, "--concurrency", "2", "--json")
    printed = json.loads(out)
    assert (status, printed["points"][0]["summary"]["completed"]) == (0, 6)
    assert "measurements" not in printed["points"][0]["record"]


def test_a_sweep_and_the_highest_rate(bench, tiny_url, tmp_path):
    work = (
        "serve",
        "--url",
        tiny_url,
        "-w",
        "{kind: random, input: 4, output: 2}",
        "--seconds",
        "0.3",
        "--warmup",
        "0",
    )
    html = tmp_path / "sweep.html"
    status, out, _ = bench(*work, "--sweep", "20, 40", "--html", str(html), "--goodput", "ttft:30000")
    assert status == 0
    assert [line.split()[:1] for line in out.splitlines() if line[:2] in ("20", "40")] == [["20"], ["40"]]
    assert "fewer than 100 calls" in out
    tags = Tags()
    tags.feed(html.read_text())
    assert tags.count["svg"] == 4
    status, out, _ = bench(*work, "--find-rate", "--goodput", "ttft:0.001")
    assert status == 1
    assert "90% of the calls within ttft:0.001: at none of the measured rates" in " ".join(out.split())


def test_a_server_of_ones_own_and_offline(bench):
    work = ("-s", "threads=1", "-w", "{kind: random, count: 3, input: 8, output: 3}", "--warmup", "0", "--json")
    status, out, err = bench("serve", *work)
    assert status == 0, err
    report = BenchReport.model_validate({**json.loads(out), "points": []})
    (point,) = json.loads(out)["points"]
    assert report.startup_seconds > 0.5
    assert point["record"]["startup_seconds"] == report.startup_seconds
    assert point["record"]["peak_memory_bytes"] > 2**27
    assert point["record"]["config"]["threads"] == 1
    status, out, _ = bench("offline", *work)
    (point,) = json.loads(out)["points"]
    assert (status, point["summary"]["output_tokens"], point["record"]["kind"]) == (0, 9, "offline")


def test_mistakes_are_named(bench, tiny_url):
    for words, text in (
        (("--find-rate",), "give --goodput"),
        (("--rate", "3", "--concurrency", "2"), "give only one of them"),
        (("--sweep", "1,x"), "allowed: rates in calls per second"),
        (("--api", "grpc"), "allowed: native, openai"),
        (("--goodput", "latency:3"), "allowed: ttft:MS"),
        (("-w", "poems"), "docs/bench.md"),
        (("-s", "threads=1"), "leave out --config, --set, --model"),
        (("-w", "{kind: chat}", "--api", "openai"), "need a vocabulary"),
        (("--sweep", "1", "--arrivals", "{kind: trace, offsets: [1]}"), "have no rate"),
    ):
        status, _, err = bench("serve", "--url", tiny_url, *words)
        assert (status, text in " ".join(err.split())) == (2, True), err
    status, _, err = bench("serve", "--url", "http://127.0.0.1:9")
    assert (status, "does not answer" in err) == (2, True)
    status, out, _ = bench("serve", "--url", tiny_url, "-w", "{kind: random, count: 1, input: 3000}", "--warmup", "0")
    assert status == 1
    assert "failed 1 times: HTTP 400: the prompt has 3000 tokens" in out
