"""What a step has brought, given to its requests one by one."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING

from dovetail.messages import TokenOutput
from dovetail.scheduler.stopping import finish_reason
from dovetail.types import FinishKind, FinishReason

if TYPE_CHECKING:
    from dovetail.scheduler.limits import Totals
    from dovetail.types import Batch, DraftTree, HostOutput, Req, TokenLogprob

log = logging.getLogger(__name__)


def sampled(batch: Batch) -> list[Req]:
    """Requests of the rows for which there are tokens."""
    return list(itertools.compress(batch.reqs, batch.samples.tolist())) if batch.num_extend else batch.reqs


def settle_drafts(batch: Batch, drafts: DraftTree, output: HostOutput, totals: Totals) -> None:
    """Take back, from the cursors of the requests, the drafts that were not accepted; count those that were."""
    drafted = drafts.lens[batch.samples].tolist()
    for req, count, tokens in zip(sampled(batch), drafted, output.token_ids, strict=True):
        if count == 0 or req.finish is not None:
            continue
        accepted = len(tokens) - 1
        req.cached_len -= count - accepted
        req.device_len -= count - accepted
        req.drafted += count
        req.accepted += accepted
        totals.drafted_tokens += count
        totals.accepted_tokens += accepted


def take_tokens(
    req: Req, tokens: list[int], logprobs: list[TokenLogprob] | None, eos_token_ids: frozenset[int]
) -> TokenOutput:
    """Append ``tokens`` to the request, up to the one that ends it, and set ``req.finish`` then. The answer for its client."""
    before = known = req.known_len
    for token in tokens:
        req.token_ids[known] = token
        req.known_len = known = known + 1
        try:
            req.finish = finish_reason(req, token, eos_token_ids)
        except Exception as error:  # of its matcher or detokenizer: it ends this request alone
            log.exception("request %s could not take token %d", req.rid, token)
            text = f"token {token}: {type(error).__name__}: {error}"
            req.finish = FinishReason(FinishKind.ERROR, message=text)
        if req.finish is not None:
            break
    count = known - before
    return TokenOutput(
        req.rid,
        tokens[:count],
        req.finish,
        req.prompt_len,
        known - req.prompt_len,
        req.prefix_hit_len,
        logprobs[:count] if logprobs is not None and req.params.logprobs is not None else None,
        req.prompt_logprobs if before == req.prompt_len and req.params.prompt_logprobs is not None else None,
        req.drafted,
        req.accepted,
        req.grammar_backend,
    )


def add_prompt_logprobs(req: Req, start: int, entries: list[TokenLogprob]) -> None:
    """``entries[i]`` belongs to prompt token ``start + i + 1``; a retracted request computes some of them again."""
    fresh = entries[len(req.prompt_logprobs) - start - 1 :]
    req.prompt_logprobs.extend(fresh[: req.prompt_len - len(req.prompt_logprobs)])
