"""Find out whether a model of transformers computes with a rank's share of its linear layers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from dovetail.interfaces.mesh import Mesh, OneRank
from dovetail_models.fallback.attention import ATTRIBUTE, CurrentStep
from dovetail_models.fallback.facts import AttentionFacts, TransformersSizes
from dovetail_models.fallback.replaced import replace_modules
from dovetail_models.fallback.tree import body_of, new_tree

_TRIED = (2, 3, 5, 7, 11, 13)
_TOKENS = 3


class RankOfShapes(OneRank):
    """Be the first of several ranks in a pass without numbers: results have the right shapes, and no values."""

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather(self, x: torch.Tensor, width: int | None = None) -> torch.Tensor:
        """See ``Collectives``."""
        return x.new_empty(len(x), self.size * x.shape[1] if width is None else width)


class _AttentionShape:
    """Return results of the shape that attention has for the queries it gets: those of the rank, or of the whole layer."""

    def __init__(self, facts: AttentionFacts, ranks: int) -> None:
        self._facts, self._ranks = facts, ranks

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, given: Any
    ) -> torch.Tensor:
        """See ``PagedAttention``."""
        for tensor, heads in ((query, self._facts.num_heads), (key, self._facts.num_kv_heads)):
            if tensor.shape[1] not in (heads, max(heads // self._ranks, 1)):
                raise ValueError(f"it attends with {tensor.shape[1]} of {heads} heads")
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


def why_undivided(tree: PreTrainedModel, sizes: TransformersSizes, split: tuple[tuple[str, int], ...]) -> str | None:
    """Return why the modules cannot compute with a rank's share, or None if they do. ``split`` are the sizes, besides heads,
    that ranks must divide evenly."""
    heads = sizes.attention[0]
    whole = [heads.num_heads, *(size for _, size in split)]
    ranks = next((n for n in _TRIED if all(size % n == 0 for size in whole) and _fits(heads.num_kv_heads, n)), None)
    if ranks is None:
        return None  # no number of ranks is allowed, whatever the modules do
    own = new_tree(sizes.config)
    try:
        with torch.device("meta"), torch.no_grad():
            replace_modules(own, sizes, CurrentStep(), 1.0, Mesh(RankOfShapes(ranks)))
            for facts in sizes.attention:
                module = own.get_submodule(facts.module)
                delattr(module, ATTRIBUTE)
                setattr(module, ATTRIBUTE, _AttentionShape(facts, ranks))
            ids = torch.zeros(1, _TOKENS, dtype=torch.int64)
            body_of(own)(input_ids=ids, position_ids=ids, use_cache=False)
    except Exception as error:  # of code of transformers that is not meant for ranks
        return f"its modules do not compute with a rank's share ({type(error).__name__}: {error})"
    return None


def _fits(kv_heads: int, ranks: int) -> bool:
    return kv_heads % ranks == 0 or ranks % kv_heads == 0
