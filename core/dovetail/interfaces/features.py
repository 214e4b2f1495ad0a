"""Define the vocabulary of negotiation: the features that components offer and need.

The resolver checks what components offer, never what they are called. It compares the needs of all components (the
model, the cache, the drafter, the grammar backend and the runtime) with the features that they offer. A feature must be
registered. The built-in features are the attributes of ``Feature``, and a plugin adds its own with the hook
``register_features``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from dovetail.interfaces.names import BuiltIn


@dataclass(frozen=True, slots=True)
class FeatureDescriptor:
    """Describe a feature.

    ``name`` has a namespace, as in ``attention.extend``, which names the side that offers the feature: a kind of
    component, the ``runtime``, the ``kv`` pool or the ``model``. ``meaning`` describes what it means that a component
    offers the feature. ``phases`` matters for kinds that have one component per phase: the components of these phases
    must offer the feature (empty: the components of all phases). ``also`` adds phases under a condition: each entry is
    a boolean setting and the phase that it adds while it is true. The resolver ignores the feature in components that
    were written for a version of the kind's interface before ``since``. ``setting`` names the setting that switches the
    feature on, and ``without`` describes what happens while it is off.
    """

    name: str
    meaning: str
    phases: tuple[str, ...] = ()
    also: tuple[tuple[str, str], ...] = ()
    since: tuple[int, int] = (0, 0)
    setting: str = ""
    without: str = ""

    @property
    def namespace(self) -> str:
        """Return the part of the name before the first dot."""
        return self.name.partition(".")[0]


BUILT_IN_FEATURES: list[FeatureDescriptor] = []
"""Hold the descriptors of the attributes of ``Feature``, in order. The registry's built-in plugin registers them."""

_MIXED = (("scheduler.mixed", "prefill"),)  # the prefill backend runs all rows of a batch that has extend rows


def _feature(
    name: str,
    meaning: str,
    phases: tuple[str, ...] = (),
    also: tuple[tuple[str, str], ...] = (),
    since: tuple[int, int] = (0, 0),
    setting: str = "",
    without: str = "",
) -> Feature:
    BUILT_IN_FEATURES.append(FeatureDescriptor(name, meaning, phases, also, since, setting, without))
    return cast("Feature", BuiltIn(name))


