"""Write the tokenizer of a GGUF file in Hugging Face's format: tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.errors import ConfigError
from dovetail.gguf.reader import GgufFile
from dovetail.gguf.token_ids import token_id

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""The types of tokens."""

SPACE = "▁"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BY_CASE = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_REST_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_BY_CASE[0]}|{_BY_CASE[1]}|\p{{N}}|{_REST_SLASH}"
_GPT4O = rf"{_BY_CASE[0]}{_CONTRACTIONS}?|{_BY_CASE[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_REST_SLASH}"
_DIGITS = (r"\p{N}", _GPT2)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-퟿]+",
    r"\p{N}+",
)

SPLITS: Mapping[str, str | tuple[str, ...]] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "phi-2": _GPT2,
    "mpt": _GPT2,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "smollm": _DIGITS,
    "codeshell": _DIGITS,
    "exaone": _DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "dbrx": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "glm4": _LLAMA3,
    "chatglm-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _QWEN2,
    "hunyuan": _QWEN2,
    "megrez": _QWEN2,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "minimax-m2": _GPT4O,
    "deepseek-v3": _DEEPSEEK3,
    "joyai-llm": _DEEPSEEK3,
    "deepseek-llm": _DEEPSEEK_LLM,
}
"""What splits text before BPE, by ``tokenizer.ggml.pre``. llama.cpp has the same in ``llama-vocab.cpp``."""

ADDS_BOS = frozenset({"llama3", "llama-v3", "llama-bpe", "tekken", "falcon3", "pixtral"})
"""The kinds of BPE whose texts begin with BOS if the metadata does not say."""

NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_files(checkpoint: GgufFile) -> dict[str, str]:
    """Return tokenizer.json and tokenizer_config.json of a file; empty if it has no tokenizer. Raises ``ConfigError`` for
    a kind that is not implemented."""
    kind = checkpoint.find("tokenizer.ggml.model", str)
    if kind in (None, "none", "no_vocab"):
        return {}
    tokens = checkpoint.get("tokenizer.ggml.tokens", list)
    if kind not in ("gpt2", "llama"):
        raise ConfigError(
            f"{checkpoint.files[0]} has a tokenizer of kind {kind!r:.40}; implemented: gpt2 (BPE of bytes), llama (SentencePiece). Set "
            "model.tokenizer to a directory with tokenizer.json"
        )
    types = _of_tokens(checkpoint, "token_type", len(tokens)) or [NORMAL] * len(tokens)
    if kind == "llama":  # Gemma's tokens of several spaces are written with spaces
        tokens = [token.replace(" ", SPACE) if token.isspace() else token for token in tokens]
    built = _bytes_bpe(checkpoint, tokens) if kind == "gpt2" else _sentencepiece(checkpoint, tokens, types)
    built["added_tokens"] = list(_added(tokens, types, names=built["model"]["vocab"]))
    config = _config(checkpoint, tokens, kind)
    built["post_processor"] = _post_processor(built["post_processor"], config, tokens)
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, **built}
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=1),
    }


def _of_tokens(checkpoint: GgufFile, name: str, count: int) -> list[Any] | None:
    """Return an array of the metadata with one number for each token, or None. Raises ``ConfigError``."""
    values = checkpoint.numbers(f"tokenizer.ggml.{name}")
    if values is not None and len(values) != count:
        raise ConfigError(
            f"{checkpoint.files[0]}: tokenizer.ggml.{name} has {len(values)} values, and there are {count} tokens; convert it again"
        )
    return None if values is None else values.tolist()


def _bytes_bpe(checkpoint: GgufFile, tokens: Sequence[str]) -> dict[str, Any]:
    pre = checkpoint.get("tokenizer.ggml.pre", str, "default")
    if pre not in SPLITS:
        raise ConfigError(
            f"{checkpoint.files[0]} has tokenizer.ggml.pre {pre!r:.40}; implemented: {', '.join(SPLITS)}. Set model.tokenizer to a "
            "directory with tokenizer.json"
        )
    splits = (SPLITS[pre],) if isinstance(SPLITS[pre], str) else SPLITS[pre]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    pattern = [
        {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False} for split in splits
    ]
    merges = [tuple(merge.split(" ", 1)) for merge in checkpoint.get("tokenizer.ggml.merges", list)]
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*pattern, level]},
        "post_processor": {**level, "trim_offsets": False},
        "decoder": {**level, "use_regex": True},
        "model": _bpe(tokens, merges, ignore_merges=pre in ("llama3", "llama-v3", "llama-bpe", "tekken")),
    }


