"""Render chat templates: Jinja in a sandbox, with the helpers that published templates expect from their renderer."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dovetail.errors import ConfigError, RequestError


class _GenerationTag(Extension):
    """Parse ``{% generation %}``, which marks the assistant's text for training, as if only its body were there."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


@functools.lru_cache(16)
def _compiled(source: str) -> jinja2.Template:
    """Compile a template once per source. Templates keep no state between renderings, so all engines of a model share
    them."""
    return _environment().from_string(source)


@contextmanager
def _config_errors() -> Iterator[None]:
    try:
        yield
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the model's chat template is not valid, line {error.lineno}: {error}") from error
    except RecursionError:
        raise ConfigError("the model's chat template is not valid: its expressions are nested too deeply") from None


class ChatTemplate:
    """Render one template. ``constants`` (bos_token, ...) are passed to every rendering.

    Neither ``compile`` nor ``render`` is bounded: a template may loop for ever, and its constant expressions are computed
    when it is compiled. ``TemplateRenderer`` bounds both.
    """

    def __init__(self, source: str, constants: Mapping[str, Any]) -> None:
        """Parse the template. Raises ``ConfigError`` if ``source`` is not valid Jinja."""
        self.source = source
        self.constants = dict(constants)
        with _config_errors():
            _environment().parse(source)

    def compile(self) -> None:
        """Compile the template, which the first rendering does otherwise. Raises ``ConfigError`` for an unknown filter or
        test."""
        with _config_errors():
            _compiled(self.source)

    def variables(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        extra: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the variables of one rendering. Raises ``RequestError`` if ``extra`` replaces one of them."""
        own = {"messages": messages, "tools": tools or None, "add_generation_prompt": add_generation_prompt}
        clash = sorted(set(extra) & set(own))
        if clash:
            raise RequestError(f"chat template variables may not set {clash}", param="chat_template_kwargs")
        return {**extra, **own}

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the prompt. Raises ``RequestError`` if the template refuses the conversation."""
        try:
            return _compiled(self.source).render({"documents": None, **self.constants, **variables})
        except MemoryError:
            raise RequestError(
                "the model's chat template needs too much memory for this conversation", param="messages"
            ) from None
        except Exception as error:  # a template may raise anything
            what = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            raise RequestError(
                f"the model's chat template refuses this conversation: {what}{error}", param="messages"
            ) from error


class Arguments(dict[str, Any]):
    """Hold the arguments of a call: a mapping for templates that look into them, and their text for templates that
    print them or join them to other text."""

    def __init__(self, parsed: dict[str, Any], text: str) -> None:
        super().__init__(parsed)
        self._text = text

    def with_text(self, parsed: dict[str, Any], text: str) -> Arguments:
        """Return arguments with other values and another text."""
        return Arguments(parsed, text)

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text

    def __reduce__(self) -> tuple[Any, ...]:
        return Arguments, (dict(self), self._text)
