"""Define the text model of Gemma 3n (2025): a residual stream of several vectors for each token, of which a layer computes one and
corrects all (AltUp, arXiv 2301.13310), embeddings for each layer, a residual of low rank beside attention (Laurel, arXiv
2411.07501), gates of which most are set to 0 (arXiv 2506.06644), and layers that read the keys and values of earlier ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from statistics import NormalDist
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from dovetail.interfaces.attention import AttentionLayer
from dovetail.interfaces.model import WeightTarget
from dovetail.interfaces.store import KVTensors
from dovetail.layers.attention import AttentionShape, SelfAttention
from dovetail.layers.base import Layer, parameter
from dovetail.layers.decoder import attention_targets, linear_targets, mlp_targets
from dovetail.layers.linear import ColumnLinear, Linear, row_linear
from dovetail.layers.mlp import GatedMLP
from dovetail.layers.norm import RMSNorm
from dovetail.layers.rotary import HeadCounts, KVPlace, LayerRotation
from dovetail.ops.activation import GATES, soft_cap
from dovetail.ops.norm import rms_norm
from dovetail_models.decoder import DecoderModel, attention_sizes
from dovetail_models.gemma import ScaledEmbedding

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.interfaces.model import ModelInfo
    from dovetail.layers.rotary import Rotation
    from dovetail.types import Batch
    from dovetail_models.decoder import Targets
    from dovetail_models.gemma3n_describe import Gemma3nSizes

_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attn_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
    "post_input_norm": "post_per_layer_input_norm",
}
"""Map the norms of a layer to their names in a checkpoint."""
_SMALLEST = 1e-5
"""The smallest mean square by which a vector of the residual stream is divided."""


class NormedValues(ColumnLinear):
    """Compute the projections of attention, and divide the values of each head by their root mean square."""

    def __init__(self, shape: AttentionShape, mesh: Mesh) -> None:
        keys, size = shape.num_kv_heads * shape.head_dim, shape.head_dim
        widths = {"q": shape.num_heads * size, "k": keys, "v": keys}
        super().__init__(shape.hidden_size, widths, mesh, bias=shape.qkv_bias, unit=size)
        assert shape.qk_norm_eps is not None
        self._size, self._eps = size, shape.qk_norm_eps
        self._own = mesh.tp.share(shape.num_kv_heads)[1]
        self._ones: torch.Tensor

    def prepare(self) -> None:
        """See ``Layer.prepare``."""
        super().prepare()
        device = next(self.parameters()).device
        self._ones = torch.ones(self._own, self._size, dtype=torch.float32, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Map contiguous ``x [tokens, in]`` to ``[tokens, out]``. Mutates nothing."""
        qkv = super().forward(x)
        values = qkv.unflatten(1, (-1, self._size))[:, -self._own :]
        values.copy_(rms_norm(values, self._ones, self._eps))
        return qkv


class NoStore:
    """Stand in the place of a pool where queries are rotated alone: there are no keys and values to store."""

    def __init__(self, head_dim: int, like: torch.Tensor) -> None:
        self._empty = like.new_empty(1, 1, 0, head_dim)

    def keys(self, layer_id: int) -> torch.Tensor:
        """Return keys of no head."""
        return self._empty

    def tensors(self, layer_id: int) -> KVTensors:
        """Return keys and values of no head."""
        return KVTensors(self._empty, self._empty)

    def store(self, layer_id: int, k: torch.Tensor, v: torch.Tensor | None, out_loc: torch.Tensor) -> None:
        """Store nothing."""


