"""Build the prompt of a call from the calls before it and their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.bench.records import LoadCall

if TYPE_CHECKING:
    from dovetail.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CallPrompt:
    """Hold a prompt: token ids, a text to continue, or messages with their tools."""

    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    tools: tuple[dict[str, Any], ...] = ()


def first_prompt(call: LoadCall) -> CallPrompt:
    """Return the prompt of a call that does not continue another call."""
    return CallPrompt(call.token_ids, call.text, call.messages, call.tools)


def next_prompt(call: LoadCall, before: CallPrompt, answer: str, answer_ids: Sequence[int] | None) -> CallPrompt:
    """Return the prompt that consists of the previous prompt, its output, and what ``call`` adds. ``answer_ids`` must be known if prompts are token
    ids."""
    if call.token_ids is not None:
        assert before.token_ids is not None, "Workload validates it"
        assert answer_ids is not None, "a client that receives no token ids rejects such a workload"
        return CallPrompt(token_ids=(*before.token_ids, *answer_ids, *call.token_ids))
    if call.text is not None:
        return CallPrompt(text=f"{before.text}{answer}{call.text}")
    reply = {"role": "assistant", "content": answer}
    return CallPrompt(
        messages=(*(before.messages or ()), reply, *(call.messages or ())), tools=call.tools or before.tools
    )


def encoded(prompt: CallPrompt, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of the prompt. The model's chat template renders messages. Raises ``RequestError``."""
    if prompt.token_ids is not None:
        return list(prompt.token_ids)
    if prompt.text is not None:
        return tokenizer.encode(prompt.text)
    text = tokenizer.apply_chat_template(prompt.messages or (), prompt.tools or None)
    return tokenizer.encode(text, add_special_tokens=False)
