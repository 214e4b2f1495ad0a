"""The frontend language: programs of many calls, in plain Python. See docs/language.md.

ir            what programs append: texts, messages, calls, as frozen values
api           the functions that make them
face          a state as programs see it; state: one that runs, tracing: one that writes down
interpreter   carries parts out; strand: in their order, in a thread of the state's own
conversation  messages and the chat template that writes them out
program       functions as programs; batch: over many rows; replay: from a trace
backends/     where models are: this process, a Dovetail server, OpenAI's and Anthropic's APIs
"""

from dovetail.lang.api import (
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    gen_int,
    gen_string,
    image,
    select,
    separate_reasoning,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
)
from dovetail.lang.backends import Backend
from dovetail.lang.backends.anthropic import Anthropic
from dovetail.lang.backends.endpoint import RuntimeEndpoint
from dovetail.lang.backends.local import Runtime
from dovetail.lang.backends.openai import OpenAI
from dovetail.lang.choices import (
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from dovetail.lang.defaults import flush_cache, get_server_info, set_default_backend
from dovetail.lang.program import Function, function
from dovetail.lang.state import ProgramState

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
