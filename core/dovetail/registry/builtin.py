"""Register the built-in kinds and features, through the same hooks as a third party's plugin."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.config import kinds
from dovetail.interfaces.features import BUILT_IN_FEATURES, Feature, FeatureDescriptor
from dovetail.registry.hookspecs import hookimpl
from dovetail.registry.specs import ComponentKind, KindDescriptor, RuntimeNeed, Selects

_RULES = "dovetail.registry.rules"
_TEMPLATES = "dovetail.scaffold.kinds"
_SAMPLES = "dovetail.registry.samples"

ATTENTION = KindDescriptor(
    ComponentKind.ATTENTION,
    "attention over the paged KV pool",
    "dovetail.interfaces.attention:AttentionBackend",
    # shares, shared prefixes, graph hooks as the engine calls them; graphs of verify rows; AttentionContext.batch_invariant;
    # AttentionContext.value_dim, latents; KVTensors.scales; SharedPrefixes.window; forward_projected, has_variant; ProjectedRows
    api=(1, 8),
    section=kinds.ATTENTION,
    one_for_all_phases="batch_invariant",
    namespaces=("attention",),
    runtime_needs=(
        RuntimeNeed(Feature.ATTN_EXTEND),
        RuntimeNeed(Feature.ATTN_DECODE),
        RuntimeNeed(Feature.ATTN_MIXED, when="scheduler.mixed"),
        RuntimeNeed(Feature.ATTN_GRAPH, when="graphs.decode", phases=("decode",)),
        RuntimeNeed(Feature.ATTN_BATCH_INVARIANT, when="batch_invariant"),
        RuntimeNeed(Feature.ATTN_INVARIANT_WINDOW, when="batch_invariant", if_model_needs=Feature.ATTN_SLIDING_WINDOW),
        RuntimeNeed(Feature.MODEL_BATCH_INVARIANT, when="batch_invariant"),
    ),
    rules=f"{_RULES}:attention",
    suite="dovetail.testing.attention:AttentionSuite",
    scaffold=f"{_TEMPLATES}:ATTENTION",
    order=20,
    search_order=20,
)
CACHE = KindDescriptor(
    ComponentKind.CACHE,
    "prefix caches",
    "dovetail.interfaces.cache:PrefixCache",
    api=(2, 2),  # 2.0: groups of all kinds; 2.1: evict_unneeded; 2.2: shared_prefixes without a full group
    section=kinds.CACHE,
    namespaces=("cache",),
    rules=f"{_RULES}:cache",
    suite="dovetail.testing.cache:PrefixCacheSuite",
    scaffold=f"{_TEMPLATES}:CACHE",
    sample_context=f"{_SAMPLES}:for_cache",
    order=30,
    search_order=30,
)
GRAMMAR = KindDescriptor(
    ComponentKind.GRAMMAR,
    "grammar backends",
    "dovetail.interfaces.grammar:GrammarBackend",
    api=(1, 2),  # check, GrammarSpec.backend, more kinds; dump and load
    section=kinds.GRAMMAR,
    selects=Selects.ONE_AND_OTHERS,
    namespaces=("grammar",),
    check=f"{_RULES}:check_grammar",
    suite="dovetail.testing.grammar:GrammarSuite",
    scaffold=f"{_TEMPLATES}:GRAMMAR",
    sample_context=f"{_SAMPLES}:for_grammar",
    order=50,
    search_order=50,
)
DRAFTER = KindDescriptor(
    ComponentKind.DRAFTER,
    "drafters",
    "dovetail.interfaces.speculative:Drafter",
    # DraftRuntime, must_see_all; DraftCache.run; draft.probs, tokens_ahead; load builds model(info, mesh); draft.data_attention, Batch.own; ComponentSpec.opens
    api=(1, 6),
    section=kinds.SPECULATIVE,
    namespaces=("draft",),
    rules=f"{_RULES}:drafter",
    check=f"{_RULES}:check_drafter",
    suite="dovetail.testing.drafter:DrafterSuite",
    scaffold=f"{_TEMPLATES}:DRAFTER",
    aliases=("drafter",),
    order=60,
    search_order=10,
)
POLICY = KindDescriptor(
    ComponentKind.POLICY,
    "schedule policies",
    "dovetail.interfaces.policy:SchedulePolicy",
    section=kinds.POLICY,
    namespaces=("policy",),
    rules=f"{_RULES}:policy",
    suite="dovetail.testing.policy:PolicySuite",
    scaffold=f"{_TEMPLATES}:POLICY",
    sample_context=f"{_SAMPLES}:for_policy",
    order=40,
    search_order=40,
)
MODEL = KindDescriptor(
    ComponentKind.MODEL,
    "model architectures",
    "dovetail.interfaces.model:ModelArchitecture",
    # batch.last; batch.watch, embed_tokens; before the final norm; batch_invariant; cls(info, mesh); WeightTarget.transform; tied_weights; WeightTarget.check
    api=(1, 8),
    named_at="model.arch",
    selects=Selects.BY_CHECKPOINT,
    rules=f"{_RULES}:model",
    suite="dovetail.testing.model:ModelSuite",
    scaffold=f"{_TEMPLATES}:MODEL",
    described=True,
    order=10,
)
TOOL_PARSER = KindDescriptor(
    ComponentKind.TOOL_PARSER,
    "parsers of tool calls",
    "dovetail.interfaces.parsers:ToolParser",
    api=(1, 1),  # ConstraintGate.marks
    section=kinds.TOOL_PARSER,
    selects=Selects.BY_TEMPLATE,
    suite="dovetail.testing.parsers:ToolParserSuite",
    scaffold=f"{_TEMPLATES}:TOOL_PARSER",
    sample_context=f"{_SAMPLES}:for_parser",
    light_target=True,
    order=70,
)
REASONING_PARSER = KindDescriptor(
    ComponentKind.REASONING_PARSER,
    "parsers of reasoning",
    "dovetail.interfaces.parsers:ReasoningParser",
    api=(1, 1),  # opening
    section=kinds.REASONING_PARSER,
    selects=Selects.BY_TEMPLATE,
    suite="dovetail.testing.parsers:ReasoningParserSuite",
    scaffold=f"{_TEMPLATES}:REASONING_PARSER",
    sample_context=f"{_SAMPLES}:for_parser",
    light_target=True,
    order=80,
)
API = KindDescriptor(
    ComponentKind.API,
    "protocols over HTTP",
    "dovetail.interfaces.api:Api",
    api=(1, 2),  # 1.1: Prompt.adapter, Prompt.namespace, ApiRequest.number_bytes; 1.2: Prompt.adapter_param
    section=kinds.API,
    selects=Selects.SERVED,
    suite="dovetail.testing.api:ApiSuite",
    scaffold=f"{_TEMPLATES}:API",
    sample_context=f"{_SAMPLES}:for_api",
    order=90,
)

EXECUTOR = KindDescriptor(
    ComponentKind.EXECUTOR,
    "executors",
    "dovetail.interfaces.executor:Executor",
    section=kinds.EXECUTOR,
    namespaces=("executor",),
    rules=f"{_RULES}:executor",
    suite="dovetail.testing.executor:ExecutorSuite",
    scaffold=f"{_TEMPLATES}:EXECUTOR",
    order=65,
    search_order=60,
)

LOGITS_PROCESSOR = KindDescriptor(
    ComponentKind.LOGITS_PROCESSOR,
    "logits processors",
    "dovetail.interfaces.logits:LogitsProcessor",
    section=kinds.LOGITS_PROCESSOR,
    selects=Selects.LIST,
    namespaces=("logits",),
    runtime_needs=(RuntimeNeed(Feature.LOGITS_BATCH_INVARIANT, when="batch_invariant"),),
    suite="dovetail.testing.logits:LogitsProcessorSuite",
    sample_context=f"{_SAMPLES}:for_logits",
    scaffold=f"{_TEMPLATES}:LOGITS_PROCESSOR",
    order=55,
    search_order=55,
)

QUANTIZATION = KindDescriptor(
    ComponentKind.QUANTIZATION,
    "quantizations of weights",
    "dovetail.interfaces.quantization:Quantization",
    # experts_method; quantizer, check_modules; LinearMethod.dequantized; QuantizationContext.batch_invariant; check_layers
    api=(1, 5),
    section=kinds.QUANTIZATION,
    screen=f"{_RULES}:screen_quantization",
    namespaces=("quantization",),
    runtime_needs=(RuntimeNeed(Feature.QUANTIZATION_BATCH_INVARIANT, when="batch_invariant"),),
    rules=f"{_RULES}:quantization",
    suite="dovetail.testing.quantization:QuantizationSuite",
    scaffold=f"{_TEMPLATES}:QUANTIZATION",
    described=True,
    order=15,
    search_order=15,
)

EXPERTS = KindDescriptor(
    ComponentKind.EXPERTS,
    "backends of experts",
    "dovetail.interfaces.experts:ExpertsBackend",
    api=(1, 1),  # experts.adapters
    section=kinds.EXPERTS,
    concerns=f"{_RULES}:concerns_experts",
    namespaces=("experts",),
    runtime_needs=(
        RuntimeNeed(Feature.EXPERTS_GRAPH, when="graphs.decode"),
        RuntimeNeed(Feature.EXPERTS_BATCH_INVARIANT, when="batch_invariant"),
    ),
    rules=f"{_RULES}:experts",
    check=f"{_RULES}:check_experts",
    suite="dovetail.testing.experts:ExpertsSuite",
    sample_context=f"{_SAMPLES}:for_experts",
    scaffold=f"{_TEMPLATES}:EXPERTS",
    order=25,
    search_order=25,
)

MIXER = KindDescriptor(
    ComponentKind.MIXER,
    "backends of layers with a state",
    "dovetail.interfaces.mixer:MixerBackend",
    api=(1, 2),  # StateRows.saves; states in bfloat16
    section=kinds.MIXER,
    concerns=f"{_RULES}:concerns_mixer",
    namespaces=("mixer",),
    runtime_needs=(RuntimeNeed(Feature.MIXER_GRAPH, when="graphs.decode"),),
    rules=f"{_RULES}:mixer",
    suite="dovetail.testing.mixer:MixerSuite",
    sample_context=f"{_SAMPLES}:for_mixer",
    scaffold=f"{_TEMPLATES}:MIXER",
    order=27,
    search_order=27,
)

STORE = KindDescriptor(
    ComponentKind.STORE,
    "stores of keys and values",
    "dovetail.interfaces.store:KVStoreFactory",
    api=(1, 1),  # store.state
    section=kinds.STORE,
    screen=f"{_RULES}:screen_store",
    namespaces=("store",),
    rules=f"{_RULES}:store",
    suite="dovetail.testing.store:KVStoreSuite",
    sample_context=f"{_SAMPLES}:for_store",
    scaffold=f"{_TEMPLATES}:STORE",
    order=28,
    search_order=28,
)

KINDS = (
    ATTENTION,
    CACHE,
    GRAMMAR,
    DRAFTER,
    POLICY,
    MODEL,
    TOOL_PARSER,
    REASONING_PARSER,
    API,
    EXECUTOR,
    LOGITS_PROCESSOR,
    QUANTIZATION,
    EXPERTS,
    MIXER,
    STORE,
)


@hookimpl
def register_kinds() -> Sequence[KindDescriptor]:
    """Return the built-in kinds."""
    return KINDS


@hookimpl
def register_features() -> Sequence[FeatureDescriptor]:
    """Return the built-in features."""
    return BUILT_IN_FEATURES
