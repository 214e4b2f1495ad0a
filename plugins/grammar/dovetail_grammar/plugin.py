"""The grammar backends of this distribution."""

from __future__ import annotations

from dovetail.interfaces.features import Feature
from dovetail.plugins.hookspecs import hookimpl
from dovetail.plugins.specs import ComponentKind, ComponentSpec, Requirement

XGRAMMAR = ComponentSpec(
    kind=ComponentKind.GRAMMAR,
    name="xgrammar",
    target="dovetail_grammar.xgrammar_backend:XGrammarBackend",
    config="dovetail_grammar.config:XGrammarConfig",
    summary="XGrammar: pushdown automata with token masks computed ahead; JSON schema, regex and EBNF.",
    requires=(Requirement("xgrammar", ">=0.2", "pip install xgrammar"),),
    offers=frozenset(
        {
            Feature.GRAMMAR_JSON_SCHEMA,
            Feature.GRAMMAR_JSON_OBJECT,
            Feature.GRAMMAR_REGEX,
            Feature.GRAMMAR_EBNF,
            Feature.GRAMMAR_ROLLBACK,
            Feature.GRAMMAR_JUMP_FORWARD,
        }
    ),
    priority=10,
)


@hookimpl
def register_grammar_backends() -> list[ComponentSpec]:
    """Grammar backends."""
    return [XGRAMMAR]
