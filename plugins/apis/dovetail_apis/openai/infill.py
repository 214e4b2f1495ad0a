"""Build prompts that ask a model to fill the gap between two texts, with the tokens that it was trained with."""

from __future__ import annotations

from typing import NamedTuple

from dovetail.errors import RequestError
from dovetail.interfaces.api import ApiHost


class InfillTokens(NamedTuple):
    """Name the special tokens before the prefix, the suffix and the gap. If ``suffix_first`` is set, the suffix precedes
    the prefix, and nothing marks the gap."""

    prefix: str
    suffix: str
    middle: str
    suffix_first: bool = False


KNOWN = (
    InfillTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    InfillTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    InfillTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    InfillTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    InfillTokens("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    InfillTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    InfillTokens("[PREFIX]", "[SUFFIX]", "", suffix_first=True),  # Codestral
)
"""List the tokens of published models. The first ones that the tokenizer has are used."""


async def infill_prompt(host: ApiHost, prefix: str, suffix: str) -> list[int]:
    """Return the prompt for the text between ``prefix`` and ``suffix``. Raises ``RequestError`` if the tokenizer has no
    tokens for it."""
    for tokens in KNOWN:
        ids = [host.tokenizer.token_to_id(name) for name in tokens[:3] if name]
        if all(token is not None for token in ids):
            break
    else:
        raise RequestError(
            "suffix is not supported: the tokenizer of this model has no tokens for filling in the middle; describe the "
            "gap in the prompt",
            param="suffix",
            code="unsupported_parameter",
        )
    before, after, *middle = [token for token in ids if token is not None]
    bos = [token for token in (await host.encode("", True))[:1] if token in host.tokenizer.special_token_ids]
    prefix_ids = [before, *await host.encode(prefix, False)]
    suffix_ids = [after, *await host.encode(suffix, False)]
    parts = (suffix_ids, prefix_ids) if tokens.suffix_first else (prefix_ids, suffix_ids)
    return [*bos, *parts[0], *parts[1], *middle]
