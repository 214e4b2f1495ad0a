"""Prepare a server that runs an experiment."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from dovetail.config import Config
from dovetail.experiment.online.arms import ArmsClient
from dovetail.experiment.online.comparison import ComparisonRow, Side
from dovetail.experiment.online.configs import arm_configs, check_arms
from dovetail.experiment.online.routes import OnlineExperiment
from dovetail.registry.installed import Registry
from dovetail.server.engine_process import EngineTarget
from dovetail.server.parts import ServerParts
from dovetail.tokenizer import Tokenizer


async def prepare_experiment(
    config: Config, registry: Registry, target: EngineTarget, tokenizer: Tokenizer
) -> ServerParts:
    """Resolve every arm of ``config.experiment`` and return the server's parts: the engines of all arms behind one handle, the
    routes of the experiment and its metrics. No engine has been started. Raises ``ConfigError`` or ``PluginError`` that names
    the arm. This is a ``server.parts.Prepare``."""
    arms = arm_configs(config, registry)
    await asyncio.to_thread(check_arms, arms)
    client = ArmsClient(config, arms, target, lambda ids: tokenizer.decode(list(ids)))
    return OnlineExperiment(config, client, _compare_arms).parts()


def _compare_arms(control: Side, others: Sequence[Side]) -> list[ComparisonRow]:
    """Compare the arms. The libraries that this needs are imported by the first comparison."""
    from dovetail.experiment.online.arm_statistics import compare_arms

    return compare_arms(control, others)
