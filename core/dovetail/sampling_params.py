"""Define the parameters of a request: how its tokens are chosen, what constrains its output, and which vector its
prompt is pooled into."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from dovetail.errors import RequestError
from dovetail.sampling_names import MAX_PROCESSORS, LogitsProcessorCall, accepts_other_names
from dovetail.stop_regex import StopRegexError, stop_regexes

MIN_TEMPERATURE = 1e-5
"""Treat lower temperatures as greedy: logits divided by them exceed the range of float32, and only the most likely
token could be sampled anyway."""


class GrammarKind(enum.StrEnum):
    """Name the language in which a constraint is written."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    EBNF = "ebnf"  # llama.cpp's GBNF dialect
    LARK = "lark"  # llguidance's dialect of Lark
    CHOICE = "choice"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """Describe a constraint on the output text. Hashable: it is the key of the compile cache.

    ``text`` depends on the kind: the schema (as JSON), the regex or the grammar; empty for ``json_object``; a JSON
    array of the allowed texts for ``choice``; for ``structural_tag`` a JSON object ``{"structures": [{"begin",
    "schema", "end"}, ...], "triggers": [...]}``, which stands for free text in which every part that begins with a
    trigger must be one of the structures. ``backend`` names the grammar backend that must honour the constraint; if it
    is None, the server chooses. ``param`` is the request field that holds the constraint, for errors; equal constraints of
    different fields are compiled once.
    """

    kind: GrammarKind
    text: str = ""
    backend: str | None = None
    param: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class GrammarGate:
    """Describe the part of an output that precedes its constraint, in token ids. ``interfaces.parsers.ConstraintGate``
    has the same fields with texts in place of token ids, and documents them. ``marks`` are pairs of a special token and
    the ordinary token that represents it in the grammar.
    """

    lead: tuple[int, ...] = ()
    optional: bool = False
    until: int | None = None
    may_end: bool = False
    prefix: tuple[int, ...] = ()
    prefix_in_grammar: bool = False
    marks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ThinkingSpan:
    """Describe the reasoning of an output, in token ids. It begins with the output if ``begun``, and after the tokens
    ``lead`` (empty: never again), and ends with the token ``until``."""

    lead: tuple[int, ...]
    until: int
    begun: bool


class PoolingKind(enum.StrEnum):
    """Name what a prompt is pooled into. A prompt that is pooled is not continued."""

    LAST = "last"  # the hidden state of its last token
    MEAN = "mean"  # the mean of the hidden states of all its tokens
    LABELS = "labels"  # log-probabilities of given tokens as the next one


MAX_LABELS = 1024
"""Limit the number of tokens whose log-probabilities one prompt may request."""


@dataclass(frozen=True, slots=True)
class Pooling:
    """Describe how a prompt whose ``max_new_tokens`` is 0 is pooled into one float32 vector.

    Hidden states are those after the model's final norm, ``[hidden_size]``, without further normalisation; they need a
    model that offers ``model.embed``. ``labels`` are natural logarithms of the model's own probabilities (softmax over
    the whole vocabulary, before temperature, biases and penalties), in the order of ``token_ids``. Raises
    ``RequestError``.
    """

    kind: PoolingKind
    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind is not PoolingKind.LABELS:
            _require(not self.token_ids, "pooling.token_ids", self.token_ids, f"no token ids with kind {self.kind}")
            return
        count = len(self.token_ids)
        _require(1 <= count <= MAX_LABELS, "label_token_ids", f"{count} ids", f"1 to {MAX_LABELS} token ids")
        for token in self.token_ids:
            _require(_is_int(token) and token >= 0, "label_token_ids", token, "token ids of at least 0")

    @property
    def reads_all(self) -> bool:
        """Return True if every token of the prompt must enter a forward pass, even if its prefix is cached."""
        return self.kind is PoolingKind.MEAN


MAX_TOKEN_SETTINGS = 4096
"""Limit the number of entries of ``logit_bias`` and of ``stop_token_ids``. More entries would slow down every step of
the batch that contains the request."""


MAX_ALLOWED = 2**18
"""Limit the number of entries of ``allowed_token_ids``."""

MAX_SCORED = 256
"""Limit the number of entries of ``token_ids_logprob``. Each is answered at each position."""

MAX_BAD_WORDS = 256
"""Limit the number of entries of ``bad_words``, and the characters of each."""


