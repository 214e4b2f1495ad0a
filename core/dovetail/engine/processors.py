"""Apply the logits processors that requests name, in their order, and keep the processors' state of each request."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from dovetail.engine.penalties import path_tokens
from dovetail.engine.settings import BLOCKED
from dovetail.interfaces.logits import ProcessedRow
from dovetail.ops.transfer import to_device

if TYPE_CHECKING:
    from pydantic import BaseModel

    from dovetail.interfaces.logits import LogitsProcessor
    from dovetail.registry.resolution import Chosen
    from dovetail.types import AdmittedRequest, Batch, IntArray, LogitRows

log = logging.getLogger(__name__)

_LARGEST = 1e30


class _Call(NamedTuple):
    name: str
    params: Any
    state: Any


class _Texts(NamedTuple):
    """Hold the rows of logits of one sampled row: their indices, and the text before each. The first ``known`` tokens of
    the texts are no drafts."""

    first: int
    known: int
    texts: list[IntArray]


class RowProcessors:
    """Process the logits of rows whose requests name processors. Not thread-safe."""

    def __init__(self, processors: Mapping[str, tuple[LogitsProcessor, type[BaseModel]]]) -> None:
        """``processors`` are the processors by name, with the classes of their parameters."""
        self._processors = processors
        # a request is collected once another one has got its slot
        self._requests: WeakKeyDictionary[AdmittedRequest, list[_Call]] = WeakKeyDictionary()

    @classmethod
    def build(cls, chosen: Sequence[Chosen], context: Any) -> RowProcessors:
        """Build the chosen processors."""
        return cls({one.name: (one.build(context), params_class(one)) for one in chosen})

    def apply(self, batch: Batch, logits: torch.Tensor, layout: LogitRows, rows: Sequence[int]) -> dict[int, str]:
        """Process the logits of the sampled rows ``rows``, in place. Return the errors of processors by sampled row; the
        logits of these rows are as they were before the call that failed."""
        reqs, errors = batch.sampled_reqs, dict[int, str]()
        calls = {row: self._calls(reqs[row]) for row in rows}
        texts = {row: _texts_of(batch, reqs[row], layout, row) for row in rows}
        for place in range(max(map(len, calls.values()))):
            together: dict[str, list[int]] = {}
            for row, own in calls.items():
                if place < len(own) and row not in errors:
                    together.setdefault(own[place].name, []).append(row)
            for name, group in together.items():
                given = [(reqs[row], calls[row][place], texts[row]) for row in group]
                error = self._process(name, logits, given)
                errors |= dict.fromkeys(group, error) if error is not None else {}
        return errors

    def _process(
        self, name: str, logits: torch.Tensor, given: Sequence[tuple[AdmittedRequest, _Call, _Texts]]
    ) -> str | None:
        """Call a processor with all rows of logits of these requests. Return its error, or None."""
        rows = [
            ProcessedRow(call.params, req.prompt_len, min(own.known, len(text)), text, call.state)
            for req, call, own in given
            for text in own.texts
        ]
        places = np.concatenate([np.arange(own.first, own.first + len(own.texts)) for _, _, own in given])
        index = to_device(places.astype(np.int64), logits.device)
        part = logits[index]
        try:
            self._processors[name][0].process(part, rows)
        except Exception as error:
            log.exception("logits processor %s has failed; the requests of its rows end", name)
            return f"logits processor {name}: {type(error).__name__}: {error}"
        logits[index] = part.nan_to_num_(nan=BLOCKED, posinf=_LARGEST, neginf=BLOCKED)
        return None

    def _calls(self, req: AdmittedRequest) -> list[_Call]:
        """Return the calls of a request with their state, which begins when the request has got its slot."""
        calls = self._requests.get(req)
        if calls is None:
            calls = self._requests[req] = [self._begin(call.name, call.params) for call in req.params.logits_processors]
        return calls

    def _begin(self, name: str, params: str) -> _Call:
        processor, cls = self._processors[name]
        valid = cls.model_validate_json(params)
        return _Call(name, valid, processor.begin(valid))


def params_class(chosen: Chosen) -> type[BaseModel]:
    """Return the class of the parameters that requests give to a processor."""
    return chosen.config.params  # pyright: ignore[reportAttributeAccessIssue]


def _texts_of(batch: Batch, req: AdmittedRequest, layout: LogitRows, sampled: int) -> _Texts:
    row = int(layout.rows[sampled])
    drafts, parents = batch.drafts.row(row) if batch.drafts is not None else ([], [])
    known = int(batch.prefix_lens[row] + batch.extend_lens[row]) - len(drafts)
    text = req.token_ids[:known]
    text.flags.writeable = False
    paths = [np.array(path_tokens(node, drafts, parents), np.int32) for node in range(len(drafts))]
    return _Texts(int(layout.starts[sampled]), known, [text, *(np.concatenate([text, path]) for path in paths)])
