"""Choose the backend of programs that are not given one."""

from __future__ import annotations

from typing import Any

from dovetail.lang.backends.base import Backend

_default: list[Backend] = []


def set_default_backend(backend: Any) -> None:
    """Set the backend of programs that are not given one: a ``Backend``, or an object with one as its ``endpoint``.
    None removes the default."""
    _default[:] = [] if backend is None else [as_backend(backend)]


def backend_of(given: Any) -> Backend:
    """Return ``given`` or the default as a backend. Raises ``RuntimeError`` if there is neither."""
    if given is not None:
        return as_backend(given)
    if not _default:
        raise RuntimeError(
            "a program needs a backend; give one to run(backend=...), or call set_default_backend(Runtime('tiny')) or "
            "set_default_backend(RuntimeEndpoint('http://127.0.0.1:30000')) first"
        )
    return _default[0]


def as_backend(given: Any) -> Backend:
    """Return ``given`` as a backend. Raises ``TypeError``."""
    found = given if isinstance(given, Backend) else getattr(given, "endpoint", None)
    if not isinstance(found, Backend):
        raise TypeError(f"{given!r:.80} is not a backend; Runtime(llm) makes a backend from an LLM")
    return found


def flush_cache(backend: Any = None) -> None:
    """Remove every cached prefix of the backend."""
    backend_of(backend).flush_cache()


def get_server_info(backend: Any = None) -> dict[str, Any]:
    """Return what the backend reports about the system on which its model runs."""
    return backend_of(backend).server_info()
