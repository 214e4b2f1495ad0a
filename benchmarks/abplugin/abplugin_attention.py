"""Run the attention of ``torch_native`` in steps that take longer than they need to."""

from __future__ import annotations

import time

from abplugin_config import SlowedConfig

from dovetail.interfaces.attention import AttentionContext
from dovetail.types import Batch
from dovetail_attention.torch_native import TorchNativeAttention

IDLE_SECONDS = 0.05
"""A longer pause between two steps does not count as work of a step."""


class Slowed(TorchNativeAttention):
    """Spin at the start of each step for a share of the time that the previous step took."""

    def __init__(self, config: SlowedConfig, context: AttentionContext) -> None:
        super().__init__(config, context)
        self._share = config.share
        self._began: float | None = None

    def plan(self, batch: Batch) -> None:
        """See ``AttentionBackend.plan``."""
        now = time.perf_counter()
        took = now - self._began if self._began is not None else 0.0
        if took < IDLE_SECONDS:
            until = now + self._share * took
            while time.perf_counter() < until:
                pass
        self._began = time.perf_counter()  # the added time is not counted
        super().plan(batch)
