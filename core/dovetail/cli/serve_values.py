"""Turn the flags of ``dovetail serve`` into config settings."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.cli.serve_flags import FLAGS, ServeFlag
from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from dovetail.registry.specs import ComponentSpec

Drafters = Callable[[], "list[ComponentSpec]"]
"""Return the specs of the drafters that are installed, which takes a moment."""

KEYS_VARIABLE = "_DOVETAIL_KEYS_OF_FLAGS"
"""The environment variable that holds the key file of ``--api-key``: digests, so that no output of the config and no
child process has the keys."""

_SPECULATIVE = {
    "speculative_draft_model_path": "path",
    "speculative_num_steps": "steps",
    "speculative_eagle_topk": "topk",
    "speculative_num_draft_tokens": "tokens",
}
_CONFIG_KEYS = {
    "num_speculative_tokens": "num_draft_tokens",
    "prompt_lookup_max": "max_ngram",
    "prompt_lookup_min": "min_ngram",
    "model": "path",
}


def settings_of(given: Mapping[str, Any], files: Sequence[Path] = (), sets: Sequence[str] = ()) -> dict[str, Any]:
    """Return the values of config keys. ``given`` has the values of flags by their ``parameter``. The config of ``files`` and
    ``sets`` says which plugins may be loaded, for flags that depend on the drafter. Raises ``ConfigError`` for two flags that
    set one key to different values."""
    settings: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for flag in FLAGS:
        value = given.get(flag.parameter)
        if value is None or value is False or value == [] or flag.parameter.startswith("speculative_"):
            continue
        for key, setting in _settings(flag, value).items():
            if settings.setdefault(key, setting) != setting:
                raise ConfigError(f"{flag.names[0]} and {origins[key]} contradict each other: both set {key}; keep one")
            origins[key] = flag.names[0]
    return settings | _speculative(given, partial(_drafters, files, sets))


def key_file(keys: Sequence[str]) -> str:
    """Return the text of a key file in which ``keys`` are an admin's. Raises ``ConfigError`` for an empty key."""
    from dovetail.config.tenants import key_digest

    if not all(keys):
        raise ConfigError("--api-key is empty; give a key, as `dovetail keys new` makes it")
    digests = list(dict.fromkeys(key_digest(key.encode()) for key in keys))
    return json.dumps({"admins": {"api-key": {"keys": digests}}})


def _settings(flag: ServeFlag, value: Any) -> Mapping[str, Any]:
    if flag.type is bool:
        return flag.sets
    if flag.parameter == "api_key":
        return {flag.key: f"env:{KEYS_VARIABLE}"}
    if flag.key == "adapters.load":
        return {flag.key: dict(map(_adapter, value)), "adapters.enabled": True}
    if flag.key == "adapters.modules":
        kinds = (kind for name in value for kind in _ADAPTED.get(name, ("linear",)))
        return {flag.key: list(dict.fromkeys(kinds))}
    if flag.repeatable and len(value) == 1:
        return {flag.key: value[0]}
    if flag.json:
        return {flag.key: _json(flag.names[0], value)}
    return {flag.key: flag.values.get(value, value) if isinstance(value, str) else value}


_ADAPTED: Mapping[str, tuple[str, ...]] = {
    "all": ("linear", "experts", "embedding", "head"),
    "all-linear": ("linear", "experts"),
    "experts": ("experts",),
    "embed_tokens": ("embedding",),
    "lm_head": ("head",),
}
"""The kinds of modules that names in ``--lora-target-modules`` stand for; other names stand for linear layers."""


def _adapter(text: str) -> tuple[str, str]:
    """Return the name and the directory of an adapter. Raises ``ConfigError``."""
    if text.startswith("{"):
        given = _json("--lora-modules", text)
        if not (isinstance(given, dict) and {"name", "path"} <= given.keys() <= {"name", "path", "base_model_name"}):
            raise ConfigError(
                f'--lora-modules is {text!r:.200}; allowed: name=directory, or {{"name": ..., "path": ...}}'
            )
        return str(given["name"]), str(given["path"])
    name, separator, path = text.partition("=")
    return (name, path) if separator else (text, text)


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is {text!r:.200}, which is not JSON: {error}") from None


