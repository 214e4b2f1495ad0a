"""Derive one complete config for each arm from a config with an experiment, and check all of them before an engine starts."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from dovetail.config import Config, dump, validate
from dovetail.config.longform import long_form
from dovetail.config.sources import Raw, SettingsSource
from dovetail.config.tree import Choices
from dovetail.errors import ConfigError, DovetailError, PluginError
from dovetail.tokenizer import load_tokenizer

SHARED = ("server", "plugins", "experiment")
"""Sections that configure the server and not an engine. Together with the sections of kinds ``of_server`` they are the same for all
arms."""


def arm_configs(config: Config, choices: Choices) -> dict[str, Config]:
    """Return the config of each arm that runs. The first one is the control, with which the others are compared. Raises
    ``ConfigError`` or ``PluginError`` that names the arm."""
    given = {key: value for key, value in dump(config).items() if key != "experiment"}
    tree = long_form(given, choices.sections)
    arms = config.experiment.arms
    return {name: _arm(name, tree, arms.get(name, {}), choices) for name in config.experiment.names}


def _arm(name: str, base: Mapping[str, Any], settings: Mapping[str, Any], choices: Choices) -> Config:
    own = long_form(settings, choices.sections)
    where = f"experiment.arms.{name}"
    shared = {*SHARED, *(section.key for section in choices.sections if section.of_server)}
    for key in own:
        if key in shared:
            raise ConfigError(
                f"{where}.{key} would differ between the arms of one server; set {key} at the top level of the config, for all arms"
            )
    if isinstance(own.get("model"), dict) and "served_name" in own["model"]:
        raise ConfigError(
            f"{where}.model.served_name cannot be set: all arms are served under one name; set model.served_name at the top level of the config"
        )
    try:
        return validate(Raw((SettingsSource(where, own),), choices.sections, dict(base)), choices)
    except (ConfigError, PluginError) as error:
        raise type(error)(f"arm {name}: {error}") from error


def check_arms(arms: Mapping[str, Config]) -> None:
    """Check that all arms have the same tokenizer, and resolve each. Raises ``ConfigError`` that names the first arm that is
    refused.

    A separate process resolves the configs, because the server process does not import torch and holds no device.
    """
    first, *others = arms
    for name in others:
        if arms[name].model != arms[first].model and _tokenizer_json(arms[name]) != _tokenizer_json(arms[first]):
            raise ConfigError(
                f"arm {name}: its tokenizer differs from the tokenizer of arm {first}; the arms of one server share one tokenizer, so "
                "choose models with the same tokenizer.json"
            )
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        for name, problem in zip(arms, pool.map(_refusal, arms.values()), strict=True):
            if problem is not None:
                raise ConfigError(f"arm {name}: {problem}")


def _refusal(config: Config) -> str | None:
    """Return why a config cannot run, or None if it can. Runs in a separate process."""
    from dovetail.registry.loader import load_plugins
    from dovetail.registry.machine import Machine
    from dovetail.registry.resolver import resolve

    try:
        resolve(config, load_plugins(config.plugins), Machine.detect(config.device))
    except DovetailError as error:
        return str(error)
    return None


def _tokenizer_json(config: Config) -> str:
    return load_tokenizer(config).json
