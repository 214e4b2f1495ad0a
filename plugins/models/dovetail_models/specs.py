"""List the specs of the models. Imports nothing heavy."""

from __future__ import annotations

from dovetail.registry.specs import ComponentKind, ComponentSpec

_HEADS = ("ForCausalLM", "LMHeadModel")


def without_head(architecture: str) -> str:
    """Return the name that transformers writes into checkpoints of ``architecture`` that were saved without the head:
    ``LlamaModel`` for ``LlamaForCausalLM``."""
    for head in _HEADS:
        if architecture.endswith(head):
            return f"{architecture.removesuffix(head)}Model"
    raise ValueError(f"{architecture} does not end in one of {', '.join(_HEADS)}")


def _spec(
    name: str, architecture: str, model: str, description: str, config: str, summary: str, more: tuple[str, ...] = ()
) -> ComponentSpec:
    """Return the spec of a model of this package. ``model`` is the path of its class, ``description`` the module of its
    function ``describe_{name}``, ``config`` its class in ``config``, and ``more`` are further architectures of
    checkpoints that it reads."""
    return ComponentSpec(
        kind=ComponentKind.MODEL,
        name=name,
        target=f"dovetail_models.{model}",
        config=f"dovetail_models.config:{config}",
        describe=f"dovetail_models.{description}:describe_{name}",
        aliases=(architecture, without_head(architecture), *more),
        summary=summary,
    )


