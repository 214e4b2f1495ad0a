"""Describe the kind ``prompt_rewriter`` and its features."""

from __future__ import annotations

from dovetail.config.kinds import KindSection
from dovetail.interfaces.features import Feature, FeatureDescriptor
from dovetail.registry.specs import ComponentKind, KindDescriptor, Selects

PROMPT_REWRITER = ComponentKind("prompt_rewriter")
NORMALIZES = Feature("prompt_rewriter.normalizes")
IDEMPOTENT = Feature("prompt_rewriter.idempotent")

KIND = KindDescriptor(
    PROMPT_REWRITER,
    "rewriters of prompts",
    "dovetail_prompt_rewriters.interface:PromptRewriter",
    api=(1, 0),
    section=KindSection(
        "prompt_rewriter",
        "Rewrites prompts before they are tokenized. All components of a list are applied, in its order.",
        optional=True,
        takes_all=True,
        of_server=True,
        default="none",
    ),
    selects=Selects.LIST,
    namespaces=("prompt_rewriter",),
    rules="dovetail_prompt_rewriters.rules:order",
    suite="dovetail_prompt_rewriters.testing:PromptRewriterSuite",
    scaffold="dovetail_prompt_rewriters.scaffold:TEMPLATE",
    light_target=True,
    for_prompts=True,
)

FEATURES = (
    FeatureDescriptor(NORMALIZES, "returns text in a Unicode normal form, so that later patterns match every spelling"),
    FeatureDescriptor(IDEMPOTENT, "rewriting a text twice gives the same result as rewriting it once"),
)
