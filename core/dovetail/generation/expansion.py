"""Expand a request for n outputs of one prompt into n messages to the engine."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Sequence

import numpy as np

from dovetail.messages import GenerateMsg
from dovetail.ops.random import GAMMA, mix
from dovetail.sampling_params import SamplingParams

_seeds = random.Random()  # seeded by the system once; a request of thousands of prompts needs as many numbers
os.register_at_fork(after_in_child=_seeds.seed)


def expand(
    ids: list[int],
    params: SamplingParams,
    rids: Sequence[str],
    *,
    namespace: str = "",
    priority: int = 0,
    group: str = "",
    group_size: int = 1,
    session: str = "",
    tenant: str = "",
    weight: float = 1.0,
    adapter: str = "",
    adapter_directory: str = "",
    adapter_param: str = "model",
) -> list[GenerateMsg]:
    """Return one message for each of ``rids``, the ids of the ``params.n`` outputs of the prompt ``ids``.

    Each message has its own seed, derived from ``params.seed`` or, if that is None, from a random number. If there are
    several outputs and no ``group``, the outputs become a group, so that the engine computes their prompt once.
    """
    seed = _seeds.getrandbits(63) if params.seed is None else params.seed
    if params.n != 1:
        params = dataclasses.replace(params, n=1)
    if len(rids) > 1 and not group:
        group, group_size = f"{rids[0]}/n", len(rids)
    hints = namespace, priority, group, group_size, session, tenant, weight
    lora = adapter, adapter_directory, adapter_param
    return [GenerateMsg(rid, ids, params, derive_seed(seed, i), *hints, *lora) for i, rid in enumerate(rids)]


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of output ``index`` of a request. Output 0 has the request's own seed."""
    if index == 0:
        return seed
    start = np.array([seed], np.int64).astype(np.uint64)
    mixed = mix(start + np.array([index], np.uint64) * GAMMA)
    return int(mixed.astype(np.int64)[0])
