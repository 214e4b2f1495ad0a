"""Prepare an engine for the steps that it will run: have their Triton kernels compiled in other processes, load them,
and report the progress of this and of the captures."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

from dovetail.engine.captures import try_capture
from dovetail.engine.device import first_line, lost_device
from dovetail.engine.dry_run import ZeroedMemory, every_filter, first_layers, prompts
from dovetail.engine.graphs import GraphKey
from dovetail.errors import RankLostError
from dovetail.interfaces.executor import WarmUpProgress
from dovetail.interfaces.features import Feature
from dovetail.layers.experts import experts_left_out
from dovetail.ops.sampling import Filters, greedy, sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail.engine.captures import Captures
    from dovetail.engine.draft_graphs import DraftGraphs
    from dovetail.engine.graphs import DecodeGraphs
    from dovetail.engine.grouped import Pools
    from dovetail.engine.pieces import StepSeconds
    from dovetail.engine.verify_graphs import VerifyGraphs
    from dovetail.interfaces.attention import AttentionBackend
    from dovetail.interfaces.mesh import Mesh
    from dovetail.interfaces.model import ModelArchitecture, ModelInfo
    from dovetail.ops.triton.ahead import KernelsAhead
    from dovetail.types import Batch

log = logging.getLogger(__name__)

LAYERS, LAYERS_WITH_WINDOWS = 3, 8
"""The number of layers in which a step launches all kernels that it launches. Layers with and without a window follow
each other in models that have windows."""

PROMPT_TOKENS = (512, 1, 128, 64, 32, 16)
"""The numbers of tokens of the prompts whose kernels are noted. Products of up to 128 rows have kernels for each of
these sizes, which decode steps launch as well: they are noted before the memory is measured, so that they are compiled
in that time."""

EXPERT_TOKENS = (4096, 1024, 256)
"""Further numbers of tokens for models with experts, whose products have other tiles for longer prompts
(``ops.triton.expert_tiles``)."""

VARIANTS = (0, 1)
"""The variants of the attention backend's decode steps whose kernels are noted (``GraphKey.variant``)."""

MOST_PROCESSES = 32
"""There are at most this many processes that compile kernels, and about as many as processors."""

LARGE_STEPS = 5.0
"""The ratio of the device's time for the largest prompts of a step to the host's time for launching them from which on fewer steps are
captured at the start (``WarmUp.start``). By the estimates of ``step_seconds`` it is 18 for Llama-3.1-8B on an H200 and 1.2 for Qwen3-0.6B."""

BUSY_TOKENS = 1024
"""Steps with prompts of at least this number of tokens take the device longer than a capture takes the host, or about
as long."""


