"""Load the tokenizer of a model directory, and encode and decode text with it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Backend

from dovetail.config import Config
from dovetail.config.checkpoint import locate, read_json, read_text
from dovetail.config.generation import FILE, generation_file
from dovetail.errors import ConfigError, RequestError
from dovetail.templates.chat_template import ChatTemplate
from dovetail.tokenizer.content import ContentTokens, MarkedPrompt
from dovetail.tokenizer.detokenizer import IncrementalDetokenizer
from dovetail.tokenizer.template_files import find_source, read_template
from dovetail.tokenizer.vocabulary import Vocabulary, read_vocabulary

_PROBE_CHARS = 12
"""Assume this number of characters per token, which is higher than the average of prose."""

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class ChatRendering(NamedTuple):
    """Hold the template of a conversation, its variables, what follows the rendered text, and the character that marks
    texts in both."""

    template: ChatTemplate
    variables: Mapping[str, Any]
    opening: str
    mark: str | None = None

    def prompt(self, rendered: str) -> str:
        """Return the prompt, of the text that the template has rendered."""
        text = rendered + self.opening
        return text if self.mark is None else MarkedPrompt(text, self.mark)


class Tokenizer:
    """Turn text into token ids and back. Safe to share between threads.

    ``token_bytes[i]`` are the bytes that token i adds to the text; None for special tokens and for ids without a token.
    ``eos_token_ids`` are all ids that end an output, from the files of the tokenizer and of the model.
    """

    def __init__(
        self,
        json_text: str,
        config: Mapping[str, Any] | None = None,
        *,
        eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
        tool_template: str | None = None,
    ) -> None:
        """Build the tokenizer from the text of tokenizer.json and the parsed tokenizer_config.json (``config``). Raises
        ``ConfigError``."""
        self.json = json_text
        self._backend = _load_backend(json_text)
        self._vocabulary: Vocabulary = read_vocabulary(json.loads(json_text))
        self._names = _named_tokens(config or {})
        self.bos_token_id = self._named_id("bos_token")
        self.pad_token_id = self._named_id("pad_token")
        eos = self._named_id("eos_token")
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*([] if eos is None else [eos]), *eos_token_ids]))
        self.special_token_ids = self._vocabulary.special_ids
        self.token_bytes = self._visible_bytes()
        self._kept_bytes: dict[tuple[int, ...], list[bytes | None]] = {}  # by the special tokens that are kept
        self._template = ChatTemplate(chat_template, self._names) if chat_template else None
        self._tool_template = ChatTemplate(tool_template, self._names) if tool_template else self._template
        self._prepend = self._missing_bos(config or {})
        self._content = ContentTokens(json_text)
        self.marks_content = True
        """If False, text of messages that spells a special token becomes that token (``model.special_tokens_in_messages``)."""

    @classmethod
    def from_dir(
        cls,
        path: Path | str,
        model: Path | str | None = None,
        template: str | None = None,
        generation: Path | None = None,
    ) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and the chat template of ``path``; ``template`` replaces the
        source of that template. End-of-sequence ids are also read from config.json and generation_config.json of
        ``model``, by default ``path``, and from the file ``generation``. Raises ``ConfigError``."""
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"{directory} has no tokenizer.json; set model.tokenizer to a directory that has one, or convert the "
                "tokenizer to the fast format"
            )
        config = _optional_json(directory, "tokenizer_config.json")
        return cls(
            read_text(file),
            config,
            eos_token_ids=_model_eos(Path(model or path), generation),
            chat_template=template or find_source(directory, config),
            tool_template=template or find_source(directory, config, tools=True),
        )

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids, which is one more than the highest id."""
        return len(self.token_bytes)

    @property
    def strip_leading_space(self) -> bool:
        """Return True if decoding drops one space at the start of a text, as SentencePiece does."""
        return self._vocabulary.strip_leading_space

    @property
    def has_chat_template(self) -> bool:
        """Return True if ``apply_chat_template`` can be called."""
        return self._template is not None

    @property
    def chat_template(self) -> str:
        """Return the source of the chat template; empty if there is none."""
        return self._template.source if self._template else ""

    @property
    def named_tokens(self) -> dict[str, str]:
        """Return the tokens that chat templates may use as variables (``bos_token``, ...), by the names of the
        variables."""
        return dict(self._names)

    @property
    def adds_bos(self) -> bool:
        """Return True if ``encode`` puts a BOS token before a text."""
        return self.bos_token_id is not None and self.encode("")[:1] == [self.bos_token_id]

    @property
    def templates(self) -> tuple[ChatTemplate, ChatTemplate] | None:
        """Return the chat templates for conversations without tools and with tools; None if there is none."""
        if self._template is None or self._tool_template is None:
            return None
        return self._template, self._tool_template

    @property
    def tool_template(self) -> str:
        """Return the source of the chat template for conversations with tools; empty if there is none."""
        return self._tool_template.source if self._tool_template else ""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``. With ``add_special_tokens`` the tokenizer adds its special tokens, a BOS
        for example. Text that spells a special token becomes that token, except for the marked texts of a
        ``MarkedPrompt``. Releases the GIL for most of its time. Raises
        ``RequestError`` for text that cannot be written in UTF-8."""
        try:  # only the backend's calls for batches release the GIL
            if isinstance(text, MarkedPrompt):
                ids = self._content.encode(text, add_special_tokens)
            else:
                ids = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError:
            raise _unwritable(text) from None
        return self._prepend + ids if add_special_tokens else ids

    def surely_exceeds(self, text: str, limit: int) -> bool:
        """Return True only if ``text`` certainly has more than ``limit`` tokens. May return False for such a
        text too. Encodes no more of ``text`` than necessary."""
        size = _PROBE_CHARS * limit
        while size < len(text):
            # cutting the text changes the tokens near the cut; comparing with twice the limit allows for that
            if len(self.encode(text[:size], add_special_tokens=False)) > 2 * limit:
                return True
            size *= 4
        return False

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``. Bytes that are not valid UTF-8 become U+FFFD; ids without a token add nothing."""
        detokenizer = IncrementalDetokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.finish()

    def text_bytes(self, skip_special_tokens: bool, keep: tuple[int, ...] = ()) -> list[bytes | None]:
        """Return the bytes of every token. With ``skip_special_tokens`` special tokens that are not in ``keep`` have
        None. The caller must not change the list."""
        if not skip_special_tokens or not keep:
            return self.token_bytes if skip_special_tokens else self._vocabulary.token_bytes
        if keep not in self._kept_bytes:
            every = self._vocabulary.token_bytes
            kept = set(keep)
            self._kept_bytes[keep] = [every[i] if i in kept else data for i, data in enumerate(self.token_bytes)]
        return self._kept_bytes[keep]

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of one token; for a special token, the bytes of its name; for an id without a token, no
        bytes."""
        every = self._vocabulary.token_bytes
        return (every[token_id] if token_id < len(every) else None) or b""

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token by its name in the vocabulary; None if there is none."""
        return self._backend.token_to_id(token)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        opening: str = "",
        assistant_marks: frozenset[str] = frozenset(),
    ) -> str:
        """Return the prompt of a conversation, which the caller must encode with ``add_special_tokens=False``.
        ``extra`` are further variables of the template; ``opening`` is appended. See ``chat_rendering`` for the other
        parameters, and for what it raises. Raises ``RequestError`` if the template refuses the conversation."""
        rendering = self.chat_rendering(messages, tools, add_generation_prompt, extra, opening, assistant_marks)
        return rendering.prompt(rendering.template.render(rendering.variables))

    def chat_rendering(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        opening: str = "",
        assistant_marks: frozenset[str] = frozenset(),
    ) -> ChatRendering:
        """Return the template of a conversation and what to render with it. If ``marks_content`` is set, texts of the
        conversation that spell special tokens stay text; only messages of the assistant, and ``opening``, may spell
        ``assistant_marks``. Raises ``RequestError`` if there is no template."""
        template = self._tool_template if tools else self._template
        if template is None:
            raise RequestError("this model has no chat template; use /v1/completions or /generate", param="messages")
        variables = template.variables(messages, tools, add_generation_prompt, extra or {})
        if not self.marks_content:
            return ChatRendering(template, variables, opening)
        own = [message for message in messages if assistant_marks and message.get("role") == "assistant"]
        others = messages if not own else [message for message in messages if message.get("role") != "assistant"]
        rest = {name: value for name, value in variables.items() if name != "messages"}
        content, nothing = self._content, frozenset[str]()
        free = (own, opening) if assistant_marks and (own or opening) else None
        mark = content.mark_for(((others, rest, "" if free else opening), nothing), (free, assistant_marks))
        if mark is None:
            return ChatRendering(template, variables, opening)
        variables = content.marked(rest, nothing, mark)
        variables["messages"] = [
            content.marked(message, assistant_marks if message.get("role") == "assistant" else nothing, mark)
            for message in messages
        ]
        return ChatRendering(template, variables, content.marked(opening, assistant_marks, mark), mark)

    def _named_id(self, name: str) -> int | None:
        token = self._names.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def _visible_bytes(self) -> list[bytes | None]:
        special = self._vocabulary.special_ids
        return [None if i in special else data or None for i, data in enumerate(self._vocabulary.token_bytes)]

    def _missing_bos(self, config: Mapping[str, Any]) -> list[int]:
        """Return the BOS token as a list if ``add_bos_token`` requires it and tokenizer.json does not add it, else an
        empty list."""
        bos = self.bos_token_id
        if not config.get("add_bos_token") or bos is None or self._backend.encode("").ids[:1] == [bos]:
            return []
        return [bos]


def load_tokenizer(config: Config) -> Tokenizer:
    """Load the tokenizer of the configured model, from ``model.tokenizer`` if that is set, else from the model's
    directory. Raises ``ConfigError``."""
    model, own = locate(config.model.path), config.model.tokenizer
    template = read_template(config.model.chat_template) if config.model.chat_template else None
    generation = generation_file(config.model.generation_config, model)
    tokenizer = Tokenizer.from_dir(locate(own, "model.tokenizer") if own else model, model, template, generation)
    tokenizer.marks_content = not config.model.special_tokens_in_messages
    return tokenizer


def _load_backend(json_text: str) -> Backend:
    try:
        backend = Backend.from_str(json_text)
    except Exception as error:  # the binding raises bare Exception
        raise ConfigError(f"tokenizer.json cannot be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the named tokens of a tokenizer_config.json, each of which is a string or a dict with its ``content``."""
    named: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        given = config.get(name)
        token = given.get("content") if isinstance(given, dict) else given
        if isinstance(token, str):
            named[name] = token
        elif given is not None:
            raise ConfigError(
                f"tokenizer_config.json: {name} is {given!r:.80}; allowed: a text, or an object with a text as content"
            )
    return named


def _optional_json(directory: Path, name: str) -> dict[str, Any]:
    return read_json(directory, name) if (directory / name).is_file() else {}


def _model_eos(directory: Path, generation: Path | None) -> list[int]:
    ids: list[int] = []
    for file in dict.fromkeys([generation or directory / FILE, directory / FILE, directory / "config.json"]):
        eos = _optional_json(file.parent, file.name).get("eos_token_id")
        found = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(type(token) is int for token in found):
            raise ConfigError(f"{file}: eos_token_id is {eos!r:.80}; allowed: an integer, or a list of integers")
        ids += found
    return ids


def _unwritable(text: str) -> RequestError:
    at = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), 0)
    return RequestError(
        f"the text has half of a surrogate pair, {text[at]!r}, at character {at}, so it cannot be written in UTF-8"
    )
