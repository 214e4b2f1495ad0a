"""Test that the answer to any JSON is 200 or a clear 4xx: never a 500, and never silence.

.venv/bin/python -m pytest -q tests/e2e/test_server_fuzz.py
"""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail.registry.specs import ComponentKind
from dovetail.registry.targets import load_attribute
from dovetail.testing.installed import installed
from dovetail_apis.native import NativeSampling

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
small = st.integers(-2, 40) | st.floats(0, 2) | st.booleans() | st.sampled_from([None, "a", "", ["a"], {}, {"5": 1}])


def bodies(model: Any, base: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw a good request with a few of its fields changed."""
    fields = sorted(set(model.model_fields) | set(model.refused) | set(model.ignored))
    return st.dictionaries(st.sampled_from(fields), small | anything, max_size=4).map(lambda change: base | change)


def requests() -> Iterator[tuple[str, st.SearchStrategy[dict[str, Any]]]]:
    """Draw a request for each route of each API that takes a body, derived from the first example of its schema."""
    registry = installed()
    for component in registry.components(ComponentKind.API):
        config = registry.config_class(ComponentKind.API, component.spec.name)()
        for route in load_attribute(component.spec.target, component.label)(config).routes():
            if route.body is not None:
                yield route.path, bodies(route.body, route.body.model_json_schema()["examples"][0])


REQUESTS = dict(requests())
REQUESTS["/generate"] = st.tuples(REQUESTS["/generate"], bodies(NativeSampling, {"max_new_tokens": 3})).map(
    lambda pair: {**pair[0], "sampling_params": pair[1]}
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer"])},
        optional={"content": anything, "tool_calls": anything, "name": anything},
    ),
    max_size=3,
).map(lambda messages: {"messages": messages, "max_tokens": 3})


def check(fake: httpx.Client, path: str, body: dict[str, Any]) -> None:
    answer = fake.post(path, json=body)
    assert answer.status_code in (200, 400, 404), (body, answer.text)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert len(error if isinstance(error, str) else error["message"]) > 5


@pytest.mark.parametrize("path", REQUESTS)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_field_may_hold_anything(fake: httpx.Client, path: str, data: st.DataObject):
    check(fake, path, data.draw(REQUESTS[path]))


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=MESSAGES)
def test_any_message_may_hold_anything(fake: httpx.Client, body: dict[str, Any]):
    check(fake, "/v1/chat/completions", body)


@pytest.mark.parametrize(
    "text",
    [
        '{"prompt": "\\ud800"}',
        '{"prompt": "x", "stop": "\\udfff"}',
        '{"prompt": "\\u0000"}',
        '{"prompt": "x", "json_schema": "' + "[" * 5000 + '"}',
        '{"prompt": "x", "json_schema": ' + '{"a":' * 900 + "1" + "}" * 900 + "}",
        '{"prompt": [' + "[1]," * 20_000 + "[1]]" + "}",
        '{"messages": [{"role": "user", "x": ' + "[" * 900 + "]" * 900 + "}]}",
        '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "' + "[" * 5000 + '"}}]}]}',
        '{"messages": [' + '{"role": "user", "content": ""},' * 20_000 + '{"role": "user"}]}',
    ],
    ids=lambda text: text[:40],
)
def test_the_odd_ones(fake: httpx.Client, text: str):
    answer = fake.post("/v1/chat/completions" if "messages" in text else "/v1/completions", content=text.encode())
    assert answer.status_code in (200, 400), answer.text