class SharingAttention(Layer):
    """Attend with queries of its own over the keys and values that an earlier layer has written."""

    def __init__(self, shape: AttentionShape, constants: AttentionLayer, mesh: Mesh) -> None:
        super().__init__()
        assert shape.qk_norm_eps is not None
        width = shape.num_heads * shape.head_dim
        self.q = ColumnLinear(shape.hidden_size, {"q": width}, mesh, bias=shape.qkv_bias, unit=shape.head_dim)
        self.out = row_linear(width, shape.hidden_size, mesh, bias=shape.out_bias)
        self.norm = RMSNorm(shape.head_dim, shape.qk_norm_eps)
        self.constants, self.group = constants, 0
        self._heads = mesh.tp.share(shape.num_heads)[1]
        self._size = shape.head_dim

    def set_place(self, group: int, layer_id: int) -> None:
        """Set the cache group of the layer whose keys and values are read, and that layer's index in it."""
        self.group, self.constants = group, replace(self.constants, layer_id=layer_id)

    def forward(self, x: torch.Tensor, rotation: Rotation, batch: Batch, last: Batch | None = None) -> torch.Tensor:
        """Map ``x [tokens, hidden_size]`` to the same shape; for ``last`` see ``SelfAttention.forward``."""
        group, heads = self.group, self.norm.forward(self.q.forward(x).view(-1, self._size))
        own = batch.view(group) if group else batch
        place = KVPlace(NoStore(self._size, x), 0, own.out_loc)
        q = rotation.rotate_and_store(heads.view(-1, self._heads, self._size), HeadCounts(self._heads, 0), None, place)
        if last is not None:
            assert batch.logit_rows is not None
            q, batch, own = q.index_select(0, batch.logit_rows), last, last.view(group)
        attended = batch.attn[group].forward(q, self.constants, own) if len(q) else q
        return self.out.forward(attended.flatten(1))


