"""Prepare an engine for the steps that it will meet: have their Triton kernels compiled in other processes, load them,
and say how far this and the captures are."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from dovetail.engine.device import lost_device
from dovetail.engine.dry_run import every_filter, first_layers, prompts
from dovetail.engine.graphs import GraphKey
from dovetail.interfaces.features import Feature
from dovetail.ops.sampling import Filters, greedy, sample

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.engine.graphs import DecodeGraphs
    from dovetail.interfaces.attention import AttentionBackend
    from dovetail.interfaces.model import ModelArchitecture, ModelInfo
    from dovetail.memory.pool import PagedKVPool
    from dovetail.ops.triton.ahead import KernelsAhead

log = logging.getLogger(__name__)

LAYERS, LAYERS_WITH_WINDOWS = 3, 8
"""The number of layers in which a step launches all kernels that it launches. Layers with and without a window follow
each other in models that have windows."""

PROMPT_TOKENS = 512
"""The number of tokens of the prompt whose kernels are noted. The kernels of few tokens are those of decode steps."""

VARIANTS = (0, 1)


class WarmUp:
    """Note the kernels of the steps of one engine, and load them. On a CPU, and if kernels are noted for another engine
    of this process, do nothing."""

    def __init__(self, device: torch.device, info: ModelInfo, *, alone: bool) -> None:
        """The processes that compile start now, unless an earlier engine with such a model has left nothing to compile.
        ``alone`` is False if the model is divided among ranks."""
        self._alone = alone
        self._layers = LAYERS_WITH_WINDOWS if Feature.ATTN_SLIDING_WINDOW in info.needs else LAYERS
        self._kernels = _kernels_ahead(device, repr(info))

    @torch.inference_mode()
    def note_prompts(
        self,
        model: ModelArchitecture,
        attention: Callable[[], AttentionBackend],
        pool: PagedKVPool,
        rows: int,
        dtype: torch.dtype,
    ) -> None:
        """Note the kernels of steps with prompts, and of sampling ``rows`` rows. ``attention`` builds the backend that
        attends in them over ``pool``."""

        def step() -> None:
            first_layers(model, prompts(attention(), pool, [PROMPT_TOKENS]), self._layers)
            draw(model.logits(torch.zeros(rows, model.info.hidden_size, dtype=dtype, device=pool.device)))

        if self._kernels is not None:
            with self._kernels.noting():
                self._try(step)

    def note_decode(self, graphs: DecodeGraphs) -> None:
        """Note the kernels of decode steps and of their sampling, in the order in which steps are likely. Nothing is
        noted after them."""
        if self._kernels is None:
            return
        start = time.perf_counter()
        with self._kernels.noting():
            self._try(lambda: self._rehearse(graphs))
        counts = self._kernels.counts
        seconds, where = time.perf_counter() - start, self._kernels.directory
        log.info("%d of %d Triton kernels are in %s (%.2f s)", counts.compiled, counts.noted, where, seconds)

    def load(self, graphs: DecodeGraphs) -> bool:
        """Load the kernels of decode steps onto the device, if all of them are compiled. Return True if it is done. The
        ranks of a model load nothing, because their steps wait for each other and their caches may differ."""
        if self._kernels is None or not self._alone or not self._kernels.wait(0.0):
            return False
        start = time.perf_counter()
        with self._kernels.loading():
            self._try(lambda: self._rehearse(graphs))
        log.info("loaded the kernels of decode steps (%.2f s)", time.perf_counter() - start)
        return True

    def release(self) -> None:
        """End the processes once everything is compiled."""
        if self._kernels is not None:
            self._kernels.release()

    def _try(self, step: Callable[[], None]) -> None:
        """Run ``step``. If it fails, log the error: its kernels are compiled when they are first launched."""
        try:
            step()
        except Exception as error:
            if lost_device(error):
                raise
            log.warning("some kernels cannot be compiled ahead: %s: %s", type(error).__name__, error, exc_info=True)

    @torch.inference_mode()
    def _rehearse(self, graphs: DecodeGraphs) -> None:
        for key in likely_keys(graphs):
            draw(graphs.rehearse(key, self._layers))

    def close(self) -> None:
        """End the processes."""
        if self._kernels is not None:
            self._kernels.close()


def draw(logits: torch.Tensor) -> None:
    """Sample in the usual ways: greedily, by temperature, and with every filter."""
    rows = len(logits)
    uniform = torch.full((rows,), 0.5, dtype=torch.float64, device=logits.device)
    filters = every_filter(rows, logits.device)
    greedy(logits)
    sample(logits, Filters(filters.temperature), uniform)
    sample(logits, filters, uniform)


def likely_keys(graphs: DecodeGraphs) -> Iterator[GraphKey]:
    """Return the keys of all decode steps, likely ones first: one row, and then sizes from the largest to the smallest,
    because many requests that arrive together end one by one."""
    sizes = [1, *(size for size in reversed(graphs.sizes) if size > 1)]
    return (GraphKey(rows, shared, variant) for shared in graphs.shared for variant in VARIANTS for rows in sizes)


def _kernels_ahead(device: torch.device, what: str) -> KernelsAhead | None:
    if device.type != "cuda":
        return None
    from dovetail.ops.triton.ahead import KernelsAhead

    major, minor = torch.cuda.get_device_capability(device)
    kernels = KernelsAhead(10 * major + minor, what)
    return kernels if kernels.is_active else None
