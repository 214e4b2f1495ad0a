"""A tokenizer of any size, made from the tiny model's: its own tokens, then pairs of them that are no token yet."""

from __future__ import annotations

import json
import random

from dovetail.tokenizer import Tokenizer


def enlarged(tokenizer_json: str, size: int) -> str:
    """The tokenizer's file with ``size`` tokens. It encodes as before, as the new ones have no merges; a model may say them."""
    found = json.loads(tokenizer_json)
    vocabulary: dict[str, int] = found["model"]["vocab"]
    special = {token["content"] for token in found["added_tokens"]}
    known = [text for text in vocabulary if text not in special]
    taken, source = {*vocabulary, *special}, random.Random("vocabulary")
    number = 1 + max(*vocabulary.values(), *(token["id"] for token in found["added_tokens"]))
    while number < size:
        text = source.choice(known) + source.choice(known)
        if text not in taken and len(text) <= 24:
            taken.add(text)
            vocabulary[text] = number
            number += 1
    return json.dumps(found)


def tokenizer_of(tiny: Tokenizer, size: int) -> Tokenizer:
    """The tiny model's tokenizer, enlarged."""
    return tiny if size <= tiny.vocab_size else Tokenizer(enlarged(tiny.json, size), eos_token_ids=tiny.eos_token_ids)