class WarmUp:
    """Prepare one engine: note the kernels of its steps, load them, and capture graphs while there is no other work. On
    a CPU, and if kernels are noted for another engine of this process, no kernels are noted."""

    def __init__(
        self,
        device: torch.device,
        info: ModelInfo,
        mesh: Mesh,
        *,
        attend_prefill: bool = True,
        attend_decode: bool = True,
        kernel_set: str = "",
        settings: str = "",
    ) -> None:
        """The processes that compile start now, unless an earlier engine with the same ``kernel_set`` (see
        ``engine.kernel_set``) has left nothing to compile. If it had the same ``settings`` too (see ``KernelsAhead``), nothing is noted.
        All ranks of ``mesh`` call the same methods. ``attend_prefill`` and ``attend_decode`` are True if the attention
        backend offers attention.rehearsal; otherwise attention is left out of the steps that only note or load kernels,
        because it would read memory that Triton has not written."""
        self._mesh = mesh
        self._attend_prefill, self._attend_decode = attend_prefill, attend_decode
        self._kernel_cache: str | None = None
        if device.type == "cuda":
            from dovetail.ops.triton.kernel_cache import cache_directory

            self._kernel_cache = str(cache_directory())
        self._likely: list[GraphKey] = []  # steps to capture as soon as their kernels are compiled
        self._positions: dict[Any, int] = {}  # of the kernels of each key, see ``KernelsAhead.position``
        self._idle: IdleCaptures | None = None  # from the first to the last capture of idle moments
        self._without_experts: nn.Module | None = None
        self._layers = LAYERS_WITH_WINDOWS if Feature.ATTN_SLIDING_WINDOW in info.needs else LAYERS
        self._kernels = _kernels_ahead(device, kernel_set, settings, mesh.tp.size)

    def leave_out_experts(self, model: nn.Module) -> None:
        """Leave the experts of ``model`` out of the steps that only note or load kernels, because their backend does not
        offer experts.rehearsal: it would read memory that Triton has not written."""
        self._without_experts = model

    def _experts_left_out(self) -> AbstractContextManager[None]:
        return nullcontext() if self._without_experts is None else experts_left_out(self._without_experts)

    @property
    def kernel_cache(self) -> str | None:
        """Return the directory of Triton's cache, or None if this process launches no kernels of Triton."""
        return self._kernel_cache

    @torch.inference_mode()
    def note_prompts(
        self,
        model: ModelArchitecture,
        attention: Callable[[], AttentionBackend],
        pool: Pools,
        rows: int,
        dtype: torch.dtype,
    ) -> None:
        """Note the kernels of steps with prompts, and of sampling up to ``rows`` rows. ``attention`` builds the backend
        that attends in them over ``pool``."""

        def step() -> None:
            backend, attend = attention(), self._attend_prefill
            for tokens in PROMPT_TOKENS if model.info.expert_sizes is None else (*PROMPT_TOKENS, *EXPERT_TOKENS):
                batch = prompts(backend, pool, [min(tokens, model.info.context_len)], plan=attend)
                first_layers(model, batch, self._layers, attend=attend)
                hidden = torch.zeros(min(tokens, rows), model.info.hidden_size, dtype=dtype, device=pool.device)
                draw(model.logits(hidden))
            one = torch.zeros(1, model.info.hidden_size, dtype=dtype, device=pool.device)
            draw(model.logits(one).float())  # logits that are processed before sampling are float32

        self._note(step)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """While a step runs whose memory is measured, launch no kernel that Triton compiles, unless all that were noted
        are compiled: the step allocates the same memory without them, and other work goes on while they are compiled.
        All ranks launch them or none does. Backends without attention.rehearsal or experts.rehearsal need what kernels
        write."""
        kernels, rehearses = self._kernels, self._attend_prefill and self._without_experts is None
        waits = kernels is not None and kernels.is_active and rehearses and not kernels.wait(0.0)
        if self._mesh.tp.agree(waits) and kernels is not None:
            with kernels.noting():
                yield
            return
        if kernels is not None:
            kernels.wait_for_triton()
        yield

    def note_decode(self, graphs: DecodeGraphs) -> None:
        """Note the kernels of decode steps and of their sampling, in the order in which steps are likely."""
        start = time.perf_counter()

        def step() -> None:
            for key in likely_keys(graphs):
                self._rehearse(graphs, key)
                self._record(key)

        noted = self._note(step)
        if self._kernels is not None and (noted or self._kernels.is_known):
            counts = self._kernels.counts
            seconds, where = time.perf_counter() - start, self._kernels.directory
            log.info("%d of %d Triton kernels are in %s (%.2f s)", counts.compiled, counts.noted, where, seconds)

    def note_verify(self, graphs: VerifyGraphs) -> None:
        """Note the kernels of verify steps. After ``release``, do nothing."""
        attend = self._attend_decode

        def step() -> None:
            graphs.rehearse_uncaptured(self._layers, attend=attend)
            for key in graphs.missing():
                graphs.rehearse(key, self._layers, attend=attend)
                self._record(key)

        self._note(step)

    def note_drafts(self, graphs: DraftGraphs) -> None:
        """Note the kernels of a drafter's passes. After ``release``, and for backends that read what kernels write, do
        nothing."""
        if not self._attend_decode or self._without_experts is not None:
            return

        def step() -> None:
            for key in graphs.likely(VARIANTS):
                with ZeroedMemory():
                    graphs.rehearse(key)
                self._record(key)

        self._note(step)

    def start(self, graphs: DecodeGraphs, seconds: StepSeconds, chunk: int) -> bool:
        """If all kernels of decode steps are compiled, on all ranks, load them onto the device and capture the steps
        that are most likely, within a second. Return True if this is done.

        If the largest prompts of a step, of ``chunk`` tokens, take the device ``LARGE_STEPS`` times as long as the host needs to
        launch them, the steps with shared prefixes are captured when they are needed or while the engine is idle: such a capture then delays requests by little
        compared with the prompts before it. Several ranks capture all steps now, because they capture none between steps."""
        self._likely = [GraphKey(rows, shared) for rows in reversed(graphs.sizes) for shared in graphs.shared]
        compiled = self._kernels is not None and self._kernels.wait(0.0)
        if not self._mesh.tp.agree(compiled):
            return False
        if self._mesh.tp.size == 1 and chunk * seconds.token > LARGE_STEPS * seconds.launch:
            self._likely = [key for key in self._likely if not key.shared]
        start = time.perf_counter()
        while self._prepare_next(graphs):
            pass
        log.info("warm-up: captured %d decode steps in %.2f s", graphs.num_captured, time.perf_counter() - start)
        return True

    def between_steps(self, graphs: DecodeGraphs | None, batch: Batch) -> None:
        """Capture one of the most likely steps whose kernels are compiled, if ``batch``, which was launched last, keeps
        the device busy for longer than that takes. Other kernels may still be compiled. Ranks of one model do this at the
        start only, because their captures must not depend on when their kernels are compiled."""
        if not self._likely or graphs is None or batch.num_extend == 0 or self._mesh.tp.size > 1:
            return
        if batch.num_tokens >= BUSY_TOKENS and self._kernels is not None:
            self._prepare_next(graphs)

    def _prepare_next(self, graphs: DecodeGraphs) -> bool:
        """Load the kernels of the first of the most likely steps whose kernels are compiled, and capture it. Return False
        if there is none."""
        kernels = self._kernels
        assert kernels is not None
        last = kernels.position
        for key in tuple(self._likely):
            if graphs.is_captured(key) or key in graphs.refused:
                self._likely.remove(key)
                continue
            if not kernels.has_compiled(self._positions.get(key, last)):
                continue
            self._likely.remove(key)
            with self._experts_left_out(), kernels.loading():
                loaded = self._try(lambda: self._rehearse(graphs, key))  # noqa: B023 (called at once)
            # otherwise the backend plans, or computes experts, in the run before the capture
            if loaded and self._attend_decode and self._without_experts is None:
                graphs.loaded.add(key)
            try_capture(graphs, key)
            return True
        return False

    def release(self) -> None:
        """End the processes once everything is compiled."""
        if self._kernels is not None:
            self._kernels.release()

    def capture_next(self, captures: Sequence[Captures[Any]]) -> bool:
        """Try to capture one missing graph whose kernels are compiled: a request that arrives must not wait until they
        are. Return False if there is none. Log the first and the last of the graphs that are captured while there is no
        other work, and show a progress bar on a terminal."""
        missing = [(graphs, key) for graphs in captures for key in graphs.missing()]
        if not missing:
            if self._idle is not None:
                self._idle.close(self.progress(captures))
                self._idle = None
            return False
        found = self._first_compiled(missing)
        if found is None:
            return False
        if self._idle is None:
            self._idle = IdleCaptures(self.progress(captures).graphs_missing, shown=self._mesh.tp.rank == 0)
        start = time.perf_counter()
        try_capture(*found)
        self._idle.advance(time.perf_counter() - start)
        return True

    def _record(self, key: object) -> None:
        """Record that the kernels of the step of ``key`` are noted."""
        assert self._kernels is not None
        self._positions[key] = self._kernels.position

    def _first_compiled(self, missing: Sequence[tuple[Captures[Any], Any]]) -> tuple[Captures[Any], Any] | None:
        """Return the first of ``missing`` whose kernels are compiled, or None. Graphs whose kernels were not noted, such as
        those of steps with prompts, wait for all kernels. Ranks must capture the same graphs: they wait until all kernels
        are compiled on all ranks."""
        kernels, ranks = self._kernels, self._mesh.tp
        if ranks.size > 1:
            return missing[0] if ranks.agree(kernels is None or kernels.wait(0.0)) else None
        if kernels is None:
            return missing[0]
        last = kernels.position
        return next((one for one in missing if kernels.has_compiled(self._positions.get(one[1], last))), None)

    @property
    def wait_seconds(self) -> float:
        """Return the seconds for which launches have waited for processes that compile."""
        return 0.0 if self._kernels is None else self._kernels.waited

    def progress(self, captures: Sequence[Captures[Any]]) -> WarmUpProgress:
        """Return the numbers of kernels and graphs that are ready and that are missing."""
        counts = (0, 0, 0) if self._kernels is None else self._kernels.counts
        captured = sum(graphs.num_captured for graphs in captures)
        missing = sum(1 for graphs in captures for _ in graphs.missing())
        return WarmUpProgress(
            counts[0], counts[1] + counts[2], captured, missing, sum(len(graphs.refused) for graphs in captures)
        )

    def _note(self, step: Callable[[], object]) -> bool:
        """Note the kernels of ``step`` and return True. If kernels cannot be noted, on this rank or on another, or if all ranks
        know that they are compiled, do nothing and return False: ranks may communicate in ``step``, and must all run it or none of them."""
        kernels = self._kernels
        active = kernels is not None and kernels.is_active
        if not self._mesh.tp.agree(active) or kernels is None or self._mesh.tp.agree(kernels.is_known):
            return False
        with self._experts_left_out(), kernels.noting():
            self._try(step)
        return True

    def _try(self, step: Callable[[], object]) -> bool:
        """Run ``step`` and return True. If it fails, log the error and return False: its kernels are compiled or loaded
        when they are first launched. Raises ``RankLostError`` if it fails on some ranks only: their collectives would
        meet others from then on."""
        done, tp = True, self._mesh.tp
        try:
            step()
        except Exception as error:
            if isinstance(error, RankLostError) or lost_device(error):
                raise
            log.warning("some kernels cannot be compiled ahead: %s: %s", type(error).__name__, first_line(error))
            log.debug("the step whose kernels are not compiled ahead", exc_info=True)
            done = False
        if not tp.agree(done) and not tp.agree(not done):
            raise RankLostError(
                f"the kernels of a step could not be prepared on some of {tp.size} ranks (rank {tp.rank} "
                f"{'could' if done else 'could not'}), so that the ranks cannot run the same steps any more; the logs say why"
            )
        return done

    @torch.inference_mode()
    def _rehearse(self, graphs: DecodeGraphs, key: GraphKey) -> None:
        draw(graphs.rehearse(key, self._layers, attend=self._attend_decode))

    def close(self) -> None:
        """End the processes."""
        if self._kernels is not None:
            self._kernels.close()


