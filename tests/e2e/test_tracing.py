"""Test the OpenTelemetry traces of requests: a receiver decodes what servers send it.

.venv/bin/python -m pytest -q tests/e2e/test_tracing.py
"""

import json
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence

import httpx
import pytest

from dovetail.config import Config
from dovetail.config.telemetry import TracingSection
from dovetail.errors import ConfigError
from dovetail.server.launch import running_server
from dovetail.server.tenants.keys import key_digest
from dovetail.server.tracing import RequestTraces, Tracing, current_trace

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed; pip install 'dovetail[otel]'")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install 'dovetail[otel]'")

from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from trace_receiver import TraceReceiver, trace_receiver, values

KEY = "sk-a-key-for-the-tests-of-traces"
SECRET = "zanzibar quokka"
PARIS = [{"role": "user", "content": f"What is the weather in Paris? {SECRET}"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
ERROR = Status.STATUS_CODE_ERROR


@pytest.fixture(scope="module")
def receiver() -> Iterator[tuple[TraceReceiver, str]]:
    with trace_receiver() as both, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield both


def config_for(url: str, **server: object) -> Config:
    tracing = {"endpoint": url, "service_name": "here"}
    model = {"aliases": {"claude-*": "tiny"}}
    tree = {"model": model, "threads": 1, "server": {"port": 0, "log_level": "warning", **server}, "tracing": tracing}
    return Config.model_validate(tree)


@pytest.fixture(scope="module")
def traced(receiver: tuple[TraceReceiver, str]) -> Iterator[httpx.Client]:
    """Return a client of a server of the embedded model."""
    with running_server(config_for(receiver[1])) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def scripted(receiver: tuple[TraceReceiver, str]) -> Iterator[httpx.Client]:
    """Return a client, with the key of tenant ``acme``, of a server whose engine is scripted, and that ends requests after a
    second."""
    from fake_engine import run_fake_engine

    config = config_for(receiver[1], max_seconds=1.0, keys="env:KEYS_OF_TRACING")
    headers = {"authorization": f"Bearer {KEY}"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEYS_OF_TRACING", json.dumps({"tenants": {"acme": {"keys": [key_digest(KEY.encode())]}}}))
        with (
            running_server(config, target=run_fake_engine) as url,
            httpx.Client(base_url=url, timeout=60, headers=headers) as client,
        ):
            yield client


class Caller:
    """Send requests as a part of a caller's trace."""

    def __init__(self, sampled: bool = True) -> None:
        self.trace_id, self.span_id = secrets.token_hex(16), secrets.token_hex(8)
        self.headers = {"traceparent": f"00-{self.trace_id}-{self.span_id}-0{int(sampled)}"}


def test_a_request_has_a_span_with_its_phases(traced: httpx.Client, receiver: tuple[TraceReceiver, str]) -> None:
    caller = Caller()
    body = {"prompt": f"The {SECRET}", "max_tokens": 5, "temperature": 0.5, "top_k": 7, "seed": 3, "ignore_eos": True}
    answer = traced.post("/v1/completions", json=body, headers=caller.headers).json()
    spans = receiver[0].trace(caller.trace_id)
    assert {name: len(found) for name, found in spans.items()} == {"root": 1, "queue": 1, "prefill": 1, "decode": 1}
    (root,), (queue,), (prefill,), (decode,) = (spans[name] for name in ("root", "queue", "prefill", "decode"))
    assert root.parent_span_id.hex() == caller.span_id
    assert {span.parent_span_id for span in (queue, prefill, decode)} == {root.span_id}
    assert root.start_time_unix_nano <= queue.start_time_unix_nano
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano
    assert prefill.start_time_unix_nano < prefill.end_time_unix_nano < decode.end_time_unix_nano
    assert decode.end_time_unix_nano <= root.end_time_unix_nano
    given = values(root)
    ttft = given.pop("gen_ai.response.time_to_first_chunk")
    assert abs(ttft * 1e9 - (decode.start_time_unix_nano - queue.start_time_unix_nano)) < 1e5
    usage = answer["usage"]
    assert given == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "dovetail",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": answer["id"],
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": 3,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["length"],
    }
    assert root.name == "text_completion tiny"
    assert root.status.code == Status.STATUS_CODE_UNSET
    assert values(prefill)["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert values(decode)["gen_ai.usage.output_tokens"] == 5
    assert receiver[0].paths == {"/v1/traces"}
    assert receiver[0].resources[0]["service.name"] == "here"


@pytest.mark.parametrize("stream", [False, True])
def test_constraints_and_tools_have_spans(
    traced: httpx.Client, receiver: tuple[TraceReceiver, str], stream: bool
) -> None:
    caller = Caller()
    body = {"messages": PARIS, "tools": TOOLS, "tool_choice": "required", "stream": stream, "temperature": 0}
    answer = traced.post("/v1/chat/completions", json=body, headers=caller.headers)
    assert "get_weather" in answer.text
    spans = receiver[0].trace(caller.trace_id)
    assert set(spans) == {"root", "queue", "grammar", "prefill", "decode", "tools"}
    (root,), (grammar,), (queue,), (tools,), (decode,) = (
        spans[name] for name in ("root", "grammar", "queue", "tools", "decode")
    )
    assert root.name == "chat tiny"
    assert grammar.start_time_unix_nano == queue.start_time_unix_nano
    assert grammar.end_time_unix_nano <= queue.end_time_unix_nano
    assert values(grammar)["dovetail.grammar.backend"]
    assert values(tools)["dovetail.tool_calls"] == 1
    assert decode.start_time_unix_nano <= tools.start_time_unix_nano <= tools.end_time_unix_nano
    assert 0 < values(tools)["dovetail.parse_seconds"] < 10


def test_outputs_and_embeddings(traced: httpx.Client, receiver: tuple[TraceReceiver, str]) -> None:
    caller = Caller()
    body = {"prompt": ["a b", "c d"], "n": 10, "max_tokens": 2, "ignore_eos": True}
    traced.post("/v1/completions", json=body, headers=caller.headers)
    spans = receiver[0].trace(caller.trace_id)
    assert sorted(values(span)["dovetail.output.index"] for span in spans["decode"]) == [*range(16)]
    assert (values(spans["root"][0])["dovetail.prompts"], values(spans["root"][0])["gen_ai.request.choice.count"]) == (
        2,
        10,
    )
    assert values(spans["root"][0])["gen_ai.usage.output_tokens"] == 40
    caller = Caller()
    traced.post("/v1/embeddings", json={"input": "some text"}, headers=caller.headers)
    spans = receiver[0].trace(caller.trace_id)
    assert set(spans) == {"root", "queue", "prefill"}
    assert spans["root"][0].name == "embeddings tiny"
    assert "gen_ai.request.temperature" not in values(spans["root"][0])


def test_contents_are_never_sent(traced: httpx.Client, receiver: tuple[TraceReceiver, str]) -> None:
    caller = Caller()
    body = {"messages": [{"role": "user", "content": SECRET}], "stop": [SECRET], "max_tokens": 5}
    traced.post("/v1/chat/completions", json=body, headers=caller.headers)
    receiver[0].trace(caller.trace_id)
    wrong = Caller()
    body = {"prompt": "x", "max_tokens": 5, "regex": f"({SECRET}"}
    assert traced.post("/v1/completions", json=body, headers=wrong.headers).status_code == 400
    receiver[0].trace(wrong.trace_id)
    for word in (*SECRET.split(), "Paris", "get_weather"):
        assert word.encode() not in receiver[0].raw


def test_a_client_that_leaves_and_an_abort_are_errors(
    traced: httpx.Client, receiver: tuple[TraceReceiver, str]
) -> None:
    caller = Caller()
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with traced.stream("POST", "/v1/completions", json=body, headers=caller.headers) as answer:
        next(answer.iter_lines())
    spans = receiver[0].trace(caller.trace_id)
    root = spans["root"][0]
    assert (root.status.code, values(root)["error.type"]) == (ERROR, "client_disconnect")
    assert set(spans) == {"root", "queue", "prefill", "decode"}
    caller = Caller()
    with traced.stream("POST", "/v1/completions", json={**body, "rid": "mine"}, headers=caller.headers) as answer:
        lines = answer.iter_lines()
        next(lines)
        traced.post("/abort_request", json={"rid": "mine"})
        list(lines)
    root = receiver[0].trace(caller.trace_id)["root"][0]
    assert (root.status.code, values(root)["error.type"]) == (ERROR, "abort")
    assert values(root)["gen_ai.response.finish_reasons"] == ["abort"]


@pytest.mark.parametrize(
    ("extra", "status", "kind", "code"),
    [
        ({"cache_salt": "status:400"}, 400, "RequestError", Status.STATUS_CODE_UNSET),
        ({"cache_salt": "status:503"}, 503, "QueueFullError", ERROR),
        ({"cache_salt": "slow", "max_tokens": 2000}, 504, "TimeLimitError", ERROR),
        ({"model": "unknown"}, 404, "404", Status.STATUS_CODE_UNSET),
        ({"max_tokens": -1}, 400, "400", Status.STATUS_CODE_UNSET),
    ],
)
def test_failures_have_status(
    scripted: httpx.Client, receiver: tuple[TraceReceiver, str], extra: dict, status: int, kind: str, code: int
) -> None:
    caller = Caller()
    body = {"prompt": "x y", "max_tokens": 5, **extra}
    assert scripted.post("/v1/completions", json=body, headers=caller.headers).status_code == status
    root: Span = receiver[0].trace(caller.trace_id)["root"][0]
    given = values(root)
    assert (given["http.response.status_code"], given["error.type"], root.status.code) == (status, kind, code)
    assert given["http.route"] == "/v1/completions"


def test_the_tenant_and_the_name_that_a_request_has_given_the_model(
    scripted: httpx.Client, receiver: tuple[TraceReceiver, str]
) -> None:
    caller = Caller()
    body = {"model": "claude-x", "prompt": "x y", "max_tokens": 2}
    assert scripted.post("/v1/completions", json=body, headers=caller.headers).status_code == 200
    given = values(receiver[0].trace(caller.trace_id)["root"][0])
    assert (given["dovetail.tenant"], given["gen_ai.request.model"], given["gen_ai.response.model"]) == (
        "acme",
        "claude-x",
        "tiny",
    )
    unknown = Caller()
    headers = {**unknown.headers, "authorization": "Bearer unknown"}
    assert scripted.post("/v1/completions", json=body, headers=headers).status_code == 401
    given = values(receiver[0].trace(unknown.trace_id)["root"][0])
    assert given["error.type"] == "401"
    assert "dovetail.tenant" not in given


def test_outputs_in_the_background_belong_to_the_trace(
    traced: httpx.Client, receiver: tuple[TraceReceiver, str]
) -> None:
    caller = Caller()
    body = {"input": "x", "max_output_tokens": 20, "background": True}
    assert traced.post("/v1/responses", json=body, headers=caller.headers).json()["status"] != "failed"
    spans = receiver[0].trace(caller.trace_id)
    (root,), (decode,) = spans["root"], spans["decode"]
    assert root.end_time_unix_nano >= decode.end_time_unix_nano
    assert values(root)["gen_ai.usage.output_tokens"] == values(decode)["gen_ai.usage.output_tokens"]


def test_a_client_that_leaves_before_the_first_token(traced: httpx.Client, receiver: tuple[TraceReceiver, str]) -> None:
    caller = Caller()
    traced.post("/pause_generation", json={})
    try:
        with pytest.raises(httpx.ReadTimeout):
            traced.post("/v1/completions", json={"prompt": "x"}, headers=caller.headers, timeout=0.3)
        spans = receiver[0].trace(caller.trace_id)
    finally:
        traced.post("/continue_generation")
    assert set(spans) == {"root", "unanswered"}
    (root,), (phase,) = spans["root"], spans["unanswered"]
    assert values(root)["error.type"] == "client_disconnect"
    assert phase.end_time_unix_nano - phase.start_time_unix_nano > 0.1e9


def test_a_server_that_does_not_trace_does_not_import_the_sdk() -> None:
    program = "import sys, dovetail.server.launch; print('opentelemetry.sdk' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


async def run(app: RequestTraces, method: str = "POST", pairs: Sequence[tuple[str, str]] = (), **headers: str) -> None:
    async def receive() -> dict:
        return {"type": "http.request"}

    async def send(message: object) -> None:
        pass

    raw = [(name.encode(), value.encode()) for name, value in [*pairs, *headers.items()]]
    await app({"type": "http", "method": method, "headers": raw}, receive, send)  # type: ignore[arg-type]


async def plain_app(scope: object, receive: object, send: object) -> None:
    await send({"type": "http.response.start", "status": 200})  # type: ignore[operator]


@pytest.mark.parametrize(("ratio", "expected"), [(0.0, ["with"]), (1.0, ["with", "none"])])
def test_the_sampled_share_is_that_of_the_config_or_of_the_caller(ratio: float, expected: list[str]) -> None:
    import asyncio

    exporter = InMemorySpanExporter()
    tracing = Tracing(TracingSection(endpoint="http://127.0.0.1:9", sample_ratio=ratio), "1", exporter)
    app = RequestTraces(plain_app, tracing)
    callers = {"with": Caller(), "without": Caller(sampled=False)}
    for caller in callers.values():
        asyncio.run(run(app, **caller.headers))
    asyncio.run(run(app))
    asyncio.run(run(app, "GET", **callers["with"].headers))
    asyncio.run(run(app, traceparent="nonsense") if ratio == 0 else run(app, "GET"))
    tracing.close()
    by_id = {int(caller.trace_id, 16): name for name, caller in callers.items()}
    assert [by_id.get(span.context.trace_id, "none") for span in exporter.get_finished_spans()] == expected
    assert current_trace() is None


GOOD = f"{'1' * 32}-{'2' * 16}"
NEW = [  # headers that name no trace, so that a new one begins
    [("traceparent", value)]
    for value in (
        "", "-", "0", "00-", "00", f"00-{GOOD}", f"00-{GOOD}-", f"00-{GOOD}-1", f"00-{GOOD}-01-more", f"ff-{GOOD}-01", f"0g-{GOOD}-01",
        f"00-{'0' * 32}-{'2' * 16}-01", f"00-{'1' * 32}-{'0' * 16}-01", f"00-{GOOD.replace('1', 'A')}-01", f"00-{GOOD}-01\n",
        f"00-{'１' * 32}-{'2' * 16}-01", f"00-{'1' * 31}-{'2' * 16}-01", "0" * 60_000, f"{' ' * 30_000}00-{GOOD}-01", f"01-{GOOD}-01-{'x' * 60_000}",
        f"01-{GOOD}-01-\xff", "\x00" * 100, "é" * 55, "00-" + "-" * 5000,
    )
]  # fmt: skip
NEW += [[], [("traceparent", f"00-{GOOD}-01")] * 2, [("tracestate", "a=1")], [("tracecontext", f"00-{GOOD}-01")]]
CONTINUED = [
    ([], {}),
    ([("tracestate", "a=1,b=2")], {"a": "1", "b": "2"}),
    ([("tracestate", "a=1"), ("tracestate", "b=2")], {"a": "1", "b": "2"}),
    *(
        ([("tracestate", value)], {})
        for value in ("", ",", "=", "a", "a=1,a=2", "a=\x00", "é=1", "a=" + "x" * 600, " " * 60_000 + "a=1")
    ),
    ([("tracestate", ",".join(f"k{i}=1" for i in range(60)))], {}),
]


def test_malformed_and_hostile_trace_headers_are_ignored() -> None:
    import asyncio

    exporter = InMemorySpanExporter()
    tracing = Tracing(TracingSection(endpoint="http://127.0.0.1:9"), "1", exporter)
    app = RequestTraces(plain_app, tracing)
    parent = ("traceparent", f"00-{GOOD}-01")
    for headers in [*NEW, *([parent, *states] for states, _ in CONTINUED), [("traceparent", f"cc-{GOOD}-01-more")]]:
        asyncio.run(run(app, pairs=headers))
    tracing.close()
    contexts = [span.context for span in exporter.get_finished_spans()]
    assert len(contexts) == len(NEW) + len(CONTINUED) + 1
    named = int("1" * 32, 16)
    assert named not in {context.trace_id for context in contexts[: len(NEW)]}
    assert {context.trace_id for context in contexts[len(NEW) :]} == {named}
    for (_, state), context in zip(CONTINUED, contexts[len(NEW) :], strict=False):
        assert dict(context.trace_state) == state


def test_a_server_answers_requests_with_hostile_trace_headers(traced: httpx.Client) -> None:
    for headers in NEW:
        if all(value.isprintable() and value.isascii() and value == value.strip() for _, value in headers):
            assert traced.post("/tokenize", json={"prompt": "a"}, headers=headers).status_code == 200


def test_an_exception_of_the_application_is_an_error() -> None:
    import asyncio

    async def broken(scope: object, receive: object, send: object) -> None:
        raise KeyError("x")

    exporter = InMemorySpanExporter()
    tracing = Tracing(TracingSection(endpoint="http://127.0.0.1:9"), "1", exporter)
    with pytest.raises(KeyError):
        asyncio.run(run(RequestTraces(broken, tracing)))
    tracing.close()
    (span,) = exporter.get_finished_spans()
    assert (span.attributes or {})["error.type"] == "KeyError"
    assert not span.status.is_ok
    assert not span.events  # the text of an exception may have contents


def test_without_opentelemetry_the_server_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"tracing\.endpoint.*pip install 'dovetail\[otel\]'"):
        Tracing(TracingSection(endpoint="http://127.0.0.1:4318"), "1")


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://a:4318", "http://a:4318/v1/traces"),
        ("http://a:4318/", "http://a:4318/v1/traces"),
        ("https://a/otlp/v1/traces", "https://a/otlp/v1/traces"),
        ("a:4318", None),
        ("grpc://a:4317", None),
    ],
)
def test_endpoints(endpoint: str, url: str | None) -> None:
    if url is None:
        with pytest.raises(ValueError, match="is not a URL"):
            TracingSection(endpoint=endpoint)
    else:
        assert TracingSection(endpoint=endpoint).url == url
