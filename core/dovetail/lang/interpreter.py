"""Execute parts on the values of one state: text, messages, calls of the model, joins."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dovetail.errors import ProgramError, RequestError
from dovetail.lang.backends.base import Backend, Generated, ReuseHints
from dovetail.lang.conversation import Conversation
from dovetail.lang.ir import (
    Assign,
    Expr,
    ExprSeq,
    Gen,
    Image,
    RoleBegin,
    RoleEnd,
    SamplingOptions,
    ScopeBegin,
    ScopeEnd,
    Select,
    SeparateReasoning,
    Text,
    calls_of,
    leaves,
    names_of,
    reasoning_name,
)
from dovetail.lang.reasoning import split_reasoning
from dovetail.lang.references import Join, Ref
from dovetail.lang.state_interface import GATHER, State


class Interpreter:
    """Hold the values of a state and apply each kind of part to them.

    One thread at a time executes parts; other threads read while holding ``changed``. After an error every further part
    is skipped.
    """

    def __init__(
        self, backend: Backend, defaults: SamplingOptions, changed: threading.Condition, streaming: bool
    ) -> None:
        self.backend = backend
        self.conversation = Conversation()
        self.values: dict[str, Any] = {}
        self.metas: dict[str, Any] = {}
        self.error: ProgramError | None = None
        self.hints = ReuseHints()
        self.log: list[str] = []
        self.logs: dict[str, list[str]] = {}
        self._logged = ""
        self.pending: Counter[str] = (
            Counter()
        )  # for each variable, how many times parts that are not executed yet will set it
        self._defaults = defaults
        self._changed = changed
        self._streaming = streaming
        self._scopes: list[tuple[str, int]] = []  # open scopes, and the length of the text at their beginning

    def start_from(self, other: Interpreter) -> None:
        """Start from the values of ``other``."""
        self.conversation = other.conversation
        self.values, self.metas = dict(other.values), dict(other.metas)
        self._scopes, self._logged = list(other._scopes), other._logged

    def text(self) -> str:
        """Return the text so far. Raises ``RequestError`` if the chat template rejects the conversation."""
        return self.conversation.text(self.backend.template()) if self.conversation.chat else self.conversation.before

    def expect(self, expr: Expr) -> None:
        """Record that ``expr`` will be executed and will set its variables."""
        with self._changed:
            self.pending.update(names_of(expr))

    def has(self, name: str) -> bool:
        """Return whether ``name`` has a value that no appended part will change. Hold ``changed``."""
        return name in self.values and not self.pending[name]

    def raise_error(self) -> None:
        """Raise the error of this state, each time as a new exception."""
        if self.error is not None:
            raise ProgramError(*self.error.args) from self.error.__cause__

    def execute(self, expr: Expr, line: str) -> None:
        """Execute ``expr`` unless a part before it has failed. An error is stored; only Ctrl-C is raised as well."""
        if self.error is not None:
            return
        try:
            for part in leaves(expr):
                self._part(part)
                self._log_text()
        except ProgramError as error:  # an error of another state already names its line
            self._fail(error)
        except BaseException as error:  # waiting readers must receive the error, whatever its type
            self._fail(failure(error, line, _named(expr)))
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise

    def _fail(self, error: ProgramError) -> None:
        with self._changed:
            self.error = error
            self._changed.notify_all()

    def _part(self, part: Expr) -> None:
        match part:
            case Text(text):
                self._plus(text)
            case RoleBegin(role):
                self.conversation = self.conversation.begin(role)
            case RoleEnd(role):
                self.conversation = self.conversation.end(role)
            case Gen():
                self._generate(part)
            case Select():
                self._select(part)
            case Image():
                self.conversation = self.conversation.plus(part, self.backend.template)
            case Assign(name, Ref(state, source)):
                self._set(name, self._value_of(state, source))
            case Assign(name, value):
                self._set(name, value)
            case Ref(state, name):
                self._plus(_as_text(self._value_of(state, name), name))
            case SeparateReasoning():
                self._separate(part)
            case ScopeBegin(name):
                self._scopes.append((name, len(self.text())))
            case ScopeEnd(name):
                opened, at = self._scopes.pop()
                assert opened == name, "scopes are context managers, which end in reverse order"
                self._set(name, self.text()[at:])
            case Join(forks, mode):
                self._join_forks(forks, mode)
            case ExprSeq(parts):
                for each in parts:
                    self._part(each)
            case _:
                raise TypeError(f"{part!r} is not a part of a prompt")

    def _value_of(self, state: State, name: str) -> Any:
        own = getattr(state, "interpreter", None) is self  # this thread cannot wait for itself
        return self.values[name] if own else state.get_var(name)

    def _plus(self, text: str) -> None:
        self.conversation = self.conversation.plus(text, self.backend.template)

    def _set(self, name: str | None, value: Any, meta: Any = None) -> None:
        if name is None:
            return
        with self._changed:
            if meta is not None:
                self.metas[name] = meta
            self.values[name] = value
            self.pending[name] = max(self.pending[name] - 1, 0)
            self._changed.notify_all()

    # -- calls -------------------------------------------------------------------------------------------------------

    def _next_hints(self) -> ReuseHints:
        """Return the hints of this call; a group applies to the first call only."""
        hints, self.hints = self.hints, ReuseHints(session=self.hints.session)
        return hints

    def _generate(self, part: Gen) -> None:
        outputs = self._outputs(part)
        self._plus(outputs[0].text)
        single = (part.sampling.n or self._defaults.n or 1) == 1
        texts, metas = [o.text for o in outputs], [o.meta for o in outputs]
        self._set(part.name, texts[0] if single else texts, metas[0] if single else metas)

    def _outputs(self, part: Gen) -> list[Generated]:
        sampling = part.sampling.over(self._defaults)
        if sampling.max_tokens == 0 and sampling.return_logprob:
            return self._next_token_logprobs(sampling)
        if self._streaming:
            return self.backend.generate(self.conversation, sampling, self._next_hints(), self._piece_logger(part.name))
        outputs = self.backend.generate(self.conversation, sampling, self._next_hints())
        self._log_piece(part.name, outputs[0].text)
        return outputs

    def _next_token_logprobs(self, sampling: SamplingOptions) -> list[Generated]:
        """Return no text and the log-probabilities of the next token: the result of a call of zero tokens that requests
        log-probabilities."""
        outputs = self.backend.generate(self.conversation, replace(sampling, max_tokens=1), self._next_hints())
        return [replace(output, text="") for output in outputs]

    def _select(self, part: Select) -> None:
        method, choices = part.method, part.choices
        scored, meta = self.backend.score(self.conversation, choices, method.unconditional, self._next_hints())
        decision = method(scored)
        shown = [[[p, t, None] for t, p in zip(each.tokens, each.logprobs, strict=True)] for each in scored]
        self._plus(choices[decision.index])
        details = {
            "normalized_prompt_logprobs": [each.mean for each in scored],
            "input_token_logprobs": shown,
            "output_token_logprobs": [[] for _ in scored],
            "scores": list(decision.scores),
        }
        self._log_piece(part.name, choices[decision.index])
        self._set(part.name, choices[decision.index], {**meta, **details, **decision.details})

    def _separate(self, part: SeparateReasoning) -> None:
        for inner in leaves(part.inner):
            if not isinstance(inner, Gen):
                self._part(inner)
                continue
            opened = self.conversation.chat and self.text().rstrip().endswith(part.begin)
            sampling = inner.sampling.over(self._defaults)
            output = self.backend.generate(self.conversation, sampling, self._next_hints())[0]
            reasoning, answer = split_reasoning(output.text, part.begin, part.end, opened)
            self._plus(answer)
            self._log_piece(inner.name, answer)
            if inner.name is not None:
                self._log_piece(reasoning_name(inner.name), reasoning)
                self._set(reasoning_name(inner.name), reasoning, output.meta)
            self._set(inner.name, answer, output.meta)

    def _join_forks(self, forks: Sequence[Any], mode: str) -> None:
        if mode == GATHER:
            own, found = set(self.values), dict[str, list[Any]]()
            for fork in forks:
                for name, value in fork.values().items():
                    if name not in own:
                        found.setdefault(name, []).append(value)
            for name, values in found.items():
                self._set(name, values)
            return
        for fork in forks:
            messages, text = fork.added()
            self._plus(text)
            if messages:
                self.conversation = replace(self.conversation, messages=(*self.conversation.messages, *messages))

    # -- streams -----------------------------------------------------------------------------------------------------

    def _log_piece(self, name: str | None, text: str) -> None:
        if name is not None:
            self.logs.setdefault(name, []).append(text)

    def _piece_logger(self, name: str | None) -> Any:
        own = self.logs.setdefault(name, []) if name is not None else []

        def log_piece(piece: str) -> None:
            with self._changed:
                own.append(piece)
                self.log.append(piece)
                self._logged += piece
                self._changed.notify_all()

        return log_piece

    def _log_text(self) -> None:
        """Log the new text for streams. If the template now renders the logged text differently, nothing is logged this
        time, and readers get only what is appended later."""
        if not self._streaming:
            return
        try:
            text = self.text()
        except RequestError:  # the template rejects a conversation that has only begun
            return
        with self._changed:
            if text.startswith(self._logged) and len(text) > len(self._logged):
                self.log.append(text[len(self._logged) :])
                self._changed.notify_all()
            self._logged = text


def failure(error: BaseException, line: str, what: str) -> ProgramError:
    """Return ``error`` as a ``ProgramError`` with the program's line."""
    failed = ProgramError(f"{what} at {line} failed: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed


def _named(expr: Expr) -> str:
    calls = calls_of(expr)
    if not calls:
        return type(expr).__name__.lower() if not isinstance(expr, ExprSeq) else "the prompt"
    return " and ".join(f"{type(call).__name__.lower()}({call.name!r})" for call in calls)


def _as_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"variable {name!r} is {value!r:.80}; only text can be a part of a prompt")
    return value
