"""Replace the modules of a model of transformers that Dovetail computes itself."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dovetail.interfaces.mesh import Mesh
from dovetail.layers.embedding import Embedding, LMHead
from dovetail.layers.linear import Linear
from dovetail_models.describe import group_layers
from dovetail_models.fallback.attention import ATTRIBUTE, CurrentStep, PagedAttention
from dovetail_models.fallback.facts import TransformersSizes
from dovetail_models.fallback.fused import fused_mlp, fused_norm
from dovetail_models.fallback.layers import HeadProjection, TokenEmbedding, TransposedProjection, new_projection
from dovetail_models.fallback.tree import TokenModules, vocabulary_of


def replace_modules(
    tree: PreTrainedModel, sizes: TransformersSizes, step: CurrentStep, scale: float, mesh: Mesh
) -> None:
    """Replace embedding, head, linear layers and attention of ``tree``, and norms and gated MLPs where Dovetail's compute the
    same, by this rank's share. ``step`` has the batch for attention, ``scale`` multiplies embeddings."""
    _replace_vocabulary(tree, vocabulary_of(tree), scale, mesh)
    _replace_fused(tree, sizes, mesh)
    _replace_linear_layers(tree, sizes, mesh)
    _replace_attention(tree, sizes, step, mesh)


def _replace_vocabulary(tree: PreTrainedModel, names: TokenModules, scale: float, mesh: Mesh) -> None:
    """Let the ranks divide the embedding and the head of ``tree`` by tokens."""
    theirs, linear = tree.get_submodule(names.embedding), tree.get_submodule(names.head)
    assert isinstance(theirs, nn.Embedding)
    assert isinstance(linear, nn.Linear)
    embedding = Embedding(theirs.num_embeddings, theirs.embedding_dim, mesh)
    tied = embedding if linear.weight is theirs.weight else None
    head = LMHead(linear.in_features, linear.out_features, mesh, tied=tied, bias=linear.bias is not None)
    tree.set_submodule(names.embedding, TokenEmbedding(embedding, scale))
    tree.set_submodule(names.head, HeadProjection(head))


def _replace_fused(tree: PreTrainedModel, sizes: TransformersSizes, mesh: Mesh) -> None:
    """Replace norms and gated MLPs by Dovetail's, where these compute the same."""
    for name, module in list(tree.named_modules()):
        fused = fused_norm(module) or fused_mlp(name, module, sizes.plan, mesh)
        if fused is not None:
            tree.set_submodule(name, fused)


def _replace_linear_layers(tree: PreTrainedModel, sizes: TransformersSizes, mesh: Mesh) -> None:
    for name, module in list(tree.named_modules()):
        if type(module) is nn.Linear:
            tree.set_submodule(name, new_projection(name, module, sizes.plan, sizes.attention, mesh))
        elif type(module) is Conv1D:
            tree.set_submodule(name, TransposedProjection(Linear(module.nx, module.nf, bias=True)))


def _replace_attention(tree: PreTrainedModel, sizes: TransformersSizes, step: CurrentStep, mesh: Mesh) -> None:
    places = group_layers(sizes.windows)
    for facts, place in zip(sizes.attention, places, strict=True):
        module = tree.get_submodule(facts.module)
        attention = PagedAttention(facts, place, step, mesh)
        if facts.sinks is not None:
            holder, _, name = facts.sinks.rpartition(".")
            attention.use_sinks(tree.get_submodule(holder), name)
        setattr(module, ATTRIBUTE, attention)