def _require(ok: bool, param: str, given: object, allowed: str) -> None:
    if not ok:
        raise RequestError(f"{param} is {given!r}; allowed: {allowed}", param=param)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@accepts_other_names
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Describe how the tokens of one request are chosen and when it stops. The constructor validates the values and
    raises ``RequestError``. It also takes the names of vLLM and SGLang (``max_tokens``, ``min_tokens``,
    ``no_stop_trim``, ...), lists in place of tuples, and a single string for ``stop``, ``stop_regex`` and ``bad_words``.

    The order of operations is: logit bias, repetition / presence / frequency penalties, logits processors, grammar bitmask, temperature,
    top-k, top-p, min-p.

    - ``max_new_tokens=None`` generates up to the end of the context. 0 computes the prompt, caches it, and ends there.
    - ``top_k=0`` (or -1) and ``top_p=1`` switch these filters off. ``temperature=0`` (or below 1e-5) is greedy.
    - ``seed`` makes sampling reproducible, independently of the other requests in the batch. Output i of ``n`` uses a
      seed derived from (seed, i).
    - ``logprobs=m`` returns the log-probability of each output token and of the ``m`` most likely tokens at its
      position, from the model's own logits before any of the above operations. ``prompt_logprobs`` does so for the
      prompt, from token ``prompt_logprobs_start`` on; tokens before that may come from the prefix cache.
    - ``grammar_gate`` determines where in the output the ``grammar`` begins to hold; by default it holds from the
      start.
    - ``stop_regex`` are regular expressions: the output ends when its text contains a match, and the match is cut off or
      kept as a stop string is. docs/request.md documents the dialect.
    - ``bad_words`` are texts that the output must not contain: the tokens of each, at the beginning of a text and after
      a space, are not completed. ``allowed_token_ids`` are the only tokens that the output may have. Both hold in
      addition to a constraint.
    - ``thinking_budget`` is the largest number of tokens of the reasoning. Then the token that ends the reasoning is
      forced, and reasoning does not begin again. The server sets ``thinking_span``, from the model's reasoning parser.
    - ``token_ids_logprob`` are tokens whose log-probabilities are returned at each position, of the output and, if
      ``prompt_logprobs`` is set, of the prompt; ``TokenLogprob.given`` holds them.
    - ``logits_processors`` are components that change the logits, in this order: mappings with a ``name`` and the
      parameters of that processor, or ``LogitsProcessorCall``.
    - ``keep_special`` are special tokens that stay in the text even with ``skip_special_tokens``.
    - ``speculative=False`` decodes this request without drafts. The outputs are the same either way.
    - ``pooling`` requests a vector made of the prompt, and needs ``max_new_tokens=0``.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    grammar: GrammarSpec | None = None
    grammar_gate: GrammarGate | None = None
    token_ids_logprob: tuple[int, ...] | None = None
    logits_processors: tuple[LogitsProcessorCall, ...] = ()
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    thinking_budget: int | None = None
    thinking_span: ThinkingSpan | None = None
    keep_special: tuple[int, ...] = ()
    speculative: bool = True
    pooling: Pooling | None = None

    def __post_init__(self) -> None:
        self._check_lengths()
        self._check_filters()
        self._check_penalties()
        self._check_stops()
        self._check_tokens()

    def _check_lengths(self) -> None:
        given = self.max_new_tokens
        _require(given is None or (_is_int(given) and given >= 0), "max_new_tokens", given, "an integer of at least 0")
        low = self.min_new_tokens
        _require(
            _is_int(low) and 0 <= low <= (low if given is None else given),
            "min_new_tokens",
            low,
            "0 up to max_new_tokens",
        )
        _require(self.pooling is None or given == 0, "max_new_tokens", given, "0, with pooling")
        _require(_is_int(self.n) and 1 <= self.n <= 128, "n", self.n, "an integer from 1 to 128")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or (_is_int(value) and 0 <= value <= 100), name, value, "an integer from 0 to 100")
        start = self.prompt_logprobs_start
        _require(_is_int(start) and start >= 0, "prompt_logprobs_start", start, "an integer of at least 0")
        seed = self.seed
        _require(seed is None or (_is_int(seed) and -(2**63) <= seed < 2**63), "seed", seed, "a 64-bit integer")

    def _check_filters(self) -> None:
        t = self.temperature
        _require(_is_number(t) and 0 <= t <= 100, "temperature", t, "a number from 0 to 100")
        _require(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]")
        _require(_is_int(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "an integer; 0 or -1 switches it off")
        _require(_is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "a number in [0, 1]")

    def _check_penalties(self) -> None:
        r = self.repetition_penalty
        _require(_is_number(r) and 0.01 <= r <= 100, "repetition_penalty", r, "a number in [0.01, 100]")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(_is_number(value) and -2 <= value <= 2, name, value, "a number in [-2, 2]")
        biases = self.logit_bias
        _require(
            biases is None or isinstance(biases, Mapping), "logit_bias", biases, "a mapping of token ids to biases"
        )
        _require(
            len(biases or ()) <= MAX_TOKEN_SETTINGS,
            "logit_bias",
            f"{len(biases or ())} entries",
            "at most 4096 entries",
        )
        for token, bias in (biases or {}).items():
            _require(_is_int(token) and token >= 0, "logit_bias", token, "token ids of at least 0 as keys")
            _require(_is_number(bias) and -100 <= bias <= 100, "logit_bias", bias, "biases in [-100, 100]")

    def _check_stops(self) -> None:
        for name in ("stop", "stop_regex", "stop_token_ids"):
            value = getattr(self, name)
            _require(isinstance(value, tuple | list), name, value, "a tuple, also for one: (x,)")
        for name in ("stop", "stop_regex"):
            texts = getattr(self, name)
            _require(len(texts) <= 32, name, f"{len(texts)} strings", "at most 32 strings")
            for text in texts:
                _require(isinstance(text, str) and 0 < len(text) <= 1024, name, text, "strings of 1 to 1024 characters")
        if self.stop_regex:
            try:
                stop_regexes(tuple(self.stop_regex))
            except StopRegexError as error:
                raise RequestError(f"stop_regex: {error}", param="stop_regex") from None
        count = len(self.stop_token_ids)
        _require(count <= MAX_TOKEN_SETTINGS, "stop_token_ids", f"{count} ids", "at most 4096 ids")
        for token in self.stop_token_ids:
            _require(_is_int(token) and token >= 0, "stop_token_ids", token, "token ids of at least 0")
        grammar = self.grammar
        _require(grammar is None or isinstance(grammar, GrammarSpec), "grammar", grammar, "a GrammarSpec(kind, text)")

    def _check_tokens(self) -> None:
        words = self.bad_words
        _require(isinstance(words, tuple | list), "bad_words", words, "a tuple, also for one: (x,)")
        _require(len(words) <= MAX_BAD_WORDS, "bad_words", f"{len(words)} texts", f"at most {MAX_BAD_WORDS} texts")
        for word in words:
            ok = isinstance(word, str) and bool(word.strip()) and len(word) <= MAX_BAD_WORDS
            _require(ok, "bad_words", word, f"texts of 1 to {MAX_BAD_WORDS} characters that are not all spaces")
        for name, most in (("allowed_token_ids", MAX_ALLOWED), ("token_ids_logprob", MAX_SCORED)):
            ids = getattr(self, name)
            if ids is None:
                continue
            _require(isinstance(ids, tuple | list), name, ids, "a tuple, also for one: (x,)")
            _require(1 <= len(ids) <= most, name, f"{len(ids)} ids", f"1 to {most} token ids")
            for token in ids:
                _require(_is_int(token) and token >= 0, name, token, "token ids of at least 0")
        calls = self.logits_processors
        ok = isinstance(calls, tuple) and all(isinstance(call, LogitsProcessorCall) for call in calls)
        _require(ok, "logits_processors", calls, "a list of {'name': ..., and its parameters}")
        _require(len(calls) <= MAX_PROCESSORS, "logits_processors", len(calls), f"at most {MAX_PROCESSORS}")
        budget = self.thinking_budget
        _require(
            budget is None or (_is_int(budget) and budget >= 0), "thinking_budget", budget, "an integer of at least 0"
        )

    @property
    def scores_output(self) -> bool:
        """Return True if log-probabilities of output tokens are requested."""
        return self.logprobs is not None or self.token_ids_logprob is not None

    @property
    def greedy(self) -> bool:
        """Return True if every token is the most likely one."""
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1

    @property
    def penalised(self) -> bool:
        """Return True if the logits depend on earlier tokens: if a penalty is not off."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
