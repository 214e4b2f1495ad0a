"""Register the drafters of this package without importing them."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.interfaces.features import Feature
from dovetail.registry.hookspecs import hookimpl
from dovetail.registry.specs import ComponentKind, ComponentSpec

_PROBE = "dovetail_speculative.checkpoints:probe"
_PROBE_TREE = "dovetail_speculative.checkpoints:probe_tree"

NGRAM = ComponentSpec(
    kind=ComponentKind.DRAFTER,
    name="ngram",
    target="dovetail_speculative.ngram:NgramDrafter",
    config="dovetail_speculative.config:NgramConfig",
    summary="Prompt lookup: drafts what followed the last occurrence of the latest tokens, in this request or in recent outputs.",
    aliases=("prompt_lookup",),
    offers=frozenset({Feature.DRAFT_CHAIN}),
    needs=frozenset({Feature.ATTN_VERIFY, Feature.KV_ROLLBACK}),
)

_CHAINS = frozenset({Feature.DRAFT_CHAIN, Feature.DRAFT_DATA_ATTENTION})
_TREES = frozenset({Feature.DRAFT_TREE, Feature.DRAFT_PROBS, Feature.DRAFT_DATA_ATTENTION})
_OWN_CACHE_NEEDS = frozenset({Feature.ATTN_VERIFY, Feature.KV_ROLLBACK, Feature.KV_DRAFT_CACHE})
_HIDDEN_STATE_NEEDS = _OWN_CACHE_NEEDS | {Feature.MODEL_HIDDEN_STATES}

DFLASH = ComponentSpec(
    kind=ComponentKind.DRAFTER,
    name="dflash",
    target="dovetail_speculative.dflash:DFlashDrafter",
    config="dovetail_speculative.config:DFlashConfig",
    summary="Block diffusion: a small model drafts a block in one pass over hidden states of the target.",
    offers=_CHAINS,
    needs=_HIDDEN_STATE_NEEDS | {Feature.ATTN_TREE_MASK},
    api=(1, 5),
    probe=_PROBE,
)

MTP = ComponentSpec(
    kind=ComponentKind.DRAFTER,
    name="mtp",
    target="dovetail_speculative.mtp:MtpDrafter",
    config="dovetail_speculative.config:MtpConfig",
    summary="Multi-token prediction: layers of the target's own checkpoint draft chains.",
    aliases=("nextn", "deepseek_mtp"),
    offers=_CHAINS,
    needs=_HIDDEN_STATE_NEEDS | {Feature.MODEL_MTP_HEAD},
    api=(1, 5),
)

DRAFT_MODEL = ComponentSpec(
    kind=ComponentKind.DRAFTER,
    name="draft_model",
    target="dovetail_speculative.draft_model:ModelDrafter",
    config="dovetail_speculative.config:DraftModelConfig",
    summary="A smaller model of the same vocabulary drafts chains.",
    aliases=("standalone",),
    offers=_CHAINS,
    needs=_OWN_CACHE_NEEDS,
    api=(1, 6),
    probe=_PROBE,
    opens="dovetail_speculative.checkpoints:opened",
)


def _eagle(
    name: str, target: str, config: str, summary: str, *, trees: bool, aliases: tuple[str, ...] = ()
) -> ComponentSpec:
    return ComponentSpec(
        kind=ComponentKind.DRAFTER,
        name=name,
        target=f"dovetail_speculative.eagle:{target}",
        config=f"dovetail_speculative.config:{config}",
        summary=summary,
        offers=_TREES if trees else _CHAINS,
        needs=_HIDDEN_STATE_NEEDS | ({Feature.ATTN_TREE_MASK} if trees else frozenset()),
        api=(1, 5),
        aliases=aliases,
        probe=_PROBE_TREE if trees else _PROBE,
    )


EAGLE = _eagle(
    "eagle",
    "EagleDrafter",
    "EagleConfig",
    "EAGLE-2: a head that predicts the target's hidden states drafts trees.",
    trees=True,
)
EAGLE3 = _eagle(
    "eagle3",
    "Eagle3Drafter",
    "Eagle3Config",
    "EAGLE-3: a head that reads three layers of the target drafts chains.",
    trees=False,
)
EAGLE3_TREE = _eagle(
    "eagle3_tree",
    "Eagle3Drafter",
    "Eagle3TreeConfig",
    "EAGLE-3 heads that draft trees.",
    trees=True,
    aliases=("eagle3",),
)


@hookimpl
def register_components() -> Sequence[ComponentSpec]:
    """Return the specs of the drafters of this package."""
    return (NGRAM, DRAFT_MODEL, EAGLE, EAGLE3, EAGLE3_TREE, MTP, DFLASH)
