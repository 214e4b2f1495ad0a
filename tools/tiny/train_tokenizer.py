"""Train the tokenizer: `python -m tools.tiny.train_tokenizer --out core/dovetail/assets/tiny`.

The tokenizer is a byte-level BPE of exactly 4096 tokens. All 256 bytes are in the alphabet, so every text can be
encoded; every digit is a separate token. The program writes tokenizer.json and tokenizer_config.json (with the chat
template).
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tools.tiny.chat import CHAT_TEMPLATE, END, END_OF_TEXT, SPECIAL_TOKENS, TEXT_TOKENS
from tools.tiny.corpus.conversation import document
from tools.tiny.corpus.python_docs import python_docs

VOCAB_SIZE = 4096
CONTEXT = 2048
SPLIT = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Pattern that splits text into words with their leading space, single digits, runs of signs, and whitespace."""


def corpus(documents: int, seed: int) -> Iterator[str]:
    """Yield training documents without their special tokens, then the Python documentation once."""
    rng = Random(seed)
    for _ in range(documents):
        text = "".join(segment.text for segment in document(rng))
        for token in SPECIAL_TOKENS:
            text = text.replace(token, "\n")
        yield text
    yield from python_docs()


def train(documents: int, seed: int) -> Tokenizer:
    """Train the merges, and return the tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(documents, seed), trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(
            f"the corpus gave {tokenizer.get_vocab_size()} tokens instead of {VOCAB_SIZE}: use more documents"
        )
    return tokenizer


def write(tokenizer: Tokenizer, out: Path) -> None:
    """Write both files; the text tokens lose their `special` mark so that decoding keeps them."""
    out.mkdir(parents=True, exist_ok=True)
    saved = json.loads(tokenizer.to_str())
    for token in saved["added_tokens"]:
        token["special"] = token["content"] not in TEXT_TOKENS
    (out / "tokenizer.json").write_text(json.dumps(saved, ensure_ascii=False) + "\n", encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "bos_token": None,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token not in TEXT_TOKENS],
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"}
            for token in saved["added_tokens"]
        },
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def main() -> None:
    """Read the command line, train and write."""
    parser = argparse.ArgumentParser(description="Train the tokenizer of the tiny model.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    write(train(args.documents, args.seed), args.out)


if __name__ == "__main__":
    main()
