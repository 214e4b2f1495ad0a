"""Define the config sections of the models. They have no settings: a checkpoint's config.json contains everything."""

from __future__ import annotations

from typing import Literal

from dovetail.config.plugin import PluginConfig


class LlamaConfig(PluginConfig):
    """Select the Llama architecture (Llama 2 and 3)."""

    kind: Literal["llama"] = "llama"  # pyright: ignore[reportIncompatibleVariableOverride]


class MistralConfig(PluginConfig):
    """Select the Mistral architecture."""

    kind: Literal["mistral"] = "mistral"  # pyright: ignore[reportIncompatibleVariableOverride]


class Qwen2Config(PluginConfig):
    """Select the Qwen2 architecture (Qwen2 and Qwen2.5)."""

    kind: Literal["qwen2"] = "qwen2"  # pyright: ignore[reportIncompatibleVariableOverride]


class MimoConfig(PluginConfig):
    """Select the MiMo architecture."""

    kind: Literal["mimo"] = "mimo"  # pyright: ignore[reportIncompatibleVariableOverride]


class Qwen3Config(PluginConfig):
    """Select the Qwen3 architecture (dense)."""

    kind: Literal["qwen3"] = "qwen3"  # pyright: ignore[reportIncompatibleVariableOverride]


class Phi3Config(PluginConfig):
    """Select the Phi-3 architecture (Phi-3, Phi-3.5 mini, Phi-4)."""

    kind: Literal["phi3"] = "phi3"  # pyright: ignore[reportIncompatibleVariableOverride]


class SmolLM3Config(PluginConfig):
    """Select the SmolLM 3 architecture."""

    kind: Literal["smollm3"] = "smollm3"  # pyright: ignore[reportIncompatibleVariableOverride]


class GraniteConfig(PluginConfig):
    """Select the Granite 3 architecture (dense)."""

    kind: Literal["granite"] = "granite"  # pyright: ignore[reportIncompatibleVariableOverride]


class Starcoder2Config(PluginConfig):
    """Select the StarCoder 2 architecture."""

    kind: Literal["starcoder2"] = "starcoder2"  # pyright: ignore[reportIncompatibleVariableOverride]


class GPT2Config(PluginConfig):
    """Select the GPT-2 architecture."""

    kind: Literal["gpt2"] = "gpt2"  # pyright: ignore[reportIncompatibleVariableOverride]


class GPTNeoXConfig(PluginConfig):
    """Select the GPT-NeoX architecture (GPT-NeoX, Pythia)."""

    kind: Literal["gpt_neox"] = "gpt_neox"  # pyright: ignore[reportIncompatibleVariableOverride]


class OPTConfig(PluginConfig):
    """Select the OPT architecture."""

    kind: Literal["opt"] = "opt"  # pyright: ignore[reportIncompatibleVariableOverride]


class PhiConfig(PluginConfig):
    """Select the first Phi architecture (Phi-1, Phi-1.5, Phi-2)."""

    kind: Literal["phi"] = "phi"  # pyright: ignore[reportIncompatibleVariableOverride]


class GPTJConfig(PluginConfig):
    """Select the GPT-J architecture."""

    kind: Literal["gptj"] = "gptj"  # pyright: ignore[reportIncompatibleVariableOverride]


class StableLmConfig(PluginConfig):
    """Select the StableLM architecture."""

    kind: Literal["stablelm"] = "stablelm"  # pyright: ignore[reportIncompatibleVariableOverride]


class FalconConfig(PluginConfig):
    """Select the Falcon architecture, with rotary positions."""

    kind: Literal["falcon"] = "falcon"  # pyright: ignore[reportIncompatibleVariableOverride]


class QwenConfig(PluginConfig):
    """Select the Qwen architecture of the first generation."""

    kind: Literal["qwen"] = "qwen"  # pyright: ignore[reportIncompatibleVariableOverride]


class MixtralConfig(PluginConfig):
    """Select the Mixtral architecture."""

    kind: Literal["mixtral"] = "mixtral"  # pyright: ignore[reportIncompatibleVariableOverride]


