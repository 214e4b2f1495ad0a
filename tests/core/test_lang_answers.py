"""Test the errors and messages made from refusals of servers. Run: python -m pytest tests/core/test_lang_answers.py"""

from __future__ import annotations

import httpx
import pytest

from dovetail.cli.chat_backends import RemoteChatBackend
from dovetail.errors import EngineError, QueueFullError, RequestError
from dovetail.lang import RuntimeEndpoint
from dovetail.lang.backends.answers import error_text


@pytest.mark.parametrize(
    ("body", "understood"),
    [
        (b'{"error": {"message": "too long", "param": "prompt"}}', "too long"),
        (b'{"error": "no such model"}', "no such model"),
        (b'{"error": {"code": 7}}', "{'code': 7}"),
        (b'{"detail": "Not Found"}', "{'detail': 'Not Found'}"),
        (b"<html>" + b"x" * 1000, "<html>" + "x" * 494),
        (b"\xff\xfe\xfd", "\ufffd\ufffd\ufffd"),
        (b"", ""),
    ],
)
def test_what_a_refusal_says(body: bytes, understood: str):
    assert error_text(body) == understood


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, RequestError), (404, RequestError), (429, QueueFullError), (503, QueueFullError), (500, EngineError)],
)
def test_a_refusal_is_the_same_error_for_programs_and_in_a_chat(
    status: int, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
):
    def refused(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, json={"error": {"message": "no"}})

    client = httpx.Client
    monkeypatch.setattr(
        httpx, "Client", lambda **settings: client(base_url="http://here", transport=httpx.MockTransport(refused))
    )
    with pytest.raises(kind, match=rf"^http://here/flush_cache answered {status}: no$"):
        RuntimeEndpoint("http://here").flush_cache()
    with pytest.raises(kind, match=rf"^no \(status {status}\)$"):
        RemoteChatBackend("http://here", None)
