"""What /openapi.json says is so: schemathesis makes requests from it, and holds the answers to it.

.venv/bin/python -m pytest -q tests/e2e/test_server_openapi.py
"""

import json
import re
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]


@pytest.fixture(scope="module")
def schema(fake_url: str) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{fake_url}/openapi.json")


def test_requests_made_from_it_are_answered_as_it_says(schema: schemathesis.BaseSchema, fake_url: str) -> None:
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 30
    for operation in operations:
        made = st.one_of(operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode)

        @settings(max_examples=6, suppress_health_check=list(HealthCheck))
        @given(case=made)
        def check(case: Any) -> None:
            case.call_and_validate(checks=CHECKS, timeout=20)

        check()
        if operation.path == "/pause_generation":
            assert httpx.post(f"{fake_url}/continue_generation").status_code == 200


def test_what_it_refers_to_is_there(fake: httpx.Client) -> None:
    text = fake.get("/openapi.json").text
    named = set(json.loads(text)["components"]["schemas"])
    assert set(re.findall(r'"#/components/schemas/([^"]+)"', text)) <= named
    assert "$defs" not in text


def test_it_says_that_messages_have_no_images(fake: httpx.Client) -> None:
    schemas = fake.get("/openapi.json").json()["components"]["schemas"]
    images = schemas["ollama.types.OllamaChatRequest.OllamaMessage"]["properties"]["images"]
    for value, accepted in ((None, True), ([], True), (["AAAA"], False)):
        assert jsonschema.Draft202012Validator(images).is_valid(value) == accepted


def test_it_says_how_each_api_words_its_errors(fake: httpx.Client) -> None:
    paths = fake.get("/openapi.json").json()["paths"]
    for path, body in (("/v1/responses", {}), ("/v1/messages", {}), ("/api/chat", {}), ("/generate", {})):
        said = paths[path]["post"]["responses"]
        assert {"200", "400", "401", "413", "429", "500", "503"} <= set(said)
        error = fake.post(path, json=body)
        assert error.status_code == 400
        jsonschema.validate(error.json(), said["400"]["content"]["application/json"]["schema"])
        assert set(error.json()) == set(said["400"]["content"]["application/json"]["schema"]["properties"])


def test_other_methods_are_refused_with_the_allowed_ones(fake: httpx.Client) -> None:
    for path, methods in (
        ("/v1/responses/x", "DELETE, GET, HEAD"),
        ("/flush_cache", "GET, HEAD, POST"),
        ("/generate", "POST"),
    ):
        answer = fake.request("PATCH", path)
        assert (answer.status_code, answer.headers["allow"]) == (405, methods)
