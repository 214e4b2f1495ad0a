"""Imitate the parts of the Hugging Face hub that downloads use: the list of a repository's files, and the files, whole or from a
byte on. The reference is the documentation of the hub's API; huggingface-hub is the client."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

Files = Mapping[str, bytes]


class Refusal(NamedTuple):
    """Describe an error of the hub: its status and its X-Error-Code."""

    status: int
    code: str


NO_REPOSITORY = Refusal(404, "RepoNotFound")
NO_REVISION = Refusal(404, "RevisionNotFound")
NO_FILE = Refusal(404, "EntryNotFound")
GATED = Refusal(403, "GatedRepo")


@dataclass
class HubServer:
    """Hold repositories, each a history of commits, and count what is downloaded.

    ``broken`` names files whose connection ends after the bytes that the list names, once for each entry. ``refused`` has repositories that are
    refused.
    """

    url: str = ""
    commits: dict[str, dict[str, Files]] = field(default_factory=dict)
    names: dict[str, dict[str, str]] = field(default_factory=dict)
    refused: dict[str, Refusal] = field(default_factory=dict)
    broken: dict[str, list[int]] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def push(self, repository: str, files: Files, *names: str) -> str:
        """Add a commit, which ``main`` and ``names`` then mean, and return its id."""
        history = self.commits.setdefault(repository, {})
        commit = hashlib.sha1(f"{repository} {len(history)}".encode()).hexdigest()
        history[commit] = files
        self.names.setdefault(repository, {}).update(dict.fromkeys(("main", *names), commit))
        return commit

    def find(self, repository: str, revision: str) -> tuple[str, Files] | Refusal:
        """Return the commit that ``revision`` means, and its files."""
        if repository in self.refused:
            return self.refused[repository]
        if repository not in self.commits:
            return NO_REPOSITORY
        commit = self.names[repository].get(revision, revision)
        found = self.commits[repository].get(commit)
        return NO_REVISION if found is None else (commit, found)

    def cut(self, name: str) -> int | None:
        """Return after how many bytes the connection ends, or None if it does not."""
        with self.lock:
            left = self.broken.get(name)
            return left.pop(0) if left else None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        api = path.startswith("api/models/")
        org, name, *rest = path.removeprefix("api/models/").split("/")
        verb, revision, *parts = [*rest, *("revision", "main")[len(rest) :]]
        found = self.hub.find(f"{org}/{name}", revision)
        if isinstance(found, Refusal):
            self.refuse(found)
        elif api:
            self.list_files(f"{org}/{name}", verb, *found)
        else:
            self.send_file(found[0], "/".join(parts), found[1])

    def list_files(self, repository: str, verb: str, commit: str, files: Files) -> None:
        if verb == "tree":
            rows = [
                {"type": "file", "path": path, "size": len(data), "oid": etag(data)} for path, data in files.items()
            ]
            self.reply(json.dumps(rows).encode())
            return
        rows = [{"rfilename": path, "size": len(data), "blobId": etag(data)} for path, data in files.items()]
        self.reply(json.dumps({"id": repository, "sha": commit, "siblings": rows}).encode())

    def send_file(self, commit: str, path: str, files: Files) -> None:
        if path not in files:
            self.refuse(NO_FILE)
            return
        data, first = files[path], 0
        if wanted := self.headers.get("Range"):
            first = int(wanted.removeprefix("bytes=").partition("-")[0])
        more = {"ETag": f'"{etag(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if first:
            more["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        self.reply(data[first:], 206 if first else 200, more, name=path)

    def reply(
        self, data: bytes, status: int = 200, more: Mapping[str, str] | None = None, name: str | None = None
    ) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **(more or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.hub.cut(name) if name else None
        part = data if cut is None else data[:cut]
        self.wfile.write(part)
        if name:
            with self.hub.lock:
                self.hub.sent[name] += len(part)
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True

    def refuse(self, refusal: Refusal) -> None:
        self.reply(b"{}", refusal.status, {"X-Error-Code": refusal.code})

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """Run a hub without repositories on a free port of this machine."""
    hub = HubServer()

    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def etag(data: bytes) -> str:
    """Return the id of a file, which depends on its content."""
    return hashlib.sha1(data).hexdigest()
