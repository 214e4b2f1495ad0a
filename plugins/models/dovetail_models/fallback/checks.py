"""Refuse models of transformers that an engine's steps would compute wrongly, by what their modules are."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel

from dovetail.errors import ConfigError
from dovetail_models.fallback.names import checkpoint_names
from dovetail_models.fallback.tree import (
    compute_buffers,
    constant_tensors,
    embedding_scale,
    fix_frequencies,
    use_parameters,
    vocabulary_of,
)


def check_tree(tree: PreTrainedModel) -> None:
    """Raise ``ConfigError`` for a model whose modules cannot run in an engine's steps, or whose weights the loader cannot
    place."""
    what = type(tree).__name__
    for key in ("vision_config", "audio_config"):
        if getattr(tree.config, key, None) is not None:
            raise ConfigError(f"{what} is multimodal ({key}); implemented: models of text")
    if getattr(tree.config, "num_kv_shared_layers", 0):
        raise ConfigError(
            f"{what} has layers that attend to the keys and values of other layers (num_kv_shared_layers)"
        )
    for name, module in tree.named_modules():
        if isinstance(module, _ConvNd | nn.RNNBase):
            raise ConfigError(f"{what}: {name} ({type(module).__name__}) computes over tokens outside of attention")
    for name, parameter in tree.named_parameters():
        if parameter.ndim > 2:
            raise ConfigError(
                f"{what}: {name} is a tensor of {parameter.ndim} dimensions, as those of experts are; implemented: models without "
                "experts"
            )
    vocabulary_of(tree)


def check_tensors(tree: PreTrainedModel) -> None:
    """Raise ``ConfigError`` for tensors of a model that nothing would compute or load. Mutates the model."""
    if constants := list(constant_tensors(tree)):
        raise ConfigError(
            f"{type(tree).__name__} has constants that no checkpoint contains: {', '.join(constants[:3])}"
        )
    compute_buffers(tree, torch.device("cpu"))
    embedding_scale(tree)
    fix_frequencies(tree, 1)
    use_parameters(tree)
    checkpoint_names(tree, [name for name, _ in tree.named_parameters(remove_duplicate=False)])
