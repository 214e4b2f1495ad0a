"""Serve the pages that a browser opens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parent

_SHARED = (
    "page.css", "icon.svg", "dom.js", "api.js", "store.js", "settings.js", "models.js", "panels.js", "parts.js", "chats.js",
    "markdown.js", "answer.js", "chat.js", "docs.js", "vendor/markdown-it.esm.min.mjs", "vendor/LICENSE.txt",
)  # fmt: skip

PAGES = {"/": "index.html", "/docs": "docs.html", **{f"/ui/{name}": name for name in _SHARED}}
"""The file at each path. None of them needs a key, because they are files of the package and hold no data of the server."""

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
    ".svg": "image/svg+xml",
}

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
"""The headers of every file. Scripts and styles can only be files of this server, and text cannot become markup or script
(Content Security Policy Level 3, Trusted Types)."""


def add_pages(app: FastAPI) -> None:
    """Add the pages to the application. They do not appear in /openapi.json."""
    for path, name in PAGES.items():
        app.add_route(path, _endpoint(name), methods=["GET"], include_in_schema=False)


def _endpoint(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return Response(_read(name), headers=HEADERS, media_type=_TYPES[Path(name).suffix])

    return endpoint


@cache
def _read(name: str) -> bytes:
    return (FOLDER / name).read_bytes()
