"""Declare vLLM's fields that cut prompts, and encode prompts accordingly."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dovetail.api.body import ApiModel, Int32
from dovetail.errors import ContextLengthError, RequestError
from dovetail.interfaces.api import ApiHost


class TruncationFields(ApiModel):
    """Declare the number of tokens to which a prompt is cut, and the side on which it is cut off."""

    truncate_prompt_tokens: Int32 | None = Field(
        None, ge=-1, description="Cut prompts to this number of tokens; -1: to what fits into the context."
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="The side that is cut off: `left`.")

    async def encoded(
        self, host: ApiHost, prompt: str | list[int], add_special_tokens: bool = True, new_tokens: int | None = None
    ) -> list[int]:
        """Return the token ids of ``prompt``, cut if the request requires it. -1 leaves space in the context for
        ``new_tokens`` (None: for one). Special tokens that the tokenizer adds are kept. Raises ``RequestError``."""
        if self.truncate_prompt_tokens is None:
            return await host.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
        most = self._most(host, 1 if new_tokens is None else new_tokens)
        if not isinstance(prompt, str):
            return self._cut(prompt, most, 0, 0)
        ids = await self._encode(host, prompt, add_special_tokens)
        specials = host.tokenizer.special_token_ids if add_special_tokens else ()
        return self._cut(ids, most, int(bool(ids) and ids[0] in specials), int(bool(ids) and ids[-1] in specials))

    def _most(self, host: ApiHost, new_tokens: int) -> int:
        given = self.truncate_prompt_tokens
        if given == -1:
            return max(host.context_len - new_tokens, 1)
        if not (given and given <= host.context_len):
            raise RequestError(
                f"truncate_prompt_tokens is {given}; allowed: -1, or 1 to {host.context_len}, the length of the context",
                param="truncate_prompt_tokens",
            )
        return given

    async def _encode(self, host: ApiHost, text: str, add_special_tokens: bool) -> list[int]:
        try:
            return await host.encode(text, add_special_tokens)
        except ContextLengthError:  # far too long: half of it is too long as well
            half = len(text) // 2
            kept = text[:half] if self.truncation_side == "right" else text[half:]
            return await self._encode(host, kept, add_special_tokens)

    def _cut(self, ids: list[int], most: int, first: int, last: int) -> list[int]:
        """Return ``most`` tokens of ``ids``. The ``first`` and ``last`` tokens are special tokens that are kept."""
        if len(ids) <= most:
            return ids
        if self.truncation_side == "right":
            last = min(last, most)
            return ids[: most - last] + ids[len(ids) - last :]
        first = min(first, most)
        return ids[:first] + ids[len(ids) - (most - first) :]
