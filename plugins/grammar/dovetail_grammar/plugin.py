"""Register the grammar backends of this distribution."""

from __future__ import annotations

from dovetail.interfaces.features import Feature
from dovetail.registry.hookspecs import hookimpl
from dovetail.registry.specs import ComponentKind, ComponentSpec, Requirement

XGRAMMAR = ComponentSpec(
    kind=ComponentKind.GRAMMAR,
    name="xgrammar",
    target="dovetail_grammar.xgrammar_backend:XGrammarBackend",
    config="dovetail_grammar.config:XGrammarConfig",
    summary="XGrammar: pushdown automata with precomputed token masks; JSON schema, regex, EBNF, choice and structural tags.",
    requires=(Requirement("xgrammar", ">=0.2", "pip install xgrammar"),),
    offers=frozenset(
        {
            Feature.GRAMMAR_JSON_SCHEMA,
            Feature.GRAMMAR_JSON_OBJECT,
            Feature.GRAMMAR_REGEX,
            Feature.GRAMMAR_EBNF,
            Feature.GRAMMAR_CHOICE,
            Feature.GRAMMAR_STRUCTURAL_TAG,
            Feature.GRAMMAR_ROLLBACK,
            Feature.GRAMMAR_JUMP_FORWARD,
            Feature.GRAMMAR_PORTABLE,
        }
    ),
    priority=8,
)

LLGUIDANCE = ComponentSpec(
    kind=ComponentKind.GRAMMAR,
    name="llguidance",
    target="dovetail_grammar.llguidance_backend:LLGuidanceBackend",
    config="dovetail_grammar.config:LLGuidanceConfig",
    summary="llguidance: an Earley parser over a lexer of derivatives; compiles in milliseconds, computes masks as needed.",
    requires=(Requirement("llguidance", ">=1.9", "pip install llguidance"),),
    offers=frozenset(
        {
            Feature.GRAMMAR_JSON_SCHEMA,
            Feature.GRAMMAR_JSON_OBJECT,
            Feature.GRAMMAR_REGEX,
            Feature.GRAMMAR_EBNF,
            Feature.GRAMMAR_LARK,
            Feature.GRAMMAR_CHOICE,
            Feature.GRAMMAR_STRUCTURAL_TAG,
            Feature.GRAMMAR_ROLLBACK,
            Feature.GRAMMAR_JUMP_FORWARD,
        }
    ),
    priority=10,
)

OUTLINES = ComponentSpec(
    kind=ComponentKind.GRAMMAR,
    name="outlines",
    target="dovetail_grammar.outlines_backend:OutlinesBackend",
    config="dovetail_grammar.config:OutlinesConfig",
    summary="outlines-core: one regex, and an index of every token in every state; the fastest masks, only finite schemas.",
    requires=(Requirement("outlines-core", ">=0.2.14", "pip install outlines-core"),),
    offers=frozenset(
        {Feature.GRAMMAR_JSON_SCHEMA, Feature.GRAMMAR_REGEX, Feature.GRAMMAR_CHOICE, Feature.GRAMMAR_ROLLBACK}
    ),
    priority=4,
)

LM_FORMAT_ENFORCER = ComponentSpec(
    kind=ComponentKind.GRAMMAR,
    name="lm_format_enforcer",
    target="dovetail_grammar.lm_format_enforcer_backend:LMFormatEnforcerBackend",
    config="dovetail_grammar.config:LMFormatEnforcerConfig",
    summary="lm-format-enforcer: pure Python, compiles in milliseconds; a new mask takes milliseconds with 4k tokens and up to "
    "a second with 128k.",
    requires=(Requirement("lm-format-enforcer", ">=0.11.3", "pip install lm-format-enforcer"),),
    offers=frozenset(
        {
            Feature.GRAMMAR_JSON_SCHEMA,
            Feature.GRAMMAR_JSON_OBJECT,
            Feature.GRAMMAR_REGEX,
            Feature.GRAMMAR_CHOICE,
            Feature.GRAMMAR_ROLLBACK,
            Feature.GRAMMAR_JUMP_FORWARD,
        }
    ),
    priority=2,
)


@hookimpl
def register_components() -> list[ComponentSpec]:
    """Return the specs of the grammar backends."""
    return [XGRAMMAR, LLGUIDANCE, OUTLINES, LM_FORMAT_ENFORCER]
