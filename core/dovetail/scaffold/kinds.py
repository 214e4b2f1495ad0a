"""What the generated package of each kind says of itself. Its code is in ``templates/<kind>``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dovetail.interfaces.features import Feature
from dovetail.registry.specs import ComponentKind


@dataclass(frozen=True, slots=True)
class KindFacts:
    """One kind: the class that is generated (``suffix`` ends its name), and what it is.

    ``setting`` is shown as an example, ``rival`` is a built-in component to measure it against.
    """

    module: str
    suffix: str
    interface: str
    summary: str
    about: str
    offers: tuple[Feature, ...] = ()
    needs: tuple[Feature, ...] = ()
    setting: Mapping[str, Any] = field(default_factory=dict)
    rival: str | None = None


FACTS: Mapping[ComponentKind, KindFacts] = {
    ComponentKind.ATTENTION: KindFacts(
        "attention",
        "Attention",
        "AttentionBackend",
        "Attention in plain torch, one row at a time.",
        "An attention backend for Dovetail in plain torch: every feature, written to be read. Begin with the slowest line.",
        (
            Feature.ATTN_EXTEND,
            Feature.ATTN_DECODE,
            Feature.ATTN_VERIFY,
            Feature.ATTN_MIXED,
            Feature.ATTN_TREE_MASK,
            Feature.ATTN_SLIDING_WINDOW,
            Feature.ATTN_SOFT_CAP,
            Feature.ATTN_SINKS,
            Feature.ATTN_BATCH_INVARIANT,
            Feature.ATTN_INVARIANT_WINDOW,
        ),
        setting={"query_block": 64},
        rival="torch_native",
    ),
    ComponentKind.CACHE: KindFacts(
        "cache",
        "Cache",
        "PrefixCache",
        "A tree of pages, one dictionary look-up per page.",
        "A prefix cache for Dovetail: a tree of pages that forgets its leaves by use.",
        (Feature.CACHE_REUSE, Feature.CACHE_NAMESPACES, Feature.CACHE_EVICT),
        setting={"eviction": "lfu"},
        rival="radix",
    ),
    ComponentKind.GRAMMAR: KindFacts(
        "grammar",
        "Backend",
        "GrammarBackend",
        "Choices: the output is one of a few texts.",
        "A grammar backend for Dovetail that honours choices, and refuses every other constraint with the way out.",
        (
            Feature.GRAMMAR_CHOICE,
            Feature.GRAMMAR_ROLLBACK,
            Feature.GRAMMAR_JUMP_FORWARD,
            Feature.GRAMMAR_PORTABLE,
        ),
        setting={"max_choices": 50},
    ),
    ComponentKind.DRAFTER: KindFacts(
        "drafter",
        "Drafter",
        "Drafter",
        "Prompt lookup: drafts what followed the last tokens before.",
        "A drafter for Dovetail: prompt lookup, which expects the text to go on as it did before.",
        (Feature.DRAFT_CHAIN,),
        needs=(Feature.ATTN_VERIFY, Feature.KV_ROLLBACK),
        setting={"longest_match": 5},
        rival="ngram",
    ),
    ComponentKind.POLICY: KindFacts(
        "policy",
        "Policy",
        "SchedulePolicy",
        "Shortest prompt first; waiting makes a prompt shorter.",
        "A schedule policy for Dovetail: the shortest prompt goes first, and nobody starves.",
        setting={"tokens_per_second": 50.0},
        rival="fcfs",
    ),
    ComponentKind.MODEL: KindFacts(
        "model",
        "Model",
        "ModelArchitecture",
        "A decoder of Llama's shape, built from dovetail.layers.",
        "A model architecture for Dovetail: a dense decoder, built from `dovetail.layers`, whose test holds it to a second "
        "implementation of the mathematics.",
    ),
    ComponentKind.TOOL_PARSER: KindFacts(
        "parser",
        "ToolParser",
        "ToolParser",
        "A line CALL name {...} is a call.",
        "A parser of tool calls for Dovetail: a line `CALL name {...}` is a call.",
        setting={"word": "DO"},
    ),
    ComponentKind.REASONING_PARSER: KindFacts(
        "parser",
        "ReasoningParser",
        "ReasoningParser",
        "Lines that begin with # are reasoning.",
        "A parser of reasoning for Dovetail: lines that begin with `#` are reasoning.",
        setting={"mark": "//"},
    ),
    ComponentKind.API: KindFacts(
        "protocol",
        "Api",
        "Api",
        "One route: a text goes on, whole or line by line.",
        "A protocol for Dovetail's server: one route that lets a text go on, whole or line by line. Every API that is "
        "installed is served, unless the config names some.",
        setting={"tokens": 16},
    ),
}