def _sentencepiece(checkpoint: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    gemma = checkpoint.architecture.startswith("gemma")
    scores = _of_tokens(checkpoint, "scores", len(tokens))
    given = checkpoint.strings("tokenizer.ggml.merges")
    if given is not None:
        merges = [tuple(merge.split(" ", 1)) for merge in given]
    else:  # Gemma's scores are not in the order of its merges
        ranks = range(0, -len(tokens), -1) if gemma or scores is None else scores
        merges = _merges(tokens, ranks, types)
    prefix = checkpoint.get("tokenizer.ggml.add_space_prefix", bool, True)
    unknown = token_id(checkpoint, "unknown") or 0
    model = _bpe(tokens, merges, byte_fallback=True, fuse_unk=True, unk_token=tokens[unknown] if tokens else None)
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    normalizers = [{"type": "Prepend", "prepend": SPACE}, replaced] if prefix else [replaced]
    decoders = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []),
    ]
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _bpe(tokens: Sequence[str], merges: Sequence[tuple[str, ...]], **more: Any) -> dict[str, Any]:
    vocab: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocab.setdefault(token, index)
    known = [merge for merge in merges if len(merge) == 2 and {*merge, "".join(merge)} <= vocab.keys()]
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return model | more | {"vocab": vocab, "merges": known}


def _merges(tokens: Sequence[str], ranks: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece vocabulary: every pair of tokens that make a token, best tokens first."""
    ids = {token: index for index, token in enumerate(tokens)}
    found: list[tuple[float, int, int, str, str]] = []
    for index, token in enumerate(tokens):
        if types[index] in (CONTROL, UNKNOWN, BYTE):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-ranks[index], ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _added(tokens: Sequence[str], types: Sequence[int], names: Mapping[str, int]) -> list[dict[str, Any]]:
    common = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": index, "content": token, **common, "special": kind in (CONTROL, UNKNOWN)}
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED, UNKNOWN) and token.strip(SPACE) and names.get(token) == index
    ]


def _config(checkpoint: GgufFile, tokens: Sequence[str], kind: str) -> dict[str, Any]:
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in NAMES.items():
        index = token_id(checkpoint, key)
        if index is not None:
            config[name] = tokens[index]
    default = kind == "llama" or checkpoint.find("tokenizer.ggml.pre", str) in ADDS_BOS
    config["add_bos_token"] = checkpoint.get("tokenizer.ggml.add_bos_token", bool, default) and "bos_token" in config
    config["add_eos_token"] = checkpoint.get("tokenizer.ggml.add_eos_token", bool, False) and "eos_token" in config
    template = checkpoint.find("tokenizer.chat_template", str)
    further = {
        key.rpartition(".")[2]: value
        for key, value in checkpoint.metadata.items()
        if key.startswith("tokenizer.chat_template.") and isinstance(value, str)
    }
    if template:
        named = [{"name": name, "template": source} for name, source in {"default": template, **further}.items()]
        config["chat_template"] = named if further else template
    return config


def _post_processor(own: Any, config: Mapping[str, Any], tokens: Sequence[str]) -> Any:
    """Return what adds BOS and EOS, after ``own``."""
    before = [config["bos_token"]] if config["add_bos_token"] else []
    after = [config["eos_token"]] if config["add_eos_token"] else []
    if not before and not after:
        return own
    special = {token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]} for token in (*before, *after)}

    def pieces(*texts: str) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        for index, text in enumerate(texts):
            made += [{"SpecialToken": {"id": token, "type_id": index}} for token in before]
            made.append({"Sequence": {"id": text, "type_id": index}})
            made += [{"SpecialToken": {"id": token, "type_id": index}} for token in after]
        return made

    template = {
        "type": "TemplateProcessing",
        "single": pieces("A"),
        "pair": pieces("A", "B"),
        "special_tokens": special,
    }
    return template if own is None else {"type": "Sequence", "processors": [own, template]}
