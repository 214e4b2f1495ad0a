"""Define every error that Dovetail raises on purpose.

    DovetailError
    ├── ConfigError (ValueError)          a setting is wrong: names the key, what was given, what is allowed
    ├── PluginError                       a plugin cannot be used
    │   ├── UnknownComponentError         no component of that kind has this name
    │   ├── DuplicateComponentError       two distributions claim one name
    │   ├── PluginLoadError               a plugin that was selected or required failed to load
    │   └── ResolutionError               the selected parts do not fit together or on this machine
    ├── RequestError (ValueError)         one request is wrong; the server answers 400 and continues
    │   ├── ContextLengthError            the prompt (or prompt plus max_new_tokens) is too long
    │   └── GrammarError                  a schema, regex or grammar that cannot be honoured
    ├── QueueFullError                    too many requests are waiting; the server answers 503
    ├── AccessError                       the client may not send this request
    │   ├── AuthenticationError           no key, or an unknown one; the server answers 401
    │   └── PermissionDeniedError         the key does not permit this request; the server answers 403
    ├── RateLimitError                    a tenant's limit is reached; the server answers 429 with a time to retry
    ├── TimeLimitError                    the request ran longer than it may; the server answers 504
    ├── PageFormatError (ValueError)      exported pages of KV memory cannot be imported; ``fault`` names why
    ├── ProgramError                      a part of a program failed: names its line, the cause is chained
    └── EngineError                       the engine failed, not the request
        ├── WeightsError                  a checkpoint does not fit its architecture
        ├── RankLostError                 another rank has ended, or did not answer in time
        └── EngineDeadError               the engine process has ended

Messages state what was given, what is allowed and what to do next.
"""

from __future__ import annotations


class DovetailError(Exception):
    """Serve as the base class of every error that Dovetail raises on purpose."""


class ConfigError(DovetailError, ValueError):
    """Raised when a setting is wrong. The message names the key, what was given and what is allowed."""


class PluginError(DovetailError):
    """Raised when a plugin cannot be used."""


class UnknownComponentError(PluginError, LookupError):
    """Raised when no component of a kind has the given name. The message lists the installed components."""


class DuplicateComponentError(PluginError):
    """Raised when two distributions register one name. The message names both."""


class PluginLoadError(PluginError):
    """Raised when a plugin that the config selects or requires fails to load. The cause is chained."""


class ResolutionError(PluginError):
    """Raised when the selected parts do not fit together or on this machine. The message gives every reason."""


class RequestError(DovetailError, ValueError):
    """Raised when one request is wrong. The server answers it with 400 in its API's own format.

    ``param`` is the request field at fault, or None; ``code`` is a short machine-readable word.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """Raised when the prompt, or the prompt plus ``max_new_tokens``, exceeds what the model or the KV pool can hold."""

    def __init__(self, message: str, *, param: str | None = "prompt") -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class PageFormatError(DovetailError, ValueError):
    """Raised when exported pages of KV memory cannot be imported. ``fault`` is a short word: ``magic``, ``version``,
    ``truncated``, ``checksum``, ``header``, ``layout``, ``pages`` or ``size``."""

    def __init__(self, fault: str, message: str) -> None:
        super().__init__(f"{fault}: {message}")
        self.fault = fault


class GrammarError(RequestError):
    """Raised when a constraint (schema, regex, grammar) is invalid or the grammar backend cannot honour it.

    ``keyword`` names the part of the constraint that this backend does not support and another backend might
    (``uniqueItems``, ``(?=``); the code is then ``unsupported_grammar``. If ``keyword`` is None, the constraint is
    wrong for every backend.
    """

    def __init__(self, message: str, *, param: str | None = None, keyword: str | None = None) -> None:
        super().__init__(message, param=param, code="invalid_grammar" if keyword is None else "unsupported_grammar")
        self.keyword = keyword


class QueueFullError(DovetailError):
    """Raised when the waiting queue has reached its configured limit. The client may retry later."""


class AccessError(DovetailError):
    """Raised when the client may not send this request, before any of the request's body is read."""


class AuthenticationError(AccessError):
    """Raised when a request has no key, or one that the server does not know (401)."""


class PermissionDeniedError(AccessError):
    """Raised when the key is known and does not permit this route, or when the host name or the origin of the request
    is not allowed (403)."""


class RateLimitError(DovetailError):
    """Raised when a limit of the tenant is reached (429). ``retry_after`` is the number of seconds until the same
    request could be accepted. ``pause`` is the number of seconds by which the server delays this answer; it is above 0
    if these answers are so frequent that they would take time from other clients.
    """

    def __init__(self, message: str, retry_after: float, pause: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.pause = pause


class TimeLimitError(DovetailError):
    """Raised when the request ran longer than ``max_seconds`` (504). Sending it again would take as long."""


class ProgramError(DovetailError):
    """Raised when a part of a program (``dovetail.lang``) fails. The message names the program's line; ``__cause__`` is
    the error that occurred there."""


class EngineError(DovetailError):
    """Raised when the engine fails while it works on a valid request."""


class WeightsError(EngineError):
    """Raised when a checkpoint does not fit its architecture: a tensor is missing, unexpected or of the wrong shape."""


class RankLostError(EngineError):
    """Raised when another rank of a divided model has ended or did not answer in time. The engine must be started
    again."""


class EngineDeadError(EngineError):
    """Raised when the engine process has ended. Nothing can be served until it is restarted."""
