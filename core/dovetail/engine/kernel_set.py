"""Name the kernels that an engine compiles ahead. Does not import torch, so that commands that only report are quick."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail.registry import Resolved


def kernel_set(resolved: Resolved) -> str:
    """Return a text that is the same for engines that compile the same kernels ahead, in every process: it does not
    depend on the order of sets, which differs between processes."""
    config, info = resolved.config, resolved.model_info
    parts = {
        "model": {one.name: getattr(info, one.name) for one in fields(info) if one.repr},
        "tp": [config.parallel.tp, config.parallel.experts, config.parallel.attention],
        "dtype": [config.model.dtype, config.memory.kv_dtype],
        "batch_invariant": config.batch_invariant,
        "attention": [resolved.attention_prefill.name, resolved.attention_decode.name],
        "quantization": resolved.quantization and [resolved.quantization.name, info.quantization],
        "store": [resolved.store.name, repr(resolved.store.config)],
        "experts": resolved.experts and resolved.experts.name,
        "mixer": resolved.mixer and resolved.mixer.name,
        "drafter": resolved.drafter and resolved.drafter.name,
        "max_running": config.scheduler.rows,
        "page_size": config.memory.page_size,
    }
    return json.dumps(parts, default=_plain)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else repr(value)
