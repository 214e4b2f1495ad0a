"""List every request field that vLLM, SGLang and OpenAI document for the routes that they share with this server, and
what this server does with it. docs/apis.md and the ``ignored`` and ``refused`` fields of the bodies come from here.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property


class Verdict(enum.StrEnum):
    """Name what the server does with a field."""

    HONOURED = "honoured"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class FieldGroup:
    """Describe fields that are treated in the same way. ``peers`` are the letters of those that document them: O
    (OpenAI), V (vLLM), S (SGLang), C (Cohere and Jina), and D for this server. ``note`` says what the fields do here, or
    why they do nothing, or what to use instead. ``defaults`` maps each field to its documented default, or to a tuple of
    defaults if the peers differ."""

    verdict: Verdict
    peers: str
    note: str
    defaults: Mapping[str, object]


def _honoured(peers: str, note: str, /, **defaults: object) -> FieldGroup:
    return FieldGroup(Verdict.HONOURED, peers, note, defaults)


def _no_effect(peers: str, note: str, /, **defaults: object) -> FieldGroup:
    return FieldGroup(Verdict.NO_EFFECT, peers, note, defaults)


def _refused(peers: str, note: str, /, **defaults: object) -> FieldGroup:
    return FieldGroup(Verdict.REFUSED, peers, note, defaults)


@dataclass(frozen=True)
class RequestFields:
    """Hold the fields of the body of one route. ``title`` is its title in docs/apis.md."""

    path: str
    title: str
    groups: tuple[FieldGroup, ...]

    def of(self, verdict: Verdict) -> Iterator[tuple[str, FieldGroup]]:
        """Yield the names of the fields with this verdict, and their groups."""
        for group in self.groups:
            if group.verdict is verdict:
                for name in group.defaults:
                    yield name, group

    def defaults(self, name: str) -> tuple[object, ...]:
        """Return the documented defaults of a field."""
        default = next(group.defaults[name] for group in self.groups if name in group.defaults)
        return default if isinstance(default, tuple) else (default,)

    @cached_property
    def ignored(self) -> frozenset[str]:
        """Return the names of the fields that have no effect, for ``ApiModel.ignored``."""
        return frozenset(name for name, _ in self.of(Verdict.NO_EFFECT))

    @cached_property
    def refused(self) -> Mapping[str, tuple[object, ...]]:
        """Return the refused fields and the values that request nothing, for ``ApiModel.refused``."""
        return {name: self.defaults(name) for name, _ in self.of(Verdict.REFUSED)}

    @cached_property
    def reasons(self) -> Mapping[str, str]:
        """Return why fields are refused, for ``ApiModel.reasons``."""
        return {name: group.note for name, group in self.of(Verdict.REFUSED)}


_SAME = ""
"""The note of fields that have the same meaning as in the peers."""

_CALLS = "Processors of this server: objects with a `name` and its parameters ([plugins.md](plugins.md))."

_SAMPLING = (
    _honoured("OVS", _SAME, n=1, temperature=(1.0, None), top_p=(1.0, None), frequency_penalty=0.0),
    _honoured("OVS", _SAME, presence_penalty=0.0, seed=None, stop=(None, []), logit_bias=None, stream=False),
    _honoured("VS", _SAME, top_k=(None, -1, 0), min_p=(None, 0.0), repetition_penalty=(None, 1.0), min_tokens=0),
    _honoured("VS", _SAME, stop_token_ids=(None, []), ignore_eos=False, skip_special_tokens=True),
)
_PLACEMENT = (
    _honoured(
        "VS",
        "With `policy: priority`, requests with a larger number are admitted first, as in SGLang (in vLLM: a smaller one).",
        priority=(None, 0),
    ),
    _honoured("VS", "Prefixes are shared only with requests that have the same salt.", cache_salt=None),
    _honoured("S", "Like `cache_salt`; with both, prefixes are shared only if both are the same.", extra_key=None),
)
_IDS = _honoured(
    "VS",
    "The id of the request: of its answer, and for `/abort_request`. With both, it is `rid`.",
    rid=None,
    request_id=None,
)
_SESSION = _honoured(
    "VSD", "A hint that a next turn follows, so that this one stays cached ([language.md](language.md)).",
    session=None, session_id=None,
)  # fmt: skip
_CONSTRAINTS = (
    _honoured("OVS", "[grammar.md](grammar.md). A request has at most one constraint.", response_format=None),
    _honoured("VSD", "Constraints.", regex=None, ebnf=None, json_schema=None, lark=None, choice=None, structural_tag=None),
    _honoured(
        "V", "An object with one of `json`, `regex`, `choice`, `grammar`, `json_object`, `structural_tag`. A `grammar` "
        "with `::=` is read as `ebnf`, another one as `lark`. Its options `disable_any_whitespace`, "
        "`disable_additional_properties`, `whitespace_pattern` and `disable_fallback` are refused unless null or false.",
        structured_outputs=None,
    ),
    _honoured("V", "As in `structured_outputs`.", guided_json=None, guided_regex=None, guided_choice=None, guided_grammar=None),
    _honoured(
        "VD", "The grammar backend; `auto` is the default, and `guidance` stands for `llguidance`.",
        grammar_backend=None, guided_decoding_backend=(None, "auto"),
    ),
    _refused("V", "write it into the constraint as a regex or a grammar", guided_whitespace_pattern=None),
    _honoured("D", "False: no draft tokens for this request.", speculative=None),
)  # fmt: skip
_TEXT_ONLY = "the served model reads and writes text only"
_ONE_ENGINE = "one engine computes prompts and outputs, without transfers between engines"
_INTERNALS = "the server does not report the model's internal state; /v1/embeddings returns hidden states as vectors"
_ADAPTERS = "name the adapter as the model"
_WATERMARKS = "outputs are not marked"
_SUPPORTS = "the server does not report from which tokens it has chosen; use logprobs"
_FLAT = "log-probabilities are lists of objects"
_PROCESSORS = "requests cannot contain code; name a processor of this server in logits_processors"
_LABELS = "metrics have no labels of requests; use API keys, which separate tenants"
_DISTRIBUTION = (
    _refused("S", _ONE_ENGINE, bootstrap_host=None, bootstrap_port=None, bootstrap_room=None),
    _refused("S", "the server has one replica", routed_dp_rank=(None, 0), data_parallel_rank=(None, 0)),
    _refused("S", _ONE_ENGINE, disagg_prefill_dp_rank=None),
)
_DISTRIBUTION_OF_VLLM = _refused("V", _ONE_ENGINE, kv_transfer_params=(None, {}), ec_transfer_params=(None, {}))
_BEAMS = (
    _refused("V", "there is no beam search; use n, or best_of of completions", use_beam_search=False),
    _refused("V", "there is no beam search; use repetition_penalty or logit_bias", length_penalty=1.0),
)
_LIMITS = (
    _honoured("S", "The output ends where its text has a match ([request.md](request.md)).", stop_regex=None),
    _honoured("V", _SAME, bad_words=(None, []), allowed_token_ids=None),
    _honoured("VD", _CALLS, logits_processors=(None, [])),
    _honoured("V", "Log-probabilities of these tokens too; needs `logprobs`.", logprob_token_ids=None),
    _honoured(
        "V",
        "The largest number of tokens of the reasoning; -1: any. It needs a reasoning parser.",
        thinking_token_budget=(None, -1),
    ),
)
_REFUSED_SAMPLING = (
    _refused("S", _PROCESSORS, custom_logit_processor=None, custom_params=(None, {})),
    _refused("V", "use logits_processors", vllm_xargs=(None, {})),
    _refused("V", _WATERMARKS, watermarking=(None, False)),
    _refused("S", _WATERMARKS, watermark=None),
    _refused("V", "use repetition_penalty, or a stop string", repetition_detection=None),
    _refused("VS", "the tokens of each step are sent at once", stream_interval=(None, 1)),
    _refused("S", _INTERNALS, return_hidden_states=False, return_routed_experts=False, routed_experts_start_len=0),
    _refused("V", _INTERNALS, routed_experts_prompt_start=0),
    _refused("V", "use /tokenize with return_token_strs", return_token_offsets=(False, None)),
    _refused(
        "S", "send the whole conversation, with session; its cached part is not computed again", session_params=None
    ),
    _refused("S", "drafters have no corpora of requests", ngram_corpus_id=None),
    _refused("V", "the weights of this server do not change", return_weight_versions=(None, False)),
    _refused("S", _TEXT_ONLY, images_config=None),
    _refused("VS", _TEXT_ONLY, mm_processor_kwargs=(None, {})),
    _refused("S", _LABELS, custom_labels=(None, {})),
)
_NOTHING_TO_DO = (
    _no_effect(
        "VS", "Special tokens are always written without additional spaces.", spaces_between_special_tokens=True
    ),
    _no_effect("V", "They concern requests that are only rendered.", return_mm_kwargs=True, mm_payload="tensors"),
)
_ACCOUNTING = _no_effect(
    "O", "OpenAI's accounting, storage and routing.", user=None, metadata=None, store=None, service_tier=(None, "auto"),
    prompt_cache_key=None, prompt_cache_options=None, prompt_cache_retention=None, safety_identifier=None, prediction=None,
)  # fmt: skip
_STOPS = (_honoured("VS", "Keep the stop string in the text.", include_stop_str_in_output=False, no_stop_trim=False),)
_TRUNCATION = _honoured(
    "V", "Cut the prompt to this number of tokens; -1: to what fits into the context. The `left` side is cut off, which is "
    "the default, or the `right` side.", truncate_prompt_tokens=None, truncation_side=None,
)  # fmt: skip
_TOKEN_IDS = (
    _honoured("VS", "Add `token_ids` and `prompt_token_ids` to each choice.", return_token_ids=(None, False)),
    _honoured("V", "Write tokens of log-probabilities as `token_id:N`.", return_tokens_as_token_ids=None),
    _honoured(
        "S", "Add `sglext.cached_tokens_details`: tokens by where they were cached.", return_cached_tokens_details=False
    ),
    _honoured(
        "S", "Add `sglext.spec_tokens_details`: the draft tokens of each choice, if there were any.",
        return_spec_tokens_details=(None, False),
    ),
    _honoured("V", "Log-probabilities of the prompt, by token id. Not with `stream`.", prompt_logprobs=None),
)  # fmt: skip
_STREAM = _honoured(
    "OVS", "`include_usage`: a last chunk has the token counts. `continuous_usage_stats`: every chunk has those of its "
    "choice. `include_obfuscation` has no effect.", stream_options=None,
)  # fmt: skip
_GENERATION = (
    *_SAMPLING,
    _honoured("S", "The name of an adapter (LoRA), or one for each prompt ([adapters.md](adapters.md)).", lora_path=None),
    *_LIMITS, _STREAM, *_STOPS, *_CONSTRAINTS, *_PLACEMENT, _IDS, _SESSION, _TRUNCATION, *_TOKEN_IDS,
    *_REFUSED_SAMPLING, *_BEAMS, *_DISTRIBUTION, _DISTRIBUTION_OF_VLLM, *_NOTHING_TO_DO, _ACCOUNTING,
)  # fmt: skip

COMPLETIONS = RequestFields("/v1/completions", "Completions", (
    _honoured("OVS", _SAME, model=None, prompt=None, echo=False),
    _honoured("OVS", "16 by default, as in the peers.", max_tokens=16),
    _honoured("OVS", "Log-probabilities of the model itself: before temperature, penalties and constraints.", logprobs=None),
    _honoured("O", "The `n` best of this number of outputs. Not with `stream`.", best_of=(None, 1)),
    _honoured("OS", "The text after the gap, if the tokenizer has tokens for filling in the middle.", suffix=(None, "")),
    _honoured("V", "False: the tokenizer adds no special tokens.", add_special_tokens=True),
    *_GENERATION,
    _refused("V", "give a text or token ids", prompt_embeds=None),
))  # fmt: skip

CHAT = RequestFields("/v1/chat/completions", "Chat", (
    _honoured("OVS", _SAME, model=None, messages=None, logprobs=False, top_logprobs=(None, 0)),
    _honoured("OVS", "By default to the end of the context, or the length that the model recommends.", max_tokens=None, max_completion_tokens=None),
    _honoured("OVS", "[tools.md](tools.md).", tools=None, tool_choice=(None, "none", "auto"), parallel_tool_calls=True),
    _honoured("VS", "Variables of the chat template.", chat_template_kwargs=None),
    _honoured("V", "The variable `documents` of the chat template.", documents=None),
    _honoured(
        "OVS", "Sets `enable_thinking` and `thinking` of the chat template (to false for `none`, else to true), and "
        "`reasoning_effort`. `reasoning` is an object with `effort` and `enabled`.", reasoning_effort=None, reasoning=None,
    ),
    _honoured(
        "D", "Set `enable_thinking` and `thinking` of the chat template. `thinking` may be `{\"type\": \"enabled\"}` or "
        "`disabled`, as in other APIs; its `budget_tokens` is a `thinking_budget`.", enable_thinking=None, thinking=None,
    ),
    _honoured("D", "Another name of `thinking_token_budget`; so is `max_tokens` of `reasoning`.", thinking_budget=None),
    _honoured("S", "False: the reasoning stays in `content`, with its marks.", separate_reasoning=True),
    _honoured("S", "False: the reasoning is sent in one chunk, once it is complete.", stream_reasoning=True),
    _honoured("V", "False: the reasoning is not returned.", include_reasoning=True),
    _honoured(
        "VS", "The answer continues the last message, which must be the assistant's. Not with `add_generation_prompt: true`.",
        continue_final_message=False,
    ),
    _honoured("V", "False: the assistant's turn is not opened.", add_generation_prompt=True),
    _honoured("V", "The text of the last message precedes the answer, if it is the assistant's.", echo=False),
    _honoured("V", "Add `prompt_text`, the rendered conversation.", return_prompt_text=None),
    _honoured("S", "Add `prompt_token_ids` to each choice.", return_prompt_token_ids=False),
    _honoured(
        "S", "Add `sglext.input_ids` and `sglext.output_ids`.", return_input_ids_in_sglext=(None, False),
        return_output_ids_in_sglext=(None, False),
    ),
    _honoured("S", "Token ids of the prompt, which replace the rendered conversation.", input_ids=None),
    *_GENERATION,
    _refused("V", "the chat template has the special tokens", add_special_tokens=False),
    _refused("V", "requests cannot contain templates; set model.chat_template in the config, or give chat_template_kwargs", chat_template=None),
    _refused("O", "use tools and tool_choice", functions=(None, []), function_call=(None, "none")),
    _refused("O", _TEXT_ONLY, audio=None, modalities=(None, ["text"])),
    _refused("V", _TEXT_ONLY, media_io_kwargs=(None, {})),
    _refused("S", _TEXT_ONLY, max_dynamic_patch=None, min_dynamic_patch=None, use_audio_in_video=False, video_config=(None, {})),
    _refused("S", _SUPPORTS, return_sampling_mask=(None, False), sampling_logprobs_mode=None),
    _refused("S", _FLAT, return_flat_raw_output_top_logprobs=(None, False)),
    _no_effect("S", "It concerns `return_flat_raw_output_top_logprobs`.", return_flat_raw_top_logprobs_b64=True),
    _refused("O", "the server has no hosted tools; declare functions in tools", web_search_options=None),
    _refused("O", "the server does not moderate", moderation=None),
    _refused("O", "say in a message how long the answer should be", verbosity=(None, "medium")),
    _refused("S", "/generate returns meta_info", return_meta_info=False),
    _refused("S", "write the task's token at the end of a completion's prompt", task=None),
    _refused("V", "use n", best_of=(None, 1)),
))  # fmt: skip

GENERATE = RequestFields("/generate", "Native", (
    _honoured("S", "Give one of them: one prompt, or a list of prompts.", text=None, input_ids=None),
    _honoured("S", "An object, or a list with one for each prompt. See the next table.", sampling_params=None),
    _honoured("S", "The counts are in `meta_info` of every event.", stream=False, stream_options=None),
    _honoured("S", "A text, or a list with one for each prompt. `/abort_request` accepts it.", rid=None),
    _honoured("S", "A value, or a list with one for each prompt.", return_logprob=(None, False), logprob_start_len=(None, -1)),
    _honoured("S", "A value, or a list with one for each prompt.", top_logprobs_num=(None, 0)),
    _honoured("S", "Log-probabilities of these tokens too, for all prompts or for each.", token_ids_logprob=(None, [])),
    _honoured("S", "The largest number of tokens of the reasoning.", max_thinking_tokens=None),
    _honoured("S", _SAME, return_text_in_logprobs=False),
    _honoured("S", "Add `prompt_token_ids`.", return_prompt_token_ids=False),
    *_PLACEMENT, _SESSION,
    _honoured("D", "Requests that share a prefix ([language.md](language.md)).", group=None, group_size=None),
    _no_effect("S", "Prompts and outputs are not logged.", no_logs=False, log_metrics=True),
    _no_effect("S", "They are for a router in front of the server.", conversation_id=None, routing_key=None),
    _no_effect("S", "For tracing and for other routes of SGLang.", external_trace_header=None, received_time=None, background=False),
    _refused("S", _TEXT_ONLY, image_data=(None, []), audio_data=(None, []), video_data=(None, []), modalities=(None, [])),
    _refused("S", _TEXT_ONLY, mm_hashes=None, mm_content_hashes=None, use_audio_in_video=False, video_config=(None, {})),
    _refused("S", _TEXT_ONLY, max_dynamic_patch=None, min_dynamic_patch=None, image_max_dynamic_patch=None),
    _refused("S", _TEXT_ONLY, video_max_dynamic_patch=None, images_config=(None, {}), need_wait_for_mm_inputs=None),
    _refused("S", _TEXT_ONLY, num_items_assigned=None, encoder_urls=None),
    _refused("S", "give text or input_ids", input_embeds=None, positional_embed_overrides=None),
    _honoured("S", "The name of an adapter (LoRA), or one for each prompt ([adapters.md](adapters.md)).", lora_path=None, lora_name=None),
    _refused("S", "give lora_path, the name of the adapter", lora_id=None),
    _refused("S", "send the whole conversation, with session; its cached part is not computed again", session_params=None),
    _refused("S", _PROCESSORS, custom_logit_processor=None),
    _refused("S", _INTERNALS, return_hidden_states=False, return_routed_experts=False, routed_experts_start_len=0),
    _refused("S", _INTERNALS, return_indexer_topk=False, return_entropy=False),
    _refused("S", "the server does not report from which tokens it has chosen; use return_logprob", return_sampling_mask=(None, False),
             sampling_logprobs_mode=None),
    _refused("S", "log-probabilities are lists; use return_logprob", return_flat_raw_top_logprobs=False,
             return_flat_raw_output_top_logprobs=False, return_flat_raw_top_logprobs_b64=False),
    _refused("S", _WATERMARKS, watermark=None),
    _refused("S", _TEXT_ONLY, mm_processor_kwargs=(None, {})),
    _refused("S", "/v1/score returns the probabilities of labels", token_indices_to_pool=None),
    _refused("S", "/v1/score scores several items", multi_item_delimiter_indices=None),
    _refused("S", "the chat routes separate reasoning", require_reasoning=False),
    *_DISTRIBUTION,
    _refused("S", _ONE_ENGINE, bootstrap_pair_key=None, decode_tp_size=None, kv_router_hint=None, kv_hints=None),
    _refused("S", _LABELS, custom_labels=(None, {})),
    _refused("S", "outputs are text", return_bytes=False),
    _refused("S", "it is internal to SGLang", http_worker_ipc=None),
))  # fmt: skip

SAMPLING_PARAMS = RequestFields("/generate", "Native: `sampling_params`", (
    _honoured("S", _SAME, n=1, temperature=1.0, top_p=1.0, top_k=(-1, 2**30), min_p=0.0, frequency_penalty=0.0),
    _honoured("S", _SAME, presence_penalty=0.0, repetition_penalty=1.0, stop=None, stop_token_ids=None, ignore_eos=False),
    _honoured("S", _SAME, skip_special_tokens=True, logit_bias=None),
    _honoured("S", "The output ends where its text has a match ([request.md](request.md)).", stop_regex=None),
    _honoured("V", _SAME, bad_words=None, allowed_token_ids=None),
    _honoured("D", _CALLS, logits_processors=(None, [])),
    _honoured("SV", "`max_tokens` and `min_tokens` are vLLM's names.", max_new_tokens=128, min_new_tokens=0, max_tokens=None,
              min_tokens=None),
    _honoured("SV", "Keep the stop string in the text.", no_stop_trim=False, include_stop_str_in_output=None),
    _honoured("SV", "Give one of them.", sampling_seed=None, seed=None),
    _honoured("SVD", "Constraints ([grammar.md](grammar.md)).", json_schema=None, regex=None, ebnf=None, structural_tag=None,
              lark=None, choice=None, grammar_backend=None),
    _honoured("D", "False: no draft tokens for this request.", speculative=None),
    _no_effect("VS", "Special tokens are always written without additional spaces.", spaces_between_special_tokens=True),
    _refused("S", _PROCESSORS, custom_params=(None, {})),
    _refused("S", "the tokens of each step are sent at once", stream_interval=(None, 1)),
    _refused("S", "there is no beam search; use n", beam_width=(None, 1)),
    _refused("S", _WATERMARKS, watermark=None),
))  # fmt: skip

_INPUTS = (
    _honoured("VS", "The id of the request, for `/abort_request`. With both, it is `rid`.", rid=None, request_id=None),
    *_PLACEMENT,
    _no_effect("OV", "OpenAI's accounting.", user=None),
    _refused("V", _TEXT_ONLY, mm_processor_kwargs=(None, {})),
)

EMBEDDINGS = RequestFields("/v1/embeddings", "Embeddings", (
    _honoured("OVS", _SAME, input=None, model=None, encoding_format=(None, "float"), dimensions=None),
    _honoured("V", "False: vectors are not scaled to length 1.", use_activation=(None, True), normalize=True),
    _honoured("V", "False: the tokenizer adds no special tokens.", add_special_tokens=True),
    _honoured("D", "`last` or `mean`.", pooling=None),
    _TRUNCATION,
    *_INPUTS,
    _honoured("S", "The name of an adapter (LoRA), or one for each text ([adapters.md](adapters.md)).", lora_path=None),
    _refused("V", "vectors are float32 in little-endian order", embed_dtype=(None, "float32"),
             endianness=(None, "native", "little")),
    _refused("V", "prompts are not padded", padding=(None, "do_not_pad")),
    _refused("V", "render the conversation with /tokenize, and give its token ids as input", messages=None, chat_template=None,
             chat_template_kwargs=None, add_generation_prompt=False, continue_final_message=False, media_io_kwargs=None),
    _refused("S", "give texts or token ids", embed_override_token_id=None, embed_overrides=None),
))  # fmt: skip

_INSTRUCTION = "write the instruction into the query, or into the template of the config"
_PAIRS = (
    _TRUNCATION,
    *_INPUTS,
    _honoured("D", "How texts are embedded: `last` or `mean`.", pooling=None),
    _refused("V", "scores are cosines or probabilities; scale them in the client", use_activation=(None, True)),
    _refused("V", "prompts are not padded", padding=(None, "do_not_pad")),
    _refused("S", _ADAPTERS, lora_path=None),
    _refused("V", "use truncate_prompt_tokens", max_tokens_per_query=(None, 0)),
    _refused("VC", "use truncate_prompt_tokens", max_tokens_per_doc=(None, 0)),
    _refused("V", _INSTRUCTION, instruction=None, chat_template_kwargs=(None, {})),
)

SCORE = RequestFields("/v1/score", "Scores", (
    _honoured("VS", _SAME, model=None, text_1=None, text_2=None),
    _honoured("V", "Other names of `text_1`.", queries=None, data_1=None),
    _honoured("V", "Other names of `text_2`.", documents=None, data_2=None),
    _honoured("S", _SAME, query=None, apply_softmax=False, item_first=False),
    _honoured("VS", "Beside `queries`, another name of `text_2`; beside `query`, what labels follow.", items=None),
    _honoured("S", "Token ids, the same for all items or a list for each.", label_token_ids=None),
    _honoured("S", "It divides the log-probabilities before `apply_softmax`, which it needs.", temperature=(None, 1.0)),
    _honoured("S", "Add `token_logprobs`: the log-probabilities of the labels.", return_token_logprobs=(None, False)),
    *_PAIRS,
    _refused("S", "the labels follow each item; give one item for each position", score_extraction_token=None),
    _refused("S", "give texts or token ids", embed_override_token_id=None, query_embed_overrides=None,
             item_embed_overrides=None),
    _refused("S", "use /v1/embeddings", return_pooled_hidden_states=False),
))  # fmt: skip

RERANK = RequestFields("/v1/rerank", "Reranking", (
    _honoured("VSC", _SAME, model=None, query=None, documents=None, return_documents=True),
    _honoured("VSC", "0: all documents.", top_n=(None, 0)),
    *_PAIRS,
    _refused("S", _INSTRUCTION, instruct=None),
    _refused("C", "use truncate_prompt_tokens", max_chunks_per_doc=None),
    _refused("C", "give each document as a text", rank_fields=None),
))  # fmt: skip

RESPONSES = RequestFields("/v1/responses", "Responses", (
    _honoured("OVS", _SAME, model=None, input=None, instructions=None, previous_response_id=None, store=True),
    _honoured("OVS", _SAME, background=False, stream=False, stream_options=None, include=None, max_output_tokens=None),
    _honoured("OVS", _SAME, temperature=None, top_p=None, top_logprobs=(None, 0), text=None, reasoning=None),
    _honoured("OVS", _SAME, tools=(None, []), tool_choice=(None, "auto"), parallel_tool_calls=True, metadata=None, user=None),
    _honoured("OVS", "It limits hosted tools, which there are none of.", max_tool_calls=None),
    _honoured("OVS", "Only `disabled`: an input that is too long is an error.", truncation=(None, "disabled")),
    _honoured("VS", _SAME, top_k=None, min_p=None, repetition_penalty=None, frequency_penalty=0.0, presence_penalty=0.0),
    _honoured("VS", _SAME, logit_bias=None, seed=None, stop=(None, []), ignore_eos=False, skip_special_tokens=True),
    _honoured("V", "Keep the stop string in the text.", include_stop_str_in_output=False),
    _honoured("V", _SAME, stop_token_ids=(None, [])),
    _honoured("V", "False: the answer has no item with the reasoning.", include_reasoning=True),
    _honoured("VS", "Variables of the chat template.", chat_template_kwargs=None),
    _honoured("V", "As in chats. Not together with `text.format`.", structured_outputs=None),
    _honoured("VS", "The id of the response.", request_id=None),
    *_PLACEMENT, _SESSION,
    _no_effect("O", "OpenAI's accounting and routing.", prompt_cache_key=None, prompt_cache_options=None,
               prompt_cache_retention=None, safety_identifier=None, service_tier=(None, "auto")),
    _refused("O", "use previous_response_id", conversation=None),
    _refused("O", "the server stores no prompts; give input and instructions", prompt=None),
    _refused("O", "the whole conversation is given to the model", context_management=None),
    _refused("O", "the server does not moderate", moderation=None),
    _refused("O", "the server has no hosted tools", access_programs=None, image=None),
    *_NOTHING_TO_DO,
    _refused("V", _TEXT_ONLY, mm_processor_kwargs=(None, {}), media_io_kwargs=(None, {})),
    _refused("V", _WATERMARKS, watermarking=(None, False)),
    *_DISTRIBUTION, _DISTRIBUTION_OF_VLLM,
    _refused("V", "/tokenize returns the rendered conversation", enable_response_messages=False),
    _refused("V", "use previous_response_id, or give the items as input", previous_input_messages=None, previous_response=None),
    _refused("V", _PROCESSORS, vllm_xargs=(None, {})),
    _refused("S", "drafters have no corpora of requests", ngram_corpus_id=None),
))  # fmt: skip

TABLES = (CHAT, COMPLETIONS, GENERATE, SAMPLING_PARAMS, RESPONSES, EMBEDDINGS, SCORE, RERANK)
"""List the tables of all routes."""
