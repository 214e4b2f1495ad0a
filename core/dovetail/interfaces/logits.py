"""Define logits processors: components that change the logits of the requests that name them.

A request names processors in ``SamplingParams.logits_processors``, each with its own parameters. The parameters are
validated when the request is admitted, with the class that the component's config names (``LogitsProcessorConfig``), and
travel to the engine once. In each step the engine calls ``LogitsProcessor.process`` once with all rows of logits whose
requests use the processor; if a request names several, they are applied in its order. They are applied after biases and
penalties, and before ``min_new_tokens``, bitmasks, temperature and filters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict

from dovetail.config.plugin import PluginConfig

if TYPE_CHECKING:
    import torch

    from dovetail.types import IntArray


class ProcessorParams(BaseModel):
    """Hold the parameters that a request gives to one processor. Subclasses add their fields. Unknown keys are
    refused, and a missing field without a default is the client's error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class LogitsProcessorConfig(PluginConfig):
    """Hold the settings of a processor, which all requests share. ``params`` is the class of a request's parameters. The
    server's process imports it, so its module must be light."""

    params: ClassVar[type[ProcessorParams]] = ProcessorParams


@dataclass(frozen=True, slots=True)
class ProcessorContext:
    """Describe the engine that a processor is built for. ``eos_token_ids`` are the tokens that end an output."""

    device: torch.device
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class ProcessedRow:
    """Describe one row of logits.

    ``token_ids`` (int32, read-only) are the tokens before the one that is chosen from the row, prompt and output. The
    first ``prompt_len`` of them are the prompt. The first ``known_len`` are certain; the others are drafts, which may be
    rejected: only processors that offer ``logits.drafts`` get such rows, one for each draft.

    ``state`` is what ``LogitsProcessor.begin`` returned for the request. From one call to the next, the first
    ``known_len`` tokens of a request stay, and some are added. A request that was retracted begins again, with a new
    state and all tokens that it has.
    """

    params: Any
    prompt_len: int
    known_len: int
    token_ids: IntArray
    state: Any = None


class LogitsProcessor(ABC):
    """Change logits. One instance serves all requests of an engine; each rank of a group has one, and gets the same
    rows. Calls come from one thread.

    What a processor remembers of a request belongs into the request's state: the engine drops it when the request has
    left. A component that offers ``logits.drafts`` processes rows of drafts; without it, the requests that name it are
    decoded without drafts. ``logits.batch_invariant`` means that the bits of a row do not depend on the other rows of a
    call; ``batch_invariant`` needs it.
    """

    @abstractmethod
    def __init__(self, config: Any, context: ProcessorContext) -> None:
        """Prepare what all requests share."""

    def begin(self, params: Any) -> Any:
        """Return the state of a request with these parameters, which were validated. The default is None."""
        return None

    @abstractmethod
    def process(self, logits: torch.Tensor, rows: Sequence[ProcessedRow]) -> None:
        """Change ``logits`` (float32 ``[len(rows), V]``, on the device of the context) in place; row i belongs to
        ``rows[i]``.

        A logit of -inf forbids a token; nan counts as -inf. If everything else is forbidden too (by a constraint, for
        example), a forbidden token is chosen nevertheless. If the call raises, the requests of its rows end with the error, and no
        other request is affected.
        """
