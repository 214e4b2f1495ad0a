"""Describe the layers that predict further tokens, which some checkpoints hold in addition to their model.

The layout and the layers are recognised by the names and shapes of tensors. In all layouts such a layer takes the
embedding of the next token and the target's hidden state (for further tokens, its own output). It normalises both, and
projects them side by side to the input of a decoder layer. The embedding and the head are the target's; copies of them
are ignored. An embedding or a head that differs from the target's is the layer's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from dovetail.errors import ConfigError
from dovetail.interfaces.cache import CacheGroup, CacheGroupKind
from dovetail.interfaces.features import Feature
from dovetail.interfaces.model import ModelInfo
from dovetail.layers.attention import AttentionShape, SelfAttention
from dovetail.layers.decoder import DecoderShape
from dovetail.layers.experts import Experts
from dovetail.layers.latent import LatentAttention, LatentShape
from dovetail.layers.norm import RMSNorm
from dovetail.layers.rope import RopeConfig, read_rope
from dovetail_speculative.checkpoints import Shapes, read_tensor, tensor_shapes

if TYPE_CHECKING:
    from pathlib import Path

    from dovetail.interfaces.expert_shapes import ExpertsShape
    from dovetail.layers.transforms import SplitHalves


@dataclass(frozen=True, slots=True)
class Layout:
    """Describe the names of the tensors in a layout.

    ``layer`` is the prefix of the names of a decoder layer, and ``entry`` the prefix of the norms and the projection
    around it. {index} counts from 0 and {behind} from the number of the target's layers. ``embedding`` and ``head`` are
    copies
    of the target's. With ``hidden_first``, the hidden state is the first half of the projection's input. With
    ``zero_first_embedding``, the embedding at position 0 is replaced by zeros. With ``before_norm``, the target's hidden state
    is the one before its final norm. Without ``final_norm``, the output of the decoder layer is not normalised. ``prefix`` is what
    all names begin with, if that is not ``entry`` and a dot.
    """

    layer: str
    entry: str
    embed_norm: str
    hidden_norm: str
    projection: str
    final_norm: str | None
    embedding: str | None = None
    head: str | None = None
    hidden_first: bool = False
    zero_first_embedding: bool = False
    before_norm: bool = False
    prefix: str | None = None

    @property
    def shares_entry(self) -> bool:
        """Return True if all layers share one set of norms and projection."""
        return "{" not in self.entry


DEEPSEEK = Layout(
    "model.layers.{behind}",
    "model.layers.{behind}",
    "enorm",
    "hnorm",
    "eh_proj",
    "shared_head.norm",
    embedding="embed_tokens",
    head="shared_head.head",
)
"""The layout of DeepSeek-V3 (arXiv 2412.19437, section 2.2)."""
QWEN = Layout("mtp.layers.{index}", "mtp", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
"""The layout of Qwen3-Next and later models. The norms are those of the target's family."""
MIMO = Layout(
    "model.mtp_layers.{index}",
    "model.mtp_layers.{index}",
    "token_layernorm",
    "hidden_layernorm",
    "input_proj",
    "final_layernorm",
    hidden_first=True,
    zero_first_embedding=True,
    before_norm=True,
)
"""The layout of MiMo (arXiv 2505.07608), as its authors run it in vLLM."""
ERNIE = Layout(
    "model.mtp_block.{index}",
    "model",
    "mtp_emb_norm.0",
    "mtp_hidden_norm.0",
    "mtp_linear_proj.0",
    None,
    zero_first_embedding=True,
    prefix="model.mtp_",
)
"""The layout of ERNIE 4.5, with the mathematics that vLLM gives it: one layer, without experts."""
LAYOUTS = (DEEPSEEK, QWEN, MIMO, ERNIE)

EMBEDDING = "model.embed_tokens"
"""The name of the target's embedding."""

ROUTER = "mlp.gate.weight"
"""The name of the weight of a layer's router, by which layers with experts are recognised."""

LATENT = "self_attn.kv_a_proj_with_mqa.weight"
"""The name of a weight by which layers with latent attention are recognised."""

