"""Describe a model that runs through transformers' modules. Imports transformers, and torch, only when it is called."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from dovetail.errors import ConfigError
from dovetail.interfaces.features import Feature
from dovetail.interfaces.model import ModelInfo
from dovetail_models.describe import HeadSizes, cache_groups
from dovetail_models.fallback.facts import AttentionFacts, TransformersSizes
from dovetail_models.settings import read_dtype, read_eos

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
_LAUNCH_FACTOR = 2.0
"""A layer of a Llama of 8B took 0.78 ms to launch kernel by kernel, and one of its own component 0.40 ms, on the host of an H200."""
_NEEDS = (
    ("window", Feature.ATTN_SLIDING_WINDOW),
    ("soft_cap", Feature.ATTN_SOFT_CAP),
    ("sinks", Feature.ATTN_SINKS),
)


def describe_transformers(config: dict[str, Any]) -> ModelInfo:
    """Return the facts of a checkpoint by building its model without memory and running it once without numbers. Raises
    ``ConfigError`` with the reason why the fallback cannot compute it."""
    return _describe(json.dumps(config, sort_keys=True))


@lru_cache(maxsize=4)
def _describe(text: str) -> ModelInfo:
    from dovetail_models.fallback.checks import check_tensors, check_tree
    from dovetail_models.fallback.plan import read_plan, split_sizes
    from dovetail_models.fallback.ranks import why_undivided
    from dovetail_models.fallback.trace import AttentionTrace
    from dovetail_models.fallback.tree import TRACED_ATTENTION, fix_frequencies, new_tree

    config: dict[str, Any] = json.loads(text)
    tree = new_tree(config, TRACED_ATTENTION)
    check_tree(tree)
    fix_frequencies(
        tree, _context_len(tree.config)
    )  # before the trace, in which modules would choose them by positions
    layers = AttentionTrace(tree).run()
    sizes = _head_sizes(tree, layers)
    plan, undivided = read_plan(tree, layers)
    head = tree.get_output_embeddings()
    assert head is not None  # check_tree refuses models without one
    split = split_sizes(tree, plan, layers)
    facts = TransformersSizes(config, layers, plan)
    undivided = undivided or why_undivided(tree, facts, split)
    check_tensors(tree)
    needs = {feature for field, feature in _NEEDS if any(getattr(layer, field) is not None for layer in layers)}
    windows = tuple(layer.window for layer in layers)
    return ModelInfo(
        architecture=type(tree).__name__,
        vocab_size=head.out_features,
        hidden_size=head.in_features,
        num_layers=len(layers),
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        context_len=_context_len(tree.config),
        cache_groups=cache_groups(windows, sizes),
        eos_token_ids=read_eos(config),
        dtype=read_dtype(config),
        needs=frozenset(needs),
        offers=frozenset({Feature.MODEL_EMBED} | (set() if undivided else {Feature.MODEL_TENSOR_PARALLEL})),
        split_sizes=split,
        config=facts,
        notes=_notes(undivided),
        launch_factor=_LAUNCH_FACTOR,
    )


def _notes(undivided: str | None) -> tuple[str, ...]:
    import transformers

    slower = (
        f"computed by the modules of transformers {transformers.__version__}, with Dovetail's attention and linear layers: slower than "
        "a component that is written for the architecture"
    )
    return (slower,) if undivided is None else (slower, f"one rank only: {undivided}")


def _head_sizes(tree: PreTrainedModel, layers: tuple[AttentionFacts, ...]) -> HeadSizes:
    """Return the heads that all layers have. Raises ``ConfigError`` if they differ, or if some layers do not attend."""
    name, count = type(tree).__name__, getattr(tree.config, "num_hidden_layers", None)
    if not layers or (count is not None and count != len(layers)):
        raise ConfigError(
            f"{name} has {count} layers, of which {len(layers)} attend through transformers' interface; others keep keys, values "
            "or states that the engine does not know, or share those of other layers"
        )
    found = {HeadSizes(layer.num_heads, layer.num_kv_heads, layer.pool_dim) for layer in layers}
    if len(found) > 1:
        texts = ", ".join(f"{one.heads} heads, {one.kv_heads} KV heads of {one.head_dim}" for one in found)
        raise ConfigError(f"{name} has layers with different heads ({texts}); implemented: the same in all layers")
    return found.pop()


def _context_len(config: PreTrainedConfig) -> int:
    found = [getattr(config, key, None) for key in _LENGTHS]
    lengths = [length for length in found if isinstance(length, int) and length > 0]
    if not lengths:
        raise ConfigError(
            f"config.json has none of {', '.join(_LENGTHS)}; set the length of the context: model.overrides "
            "{max_position_embeddings: ...}"
        )
    return lengths[0]
