"""Translate the names of parameters in transformers' modules to those in checkpoints."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from dovetail.errors import ConfigError


def checkpoint_names(tree: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Return the name in checkpoints of each parameter of ``names``. Raises ``ConfigError`` for a parameter that
    checkpoints have in another form than a tensor of its own, such as one for each expert."""
    found = get_model_conversion_mapping(tree, add_legacy=False)
    if all(isinstance(conversion, PrefixChange) for conversion in found):
        return {name: name for name in names}
    tensors = dict(tree.state_dict(keep_vars=True))
    return {name: _checkpoint_name(tree, name, tensors[name]) for name in names}


def _checkpoint_name(tree: PreTrainedModel, name: str, tensor: torch.Tensor) -> str:
    try:
        reverted = revert_weight_conversion(tree, {name: tensor})
    except Exception as error:
        raise ConfigError(_converted(tree, name)) from error
    if len(reverted) != 1 or next(iter(reverted.values())).shape != tensor.shape:
        raise ConfigError(_converted(tree, name))
    return next(iter(reverted))


def _converted(tree: PreTrainedModel, name: str) -> str:
    return (
        f"{type(tree).__name__}: transformers computes the parameter {name} from several tensors of a checkpoint, which the "
        "fallback does not do"
    )