GATED_DELTA = "linear_attn.in_proj_qkvz.weight"
"""The name of a weight by which layers with linear attention are recognised, which are not implemented."""


@dataclass(frozen=True, slots=True)
class MtpShape:
    """Describe the layers of a checkpoint.

    ``first`` is the number of the target's layers, from which {behind} counts. ``rope.context_len`` is the longest
    context. With ``own_embedding`` or ``own_head``, the layers do not use the target's. ``experts`` are those of each layer,
    or None if the layers have a gated MLP. With ``plain_projection``, the projection around the layers is not quantized,
    whatever the layers are. For ``plus_one`` see ``RMSNorm``.
    """

    layout: Layout
    decoder: DecoderShape
    rope: RopeConfig
    num_layers: int
    first: int
    own_embedding: bool = False
    own_head: bool = False
    experts: ExpertsShape | None = None
    plain_projection: bool = True
    plus_one: bool = False

    @property
    def watch(self) -> int:
        """Return the number of the target's hidden states that are read (see ``Batch.watch``)."""
        return self.first + self.layout.before_norm

    def layer(self, index: int) -> str:
        """Return the prefix of the names of decoder layer ``index``."""
        return self.layout.layer.format(index=index, behind=self.first + index)

    def entry(self, index: int) -> str:
        """Return the prefix of the names of the norms and the projection around layer ``index``."""
        return self.layout.entry.format(index=index, behind=self.first + index)


class TargetLayer(NamedTuple):
    """Describe what a layer for further tokens has in common with the layers of its target, and what the shapes of its
    tensors do not tell: the ``experts`` of the target's layers, or None, the ``order`` of the elements of its heads and
    ``gated`` (see ``AttentionShape``), ``plus_one`` of its norms (see ``RMSNorm``), and its ``latent`` attention, or None, with the
    ``scale`` of attention logits."""

    experts: ExpertsShape | None = None
    order: SplitHalves | None = None
    latent: LatentShape | None = None
    scale: float | None = None
    gated: bool = False
    plus_one: bool = False


def target_layer(target: nn.Module) -> TargetLayer:
    """Return what the layers of a model have in common. Layers without experts may precede those with experts."""
    found = TargetLayer()
    for module in target.modules():
        if isinstance(module, Experts):
            found = found._replace(experts=module.shape)
        elif isinstance(module, SelfAttention):
            found = found._replace(order=module.order, gated=module.gated)
        elif isinstance(module, LatentAttention):
            found = found._replace(latent=module.shape, scale=module.constants.scale)
        elif isinstance(module, RMSNorm) and module.plus_one:
            found = found._replace(plus_one=True)
    return found


def describe_mtp(
    config: Mapping[str, Any], directory: Path | None, target: ModelInfo, max_context: int, like: TargetLayer
) -> ModelInfo:
    """Return the facts of the layers in the checkpoint of ``target`` in ``directory``. Their ``config`` is an
    ``MtpShape``. ``like`` describes the target's own layers.

    Without a directory (for random weights), the layers are those that ``config`` (config.json) describes, in
    DeepSeek-V3's layout. Raises ``ConfigError`` if there are no such layers or if they are not implemented.
    """
    config = _text_settings(config)
    shapes = _described_shapes(config, target, like) if directory is None else tensor_shapes(directory)
    layout = _layout(shapes, target.num_layers, like)
    attention = like.latent or _attention(layout, shapes, config, target, like)
    partial = None if like.order is None else like.order.rotary_dim / attention.head_dim
    rotated = attention.qk_rope_head_dim if isinstance(attention, LatentShape) else attention.head_dim
    rope = read_rope(config, rotated, int(config.get("max_position_embeddings") or max_context), partial)
    first = layout.layer.format(index=0, behind=target.num_layers)
    experts = like.experts if f"{first}.{ROUTER}" in shapes else None
    decoder = DecoderShape(
        attention,
        shapes[f"{first}.mlp.gate_proj.weight"][0] if experts is None else experts.size,
        _norm_eps(config),
        mlp_bias=f"{first}.mlp.gate_proj.bias" in shapes,
        scale=like.scale,
    )
    rope = replace(rope, context_len=max_context)
    projection = f"{layout.entry.format(index=0, behind=target.num_layers)}.{layout.projection}"
    plain = not any(name.startswith(f"{projection}.weight_scale") for name in shapes)
    shape = MtpShape(layout, decoder, rope, 0, target.num_layers, experts=experts, plain_projection=plain)
    shape = replace(shape, plus_one=like.plus_one)
    count = 0
    while f"{shape.layer(count)}.input_layernorm.weight" in shapes:
        count += 1
    shape = replace(shape, num_layers=count)
    if directory is not None:
        shape = _with_own(shape, directory, shapes)
    group = _cache_group(attention, count)
    return ModelInfo(
        architecture=f"{target.architecture} (further tokens)",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_layers=count,
        num_heads=attention.num_heads,
        num_kv_heads=group.num_kv_heads,
        head_dim=group.head_dim,
        context_len=max_context,
        cache_groups=(group,),
        needs=frozenset() if experts is None else experts.needs,
        offers=frozenset({Feature.MODEL_TENSOR_PARALLEL}),
        split_sizes=_split_sizes(decoder, experts),
        expert_sizes=None if experts is None else target.expert_sizes,
        config=shape,
    )


