"""Describe layers of experts: their sizes, how experts are chosen, their activation, and what is computed with. Imports
no torch, so that functions that describe models can use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from dovetail.errors import ConfigError
from dovetail.interfaces.features import Feature

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """Describe how ``top_k`` of ``num_experts`` experts are chosen for a token, and how their results are weighted.

    ``scoring`` makes scores of the logits: ``softmax`` over all experts, or ``sigmoid`` of each logit. The experts with
    the largest scores are chosen, and their scores are the weights. With ``after_choice`` the experts with the largest
    logits are chosen, and scores are made of the chosen logits only (gpt-oss and Granite: softmax, Llama 4: sigmoid).
    ``sparsemixer`` (Phi-3.5-MoE, arXiv 2409.12136) chooses by logits; each weight is the softmax of the logits that are
    within ``2 * jitter`` of the largest one, without the experts that were chosen before.

    With ``corrected`` a bias for each expert is added to the scores for the choice, but not to the weights (DeepSeek-V3,
    arXiv 2412.19437). If ``groups`` is larger than 1, the experts are divided into that number of groups of consecutive experts,
    and only those of the ``groups_kept`` best groups can be chosen. The score of a group is the sum of its
    ``group_top`` largest scores.

    ``renormalize`` divides the weights of a token by their sum; ``scale`` multiplies them at last. With ``float32`` the
    logits are computed in float32 from the weight of the router in float32.
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    after_choice: bool = False
    renormalize: bool = False
    scale: float = 1.0
    corrected: bool = False
    groups: int = 1
    groups_kept: int = 1
    group_top: int = 2
    jitter: float = 0.01
    float32: bool = False

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` if the numbers contradict each other."""
        experts, groups, kept = self.num_experts, self.groups, self.groups_kept
        if not 1 <= self.top_k <= experts:
            raise ConfigError(
                f"a token has {self.top_k} of {experts} experts (num_experts_per_tok and the number of experts of config.json); "
                f"allowed: 1 to {experts}"
            )
        if groups < 1 or experts % groups or not 1 <= kept <= groups or kept * (experts // groups) < self.top_k:
            raise ConfigError(
                f"{kept} of {groups} groups of experts are kept (topk_group and n_group of config.json), and a token has "
                f"{self.top_k} of {experts} experts; allowed: a number of groups that divides the experts, and groups kept that have enough of them"
            )
        if (groups > 1 or self.corrected) and (self.after_choice or self.scoring == "sparsemixer"):
            raise ConfigError(
                "groups and a bias for the choice need scores of all experts; allowed with them: scoring softmax or "
                "sigmoid without after_choice"
            )


@dataclass(frozen=True, slots=True)
class SwiGLU:
    """Describe the activation of gated experts: ``gate * sigmoid(alpha * gate) * (up + offset)``. By default this is
    ``silu(gate) * up``. With a ``limit``, gate is clamped to at most ``limit`` before that, and up to ``[-limit, limit]``
    (gpt-oss: alpha 1.702, limit 7, offset 1)."""

    alpha: float = 1.0
    limit: float | None = None
    offset: float = 0.0


SILU = SwiGLU()
"""The activation ``silu(gate) * up``."""


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Describe the sizes and variants of a whole layer of experts.

    ``size`` is the number of intermediate values of one expert. ``bias``: gate, up and down have biases. With
    ``scaled_input`` the weight of an expert for a token multiplies the expert's input (Llama 4), otherwise its result.
    ``router_bias``: the logits of the router have a bias. If ``shared_size`` is not 0, every token also uses a shared
    expert, a ``GatedMLP`` with that number of intermediate values; with ``shared_gate`` its result is multiplied by the
    sigmoid of a number that is computed from the token (Qwen2-MoE). With ``ungated`` experts are ``down(relu(up(x)) ** 2)``,
    without a gate and without biases (Nemotron 3).
    """

    hidden_size: int
    size: int
    routing: RoutingRule
    activation: SwiGLU = SILU
    bias: bool = False
    scaled_input: bool = False
    router_bias: bool = False
    shared_size: int = 0
    shared_gate: bool = False
    ungated: bool = False

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for variants that contradict each other."""
        if self.ungated and (self.bias or self.shared_size or self.activation != SILU):
            raise ConfigError(
                "experts without a gate have a bias, a shared expert of their layer, or another activation; allowed with them: none of these"
            )

    @property
    def rows(self) -> int:
        """Return the rows of ``ExpertWeights.gate_up`` of one expert, for each of its intermediate values."""
        return 1 if self.ungated else 2

    @property
    def needs(self) -> frozenset[Feature]:
        """Return the features that a backend of experts needs for these layers. A model declares them in
        ``ModelInfo.needs``."""
        given = {
            Feature.EXPERTS_BIAS: self.bias,
            Feature.EXPERTS_SWIGLU: self.activation != SILU,
            Feature.EXPERTS_SCALED_INPUT: self.scaled_input,
            Feature.EXPERTS_UNGATED: self.ungated,
        }
        return frozenset(feature for feature, needed in given.items() if needed)


class Routing(NamedTuple):
    """Hold the experts of each token, ``ids`` (int32 ``[tokens, top_k]``), all different, and the ``weights`` of their
    results (float32 ``[tokens, top_k]``)."""

    ids: torch.Tensor
    weights: torch.Tensor


ExpertFormat = Literal["plain", "fp8_rows", "fp8_blocks", "mxfp4", "int4", "int8", "gguf"]
"""Name a form of the weights of experts, see ``ExpertWeights``."""
ADAPTED_ON_CUDA: tuple[ExpertFormat, ...] = ("plain", "fp8_rows", "fp8_blocks", "mxfp4", "int4", "int8", "gguf")
"""The formats of weights that are multiplied together with adapters on CUDA."""


class ExpertBlocks(NamedTuple):
    """Name the types of the blocks (``gguf.block_types.TYPES``) of gate and up, and of down. If ``packed``, rows are packed for
    kernels on CUDA (``ops.packed_blocks``); otherwise they are the blocks of a GGUF file."""

    gate_up: str
    down: str
    packed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """Hold what this rank has of the weights of experts.

    ``gate_up`` is ``[experts, 2 * size, hidden]``: of each expert the rows of gate, then those of up. ``down`` is
    ``[experts, hidden, size]``. With a ``format`` other than ``plain`` they are codes, which stand for their values
    times the scales ``gate_up_scale`` and ``down_scale``. ``out`` are the rows of a weight and ``in`` its columns:

    - ``fp8_rows``: codes float8_e4m3fn; scales float32 ``[experts, out]``, one for each row. Products quantize activations to
      FP8 too (W8A8), see ``ops.triton.experts_fp8``.
    - ``fp8_blocks``: codes float8_e4m3fn; scales float32 ``[experts, ceil(out / rows), ceil(in / columns)]``, one for
      each block of ``block`` = (rows, columns), which divide the size of gate. Products quantize activations too.
    - ``mxfp4``: codes uint8 ``[experts, out, in / 2]``, two E2M1 numbers in a byte; scales uint8 ``[experts, in / 32, out]``,
      powers of two (E8M0), one for each 32 columns of a row. Byte i of the 16 bytes of a block of 32 columns has column i
      in its low bits and column 16 + i in its high bits (``ops.mxfp4``). Activations are not quantized.
    - ``int4``, ``int8``: codes uint8 ``[experts, out, in / 2]`` or int8 ``[experts, out, in]``; scales in a floating-point dtype
      ``[experts, groups, out]``, one for each group of columns of a row; ``gate_up_zero`` and ``down_zero`` (uint8) of that
      shape, or None (``ops.integers``). Activations are not quantized.
    - ``gguf``: uint8 ``[experts, out, bytes of a row]``: rows of blocks, of the types and in the form of ``blocks``. They contain their scales.
      On a CPU products quantize activations (``ops.cpu.blocks``).

    The experts are those from index ``first`` on, of
    ``whole`` experts of all ranks, and ``size`` may be a rank's share of the
    intermediate values. ``gate_up_bias`` is ``[experts, 2 * size]`` and ``down_bias`` ``[experts, hidden]``, or None.
    With ``scaled_input`` the weight of an expert for a token multiplies its input, otherwise its result. Where activations are
    quantized, those beyond ``input_bound`` count as it. With ``ungated`` there is no gate: ``gate_up [experts, size, hidden]`` has
    the rows of up, its biases are None, and the activation is ``relu(up) ** 2``.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    activation: SwiGLU = SILU
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    first: int = 0
    whole: int = 0
    scaled_input: bool = False
    format: ExpertFormat = "plain"
    gate_up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None
    block: tuple[int, int] = (128, 128)
    input_bound: float | None = None
    gate_up_zero: torch.Tensor | None = None
    down_zero: torch.Tensor | None = None
    ungated: bool = False
    blocks: ExpertBlocks | None = None
