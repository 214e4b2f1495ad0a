"""Define the tiny model for training: a Llama over packed documents, with the parameter names of the Hugging Face
layout.

Shapes: T tokens of all documents of a batch in a row, D = 256 channels, H query heads, G key and value heads, C = 64.
"""

import inspect
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

CONTEXT = 2048
_WINDOWED = "window_size" in inspect.signature(varlen_attn).parameters
_CAUSAL: dict[str, Any] = {"window_size": (-1, 0)} if _WINDOWED else {"is_causal": True}
"""Arguments for causal masking in the installed torch (2.10 or later)."""


@dataclass(frozen=True, slots=True)
class TinyConfig:
    """Hold the architecture; field names are those of config.json."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = CONTEXT
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def to_hf(self) -> dict[str, Any]:
        """Return the content of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **asdict(self),
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "initializer_range": 0.02,
            "use_cache": True,
            "torch_dtype": "bfloat16",
        }


class Packed(NamedTuple):
    """Hold the positions and bounds of the documents of a batch."""

    positions: Tensor
    """[T] position of each token in its own document."""
    bounds: Tensor
    """[N + 1] int32, where each document starts; the tail repeats T."""


def _document_mask(bounds: Tensor, tokens: int) -> Tensor:
    index = torch.arange(tokens, device=bounds.device)
    document = torch.searchsorted(bounds[1:].contiguous(), index, right=True)
    return (document[:, None] == document[None, :]) & (index[:, None] >= index[None, :])


def _attend_dense(q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> Tensor:
    """Compute attention on any device with one mask [T, T], as a reference."""
    mask = _document_mask(packed.bounds, len(q))
    out = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=mask)
    return out[0].transpose(0, 1)


def _attend_varlen(q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> Tensor:
    """Compute flash attention over each document separately."""
    out = varlen_attn(q, k, v, packed.bounds, packed.bounds, CONTEXT, CONTEXT, **_CAUSAL)
    assert isinstance(out, Tensor)
    return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to [T, heads, C]; the halves of C are the two coordinates."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Norm(nn.Module):
    """Compute RMSNorm in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Compute grouped-query attention inside each document."""

    def __init__(self, cfg: TinyConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
        self.q_proj = nn.Linear(cfg.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(cfg.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(cfg.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, cfg.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, packed: Packed) -> Tensor:
        """[T, D] -> [T, D]."""
        q = _rotate(self.q_proj(x).view(len(x), self.heads, -1), cos, sin)
        k = _rotate(self.k_proj(x).view(len(x), self.kv_heads, -1), cos, sin)
        v = self.v_proj(x).view(len(x), self.kv_heads, -1)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        attend = _attend_varlen if x.is_cuda else _attend_dense
        return self.o_proj(attend(q.to(v.dtype), k.to(v.dtype), v, packed).flatten(1))


class Mlp(nn.Module):
    """Compute a SwiGLU MLP."""

    def __init__(self, cfg: TinyConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.up_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.down_proj = nn.Linear(cfg.intermediate_size, cfg.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Compute attention and MLP, each after a norm and with a residual."""

    def __init__(self, cfg: TinyConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(cfg.hidden_size, cfg.rms_norm_eps)
        self.self_attn = Attention(cfg)
        self.post_attention_layernorm = Norm(cfg.hidden_size, cfg.rms_norm_eps)
        self.mlp = Mlp(cfg)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, packed: Packed) -> Tensor:
        """[T, D] -> [T, D]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, packed)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """Hold the parameters under the name `model.`."""

    def __init__(self, cfg: TinyConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(Layer(cfg) for _ in range(cfg.num_hidden_layers))
        self.norm = Norm(cfg.hidden_size, cfg.rms_norm_eps)


class Tiny(nn.Module):
    """Run the model and compute its loss; the output matrix is the embedding."""

    frequencies: Tensor

    def __init__(self, cfg: TinyConfig) -> None:
        super().__init__()
        self.model = Body(cfg)
        steps = torch.arange(0, cfg.head_dim, 2, dtype=torch.float32) / cfg.head_dim
        self.register_buffer("frequencies", cfg.rope_theta**-steps, persistent=False)
        self._initialise(cfg)

    def _initialise(self, cfg: TinyConfig) -> None:
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * cfg.num_hidden_layers) ** 0.5 if last else 0.02)

    def hidden(self, ids: Tensor, packed: Packed) -> Tensor:
        """Return the final states: ids [T] -> [T, D]."""
        angles = packed.positions[:, None].float() * self.frequencies
        cos, sin = (torch.cat((f, f), dim=-1)[:, None] for f in (angles.cos(), angles.sin()))
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin, packed)
        return self.model.norm(x)

    def forward(self, ids: Tensor, packed: Packed, picked: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Return the mean cross-entropy at the positions `picked` [P] against `targets` [P], weighted by `weights` [P]."""
        states = self.hidden(ids, packed)[picked]
        logits = F.linear(states, self.model.embed_tokens.weight).float()
        losses = F.cross_entropy(logits, targets, reduction="none")
        return (losses * weights).sum() / weights.sum()