def _text_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the text model, without those that divide its rotation among time, height and width: the three are the
    same for every token of a text."""
    text = config.get("text_config")
    given = {**config, **text} if isinstance(text, Mapping) else dict(config)
    rope = given.get("rope_parameters")
    if isinstance(rope, Mapping):
        given["rope_parameters"] = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    return given


def _cache_group(attention: AttentionShape | LatentShape, layers: int) -> CacheGroup:
    if isinstance(attention, AttentionShape):
        return CacheGroup(layers, attention.num_kv_heads, attention.head_dim)
    return CacheGroup(layers, 1, attention.latent_dim, CacheGroupKind.LATENT, value_dim=attention.kv_lora_rank)


def _split_sizes(decoder: DecoderShape, experts: ExpertsShape | None) -> tuple[tuple[str, int], ...]:
    """Return the numbers that ranks must divide, besides the number or the size of experts."""
    if experts is None:
        return (("intermediate_size", decoder.intermediate_size),)
    return (("the size of the shared expert", experts.shared_size),) if experts.shared_size else ()


def _with_own(shape: MtpShape, directory: Path, shapes: Shapes) -> MtpShape:
    """Return ``shape`` with ``own_embedding`` and ``own_head`` set. Raises ``ConfigError`` if one of several layers has
    them."""
    head = "lm_head" if "lm_head.weight" in shapes else EMBEDDING
    for index in range(shape.num_layers):
        own_embedding = _differs(directory, shapes, f"{shape.entry(index)}.{shape.layout.embedding}.weight", EMBEDDING)
        own_head = _differs(directory, shapes, f"{shape.entry(index)}.{shape.layout.head}.weight", head)
        if (own_embedding or own_head) and shape.num_layers > 1:
            raise ConfigError(
                f"speculative is 'mtp', but one of {shape.num_layers} layers that predict further tokens ({shape.entry(index)}) has an "
                "embedding or a head other than the target's, which is implemented for a single layer only. Choose another drafter, such as ngram"
            )
        shape = replace(shape, own_embedding=own_embedding, own_head=own_head)
    return shape


def _differs(directory: Path, shapes: Shapes, name: str, of_target: str) -> bool:
    if name not in shapes:
        return False
    return not torch.equal(read_tensor(directory, name), read_tensor(directory, f"{of_target}.weight"))


def _norm_eps(config: Mapping[str, Any]) -> float:
    return float(config.get("rms_norm_eps") or 1e-6)


def _layout(shapes: Shapes, behind: int, like: TargetLayer) -> Layout:
    for layout in LAYOUTS:
        if f"{layout.entry.format(index=0, behind=behind)}.{layout.projection}.weight" in shapes:
            _refuse_missing(layout.layer.format(index=0, behind=behind), shapes, like)
            return layout
    wanted = " or ".join(f"{layout.entry}.{layout.projection}.weight" for layout in LAYOUTS)
    raise ConfigError(
        f"speculative is 'mtp', but the target's checkpoint has no layers that predict further tokens in a supported layout: "
        f"{wanted.format(index=0, behind=behind)}; choose another drafter, such as ngram"
    )


def _refuse_missing(layer: str, shapes: Shapes, like: TargetLayer) -> None:
    found = ["linear attention"] if f"{layer}.{GATED_DELTA}" in shapes else []
    if f"{layer}.{LATENT}" in shapes and like.latent is None:
        found.append("latent attention, unlike the target's layers")
    q, out = shapes.get(f"{layer}.self_attn.q_proj.weight"), shapes.get(f"{layer}.self_attn.o_proj.weight")
    with_experts = f"{layer}.{ROUTER}" in shapes
    if with_experts and like.experts is None:
        found.append("a mixture of experts, unlike the target's layers")
    if like.latent is None and q is not None and out is not None and not like.gated and q[0] == 2 * out[1]:
        found.append("a gate on its attention, unlike the target's layers")
    if found:
        raise ConfigError(
            f"speculative is 'mtp', but the layer that predicts further tokens ({layer}) has {found[0]}, which is not implemented; "
            "implemented: decoder layers of the Llama, Qwen and DeepSeek families. Choose another drafter, such as ngram"
        )
    parts = ("q", "k") if like.latent is None else ("kv_b",)
    needed = [*(f"self_attn.{part}_proj" for part in parts), "self_attn.o_proj", "input_layernorm"]
    needed += [] if with_experts else ["mlp.gate_proj"]
    lacking = [f"{layer}.{name}.weight" for name in needed if f"{layer}.{name}.weight" not in shapes]
    if lacking:
        raise ConfigError(
            f"speculative is 'mtp', but the layer that predicts further tokens lacks {', '.join(lacking)}. It is not a decoder layer "
            f"of the {'Llama and Qwen families' if like.latent is None else 'DeepSeek family, as the target is'}, which are implemented. "
            "Choose another drafter, such as ngram"
        )


def _attention(
    layout: Layout, shapes: Shapes, config: Mapping[str, Any], target: ModelInfo, like: TargetLayer
) -> AttentionShape:
    layer = f"{layout.layer.format(index=0, behind=target.num_layers)}.self_attn"
    normed = shapes.get(f"{layer}.q_norm.weight")
    head_dim = target.head_dim if normed is None else normed[0]
    return AttentionShape(
        hidden_size=target.hidden_size,
        num_heads=shapes[f"{layer}.o_proj.weight"][1] // head_dim,
        num_kv_heads=shapes[f"{layer}.k_proj.weight"][0] // head_dim,
        head_dim=head_dim,
        qkv_bias=f"{layer}.q_proj.bias" in shapes,
        out_bias=f"{layer}.o_proj.bias" in shapes,
        qk_norm_eps=None if normed is None else _norm_eps(config),
        order=like.order,
        norm_plus_one=like.plus_one,
        gated=like.gated,
    )


def _described_shapes(config: Mapping[str, Any], target: ModelInfo, like: TargetLayer) -> Shapes:
    hidden, queries = target.hidden_size, target.num_heads * target.head_dim
    keys = target.num_kv_heads * target.head_dim
    own = {
        "input_layernorm": (hidden,),
        "self_attn.o_proj": (hidden, queries),
        "eh_proj": (hidden, 2 * hidden),
    }
    if like.latent is None:
        own |= {"self_attn.q_proj": (queries * (1 + like.gated), hidden), "self_attn.k_proj": (keys, hidden)}
    else:
        own["self_attn.kv_b_proj"] = (queries, like.latent.kv_lora_rank)
    if like.experts is None:
        own["mlp.gate_proj"] = (int(config.get("intermediate_size") or 4 * hidden), hidden)
    else:
        own["mlp.gate"] = (like.experts.routing.num_experts, hidden)
    count = int(config.get("num_nextn_predict_layers") or config.get("mtp_num_hidden_layers") or 1)
    return {
        f"model.layers.{target.num_layers + index}.{name}.weight": shape
        for index in range(count)
        for name, shape in own.items()
    }
