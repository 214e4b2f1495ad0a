"""Test constraints through the server: which backend serves them, messages of refusals, hostile constraints during a
stream.

.venv/bin/python -m pytest -q -p no:xdist tests/e2e/test_server_grammar.py
"""

import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from conftest import config_with
from dovetail.server.launch import running_server

SECONDS = 2.0
IMPORTS = 100.0
"""Time to import several backends in a new worker process, which runs with a low priority: seconds, or most of a minute on busy
cores."""


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    """Return a server that compiles each constraint within two seconds and 512 MiB."""
    config = config_with(max_body_mib=8, drain_seconds=2)
    section = config.grammar.model_copy(update={"timeout": SECONDS, "memory_mib": 512})
    with (
        running_server(config.model_copy(update={"grammar": section})) as url,
        httpx.Client(base_url=url, timeout=120) as client,
    ):
        client.post("/generate", json=native(regex="[ab]{3}"))  # the workers' imports
        yield client


def native(**constraint: Any) -> dict[str, Any]:
    return {"text": "Say:", "sampling_params": {"max_new_tokens": 24, "temperature": 0.7, "seed": 1, **constraint}}


def ask(server: httpx.Client, **constraint: Any) -> dict[str, Any]:
    answer = server.post("/generate", json=native(**constraint))
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(server: httpx.Client, **constraint: Any) -> str:
    answer = server.post("/generate", json=native(**constraint))
    assert answer.status_code == 400, answer.text
    return answer.text


def backends(server: httpx.Client) -> list[str]:
    return server.get("/server_info").json()["engine"]["resolved"]["grammars"]


def metrics(server: httpx.Client) -> dict[str, float]:
    lines = server.get("/metrics").text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_a_request_names_its_backend_and_the_answer_names_the_one_that_served_it(server: httpx.Client) -> None:
    first, *_ = backends(server)
    assert ask(server, regex="[ab]{4}")["meta_info"]["grammar_backend"] == first
    for name in backends(server):
        answer = ask(server, regex="(cat|dog){2}", grammar_backend=name)
        assert answer["meta_info"]["grammar_backend"] == name
        assert re.fullmatch("(cat|dog){2}", answer["text"])
    assert "grammar_backend" not in ask(server)["meta_info"]


def test_choices_are_served_by_the_first_backend_that_takes_them(server: httpx.Client) -> None:
    answer = ask(server, choice=["alpha", "beta (x)"])
    assert answer["text"] in ("alpha", "beta (x)")
    body = {"model": "tiny", "prompt": "Say:", "max_tokens": 20, "choice": ["one", "two"]}
    completion = server.post("/v1/completions", json=body)
    assert completion.json()["choices"][0]["text"] in ("one", "two")


def test_a_lark_grammar_and_a_structural_tag(server: httpx.Client) -> None:
    assert re.fullmatch("(yes|no)!", ask(server, lark='start: ("yes" | "no") "!"')["text"])
    tag = {
        "structures": [{"begin": "<n>", "schema": {"type": "integer", "maximum": 9, "minimum": 0}, "end": "</n>"}],
        "triggers": ["<n"],
    }
    for text in (ask(server, structural_tag=tag)["text"], ask(server, structural_tag=json.dumps(tag))["text"]):
        for part in text.split("<n")[1:-1]:
            assert re.match(r">\s*[0-9]\s*</n>", part)


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ({"regex": "a", "grammar_backend": "missing"}, ["grammar_backend is 'missing'", "xgrammar"]),
        ({"grammar_backend": "xgrammar"}, ["there is no constraint", "structural_tag"]),
        ({"choice": []}, ["has no text or an empty text"]),
        ({"choice": [""]}, ["has no text or an empty text"]),
        ({"choice": ["a", ""]}, ["or an empty text"]),
        ({"choice": ["a"], "lark": "start: A"}, ["only one constraint"]),
        ({"structural_tag": {"structures": [], "triggers": ["<"]}}, ["structural_tag is", "triggers"]),
        (
            {"structural_tag": {"structures": [{"begin": "x", "schema": {}, "end": "y"}], "triggers": ["<"]}},
            ["no trigger is the beginning of 'x'"],
        ),
        ({"lark": ""}, ["lark is empty"]),
    ],
)
def test_what_is_wrong_with_the_fields_is_said(
    server: httpx.Client, constraint: dict[str, Any], words: list[str]
) -> None:
    text = refused(server, **constraint)
    for word in words:
        assert word in text


