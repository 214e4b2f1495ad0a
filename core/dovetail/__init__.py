"""Provide Dovetail, an LLM serving engine made of plugins.

Every name here is imported when it is first used, so that ``import dovetail`` costs nothing and imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dovetail import lang
from dovetail.garbage import pause_collections

if TYPE_CHECKING:
    from dovetail.config import Config, config_hash, load_config
    from dovetail.errors import (
        AccessError,
        AuthenticationError,
        ConfigError,
        ContextLengthError,
        DovetailError,
        DuplicateComponentError,
        EngineDeadError,
        EngineError,
        GrammarError,
        PageFormatError,
        PermissionDeniedError,
        PluginError,
        PluginLoadError,
        ProgramError,
        QueueFullError,
        RankLostError,
        RateLimitError,
        RequestError,
        ResolutionError,
        TimeLimitError,
        UnknownComponentError,
        WeightsError,
    )
    from dovetail.interfaces.features import Feature
    from dovetail.lang import *  # noqa: F403
    from dovetail.llm import LLM, Output
    from dovetail.registry import (
        ComponentKind,
        ComponentSpec,
        Constraints,
        Machine,
        Requirement,
        Resolved,
        hookimpl,
        resolve,
        setup,
    )
    from dovetail.sampling_params import GrammarKind, GrammarSpec, SamplingParams
    from dovetail.types import FinishReason

    __version__: str

_HOMES = {
    "config": ("Config", "config_hash", "load_config"),
    "errors": (
        "AccessError",
        "AuthenticationError",
        "ConfigError",
        "ContextLengthError",
        "DovetailError",
        "DuplicateComponentError",
        "EngineDeadError",
        "EngineError",
        "GrammarError",
        "PageFormatError",
        "PermissionDeniedError",
        "PluginError",
        "PluginLoadError",
        "ProgramError",
        "QueueFullError",
        "RankLostError",
        "RateLimitError",
        "RequestError",
        "ResolutionError",
        "TimeLimitError",
        "UnknownComponentError",
        "WeightsError",
    ),
    "interfaces.features": ("Feature",),
    "lang": tuple(lang.__all__),
    "llm": ("LLM", "Output"),
    "registry": (
        "ComponentKind",
        "ComponentSpec",
        "Constraints",
        "Machine",
        "Requirement",
        "Resolved",
        "hookimpl",
        "resolve",
        "setup",
    ),
    "sampling_params": ("GrammarKind", "GrammarSpec", "SamplingParams"),
    "types": ("FinishReason",),
}
_MODULE_OF = {name: f"dovetail.{module}" for module, names in _HOMES.items() for name in names}

__all__ = [
    "LLM",
    "AccessError",
    "AuthenticationError",
    "ComponentKind",
    "ComponentSpec",
    "Config",
    "ConfigError",
    "Constraints",
    "ContextLengthError",
    "DovetailError",
    "DuplicateComponentError",
    "EngineDeadError",
    "EngineError",
    "Feature",
    "FinishReason",
    "GrammarError",
    "GrammarKind",
    "GrammarSpec",
    "Machine",
    "Output",
    "PageFormatError",
    "PermissionDeniedError",
    "PluginError",
    "PluginLoadError",
    "ProgramError",
    "QueueFullError",
    "RankLostError",
    "RateLimitError",
    "RequestError",
    "Requirement",
    "ResolutionError",
    "Resolved",
    "SamplingParams",
    "TimeLimitError",
    "UnknownComponentError",
    "WeightsError",
    "__version__",
    "config_hash",
    "hookimpl",
    "load_config",
    "resolve",
    "setup",
]
__all__ += lang.__all__


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("dovetail")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'dovetail' has no attribute {name!r}")
    with pause_collections():
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
