"""List the specs of dense models whose weights, norms or residuals differ from Llama's. Imports nothing heavy."""

from __future__ import annotations

from dovetail.registry.specs import ComponentKind, ComponentSpec


def _spec(name: str, classes: tuple[str, str, str], aliases: tuple[str, ...], summary: str) -> ComponentSpec:
    """Return the spec of a model. ``classes`` are the paths of its model class and of its ``describe`` function, and its
    config class."""
    target, describe, config = classes
    return ComponentSpec(
        kind=ComponentKind.MODEL,
        name=name,
        target=f"dovetail_models.{target}",
        config=f"dovetail_models.config:{config}",
        describe=f"dovetail_models.{describe}:describe_{name}",
        aliases=aliases,
        summary=summary,
    )


# checkpoints that were saved without the head have the second alias
FAMILIES = (
    _spec(
        "phi3",
        ("phi3:Phi3Model", "phi3_describe", "Phi3Config"),
        ("Phi3ForCausalLM", "Phi3Model"),
        "Phi-3, Phi-3.5 mini and Phi-4: fused projections, longrope.",
    ),
    _spec(
        "smollm3",
        ("dense:DenseModel", "smollm3_describe", "SmolLM3Config"),
        ("SmolLM3ForCausalLM", "SmolLM3Model"),
        "SmolLM 3: some layers do not rotate.",
    ),
    _spec(
        "granite",
        ("granite:GraniteModel", "granite_describe", "GraniteConfig"),
        ("GraniteForCausalLM", "GraniteModel"),
        "Granite 3, dense: multipliers of embeddings, attention, residuals and logits.",
    ),
    _spec(
        "starcoder2",
        ("starcoder2:Starcoder2Model", "plain_describe", "Starcoder2Config"),
        ("Starcoder2ForCausalLM", "Starcoder2Model"),
        "StarCoder 2: LayerNorm and a sliding window.",
    ),
    _spec(
        "gpt2",
        ("gpt2:GPT2Model", "plain_describe", "GPT2Config"),
        ("GPT2LMHeadModel", "GPT2Model"),
        "GPT-2: learned positions.",
    ),
    _spec(
        "gpt_neox",
        ("gpt_neox:GPTNeoXModel", "plain_describe", "GPTNeoXConfig"),
        ("GPTNeoXForCausalLM", "GPTNeoXModel"),
        "GPT-NeoX and Pythia: attention and MLP side by side.",
    ),
    _spec(
        "opt",
        ("opt:OPTModel", "early_describe", "OPTConfig"),
        ("OPTForCausalLM", "OPTModel"),
        "OPT: learned positions, ReLU.",
    ),
    _spec(
        "phi",
        ("phi:PhiModel", "early_describe", "PhiConfig"),
        ("PhiForCausalLM", "PhiModel"),
        "Phi-1, Phi-1.5 and Phi-2: attention and MLP of one norm.",
    ),
    _spec(
        "gptj",
        ("gptj:GPTJModel", "early_describe", "GPTJConfig"),
        ("GPTJForCausalLM", "GPTJModel"),
        "GPT-J: rotated pairs, attention and MLP of one norm.",
    ),
    _spec(
        "stablelm",
        ("stablelm:StableLmModel", "early_describe", "StableLmConfig"),
        ("StableLmForCausalLM", "StableLmModel"),
        "StableLM: LayerNorm, a rotation of a part of each head.",
    ),
    _spec(
        "falcon",
        ("falcon:FalconModel", "early_describe", "FalconConfig"),
        ("FalconForCausalLM", "FalconModel"),
        "Falcon with rotary positions.",
    ),
    _spec(
        "qwen",
        ("qwen:QwenModel", "qwen_describe", "QwenConfig"),
        ("QWenLMHeadModel", "QWenModel"),
        "Qwen, the first generation.",
    ),
)
