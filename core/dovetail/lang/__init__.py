"""Provide the frontend language: programs that make many calls of a model, written in plain Python. See
docs/language.md.

The public names are listed in ``__all__``. They are imported from ``api`` on first use, and ``dovetail`` exports them
too.

    ir               what programs append: texts, messages and calls, as frozen values
    api              the functions that make them, and the other public names
    state_interface  a state as programs use it; state: a state that runs, tracing: a state that records
    interpreter      executes parts; task_queue: in order, in a thread of the state
    conversation     messages, and the chat template that renders them
    program          functions as programs; batch: over many rows; replay: from a trace
    backends/        where models run: this process, a Dovetail server, OpenAI's and Anthropic's APIs
"""

# ruff: noqa: F405 (the names of __all__ come with the import below)
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail.lang.api import *  # noqa: F403

__all__ = [
    "Anthropic",
    "Backend",
    "Function",
    "OpenAI",
    "ProgramState",
    "Runtime",
    "RuntimeEndpoint",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "greedy_token_selection",
    "image",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'dovetail.lang' has no attribute {name!r}")
    return getattr(importlib.import_module("dovetail.lang.api"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
