"""Read which linear layers the ranks of tensor parallelism divide, from the plan that transformers has for a model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import nn
from transformers import PreTrainedModel

from dovetail_models.fallback.facts import AttentionFacts

COLUMN, ROW, COLUMN_GATHERED, ROW_SPLIT, COLUMN_PACKED = (
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "rowwise_split_input",
    "packed_colwise",
)
DIVIDED = frozenset({COLUMN, ROW, COLUMN_GATHERED, ROW_SPLIT, COLUMN_PACKED})
"""The styles of linear layers that are implemented. Their names are transformers'."""
LOCAL = "local_params"
"""The style of modules whose own parameters are divided like the heads."""
WHOLE = frozenset({"replicated_with_grad_allreduce", "replicate"})
"""The styles of modules that every rank has as a whole."""
VOCABULARY = frozenset({"embedding_rowwise", "embedding_colwise", COLUMN_GATHERED, COLUMN})
"""The styles of the embedding and the head, which are always divided by tokens of the vocabulary."""


def read_plan(tree: PreTrainedModel, attention: Sequence[AttentionFacts]) -> tuple[dict[str, str], str | None]:
    """Return the style of each linear layer that ranks divide, by its name, and, if ranks cannot divide the model, the
    reason, otherwise None."""
    patterns: Mapping[str, str] = tree.tp_plan or {}
    if not patterns:
        return {}, "transformers has no plan of tensor parallelism for it"
    sinks = {facts.sinks for facts in attention}
    vocabulary = {id(tree.get_input_embeddings()), id(tree.get_output_embeddings())}
    found: dict[str, str] = {}
    for name, module in tree.named_modules():
        style = patterns.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is None or style in WHOLE or (id(module) in vocabulary and style in VOCABULARY):
            continue
        own = {f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)}
        if style == LOCAL and own <= sinks:
            continue  # attention takes the sinks of its own heads
        if type(module) is not nn.Linear or style not in DIVIDED:
            return {}, f"its plan has {name} ({type(module).__name__}) {style}, which is not implemented"
        found[name] = style
    for name, _ in tree.named_parameters():
        style = patterns.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is not None and style not in WHOLE and name not in sinks:
            return {}, f"its plan has the parameter {name} {style}, which is not implemented"
    return found, None


def split_sizes(
    tree: PreTrainedModel, plan: Mapping[str, str], attention: Sequence[AttentionFacts]
) -> tuple[tuple[str, int], ...]:
    """Return the names and values of the sizes that ranks must divide evenly, in addition to heads."""
    sizes: dict[tuple[str, int], None] = {}
    for name, style in plan.items():
        linear = tree.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        if attention_of(name, attention) is None or style in (COLUMN_GATHERED, ROW_SPLIT):
            size = linear.in_features if style in (ROW, ROW_SPLIT) else linear.out_features
            size = size // 2 if style == COLUMN_PACKED else size
            sizes[re.sub(r".*\.\d+\.", "", name), size] = None
    return tuple(sizes)


def attention_of(name: str, attention: Sequence[AttentionFacts]) -> AttentionFacts | None:
    """Return the attention layer that contains the linear layer ``name``, or None."""
    return next((facts for facts in attention if name.startswith(f"{facts.module}.")), None)


def unit_of(outputs: int, facts: AttentionFacts | None) -> int:
    """Return the number of outputs that a rank cannot divide: in attention those of a head."""
    if facts is None:
        return 1
    if outputs in (facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim):
        return facts.head_dim
    if outputs == facts.num_kv_heads * facts.value_dim:
        return facts.value_dim
    return outputs // facts.num_heads if outputs % facts.num_heads == 0 else 1
