"""Register the components. Importing this module imports neither torch nor any component."""

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
    api: tuple[int, int] = (1, 0),
) -> ComponentSpec:
    return ComponentSpec(
        kind=kind,
        name=name,
        target=f"dovetail_example.{target}",
        config=f"dovetail_example.config:{config}",
        summary=summary,
        api=api,
        offers=frozenset(offers),
        needs=needs,
        stability=Stability.EXPERIMENTAL,
        priority=-100,  # `auto` prefers every other component
    )


@hookimpl
def register_components() -> list[ComponentSpec]:
    """Return one component of each built-in kind."""
    return [*_engine_components(), *_model_components()]


def _engine_components() -> list[ComponentSpec]:
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
        ),
        _spec(
            ComponentKind.CACHE,
            "example_pages",
            "cache:PageCache",
            "PagesConfig",
            "A tree of pages, one dictionary look-up per page.",
            Feature.CACHE_REUSE,
            Feature.CACHE_NAMESPACES,
            Feature.CACHE_EVICT,
            api=(2, 0),
        ),
        _spec(
            ComponentKind.GRAMMAR,
            "example_choices",
            "grammar:ChoicesBackend",
            "ChoicesConfig",
            "Regexes that are a choice of plain texts, like yes|no.",
            Feature.GRAMMAR_REGEX,
            Feature.GRAMMAR_ROLLBACK,
        ),
        _spec(
            ComponentKind.DRAFTER,
            "example_bigram",
            "drafter:BigramDrafter",
            "BigramConfig",
            "Drafts what followed the last two tokens before.",
            Feature.DRAFT_CHAIN,
            needs=frozenset({Feature.ATTN_VERIFY, Feature.KV_ROLLBACK}),
        ),
        _spec(
            ComponentKind.POLICY,
            "example_shortest",
            "policy:ShortestFirst",
            "ShortestConfig",
            "Shortest prompt first; waiting makes a prompt count as shorter.",
        ),
    ]


def _model_components() -> list[ComponentSpec]:
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
        ),
        _spec(
            ComponentKind.TOOL_PARSER,
            "example_lines",
            "parsers:CallLines",
            "CallLinesConfig",
            "A line CALL name {...} is a call.",
        ),
        _spec(
            ComponentKind.REASONING_PARSER,
            "example_comments",
            "parsers:Comments",
            "CommentsConfig",
            "Lines that begin with # are reasoning.",
        ),
        _spec(ComponentKind.API, "example_line", "lines:Lines", "LineConfig", "POST /line: continues a line."),
    ]
