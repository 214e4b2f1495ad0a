"""Compute a model through transformers' modules, with Dovetail's attention, KV pool and linear layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from dovetail.errors import ConfigError
from dovetail.interfaces.mesh import Mesh
from dovetail.interfaces.model import ModelArchitecture, ModelInfo, WeightTarget
from dovetail.layers.base import Layer
from dovetail.layers.embedding import LMHead
from dovetail.types import Batch
from dovetail_models.fallback.attention import CurrentStep
from dovetail_models.fallback.facts import TransformersSizes
from dovetail_models.fallback.layers import (
    Replacement,
    Targets,
)
from dovetail_models.fallback.names import checkpoint_names
from dovetail_models.fallback.replaced import replace_modules
from dovetail_models.fallback.tree import (
    body_of,
    compute_buffers,
    embedding_scale,
    fix_frequencies,
    new_tree,
    use_parameters,
    vocabulary_of,
)

NOT_WEIGHTS = (r".*rotary_emb\.inv_freq", r".*\.attn\.(masked_)?bias")
"""Buffers that checkpoints of older versions of transformers contain."""


class ComputedBody(nn.Module):
    """Take the place of a model's body in its head's code: return the hidden states that were computed before."""

    hidden: torch.Tensor

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPastAndCrossAttentions:
        """Return ``hidden [1, tokens, hidden_size]`` as a body does."""
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.hidden)  # pyright: ignore[reportArgumentType]


class TransformersModel(Layer, ModelArchitecture):
    """Compute an architecture with the modules that transformers has for it, in which linear layers, the embedding, the
    head and attention are Dovetail's.

    The tokens of a step are one sequence for these modules, with the positions that they have in their own rows: nothing
    but attention depends on other tokens, which ``describe_transformers`` checks. ``transformer`` is the model without its
    head, and ``causal`` the rest, for which ``computed`` stands for the model without its head.
    """

    def __init__(self, info: ModelInfo, mesh: Mesh) -> None:
        super().__init__()
        self.info = info
        sizes: TransformersSizes = info.config
        device = torch.empty(0).device
        tree = new_tree(sizes.config)
        compute_buffers(tree, device)
        fix_frequencies(tree, info.context_len)
        use_parameters(tree)
        names = [name for name, _ in tree.named_parameters(remove_duplicate=False)]
        self._names = checkpoint_names(tree, names)
        self._vocabulary = vocabulary_of(tree)
        self._ignored = (*NOT_WEIGHTS, *(f".*({p}).*" for p in tree._keys_to_ignore_on_load_unexpected or ()))
        self._step = CurrentStep()
        replace_modules(tree, sizes, self._step, embedding_scale(tree), mesh)
        _allocate(tree, device)
        self._prefix = tree.base_model_prefix
        self.body = f"{self._prefix}."
        self.transformer = body_of(tree)
        self.computed = ComputedBody()
        setattr(tree, self._prefix, self.computed)
        self.causal = tree

    @property
    def _head(self) -> LMHead:
        head = self.causal.get_submodule(f"{self._vocabulary.head}.linear")
        assert isinstance(head, LMHead)
        return head

    def forward(self, batch: Batch) -> torch.Tensor:
        """See ``ModelArchitecture``."""
        self._step.batch = batch
        out = self.transformer(input_ids=batch.input_ids[None], position_ids=batch.positions[None], use_cache=False)
        return out[0][0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``ModelArchitecture``. The code of the model scales and caps logits."""
        self.computed.hidden = hidden[None]
        return self.causal(input_ids=None, use_cache=False).logits[0]

    def weights_map(self) -> Mapping[str, WeightTarget | list[WeightTarget]]:
        """See ``ModelArchitecture``."""
        found = dict(_targets(self.transformer, "transformer", self._prefix))
        found |= dict(_targets(self.causal, "causal", ""))
        return {self._names[name]: target for name, target in found.items()}

    def ignored_weights(self) -> Iterable[str]:
        """See ``ModelArchitecture``."""
        return (*self._ignored, *self.tied_weights())

    def tied_weights(self) -> Mapping[str, str]:
        """See ``ModelArchitecture``."""
        if not self._head.tied:
            return {}
        head, embedding = (f"{name}.weight" for name in self._vocabulary)
        return {self._names[head]: self._names[embedding]}

    def untie(self, name: str) -> None:
        """See ``ModelArchitecture``."""
        self._head.untie()


def _targets(module: nn.Module, ours: str, theirs: str) -> Targets:
    """Yield the names of the parameters of ``module``, which transformers calls ``theirs``, and their targets."""
    if isinstance(module, Replacement):
        for field, target in module.targets(ours):
            yield f"{theirs}.{field}", target
        return
    for name, _ in module.named_parameters(recurse=False):
        yield _join(theirs, name), WeightTarget(f"{ours}.{name}")
    for name, child in module.named_children():
        yield from _targets(child, f"{ours}.{name}", _join(theirs, name))


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _allocate(tree: PreTrainedModel, device: torch.device) -> None:
    """Give memory to the parameters of the modules that are not replaced. Raises ``ConfigError`` for tensors that modules
    share, and for those that nothing computes on a device."""
    seen: dict[int, str] = {}
    for name, module in tree.named_modules():
        if isinstance(module, Layer):
            continue
        for key, parameter in module.named_parameters(recurse=False):
            full = _join(name, key)
            if id(parameter) in seen:
                raise ConfigError(
                    f"{type(tree).__name__} shares {seen[id(parameter)]} with {full}; implemented: the head's"
                )
            seen[id(parameter)] = full
            empty = torch.empty_like(parameter, dtype=_dtype_of(tree, full, parameter.dtype), device=device)
            module.register_parameter(key, nn.Parameter(empty, requires_grad=False))


def _dtype_of(tree: PreTrainedModel, name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a parameter: as in transformers the model's, but float32 for what transformers keeps in it."""
    if not dtype.is_floating_point:
        return dtype
    kept = {*(tree._keep_in_fp32_modules_strict or ())}
    if torch.get_default_dtype() == torch.float16:
        kept |= {*(tree._keep_in_fp32_modules or ())}
    return torch.float32 if kept & {*name.split(".")} else torch.get_default_dtype()