def test_a_refusal_names_the_keyword_and_the_engines_that_could(server: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": "Say:", "lark": 'start: "a"', "grammar_backend": "xgrammar"}
    answer = server.post("/v1/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_grammar", "lark")
    assert "xgrammar does not support 'lark'" in error["message"]
    assert re.search(r"These may support it: [a-z_, ]*llguidance", error["message"])


@pytest.mark.parametrize(
    ("path", "constraint", "param"),
    [
        ("completions", {"guided_grammar": "root ::= ("}, "guided_grammar"),
        ("completions", {"guided_regex": "(a"}, "guided_regex"),
        ("completions", {"structured_outputs": {"grammar": "start: ("}}, "structured_outputs.grammar"),
        ("completions", {"regex": "(a"}, "regex"),
        ("completions", {"guided_regex": "a" * (256 * 1024 + 1)}, "guided_regex"),
        ("responses", {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 3}}}}, "text"),
        ("responses", {"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_refusal_names_the_field_of_the_constraint(
    server: httpx.Client, path: str, constraint: dict[str, Any], param: str
) -> None:
    body = {"prompt": "Say:"} if path == "completions" else {"input": "Say:"}
    answer = server.post(f"/v1/{path}", json={**body, **constraint})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_metrics_count_by_backend(server: httpx.Client) -> None:
    before = metrics(server)
    for _ in range(3):
        ask(server, regex="(metrics|count)", grammar_backend="xgrammar")
    after = metrics(server)

    def grown(name: str) -> float:
        return after[f"dovetail_{name}"] - before.get(f"dovetail_{name}", 0)

    assert grown('grammar_requests_total{backend="xgrammar"}') == 3
    assert (grown("grammar_misses_total"), grown("grammar_hits_total")) == (1, 2)
    assert grown("grammar_compile_seconds_total") > 0
    assert after["dovetail_grammar_cached_bytes"] > 0


HOSTILE: list[dict[str, Any]] = [
    {"regex": "(a{1000}){1000}"},
    {"regex": "((a{1,100}){1,100}){1,100}"},
    {"regex": "(a*)*" * 2000},
    {"regex": "(a|b)*a(a|b){400}"},
    {"regex": "(" * 5000 + "a" + ")" * 5000},
    {"json_schema": {"anyOf": [{"const": i} for i in range(10_000)]}},
    {"json_schema": {"anyOf": [{"type": "object", "properties": {f"p{i}": {"type": "integer"}}} for i in range(4000)]}},
    {"json_schema": {"enum": ["x" * 10 + str(i) for i in range(14_000)]}},
    {"json_schema": '{"items":' * 2000 + "{}" + "}" * 2000},
    {"json_schema": {"$ref": "#"}},
    {
        "json_schema": {
            "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 4} for i in range(20)}
            | {"d20": {"type": "null"}},
            "$ref": "#/$defs/d0",
        }
    },
    {"json_schema": {"type": "array", "items": {"type": "string"}, "minItems": 100_000}},
    {"json_schema": {"type": "string", "pattern": "^(([a-z]{1,64}){1,64}){1,64}$"}},
    {"ebnf": "root ::= " + "(" * 4000 + '"a"' + ")" * 4000},
    {"ebnf": "root ::= root root | root"},
    {"ebnf": 'root ::= s\ns ::= "a" s s | "a" s | "a" s s s | "a"', "grammar_backend": "xgrammar"},
    {"regex": ".*a.{200}", "grammar_backend": "lm_format_enforcer"},
    {"regex": "(a|b)*a(a|b){400}", "grammar_backend": "outlines"},
    {"json_schema": {"enum": [f"{i * 7919 % 100003}" for i in range(9000)]}, "grammar_backend": "lm_format_enforcer"},
]
MUST_BE_REFUSED = (0, 1, 4, 8, 13, 15, 16, 17)


class Stream(threading.Thread):
    """Generate free outputs one after another, with a short pause between them, and record the arrival time of each
    token."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.times: list[float] = []
        self.over = threading.Event()

    def run(self) -> None:
        body = {"model": "tiny", "prompt": "Once", "max_tokens": 40, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=self.url, timeout=60) as client:
            while not self.over.wait(0.15):
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    for line in answer.iter_lines():
                        if line.startswith("data:"):
                            self.times.append(time.monotonic())
                        if self.over.is_set():
                            break

    def went_on(self, start: float, end: float) -> bool:
        """Return true if some tokens arrived in every second. There should be hundreds, so a loaded machine passes too."""
        return sum(start < t < end for t in self.times) >= 5 * int(end - start)


@pytest.fixture(scope="module")
def stream(server: httpx.Client) -> Iterator[Stream]:
    thread = Stream(str(server.base_url))
    thread.start()
    yield thread
    thread.over.set()
    thread.join(60)


@pytest.mark.parametrize("index", range(len(HOSTILE)))
def test_a_hostile_constraint_is_answered_in_time_and_delays_no_other_request(
    server: httpx.Client, stream: Stream, index: int
) -> None:
    start = time.monotonic()
    answer = server.post("/generate", json=native(**HOSTILE[index]))
    end = time.monotonic()
    assert answer.status_code in ((400,) if index in MUST_BE_REFUSED else (200, 400)), answer.text
    assert end - start < SECONDS + IMPORTS, "the time limit, and the start of another worker"
    assert stream.went_on(start, end), "the free stream stood still"
    assert stream.is_alive()


def test_after_all_that_ordinary_constraints_are_served(server: httpx.Client) -> None:
    text = ask(server, json_schema={"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]})["text"]
    assert text.lstrip().startswith("{")
    deadline = time.monotonic() + 60
    while server.get("/server_info").json()["stats"]["waiting"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.get("/server_info").json()["stats"]["waiting"] == 0


def test_a_client_that_leaves_takes_its_compilation_along(server: httpx.Client) -> None:
    slow = {"json_schema": {"enum": ["z" * 10 + str(i) for i in range(14_000)]}, "grammar_backend": "xgrammar"}
    with pytest.raises(httpx.ReadTimeout):
        server.post("/generate", json=native(**slow), timeout=0.3)
    assert ask(server, regex="[xyz]{2}")["text"]
    deadline = time.monotonic() + 60
    while server.get("/server_info").json()["stats"]["waiting"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.get("/server_info").json()["stats"]["waiting"] == 0
