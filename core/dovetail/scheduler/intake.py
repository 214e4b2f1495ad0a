"""Make requests from messages, and refuse messages that the model, its context or its vocabulary does not allow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from pydantic import ValidationError

from dovetail.errors import ContextLengthError, RequestError
from dovetail.sampling_params import PoolingKind
from dovetail.token_checks import check_prompt
from dovetail.tokenizer import IncrementalDetokenizer
from dovetail.types import Req, TokenLogprob

if TYPE_CHECKING:
    from dovetail.messages import GenerateMsg
    from dovetail.sampling_params import SamplingParams
    from dovetail.scheduler.limits import SchedulerLimits
    from dovetail.tokenizer import Tokenizer


def make_req(msg: GenerateMsg, limits: SchedulerLimits, tokenizer: Tokenizer | None) -> Req:
    """Return the request that a message describes. Raises ``RequestError`` if the model, its context or its vocabulary
    does not allow it."""
    check_prompt(msg.input_ids, msg.params, limits.context_len, limits.vocab_size)
    _check_pooling(msg, limits)
    may_draft = msg.params.speculative and _check_processors(msg.params, limits)
    if msg.group_size < 1:
        raise RequestError(f"group_size is {msg.group_size}; allowed: at least 1", param="group_size")
    prompt = np.array(msg.input_ids, np.int32)
    token_ids = np.zeros(_max_len(msg, limits.context_len), np.int32)
    token_ids[: len(prompt)] = prompt
    req = Req(msg.rid, token_ids, len(prompt), msg.params, msg.seed, msg.namespace, msg.priority)
    req.group, req.group_size, req.session = msg.group, msg.group_size, msg.session
    req.tenant, req.weight = msg.tenant, msg.weight
    req.device_len = req.known_len = req.prompt_len
    req.draft_len = limits.draft_width if may_draft else 0
    if msg.params.prompt_logprobs is not None and msg.params.prompt_logprobs_start == 0:
        req.prompt_logprobs.append(TokenLogprob(msg.input_ids[0], None))
    if msg.params.stop or msg.params.stop_regex:
        req.detokenizer = _detokenizer(req, tokenizer)
    return req


def _check_pooling(msg: GenerateMsg, limits: SchedulerLimits) -> None:
    pooling = msg.params.pooling
    if pooling is None:
        return
    if pooling.kind is not PoolingKind.LABELS and not limits.embeds:
        raise RequestError(
            "this model does not offer model.embed, so it has no embeddings; serve a model that offers it",
            param="model",
        )


def _check_processors(params: SamplingParams, limits: SchedulerLimits) -> bool:
    """Check that the logits processors that a request names are installed and take its parameters. Return False if one of
    them cannot process drafts."""
    param, drafts = "logits_processors", True
    for call in params.logits_processors:
        entry = limits.processors.get(call.name)
        if entry is None:
            names = ", ".join(limits.processors) or "none is installed or selected (logits_processor in the config)"
            raise RequestError(f"there is no logits processor {call.name!r:.80}; allowed: {names}", param=param)
        try:
            entry.params.model_validate_json(call.params)
        except ValidationError as error:
            found = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}".removeprefix(": ") for e in error.errors()[:5]]
            raise RequestError(f"logits processor {call.name}: {'; '.join(found)}", param=param) from None
        drafts = drafts and entry.drafts
    return drafts


def _max_len(msg: GenerateMsg, context_len: int) -> int:
    """Return the largest number of tokens that prompt and output may have together. Raises ``ContextLengthError`` if
    the output does not fit."""
    prompt, params = len(msg.input_ids), msg.params
    most = context_len - prompt
    for name, requested in (("max_new_tokens", params.max_new_tokens), ("min_new_tokens", params.min_new_tokens)):
        if requested is not None and requested > most:
            raise ContextLengthError(
                f"{prompt} prompt tokens plus {name}={requested} exceed the context of {context_len}; "
                f"at most {most} new tokens fit",
                param="max_tokens" if name == "max_new_tokens" else "min_tokens",
            )
    return context_len if params.max_new_tokens is None else prompt + params.max_new_tokens


def _detokenizer(req: Req, tokenizer: Tokenizer | None) -> IncrementalDetokenizer:
    if tokenizer is None:
        raise RequestError("stop strings need a tokenizer, and this model was loaded without one", param="stop")
    return IncrementalDetokenizer.for_params(tokenizer, req.params)