class Feature(str):
    """Name a feature, with the side that offers it as the namespace. A plugin names its own feature with
    ``Feature("kind.word")``."""

    __slots__ = ()

    # attention backends
    ATTN_EXTEND = _feature("attention.extend", "attends from ragged queries over a paged prefix", ("prefill",))
    ATTN_DECODE = _feature("attention.decode", "attends from one query per row", ("decode",))
    ATTN_VERIFY = _feature(
        "attention.verify", "attends from several queries at the end of a row's context", ("decode",), _MIXED
    )
    ATTN_MIXED = _feature("attention.mixed", "takes extend rows and decode rows in one batch", ("prefill",))
    ATTN_TREE_MASK = _feature(
        "attention.tree_mask", "takes verify rows whose queries see only their ancestors", ("decode",), _MIXED
    )
    ATTN_SLIDING_WINDOW = _feature("attention.sliding_window", "limits a layer to a sliding window")
    ATTN_SOFT_CAP = _feature("attention.soft_cap", "caps logits softly")
    ATTN_SINKS = _feature("attention.sinks", "adds attention sinks to the softmax")
    ATTN_LATENT = _feature(
        "attention.latent",
        "attends over latent pages (MLA), whose values are the first numbers of their keys",
    )
    ATTN_EXPANDED = _feature(
        "attention.expanded",
        "attends from prompts over keys and values that latents were expanded to: ``ExpandedAttention``",
        ("prefill",),
    )
    ATTN_SCALES = _feature(
        "attention.scales",
        "multiplies keys and values by the scales of their store: ``KVTensors.scales``",
        since=(1, 5),
    )
    ATTN_GRAPH = _feature("attention.graph", "plan and forward can be captured and replayed")
    ATTN_REHEARSAL = _feature(
        "attention.rehearsal",
        "plan and forward read only what the batch has and what torch computes, so that they can run while Triton launches nothing",
    )
    ATTN_VERIFY_GRAPH = _feature(
        "attention.verify_graph",
        "plan and forward of verify rows can be captured too, with tree masks if these are offered",
    )
    ATTN_SHARED_PREFIX = _feature(
        "attention.shared_prefix", "reads a prefix that decode rows share once for all of them"
    )
    ATTN_SHARED_WINDOW = _feature(
        "attention.shared_window",
        "reads a prefix that decode rows share once in layers with a sliding window too",
        since=(1, 6),
    )
    ATTN_BATCH_INVARIANT = _feature(
        # Version 1.3 is the first in which the feature also concerns the division of a row among steps.
        "attention.batch_invariant",
        "bits depend on a row's tokens alone, where the context requires it",
        since=(1, 3),
    )
    ATTN_INVARIANT_WINDOW = _feature(
        "attention.batch_invariant_window", "is batch-invariant in layers with a sliding window too"
    )

    # prefix caches
    CACHE_REUSE = _feature("cache.reuse", "match can return a non-empty prefix")
    CACHE_NAMESPACES = _feature("cache.namespaces", "keeps the prefixes of namespaces apart")
    CACHE_EVICT = _feature("cache.evict", "can evict pages")
    CACHE_GROUPS = _feature("cache.groups", "keeps sliding and state groups next to full and latent ones")
    CACHE_SHARED_PREFIXES = _feature("cache.shared_prefixes", "reports which running rows share which prefix")

    # stores of keys and values
    STORE_FULL = _feature("store.full", "keeps groups of kind full")
    STORE_SLIDING = _feature("store.sliding", "keeps groups of kind sliding")
    STORE_LATENT = _feature("store.latent", "keeps groups of kind latent")
    STORE_STATE = _feature(
        "store.state", "keeps the states of groups of kind state: slot_bytes, make_states", since=(1, 1)
    )
    STORE_SLABS = _feature("store.slabs", "keeps groups in memory that several groups share: make_shared")

    # KV state
    KV_ROLLBACK = _feature("kv.rollback", "KV of rejected draft tokens can be abandoned")
    KV_STATE_ROLLBACK = _feature("kv.state_rollback", "recurrent state can be restored")
    KV_DRAFT_CACHE = _feature(
        "kv.draft_cache",
        "a drafter's own keys and values have pages like the target's; models of states alone have none",
    )

    # grammar backends
    GRAMMAR_JSON_SCHEMA = _feature("grammar.json_schema", "compiles JSON schemas")
    GRAMMAR_JSON_OBJECT = _feature("grammar.json_object", "constrains the output to any JSON object")
    GRAMMAR_REGEX = _feature("grammar.regex", "compiles regular expressions")
    GRAMMAR_EBNF = _feature("grammar.ebnf", "compiles EBNF grammars")
    GRAMMAR_LARK = _feature("grammar.lark", "compiles Lark grammars")
    GRAMMAR_CHOICE = _feature("grammar.choice", "constrains the output to one of several texts")
    GRAMMAR_STRUCTURAL_TAG = _feature("grammar.structural_tag", "constrains tagged parts of free text")
    GRAMMAR_ROLLBACK = _feature("grammar.rollback", "matchers can take tokens back")
    GRAMMAR_JUMP_FORWARD = _feature("grammar.jump_forward", "matchers return the text that must follow")
    GRAMMAR_PORTABLE = _feature(
        "grammar.portable", "compiled grammars can be written to bytes and read in another process"
    )

    # drafters
    DRAFT_CHAIN = _feature("draft.chain", "proposes chains of draft tokens")
    DRAFT_TREE = _feature("draft.tree", "proposes trees of draft tokens")
    DRAFT_PROBS = _feature("draft.probs", "states the probabilities of its draft tokens: DraftTree.probs")
    DRAFT_DATA_ATTENTION = _feature(
        "draft.data_attention",
        "its passes accept Batch.own, so that each rank can attend for requests of its own; a model that it opens must offer model.data_attention",
    )

    # schedule policies
    POLICY_PREFIX_AWARE = _feature("policy.prefix_aware", "orders requests by what the prefix cache holds")

    # logits processors
    LOGITS_DRAFTS = _feature(
        "logits.drafts", "processes rows of drafts; without it the requests that name the processor are not drafted"
    )
    LOGITS_BATCH_INVARIANT = _feature(
        "logits.batch_invariant", "the bits of a row do not depend on the other rows of a call"
    )

    # quantizations
    QUANTIZATION_BATCH_INVARIANT = _feature(
        "quantization.batch_invariant", "the bits of a row of a product do not depend on the other rows"
    )

    QUANTIZATION_EXPERTS = _feature(
        "quantization.experts", "stores the weights of experts too: experts_method", since=(1, 1)
    )

    # backends of experts
    EXPERTS_PLAIN = _feature("experts.plain", "multiplies weights in the dtype of activations")
    EXPERTS_FP8_ROWS = _feature("experts.fp8_rows", "multiplies FP8 weights with a scale for each row")
    EXPERTS_FP8_BLOCKS = _feature("experts.fp8_blocks", "multiplies FP8 weights with a scale for each block")
    EXPERTS_MXFP4 = _feature("experts.mxfp4", "multiplies MXFP4 weights")
    EXPERTS_INT4 = _feature("experts.int4", "multiplies integer weights of 4 bits")
    EXPERTS_INT8 = _feature("experts.int8", "multiplies integer weights of 8 bits")
    EXPERTS_GGUF = _feature("experts.gguf", "multiplies weights in blocks of GGUF")
    EXPERTS_BIAS = _feature("experts.bias", "adds the biases of gate, up and down")
    EXPERTS_SWIGLU = _feature("experts.swiglu", "computes every SwiGLU, with a factor, a limit and an offset")
    EXPERTS_SCALED_INPUT = _feature("experts.scaled_input", "multiplies the input of an expert by its weight")
    EXPERTS_UNGATED = _feature("experts.ungated", "computes experts without a gate: down(relu(up(x)) ** 2)")
    EXPERTS_GRAPH = _feature("experts.graph", "forward and parts can be captured and replayed with other experts")
    EXPERTS_REHEARSAL = _feature(
        "experts.rehearsal",
        "forward and parts read no more than their arguments on the device, so that they can run while Triton launches nothing",
    )
    EXPERTS_BATCH_INVARIANT = _feature(
        "experts.batch_invariant", "the bits of a token's result do not depend on the other tokens"
    )
    EXPERTS_ADAPTERS = _feature(
        "experts.adapters",
        "in steps in which a token has an adapter, the products of ops.experts with adapters of experts may take the place of its own",
        since=(1, 1),
    )

    # backends of layers with a state
    MIXER_SHORT_CONV = _feature("mixer.short_conv", "computes short convolutions")
    MIXER_GATED_DELTA = _feature("mixer.gated_delta", "computes the gated delta rule, with one decay for each head")
    MIXER_KDA = _feature("mixer.kda", "computes the gated delta rule with a decay for each key channel")
    MIXER_SSD = _feature("mixer.ssd", "computes the recurrence of Mamba-2")
    MIXER_SELECTIVE_SCAN = _feature("mixer.selective_scan", "computes the recurrence of Mamba")
    MIXER_DRAFTS = _feature(
        "mixer.drafts", "computes rows of drafts without writing states, and writes the states after accepted ones"
    )
    MIXER_SNAPSHOTS = _feature(
        "mixer.snapshots", "writes the states after chunks within a prompt to slots of snapshots"
    )
    MIXER_BFLOAT16_STATES = _feature("mixer.bfloat16_states", "keeps the states of recurrences in bfloat16 too")
    MIXER_GRAPH = _feature("mixer.graph", "every operation can be captured and replayed with other rows")

    # executors
    EXECUTOR_RANKS = _feature("executor.ranks", "runs several ranks")

    # the runtime
    RUNTIME_OVERLAP = _feature(
        "runtime.overlap",
        "commits a step after the next one has been launched",
        setting="scheduler.overlap",
        without="every step is committed before the next",
    )
    RUNTIME_DELAYED_MASK = _feature("runtime.delayed_mask", "fills bitmasks while the forward pass runs")

    # model architectures
    MODEL_EMBED = _feature("model.embed", "hidden states after the final norm serve as embeddings of texts")
    MODEL_MTP_HEAD = _feature("model.mtp_head", "the checkpoint has layers that predict further tokens")
    MODEL_HIDDEN_STATES = _feature(
        "model.hidden_states", "forward keeps hidden states of named layers; has embed_tokens"
    )
    MODEL_LAST_ROWS = _feature("model.last_rows", "the last layer computes only the rows that are sampled")
    MODEL_TENSOR_PARALLEL = _feature(
        "model.tensor_parallel", "builds its layers with the mesh, so that ranks hold a share of each"
    )
    MODEL_DATA_ATTENTION = _feature(
        "model.data_attention",
        "attends with SelfAttention or LatentAttention and keeps states with StateMixer only, so that each rank can compute these layers for requests of its own",
    )
    MODEL_BATCH_INVARIANT = _feature(
        "model.batch_invariant", "computes every product with Linear, and everything else token by token"
    )
