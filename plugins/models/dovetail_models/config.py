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