MODELS = (
    _spec(
        "llama",
        "LlamaForCausalLM",
        "dense:DenseModel",
        "dense_describe",
        "LlamaConfig",
        "Llama 2 and 3, and models of their shape.",
    ),
    _spec(
        "mistral",
        "MistralForCausalLM",
        "dense:DenseModel",
        "dense_describe",
        "MistralConfig",
        "Mistral, with its sliding window.",
    ),
    _spec(
        "qwen2", "Qwen2ForCausalLM", "dense:DenseModel", "dense_describe", "Qwen2Config", "Qwen2 and Qwen2.5, dense."
    ),
    _spec(
        "mimo",
        "MiMoForCausalLM",
        "dense:DenseModel",
        "dense_describe",
        "MimoConfig",
        "MiMo: Qwen2's layers, and one that predicts a further token.",
    ),
    _spec(
        "qwen3",
        "Qwen3ForCausalLM",
        "dense:DenseModel",
        "dense_describe",
        "Qwen3Config",
        "Qwen3, dense: norms over query and key heads.",
    ),
    _spec(
        "phi3",
        "Phi3ForCausalLM",
        "phi3:Phi3Model",
        "phi3_describe",
        "Phi3Config",
        "Phi-3, Phi-3.5 mini and Phi-4: fused projections, longrope.",
    ),
    _spec(
        "smollm3",
        "SmolLM3ForCausalLM",
        "dense:DenseModel",
        "smollm3_describe",
        "SmolLM3Config",
        "SmolLM 3: some layers do not rotate.",
    ),
    _spec(
        "granite",
        "GraniteForCausalLM",
        "granite:GraniteModel",
        "granite_describe",
        "GraniteConfig",
        "Granite 3, dense: multipliers of embeddings, attention, residuals and logits.",
    ),
    _spec(
        "starcoder2",
        "Starcoder2ForCausalLM",
        "starcoder2:Starcoder2Model",
        "starcoder2_describe",
        "Starcoder2Config",
        "StarCoder 2: LayerNorm and a sliding window.",
    ),
    _spec("gpt2", "GPT2LMHeadModel", "gpt2:GPT2Model", "gpt2_describe", "GPT2Config", "GPT-2: learned positions."),
    _spec(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        "gpt_neox:GPTNeoXModel",
        "gpt_neox_describe",
        "GPTNeoXConfig",
        "GPT-NeoX and Pythia: attention and MLP side by side.",
    ),
    _spec("opt", "OPTForCausalLM", "opt:OPTModel", "opt_describe", "OPTConfig", "OPT: learned positions, ReLU."),
    _spec(
        "phi",
        "PhiForCausalLM",
        "phi:PhiModel",
        "phi_describe",
        "PhiConfig",
        "Phi-1, Phi-1.5 and Phi-2: attention and MLP of one norm.",
    ),
    _spec(
        "gptj",
        "GPTJForCausalLM",
        "gptj:GPTJModel",
        "gptj_describe",
        "GPTJConfig",
        "GPT-J: rotated pairs, attention and MLP of one norm.",
    ),
    _spec(
        "stablelm",
        "StableLmForCausalLM",
        "stablelm:StableLmModel",
        "stablelm_describe",
        "StableLmConfig",
        "StableLM: LayerNorm, a rotation of a part of each head.",
    ),
    _spec(
        "falcon",
        "FalconForCausalLM",
        "falcon:FalconModel",
        "falcon_describe",
        "FalconConfig",
        "Falcon with rotary positions.",
    ),
    _spec("qwen", "QWenLMHeadModel", "qwen:QwenModel", "qwen_describe", "QwenConfig", "Qwen, the first generation."),
    _spec(
        "mixtral",
        "MixtralForCausalLM",
        "moe:MoeModel",
        "moe_describe",
        "MixtralConfig",
        "Mixtral: experts in every layer.",
    ),
    _spec(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        "moe:MoeModel",
        "moe_describe",
        "Qwen2MoeConfig",
        "Qwen1.5 and Qwen2 with experts and a shared expert.",
    ),
    _spec("qwen3_moe", "Qwen3MoeForCausalLM", "moe:MoeModel", "moe_describe", "Qwen3MoeConfig", "Qwen3 with experts."),
    _spec(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        "qwen3_next:Qwen3NextModel",
        "qwen3_next_describe",
        "Qwen3NextConfig",
        "Qwen3-Next: gated delta nets, gated attention and experts.",
    ),
    _spec(
        "olmoe",
        "OlmoeForCausalLM",
        "moe:MoeModel",
        "moe_describe",
        "OlmoeConfig",
        "OLMoE: norms over all queries and all keys.",
    ),
    _spec(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        "moe:MoeModel",
        "moe_corrected_describe",
        "Glm4MoeConfig",
        "GLM-4.5 and GLM-4.6: routers with groups and a correction bias, shared experts.",
    ),
    _spec(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        "deepseek:LatentMoeModel",
        "deepseek_describe",
        "DeepseekV2Config",
        "DeepSeek-V2 and V2-Lite: latent attention, shared experts.",
    ),
    _spec(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        "deepseek:LatentMoeModel",
        "deepseek_describe",
        "DeepseekV3Config",
        "DeepSeek-V3, DeepSeek-R1 and Kimi K2: latent attention, routers with groups and a correction bias, shared experts.",
    ),
    _spec(
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        "deepseek:LatentMoeModel",
        "deepseek_describe",
        "Glm4MoeLiteConfig",
        "GLM-4.7-Flash: DeepSeek-V3's layers.",
    ),
    _spec(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        "moe:MoeModel",
        "moe_corrected_describe",
        "MinimaxM2Config",
        "MiniMax-M2: routers with a correction bias.",
    ),
    _spec(
        "ernie_moe",
        "Ernie4_5_MoeForCausalLM",
        "ernie_moe:ErnieMoeModel",
        "moe_corrected_describe",
        "ErnieMoeConfig",
        "ERNIE 4.5 with experts: routers with a correction bias, shared experts.",
    ),
    _spec(
        "gpt_oss",
        "GptOssForCausalLM",
        "gpt_oss:GptOssModel",
        "gpt_oss_describe",
        "GptOssConfig",
        "gpt-oss: attention sinks, alternating windows, clamped activations.",
    ),
    _spec(
        "phi_moe",
        "PhimoeForCausalLM",
        "phi_moe:PhiMoeModel",
        "phi_moe_describe",
        "PhiMoeConfig",
        "Phi-3.5-MoE: LayerNorm, routers that choose by sparsemixer.",
        ("PhiMoEForCausalLM",),
    ),
    _spec(
        "granite_moe",
        "GraniteMoeForCausalLM",
        "granite:GraniteMoeModel",
        "granite_moe_describe",
        "GraniteMoeConfig",
        "Granite 3 with experts.",
    ),
    _spec(
        "granite_moe_shared",
        "GraniteMoeSharedForCausalLM",
        "granite:GraniteMoeModel",
        "granite_moe_describe",
        "GraniteMoeSharedConfig",
        "Granite with experts and a shared expert.",
    ),
    _spec(
        "llama4",
        "Llama4ForCausalLM",
        "llama4:Llama4Model",
        "llama4_describe",
        "Llama4Config",
        "Llama 4, the text model.",
        ("Llama4ForConditionalGeneration",),
    ),
    _spec(
        "gemma",
        "GemmaForCausalLM",
        "gemma:GemmaModel",
        "gemma_describe",
        "GemmaConfig",
        "Gemma: Llama's layers with GELU and scaled embeddings.",
    ),
    _spec(
        "gemma2",
        "Gemma2ForCausalLM",
        "gemma:GemmaModel",
        "gemma_describe",
        "Gemma2Config",
        "Gemma 2: norms around attention and MLP, soft caps.",
    ),
    _spec(
        "gemma3",
        "Gemma3ForCausalLM",
        "gemma:GemmaModel",
        "gemma_describe",
        "Gemma3Config",
        "Gemma 3, the text model: Gemma 2's layers with norms over heads and two rotary settings.",
        (
            "Gemma3TextModel",
            "Gemma3ForConditionalGeneration",
        ),
    ),
    _spec(
        "olmo2",
        "Olmo2ForCausalLM",
        "olmo:OlmoModel",
        "olmo_describe",
        "Olmo2Config",
        "OLMo 2: norms after attention and MLP only.",
    ),
    _spec(
        "olmo3",
        "Olmo3ForCausalLM",
        "olmo:OlmoModel",
        "olmo_describe",
        "Olmo3Config",
        "OLMo 3: OLMo 2's layers, some with a window.",
    ),
    _spec(
        "glm",
        "GlmForCausalLM",
        "glm:GlmModel",
        "glm_describe",
        "GlmConfig",
        "GLM-4-9B: Llama's layers, which rotate half of each head.",
    ),
    _spec(
        "glm4",
        "Glm4ForCausalLM",
        "glm:GlmModel",
        "glm_describe",
        "Glm4Config",
        "GLM-4-0414: norms around attention and MLP.",
    ),
    _spec(
        "cohere",
        "CohereForCausalLM",
        "cohere:CohereModel",
        "cohere_describe",
        "CohereConfig",
        "Command R: attention and MLP side by side.",
    ),
    _spec(
        "cohere2",
        "Cohere2ForCausalLM",
        "cohere:CohereModel",
        "cohere_describe",
        "Cohere2Config",
        "Command R7B and Command A: layers with a window and positions, and layers with neither.",
    ),
    _spec(
        "mamba2",
        "Mamba2ForCausalLM",
        "mamba2:Mamba2Model",
        "mamba2_describe",
        "Mamba2Config",
        "Mamba-2: states in place of attention.",
    ),
    _spec(
        "granite_hybrid",
        "GraniteMoeHybridForCausalLM",
        "granite_hybrid:GraniteHybridModel",
        "granite_hybrid_describe",
        "GraniteHybridConfig",
        "Granite 4: Mamba-2 mixers and some layers with attention, with experts or without.",
    ),
    _spec(
        "falcon_h1",
        "FalconH1ForCausalLM",
        "falcon_h1:FalconH1Model",
        "falcon_h1_describe",
        "FalconH1Config",
        "Falcon-H1: attention and a Mamba-2 mixer side by side in every layer.",
    ),
)
"""Hold the specs of all models of this package."""