class IdleCaptures:
    """Report the captures of idle moments: in the log, and with a progress bar on a terminal."""

    def __init__(self, missing: int, console: Console | None = None, *, shown: bool = True) -> None:
        """``missing`` is the number of graphs to capture. Without ``shown``, there is no bar."""
        console = console or Console(stderr=True)
        self._count, self._seconds = 0, 0.0
        shown = shown and console.is_terminal
        self._bar = Progress(console=console, transient=True, auto_refresh=False) if shown else None
        if self._bar is not None:
            self._task = self._bar.add_task("capturing graphs", total=missing)
            self._bar.start()
        log.info("warm-up: %d graphs are captured while no request is running", missing)

    def advance(self, seconds: float) -> None:
        """Record a capture that took ``seconds``."""
        self._count += 1
        self._seconds += seconds
        if self._bar is not None:
            self._bar.advance(self._task)
            self._bar.refresh()

    def close(self, progress: WarmUpProgress) -> None:
        """Report the end."""
        if self._bar is not None:
            self._bar.stop()
        log.info(
            "warm-up: done; captured %d graphs in %.1f s, %d in all; %d could not be captured",
            self._count,
            self._seconds,
            progress.graphs_captured,
            progress.graphs_refused,
        )


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
    because many requests that arrive together end one by one. Steps of a size with and without shared prefixes follow each
    other: they have all kernels but those of attention in common, and either may come first."""
    sizes = [1, *(size for size in reversed(graphs.sizes) if size > 1)]
    return (
        GraphKey(rows, shared, variant)
        for variant in VARIANTS
        for rows in sizes
        if graphs.graph_has_variant(variant, rows)
        for shared in graphs.shared
    )


def _kernels_ahead(device: torch.device, kernel_set: str, settings: str, ranks: int) -> KernelsAhead | None:
    if device.type != "cuda":
        return None
    from dovetail.ops.triton.ahead import KernelsAhead

    major, minor = torch.cuda.get_device_capability(device)
    processors = (len(os.sched_getaffinity(0)) - 1) // ranks  # the ranks compile the same kernels at the same time
    exact = f"{settings} {torch.cuda.get_device_name(device)}" if settings else ""
    processes = max(1, min(MOST_PROCESSES, processors))
    kernels = KernelsAhead(10 * major + minor, kernel_set, processes, device, settings=exact)
    return kernels if kernels.is_active else None
