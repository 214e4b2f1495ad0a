"""Every error Dovetail raises on purpose.

    DovetailError
    ├── ConfigError (ValueError)          a setting is wrong: names the key, what was given, what is allowed
    ├── PluginError                       a plugin cannot be used
    │   ├── UnknownComponentError         no component of that kind has this name
    │   ├── DuplicateComponentError       two distributions claim one name
    │   ├── PluginLoadError               a plugin that was selected or required failed to load
    │   └── ResolutionError               the selected parts do not fit together or on this machine
    ├── RequestError (ValueError)         one request is wrong; the server answers 400 and serves on
    │   ├── ContextLengthError            the prompt (or prompt plus max_new_tokens) is too long
    │   └── GrammarError                  a schema, regex or grammar that cannot be honoured
    ├── QueueFullError                    too many requests are waiting; the server answers 503
    ├── AccessError                       who asks may not
    │   ├── AuthenticationError           no key, or none that is known; the server answers 401
    │   └── PermissionDeniedError         the key does not open this; the server answers 403
    ├── RateLimitError                    a tenant's limit; the server answers 429 and says when to come again
    ├── TimeLimitError                    the request ran longer than it may; the server answers 504
    ├── ProgramError                      a part of a program failed: names its line, the cause is chained
    └── EngineError                       the engine failed, not the request
        ├── WeightsError                  a checkpoint does not fit its architecture
        └── EngineDeadError               the engine process has ended

Messages say what was given, what is allowed and what to do next.
"""

from __future__ import annotations


class DovetailError(Exception):
    """Root of every error raised on purpose."""


class ConfigError(DovetailError, ValueError):
    """A setting is wrong. The message names the key, what was given and what is allowed."""


class PluginError(DovetailError):
    """A plugin cannot be used."""


class UnknownComponentError(PluginError, LookupError):
    """No component of this kind has this name; the message lists those that are installed."""


class DuplicateComponentError(PluginError):
    """Two distributions register one name; the message names both."""


class PluginLoadError(PluginError):
    """A plugin that the config selects or requires failed to load; the cause is chained."""


class ResolutionError(PluginError):
    """The selected parts do not fit together or on this machine; the message gives every reason."""


class RequestError(DovetailError, ValueError):
    """One request is wrong: it is answered with 400 in its API's own format.

    ``param`` is the request field at fault, where there is one; ``code`` is a short machine-readable word.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """The prompt, or the prompt plus ``max_new_tokens``, exceeds what the model or the KV pool can hold."""

    def __init__(self, message: str, *, param: str | None = "prompt") -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class GrammarError(RequestError):
    """A constraint (schema, regex, grammar) is invalid or cannot be honoured by the grammar backend.

    ``keyword`` is what this backend has no support for, where another might have it (``uniqueItems``, ``(?=``): the code is
    then ``unsupported_grammar``. Without one the constraint is wrong for every backend.
    """

    def __init__(self, message: str, *, param: str | None = None, keyword: str | None = None) -> None:
        super().__init__(message, param=param, code="invalid_grammar" if keyword is None else "unsupported_grammar")
        self.keyword = keyword


class QueueFullError(DovetailError):
    """The waiting queue is at its configured bound; the client may retry later."""


class AccessError(DovetailError):
    """Who asks may not. Raised before anything of the request's body is read."""


class AuthenticationError(AccessError):
    """There is no key, or none that is known here (401)."""


class PermissionDeniedError(AccessError):
    """The key is known and does not open this route, or the page that asks is not allowed to (403)."""


class RateLimitError(DovetailError):
    """A limit of the tenant is reached (429). ``retry_after``: seconds until the same request could be taken. ``pause``: seconds
    after which the client is told, where it is told so often that this takes the time of others."""

    def __init__(self, message: str, retry_after: float, pause: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.pause = pause


class TimeLimitError(DovetailError):
    """The request ran longer than ``max_seconds`` (504). To send it again would cost as much."""


class ProgramError(DovetailError):
    """A part of a program (``dovetail.lang``) failed. The message names the program's line; ``__cause__`` is what happened."""


class EngineError(DovetailError):
    """The engine failed while it worked on a request that was valid."""


class WeightsError(EngineError):
    """A checkpoint does not fit its architecture: a tensor is missing, unexpected or of the wrong shape."""


class EngineDeadError(EngineError):
    """The engine process has ended; nothing can be served until it is restarted."""