def _speculative(given: Mapping[str, Any], drafters: Drafters) -> dict[str, Any]:
    """Return the section ``speculative`` that the flags of SGLang, or the JSON of vLLM, describe."""
    parts = {name: given[flag] for flag, name in _SPECULATIVE.items() if given.get(flag) is not None}
    algorithm, text = given.get("speculative_algorithm"), given.get("speculative_config")
    if text is not None:
        if parts or algorithm is not None:
            raise ConfigError("--speculative-config has all settings in it; leave out the other --speculative- flags")
        return {"speculative": _of_config(_json("--speculative-config", text), drafters())}
    if algorithm is None:
        if parts:
            raise ConfigError("the --speculative- flags need --speculative-algorithm, such as NGRAM or EAGLE3")
        return {}
    return {"speculative": _of_flags(algorithm, parts, drafters())}


def _drafters(files: Sequence[Path], sets: Sequence[str]) -> list[ComponentSpec]:
    from dovetail.config import plugins_section, read
    from dovetail.registry.loader import load_plugins
    from dovetail.registry.specs import ComponentKind

    registry = load_plugins(plugins_section(read(files, sets, os.environ)), strict=False)
    return [component.spec for component in registry.components(ComponentKind.DRAFTER)]


def _drafter(name: str, specs: Sequence[ComponentSpec], *, trees: bool) -> tuple[str, bool]:
    """Return the name of the drafter that ``name``, of any engine, stands for, and whether it drafts trees. Of several, it is one
    that does if ``trees`` are wanted, otherwise the one of this name. An unknown name stays as it is."""
    from dovetail.interfaces.features import Feature

    name = name.lower()
    known = [(Feature.DRAFT_TREE in spec.offers, spec) for spec in specs if name in (spec.name, *spec.aliases)]
    if not known:
        return name, False
    made, spec = max(known, key=lambda one: (trees and one[0], one[1].name == name))
    return spec.name, made


def _of_flags(algorithm: str, parts: dict[str, Any], specs: Sequence[ComponentSpec]) -> Any:
    """Return the drafter that SGLang's flags describe. Its numbers of draft tokens count the token before the drafts."""
    steps, topk, tokens = (parts.pop(name, None) for name in ("steps", "topk", "tokens"))
    kind, trees = _drafter(algorithm, specs, trees=(topk or 1) > 1)
    if trees:
        found = {"depth": steps, "topk": topk, "num_draft_tokens": tokens and tokens - 1}
    else:
        found = {"topk": topk if topk != 1 else None, "num_draft_tokens": steps or (tokens and tokens - 1)}
    settings = {key: value for key, value in {**parts, **found}.items() if value is not None}
    return {"kind": kind, **settings} if settings else kind


def _of_config(config: object, specs: Sequence[ComponentSpec]) -> dict[str, Any]:
    """Return the drafter that vLLM's object describes. Raises ``ConfigError`` for keys without a meaning here."""
    if not isinstance(config, dict):
        raise ConfigError('--speculative-config is no object; allowed: {"method": ..., "num_speculative_tokens": ...}')
    left = dict(config)
    method = str(left.pop("method", "draft_model" if "model" in left else "ngram"))
    kind, trees = _drafter(method, specs, trees=False)
    found = {name: left.pop(key) for key, name in _CONFIG_KEYS.items() if key in left}
    if left:
        raise ConfigError(
            f"--speculative-config has the key {sorted(left)[0]!r}; allowed: method, {', '.join(_CONFIG_KEYS)}"
        )
    if trees and (count := found.get("num_draft_tokens")):  # vLLM drafts chains
        found |= {"depth": count, "topk": 1}
    return {"kind": kind, **found}
