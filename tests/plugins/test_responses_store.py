"""Test the store of responses: bounds, age and owners.

.venv/bin/python -m pytest -q tests/plugins/test_responses_store.py
"""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.api.problems import NotFoundError
from dovetail.errors import EngineDeadError, QueueFullError, RequestError
from dovetail.testing.api_server import EchoServer
from dovetail.types import FinishKind, FinishReason
from dovetail_apis.config import ResponsesConfig
from dovetail_apis.responses import Responses
from dovetail_apis.responses.builder import ResponseBuilder
from dovetail_apis.responses.items import chat_messages, read_items
from dovetail_apis.responses.store import ResponseStore, StoredResponse
from dovetail_apis.responses.types import ResponsesRequest

USAGE = SimpleNamespace(prompt=3, completion=2, cached=1, reasoning=0)


def record(rid: str, *, running: bool = False, size: int = 10) -> StoredResponse:
    host: Any = SimpleNamespace(sampling_defaults={}, tokenizer=None, model_name="tiny")
    outputs: Any = SimpleNamespace(rid=rid, usage=USAGE)
    made = StoredResponse(ResponseBuilder(host, ResponsesRequest(input="x"), outputs), read_items("x" * size))
    if not running:
        made.builder.end(FinishReason(FinishKind.STOP))
        made.finish()
    return made


def kept(store: ResponseStore, owner: str, *rids: str) -> list[bool]:
    found = []
    for rid in rids:
        try:
            found.append(store.get(owner, rid).id == rid)
        except NotFoundError:
            found.append(False)
    return found


def test_an_owner_sees_its_own_only():
    store = ResponseStore(ResponsesConfig())
    store.add("ada", record("r1"))
    store.add("bob", record("r2"))
    assert kept(store, "ada", "r1", "r2") == [True, False]
    assert kept(store, "bob", "r1", "r2") == [False, True]
    assert kept(store, "", "r1", "r2") == [False, False]
    with pytest.raises(NotFoundError):
        store.remove("bob", "r1")
    store.remove("ada", "r1")
    assert kept(store, "ada", "r1") == [False]


def test_the_oldest_goes_first_and_others_keep_theirs():
    store = ResponseStore(ResponsesConfig(max_responses=2))
    store.add("bob", record("b"))
    for i in range(4):
        store.add("ada", record(f"r{i}"))
    assert kept(store, "ada", "r0", "r1", "r2", "r3") == [False, False, True, True]
    assert kept(store, "bob", "b") == [True]


def test_what_runs_is_never_forgotten():
    store = ResponseStore(ResponsesConfig(max_responses=1, max_age=0.01))
    store.add("", record("runs", running=True))
    store.add("", record("done"))
    time.sleep(0.02)
    assert kept(store, "", "runs", "done") == [True, False]


def test_memory_is_bounded():
    store = ResponseStore(ResponsesConfig(max_mib=0.5))
    for i in range(8):
        store.add("", record(f"r{i}", size=2**17))
    assert kept(store, "", *(f"r{i}" for i in range(8))) == [False] * 5 + [True] * 3


def test_the_number_of_background_responses_is_bounded():
    store = ResponseStore(ResponsesConfig(max_background=1))
    store.check_capacity("ada")
    store.add("ada", record("r", running=True))
    store.check_capacity("bob")
    with pytest.raises(QueueFullError, match="max_background"):
        store.check_capacity("ada")


def test_items_become_turns():
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    items = read_items(
        [
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"role": "assistant", "content": "let me see"},
            call,
            {**call, "call_id": "c2"},
            {"type": "function_call_output", "call_id": "c2", "output": "2"},
            {"role": "assistant", "content": "well"},
            {"role": "assistant", "content": "done"},
        ]
    )
    function = {"name": "f", "arguments": "{}"}
    assert chat_messages("be kind", items) == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": "let me see",
            "tool_calls": [{"id": rid, "type": "function", "function": function} for rid in ("c1", "c2")],
        },
        {"role": "tool", "tool_call_id": "c2", "name": "f", "content": "2"},
        {"role": "assistant", "content": "well"},
        {"role": "assistant", "content": "done"},
    ]
    with pytest.raises(RequestError, match="no function_call with call_id 'c1'"):
        chat_messages(None, read_items([{"type": "function_call_output", "call_id": "c1", "output": ""}]))


async def statuses(method: str, path: str) -> list[int]:
    """Call each route as another owner, then as the owner of the response. A POST without a path continues it."""
    server = EchoServer(Responses(ResponsesConfig()))
    server.service.owner = "ada"
    rid = (await server.request("POST", "/v1/responses", {"input": "hello"})).json()["id"]
    goes_on = (method, path) == ("POST", "")
    found = []
    for server.service.owner in ("bob", "ada"):
        where = "" if goes_on else f"/{rid}{path}"
        body = {"input": "more", "previous_response_id": rid} if goes_on else None
        found.append((await server.request(method, f"/v1/responses{where}", body)).status)
    return found


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "", 200), ("GET", "/input_items", 200), ("POST", "/cancel", 400), ("DELETE", "", 200), ("POST", "", 200)],
)
def test_other_tenants_find_nothing(method: str, path: str, status: int):
    assert asyncio.run(statuses(method, path)) == [404, status]


def test_a_stream_that_fails_is_completed_and_stored():
    async def run() -> tuple[list[Any], Any]:
        server = EchoServer(Responses(ResponsesConfig()))
        server.engine.most_steps, server.engine.death = 3, EngineDeadError("it is lost")
        events = (await server.request("POST", "/v1/responses", {"input": "hello", "stream": True})).events()
        return events, (await server.request("GET", f"/v1/responses/{events[0]['response']['id']}")).json()

    events, kept = asyncio.run(run())
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[-2:]] == ["response.output_item.done", "response.failed"]
    assert events[-1]["response"] == kept
    assert (kept["status"], kept["error"]) == ("failed", {"code": "server_error", "message": "it is lost"})
    assert kept["output"][0]["status"] == "incomplete"
