"""Define the config sections of the models with experts. They have no settings: a checkpoint's config.json contains
everything."""

from __future__ import annotations

from typing import Literal

from dovetail.config.plugin import PluginConfig


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