class Qwen2MoeConfig(PluginConfig):
    """Select the architecture of Qwen2 with experts."""

    kind: Literal["qwen2_moe"] = "qwen2_moe"  # pyright: ignore[reportIncompatibleVariableOverride]


class Qwen3MoeConfig(PluginConfig):
    """Select the architecture of Qwen3 with experts."""

    kind: Literal["qwen3_moe"] = "qwen3_moe"  # pyright: ignore[reportIncompatibleVariableOverride]


class OlmoeConfig(PluginConfig):
    """Select the OLMoE architecture."""

    kind: Literal["olmoe"] = "olmoe"  # pyright: ignore[reportIncompatibleVariableOverride]


class Glm4MoeConfig(PluginConfig):
    """Select the architecture of GLM-4.5."""

    kind: Literal["glm4_moe"] = "glm4_moe"  # pyright: ignore[reportIncompatibleVariableOverride]


class DeepseekV2Config(PluginConfig):
    """Select the architecture of DeepSeek-V2."""

    kind: Literal["deepseek_v2"] = "deepseek_v2"  # pyright: ignore[reportIncompatibleVariableOverride]


class DeepseekV3Config(PluginConfig):
    """Select the architecture of DeepSeek-V3 (also R1 and Kimi K2)."""

    kind: Literal["deepseek_v3"] = "deepseek_v3"  # pyright: ignore[reportIncompatibleVariableOverride]


class Glm4MoeLiteConfig(PluginConfig):
    """Select the architecture of GLM-4.7-Flash."""

    kind: Literal["glm4_moe_lite"] = "glm4_moe_lite"  # pyright: ignore[reportIncompatibleVariableOverride]


class MinimaxM2Config(PluginConfig):
    """Select the architecture of MiniMax-M2."""

    kind: Literal["minimax_m2"] = "minimax_m2"  # pyright: ignore[reportIncompatibleVariableOverride]


class ErnieMoeConfig(PluginConfig):
    """Select the architecture of ERNIE 4.5 with experts."""

    kind: Literal["ernie_moe"] = "ernie_moe"  # pyright: ignore[reportIncompatibleVariableOverride]


class GptOssConfig(PluginConfig):
    """Select the architecture of gpt-oss."""

    kind: Literal["gpt_oss"] = "gpt_oss"  # pyright: ignore[reportIncompatibleVariableOverride]


class PhiMoeConfig(PluginConfig):
    """Select the architecture of Phi-3.5-MoE."""

    kind: Literal["phi_moe"] = "phi_moe"  # pyright: ignore[reportIncompatibleVariableOverride]


class GraniteMoeConfig(PluginConfig):
    """Select the architecture of Granite 3 with experts."""

    kind: Literal["granite_moe"] = "granite_moe"  # pyright: ignore[reportIncompatibleVariableOverride]


class GraniteMoeSharedConfig(PluginConfig):
    """Select the architecture of Granite with experts and a shared expert."""

    kind: Literal["granite_moe_shared"] = "granite_moe_shared"  # pyright: ignore[reportIncompatibleVariableOverride]


class Llama4Config(PluginConfig):
    """Select the architecture of the text model of Llama 4."""

    kind: Literal["llama4"] = "llama4"  # pyright: ignore[reportIncompatibleVariableOverride]


class GemmaConfig(PluginConfig):
    """Select the architecture of the first Gemma."""

    kind: Literal["gemma"] = "gemma"  # pyright: ignore[reportIncompatibleVariableOverride]


class Gemma2Config(PluginConfig):
    """Select the Gemma 2 architecture."""

    kind: Literal["gemma2"] = "gemma2"  # pyright: ignore[reportIncompatibleVariableOverride]


class Gemma3Config(PluginConfig):
    """Select the architecture of the text model of Gemma 3."""

    kind: Literal["gemma3"] = "gemma3"  # pyright: ignore[reportIncompatibleVariableOverride]


