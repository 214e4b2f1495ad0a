"""From a message to a request, or a refusal that says what is allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dovetail.errors import ContextLengthError, RequestError
from dovetail.sampling_params import PoolingKind
from dovetail.tokenizer import IncrementalDetokenizer
from dovetail.types import Req, TokenLogprob

if TYPE_CHECKING:
    from dovetail.messages import GenerateMsg
    from dovetail.scheduler.limits import SchedulerLimits
    from dovetail.tokenizer import Tokenizer


def make_req(msg: GenerateMsg, limits: SchedulerLimits, tokenizer: Tokenizer | None) -> Req:
    """The request of a message. Raises ``RequestError`` if the model, its context or its vocabulary forbids it."""
    _check_tokens(msg, limits.vocab_size)
    _check_pooling(msg, limits)
    if msg.group_size < 1:
        raise RequestError(f"group_size is {msg.group_size}; allowed: 1 and more", param="group_size")
    prompt = np.array(msg.input_ids, np.int32)
    token_ids = np.zeros(_max_len(msg, limits.context_len), np.int32)
    token_ids[: len(prompt)] = prompt
    req = Req(msg.rid, token_ids, len(prompt), msg.params, msg.seed, msg.namespace, msg.priority)
    req.group, req.group_size, req.session = msg.group, msg.group_size, msg.session
    req.device_len = req.known_len = req.prompt_len
    req.draft_len = limits.draft_width if msg.params.speculative else 0
    if msg.params.prompt_logprobs is not None and msg.params.prompt_logprobs_start == 0:
        req.prompt_logprobs.append(TokenLogprob(msg.input_ids[0], None))
    if msg.params.stop:
        req.detokenizer = _detokenizer(req, tokenizer)
    return req


def _check_tokens(msg: GenerateMsg, vocab_size: int) -> None:
    if not msg.input_ids:
        raise RequestError("the prompt is empty; give at least one token", param="prompt")
    if not 0 <= min(msg.input_ids) <= max(msg.input_ids) < vocab_size:
        raise RequestError(f"token ids must be in [0, {vocab_size})", param="input_ids")
    for token_id in (*(msg.params.logit_bias or {}), *msg.params.stop_token_ids):
        if token_id >= vocab_size:
            raise RequestError(f"token id {token_id} is not below the vocabulary size {vocab_size}")


def _check_pooling(msg: GenerateMsg, limits: SchedulerLimits) -> None:
    pooling = msg.params.pooling
    if pooling is None:
        return
    if pooling.kind is not PoolingKind.LABELS and not limits.embeds:
        raise RequestError(
            "this model does not offer model.embed, so that it has no embeddings; serve one that does", param="model"
        )
    if any(token >= limits.vocab_size for token in pooling.token_ids):
        raise RequestError(f"label_token_ids has ids outside of [0, {limits.vocab_size})", param="label_token_ids")


def _max_len(msg: GenerateMsg, context_len: int) -> int:
    prompt, output = len(msg.input_ids), msg.params.max_new_tokens != 0
    if prompt + output > context_len:
        raise ContextLengthError(
            f"the prompt has {prompt} tokens; the context holds {context_len}{', one of them for output' * output}"
        )
    params, room = msg.params, context_len - prompt
    for name, asked in (("max_new_tokens", params.max_new_tokens), ("min_new_tokens", params.min_new_tokens)):
        if asked is not None and asked > room:
            raise ContextLengthError(
                f"{prompt} prompt tokens plus {name}={asked} exceed the context of {context_len}; "
                f"at most {room} new tokens fit",
                param="max_tokens" if name == "max_new_tokens" else "min_tokens",
            )
    return context_len if params.max_new_tokens is None else prompt + params.max_new_tokens


def _detokenizer(req: Req, tokenizer: Tokenizer | None) -> IncrementalDetokenizer:
    if tokenizer is None:
        raise RequestError("stop strings need a tokenizer, and this model was loaded without one", param="stop")
    params = req.params
    return IncrementalDetokenizer.for_params(tokenizer, params)
