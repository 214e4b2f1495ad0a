"""The backend that programs run on where none is given."""

from __future__ import annotations

from typing import Any

from dovetail.lang.backends.base import Backend

_default: list[Backend] = []


def set_default_backend(backend: Any) -> None:
    """The backend of programs that are given none: a ``Backend``, or what has one as its ``endpoint``. None takes it away."""
    _default[:] = [] if backend is None else [as_backend(backend)]


def backend_of(given: Any) -> Backend:
    """``given``, or the default. Raises ``RuntimeError`` where there is neither."""
    if given is not None:
        return as_backend(given)
    if not _default:
        raise RuntimeError(
            "a program needs a backend; give one to run(backend=...), or call set_default_backend(Runtime('tiny')) or "
            "set_default_backend(RuntimeEndpoint('http://127.0.0.1:30000')) first"
        )
    return _default[0]


def as_backend(given: Any) -> Backend:
    """``given`` as a backend. Raises ``TypeError``."""
    found = given if isinstance(given, Backend) else getattr(given, "endpoint", None)
    if not isinstance(found, Backend):
        raise TypeError(f"{given!r:.80} is no backend; Runtime(llm) makes one of an LLM")
    return found


def flush_cache(backend: Any = None) -> None:
    """Forget every cached prefix of the backend."""
    backend_of(backend).flush_cache()


def get_server_info(backend: Any = None) -> dict[str, Any]:
    """What the backend's model runs on."""
    return backend_of(backend).server_info()