class Gemma3nConfig(PluginConfig):
    """Select the text model of the Gemma 3n architecture."""

    kind: Literal["gemma3n"] = "gemma3n"  # pyright: ignore[reportIncompatibleVariableOverride]


class Olmo2Config(PluginConfig):
    """Select the OLMo 2 architecture."""

    kind: Literal["olmo2"] = "olmo2"  # pyright: ignore[reportIncompatibleVariableOverride]


class Olmo3Config(PluginConfig):
    """Select the OLMo 3 architecture."""

    kind: Literal["olmo3"] = "olmo3"  # pyright: ignore[reportIncompatibleVariableOverride]


class GlmConfig(PluginConfig):
    """Select the architecture of GLM-4-9B."""

    kind: Literal["glm"] = "glm"  # pyright: ignore[reportIncompatibleVariableOverride]


class Glm4Config(PluginConfig):
    """Select the architecture of GLM-4-0414."""

    kind: Literal["glm4"] = "glm4"  # pyright: ignore[reportIncompatibleVariableOverride]


class CohereConfig(PluginConfig):
    """Select the architecture of Command R."""

    kind: Literal["cohere"] = "cohere"  # pyright: ignore[reportIncompatibleVariableOverride]


class Cohere2Config(PluginConfig):
    """Select the architecture of Command R7B and Command A."""

    kind: Literal["cohere2"] = "cohere2"  # pyright: ignore[reportIncompatibleVariableOverride]


class Mamba2Config(PluginConfig):
    """Select the Mamba-2 architecture."""

    kind: Literal["mamba2"] = "mamba2"  # pyright: ignore[reportIncompatibleVariableOverride]


class Qwen3NextConfig(PluginConfig):
    """Select the Qwen3-Next architecture."""

    kind: Literal["qwen3_next"] = "qwen3_next"  # pyright: ignore[reportIncompatibleVariableOverride]


class GraniteHybridConfig(PluginConfig):
    """Select the Granite 4 hybrid architecture."""

    kind: Literal["granite_hybrid"] = "granite_hybrid"  # pyright: ignore[reportIncompatibleVariableOverride]


class BambaConfig(PluginConfig):
    """Select the Bamba architecture."""

    kind: Literal["bamba"] = "bamba"  # pyright: ignore[reportIncompatibleVariableOverride]


class FalconH1Config(PluginConfig):
    """Select the Falcon-H1 architecture."""

    kind: Literal["falcon_h1"] = "falcon_h1"  # pyright: ignore[reportIncompatibleVariableOverride]


class Qwen35Config(PluginConfig):
    """Select the architecture of Qwen3.5's dense text models."""

    kind: Literal["qwen3_5"] = "qwen3_5"  # pyright: ignore[reportIncompatibleVariableOverride]


class Qwen35MoeConfig(PluginConfig):
    """Select the architecture of Qwen3.5's text models with experts."""

    kind: Literal["qwen3_5_moe"] = "qwen3_5_moe"  # pyright: ignore[reportIncompatibleVariableOverride]


class JambaConfig(PluginConfig):
    """Select the Jamba architecture."""

    kind: Literal["jamba"] = "jamba"  # pyright: ignore[reportIncompatibleVariableOverride]


class KimiLinearConfig(PluginConfig):
    """Select the Kimi Linear architecture."""

    kind: Literal["kimi_linear"] = "kimi_linear"  # pyright: ignore[reportIncompatibleVariableOverride]


class Lfm2Config(PluginConfig):
    """Select the LFM2 architecture."""

    kind: Literal["lfm2"] = "lfm2"  # pyright: ignore[reportIncompatibleVariableOverride]


class NemotronHConfig(PluginConfig):
    """Select the Nemotron-H architecture."""

    kind: Literal["nemotron_h"] = "nemotron_h"  # pyright: ignore[reportIncompatibleVariableOverride]


class TransformersConfig(PluginConfig):
    """Select the modules of transformers, for an architecture that no other component implements."""

    kind: Literal["transformers"] = "transformers"  # pyright: ignore[reportIncompatibleVariableOverride]
