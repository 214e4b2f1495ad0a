"""The entry point: what there is. Importing this module imports no torch, and none of the parts."""

from __future__ import annotations

from dovetail.interfaces.features import Feature
from dovetail.registry.hookspecs import hookimpl
from dovetail.registry.specs import ComponentKind, ComponentSpec, Stability


def _spec(
    kind: ComponentKind,
    name: str,
    target: str,
    config: str,
    summary: str,
    *offers: Feature,
    needs: frozenset[Feature] = frozenset(),
) -> ComponentSpec:
    return ComponentSpec(
        kind=kind,
        name=name,
        target=f"dovetail_example.{target}",
        config=f"dovetail_example.config:{config}",
        summary=summary,
        offers=frozenset(offers),
        needs=needs,
        stability=Stability.EXPERIMENTAL,
        priority=-100,  # `auto` prefers any other
    )


@hookimpl
def register_attention_backends() -> list[ComponentSpec]:
    """``example_eager``."""
    return [
        _spec(
            ComponentKind.ATTENTION,
            "example_eager",
            "attention:EagerAttention",
            "EagerConfig",
            "Attention in plain torch, one row at a time.",
            Feature.ATTN_EXTEND,
            Feature.ATTN_DECODE,
            Feature.ATTN_VERIFY,
            Feature.ATTN_MIXED,
            Feature.ATTN_SLIDING_WINDOW,
        )
    ]


@hookimpl
def register_prefix_caches() -> list[ComponentSpec]:
    """``example_pages``."""
    return [
        _spec(
            ComponentKind.CACHE,
            "example_pages",
            "cache:PageCache",
            "PagesConfig",
            "A tree of pages, one dictionary look-up per page.",
            Feature.CACHE_REUSE,
            Feature.CACHE_NAMESPACES,
            Feature.CACHE_EVICT,
        )
    ]


@hookimpl
def register_grammar_backends() -> list[ComponentSpec]:
    """``example_choices``."""
    return [
        _spec(
            ComponentKind.GRAMMAR,
            "example_choices",
            "grammar:ChoicesBackend",
            "ChoicesConfig",
            "Regexes that are a choice of plain texts, like yes|no.",
            Feature.GRAMMAR_REGEX,
            Feature.GRAMMAR_ROLLBACK,
        )
    ]


@hookimpl
def register_drafters() -> list[ComponentSpec]:
    """``example_bigram``."""
    return [
        _spec(
            ComponentKind.DRAFTER,
            "example_bigram",
            "drafter:BigramDrafter",
            "BigramConfig",
            "Drafts what followed the last two tokens before.",
            Feature.DRAFT_CHAIN,
            needs=frozenset({Feature.ATTN_VERIFY, Feature.KV_ROLLBACK}),
        )
    ]


@hookimpl
def register_policies() -> list[ComponentSpec]:
    """``example_shortest``."""
    return [
        _spec(
            ComponentKind.POLICY,
            "example_shortest",
            "policy:ShortestFirst",
            "ShortestConfig",
            "Shortest prompt first; waiting makes a prompt shorter.",
        )
    ]


@hookimpl
def register_models() -> list[ComponentSpec]:
    """``example``: checkpoints whose config.json names ``ExampleForCausalLM``."""
    return [
        ComponentSpec(
            kind=ComponentKind.MODEL,
            name="example",
            target="dovetail_example.model:ExampleModel",
            config="dovetail_example.config:ExampleConfig",
            describe="dovetail_example.describe:describe",
            aliases=("ExampleForCausalLM",),
            summary="A decoder of Llama's shape, built from dovetail.layers.",
            stability=Stability.EXPERIMENTAL,
        )
    ]


@hookimpl
def register_tool_parsers() -> list[ComponentSpec]:
    """``example_lines``; without a ``template`` it is taken by name only."""
    return [
        _spec(
            ComponentKind.TOOL_PARSER,
            "example_lines",
            "parsers:CallLines",
            "CallLinesConfig",
            "A line CALL name {...} is a call.",
        )
    ]


@hookimpl
def register_reasoning_parsers() -> list[ComponentSpec]:
    """``example_comments``."""
    return [
        _spec(
            ComponentKind.REASONING_PARSER,
            "example_comments",
            "parsers:Comments",
            "CommentsConfig",
            "Lines that begin with # are reasoning.",
        )
    ]


@hookimpl
def register_apis() -> list[ComponentSpec]:
    """``example_line``; a server speaks every API that is installed, unless its config names some."""
    return [_spec(ComponentKind.API, "example_line", "lines:Lines", "LineConfig", "POST /line: a line goes on.")]