class SparseMLP(GatedMLP):
    """Compute a gated MLP in which the gates of a token that are below a cutoff are set to 0: the mean of its gates plus
    their standard deviation times a quantile of the normal distribution."""

    def __init__(self, hidden_size: int, intermediate_size: int, mesh: Mesh, sparsity: float) -> None:
        super().__init__(hidden_size, intermediate_size, mesh, activation="gelu_tanh")
        self._deviations = NormalDist().inv_cdf(sparsity)
        self._tp, self._whole = mesh.tp, intermediate_size

    def connect(self) -> None:
        """See ``Layer.connect``. What reads the gates is computed here."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See ``GatedMLP.forward``."""
        both = self.gate_up.forward(x)
        gate = both[:, : both.shape[1] // 2]
        exact = gate.float()
        exact -= self._tp.all_reduce(exact.sum(1, keepdim=True)) / self._whole  # the mean of the gates of all ranks
        deviation = (self._tp.all_reduce(exact.square().sum(1, keepdim=True)) / self._whole).sqrt_()
        gate.copy_(exact.sub_(deviation * self._deviations).relu_())
        return self.down.forward(GATES["gelu_tanh"](both))


class AltUp(Layer):
    """Predict the vectors of the residual stream after a layer from those before it, and correct them by what the layer
    computes of one of them."""

    def __init__(self, hidden_size: int, eps: float, streams: int, active: int) -> None:
        super().__init__()
        self.correct_output_scale = parameter(hidden_size)
        self.correction = Linear(streams, streams)
        self.prediction = Linear(streams, streams * streams)
        self.router = Linear(hidden_size, streams)
        for layer in (self.correction, self.prediction, self.router):
            layer.precise = True  # their products are small
        self.router_norm = RMSNorm(hidden_size, eps)
        self._streams, self._active, self._factor = streams, active, 1.0 / hidden_size

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``x [tokens, streams, hidden_size]`` to the same shape. Mutates nothing."""
        mixing = self.prediction.forward(self._route(x[:, self._active])).view(-1, self._streams, self._streams)
        return torch.baddbmm(x, mixing, x)

    def correct(self, predicted: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
        """Return the residual stream, given what ``predict`` returns and what the layer computes of the active vector,
        ``[tokens, hidden_size]``. Mutates nothing."""
        weights = self.correction.forward(self._route(computed)) + 1.0
        change = computed - predicted[:, self._active]
        return torch.addcmul(predicted, change.unsqueeze(1), weights.unsqueeze(2))

    def _route(self, x: torch.Tensor) -> torch.Tensor:
        routed = self.router.forward(self.router_norm.forward(x.contiguous()))
        return (routed.float() * self._factor).tanh_().to(x.dtype)

    def targets(self, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """Yield the targets of the tensors."""
        theirs, ours = checkpoint_prefix, parameter_prefix
        yield f"{theirs}.correct_output_scale", WeightTarget(f"{ours}.correct_output_scale")
        yield from linear_targets(self.correction, f"{theirs}.correction_coefs", f"{ours}.correction")
        yield from linear_targets(self.prediction, f"{theirs}.prediction_coefs", f"{ours}.prediction")
        yield from linear_targets(self.router, f"{theirs}.modality_router", f"{ours}.router")
        yield from self.router_norm.targets(f"{theirs}.router_norm", f"{ours}.router_norm")


class Gemma3nLayer(Layer):
    """Compute a layer of Gemma 3n: attention and a gated MLP of one vector of the residual stream, each between two norms, and
    what a token's own embedding for this layer adds to the other vectors."""

    def __init__(self, info: ModelInfo, index: int, mesh: Mesh) -> None:
        super().__init__()
        config: Gemma3nSizes = info.config
        hidden, eps, bias = info.hidden_size, config.norm_eps, config.attention_bias
        shape = replace(attention_sizes(info), qkv_bias=bias, out_bias=bias, qk_norm_eps=eps)
        constants = AttentionLayer(config.places[index].layer_id, 1.0, config.windows[index])
        self.attn: SelfAttention | SharingAttention
        if index < info.num_layers - config.shared:
            self.attn = SelfAttention(shape, constants, mesh)
            self.attn.qkv = NormedValues(shape, mesh)
        else:
            self.attn = SharingAttention(shape, constants, mesh)
        sparsity, width = config.sparsity[index], config.intermediate_sizes[index]
        self.mlp = (
            SparseMLP(hidden, width, mesh, sparsity)
            if sparsity
            else GatedMLP(hidden, width, mesh, activation="gelu_tanh")
        )
        self.attn_norm, self.post_attn_norm, self.mlp_norm, self.post_mlp_norm, self.post_input_norm = (
            RMSNorm(hidden, eps) for _ in _NORMS
        )
        self.altup = AltUp(hidden, eps, config.streams, config.active)
        self.laurel_left, self.laurel_right = Linear(hidden, config.laurel_rank), Linear(config.laurel_rank, hidden)
        self.laurel_norm = RMSNorm(hidden, eps)
        self.input_gate, self.input_out = Linear(hidden, config.layer_width), Linear(config.layer_width, hidden)
        self._active = config.active

    def forward(
        self, x: torch.Tensor, own: torch.Tensor, rotation: Rotation, batch: Batch, last: Batch | None = None
    ) -> torch.Tensor:
        """Map the residual stream ``x [tokens, streams, hidden_size]`` to the same shape; with ``last``, of the rows
        ``batch.logit_rows`` only. ``own [tokens, layer_width]`` are the tokens' embeddings for this layer."""
        predicted = self.altup.predict(x)
        normed = self.attn_norm.forward(predicted[:, self._active].contiguous())
        attended = self.post_attn_norm.forward(self.attn.forward(normed, rotation, batch, last))
        if last is not None:
            assert batch.logit_rows is not None
            predicted, normed, own = (each.index_select(0, batch.logit_rows) for each in (predicted, normed, own))
        low_rank = normed + self.laurel_norm.forward(self.laurel_right.forward(self.laurel_left.forward(normed)))
        mixed = (predicted[:, self._active] + attended + low_rank) * 0.5**0.5
        computed = mixed + self.post_mlp_norm.forward(self.mlp.forward(self.mlp_norm.forward(mixed)))
        x = self.altup.correct(predicted, computed)
        scaled = x[:, self._active] * self.altup.correct_output_scale
        gate = functional.gelu(self.input_gate.forward(scaled), approximate="tanh")
        x[:, 1:] += self.post_input_norm.forward(self.input_out.forward(gate * own)).unsqueeze(1)
        return x

    def targets(self, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """Yield the targets of the layer's tensors."""
        theirs, ours = checkpoint_prefix, parameter_prefix
        for norm, name in _NORMS.items():
            yield from getattr(self, norm).targets(f"{theirs}.{name}", f"{ours}.{norm}")
        if isinstance(self.attn, SelfAttention):
            yield from attention_targets(self.attn, f"{theirs}.self_attn", f"{ours}.attn")
        else:
            yield from self.attn.norm.targets(f"{theirs}.self_attn.q_norm", f"{ours}.attn.norm")
            yield from linear_targets(self.attn.q, f"{theirs}.self_attn.q_proj", f"{ours}.attn.q", "q")
            yield from linear_targets(self.attn.out, f"{theirs}.self_attn.o_proj", f"{ours}.attn.out")
        yield from mlp_targets(self.mlp, f"{theirs}.mlp", f"{ours}.mlp")
        yield from self.altup.targets(f"{theirs}.altup", f"{ours}.altup")
        yield from linear_targets(self.laurel_left, f"{theirs}.laurel.linear_left", f"{ours}.laurel_left")
        yield from linear_targets(self.laurel_right, f"{theirs}.laurel.linear_right", f"{ours}.laurel_right")
        yield from self.laurel_norm.targets(f"{theirs}.laurel.post_laurel_norm", f"{ours}.laurel_norm")
        yield from linear_targets(self.input_gate, f"{theirs}.per_layer_input_gate", f"{ours}.input_gate")
        yield from linear_targets(self.input_out, f"{theirs}.per_layer_projection", f"{ours}.input_out")


class Gemma3nModel(DecoderModel):
    """Compute the text model of a ``ModelInfo`` whose ``config`` is a ``Gemma3nSizes``."""

    def __init__(self, info: ModelInfo, mesh: Mesh) -> None:
        config: Gemma3nSizes = info.config
        self._name = "model.language_model" if config.multimodal else "model"
        self.embed_name, self.layers_name = f"{self._name}.embed_tokens", f"{self._name}.layers"
        self.norm_name = f"{self._name}.norm"
        super().__init__(info, mesh)
        hidden, width = info.hidden_size, info.num_layers * config.layer_width
        self.layer_embed = ScaledEmbedding(config.layer_vocab, width, mesh, config.layer_width)
        self.layer_project = Linear(hidden, width)
        self.layer_norm = RMSNorm(config.layer_width, config.norm_eps)
        others = {str(index): hidden for index in range(config.streams - 1)}
        self.spread = ColumnLinear(hidden, others, mesh, whole=others) if others else None
        self.gather = nn.ModuleList(Linear(hidden, hidden) for _ in others)
        self._blocks: tuple[Gemma3nLayer, ...] = tuple(self.layers)  # pyright: ignore[reportAttributeAccessIssue]

    def make_embedding(self, mesh: Mesh) -> ScaledEmbedding:
        """See ``DecoderModel``."""
        return ScaledEmbedding(self.info.vocab_size, self.info.hidden_size, mesh)

    def make_layer(self, index: int, mesh: Mesh) -> Gemma3nLayer:
        """See ``DecoderModel``."""
        return Gemma3nLayer(self.info, index, mesh)

    def place_layers(self) -> None:
        """See ``DecoderModel``."""
        for layer, place in zip(self.layers, self.info.config.places, strict=True):
            assert isinstance(layer, Gemma3nLayer)
            layer.attn.set_place(*place)

    def forward(self, batch: Batch) -> torch.Tensor:
        """See ``ModelArchitecture.forward``."""
        config: Gemma3nSizes = self.info.config
        embedded = self.embed_batch(batch)
        own = self._layer_inputs(batch.input_ids, embedded)
        x = self._spread(embedded)
        rotation, final = self.rotary.forward(batch.positions), len(self._blocks) - 1
        assert isinstance(rotation, LayerRotation)
        for index, layer in enumerate(self._blocks):
            mine = own[:, index * config.layer_width : (index + 1) * config.layer_width]
            x = layer.forward(x, mine, rotation.layers[index], batch, batch.last if index == final else None)
        return self.norm.forward(self._gather(x))

    def _layer_inputs(self, input_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of all layers, ``[tokens, layers * layer_width]``. Tokens beyond their table have those of
        token 0."""
        config: Gemma3nSizes = self.info.config
        projected = self.layer_project.forward(embedded).mul_(self.info.hidden_size**-0.5)
        normed = self.layer_norm.forward(projected.view(-1, config.layer_width)).view_as(projected)
        known = input_ids.masked_fill(input_ids >= config.layer_vocab, 0)
        return normed.add_(self.layer_embed.forward(known)).mul_(0.5**0.5)

    def _spread(self, embedded: torch.Tensor) -> torch.Tensor:
        """Return the residual stream ``[tokens, streams, hidden_size]`` of embeddings ``[tokens, hidden_size]``."""
        if self.spread is None:
            return embedded.unsqueeze(1)
        others = self.spread.forward(embedded).view(len(embedded), -1, embedded.shape[1])
        return torch.cat((embedded.unsqueeze(1), _of_magnitude(others, embedded.unsqueeze(1))), 1)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean of the vectors of the residual stream, of which all but the first are projected."""
        first = x[:, 0]
        others = [layer.forward(x[:, 1 + at].contiguous()) for at, layer in enumerate(self.gather)]
        return torch.stack([first, *(_of_magnitude(each, first) for each in others)]).mean(0)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``ModelArchitecture.logits``."""
        logits, cap = self.head.forward(hidden), self.info.config.logit_cap
        return logits if cap is None else soft_cap(logits, cap)

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        return self._blocks[index].targets(checkpoint_prefix, parameter_prefix)

    def norm_targets(self) -> Targets:
        """See ``DecoderModel``. Includes everything that is outside of the layers."""
        yield from super().norm_targets()
        yield f"{self._name}.embed_tokens_per_layer.weight", self.layer_embed.target("layer_embed.weight")
        yield from linear_targets(self.layer_project, f"{self._name}.per_layer_model_projection", "layer_project")
        yield from self.layer_norm.targets(f"{self._name}.per_layer_projection_norm", "layer_norm")
        for index, layer in enumerate(self.gather):
            theirs = f"{self._name}.altup_unembed_projections.{index}"
            assert isinstance(layer, Linear)
            yield from linear_targets(layer, theirs, f"gather.{index}")
            assert self.spread is not None
            yield from linear_targets(self.spread, f"{self._name}.altup_projections.{index}", "spread", str(index))

    def ignored_weights(self) -> Iterable[str]:
        """See ``ModelArchitecture.ignored_weights``. Checkpoints have keys and values of layers that do not use them."""
        yield from super().ignored_weights()
        count, layers = self.info.num_layers, self.layers_name.replace(".", r"\.")
        sharing = "|".join(map(str, range(count - self.info.config.shared, count)))
        if sharing:
            yield rf"{layers}\.({sharing})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..+"
        if self.info.config.multimodal:
            yield r"model\.(vision_tower|audio_tower|embed_vision|embed_audio)\..+"


def _of_magnitude(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Scale vectors ``x [..., hidden_size]`` to the root mean square of ``like``, whose shape is like that of ``x`` or
    can be expanded to it."""
    wanted = like.float().square().mean(-1, keepdim=True).sqrt_()
    found = x.float().square().mean(-1, keepdim=True).clamp_(min=_SMALLEST).sqrt_()
    return (x * (wanted / found)).to(x.dtype)
