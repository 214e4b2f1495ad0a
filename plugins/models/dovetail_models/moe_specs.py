"""Specify the components of models with experts. Imports nothing heavy."""

from __future__ import annotations

from dovetail.registry.specs import ComponentKind, ComponentSpec


def _spec(
    name: str,
    config: str,
    architecture: str,
    summary: str,
    target: str = "moe:MoeModel",
    describe: str = "moe_describe",
    more: tuple[str, ...] = (),
) -> ComponentSpec:
    return ComponentSpec(
        kind=ComponentKind.MODEL,
        name=name,
        target=f"dovetail_models.{target}",
        config=f"dovetail_models.moe_config:{config}",
        describe=f"dovetail_models.{describe}:describe_{name}",
        # checkpoints that were saved without the head have the second name
        aliases=(architecture, architecture.replace("ForCausalLM", "Model"), *more),
        summary=summary,
    )


MOE = (
    _spec("mixtral", "MixtralConfig", "MixtralForCausalLM", "Mixtral: experts in every layer."),
    _spec("qwen2_moe", "Qwen2MoeConfig", "Qwen2MoeForCausalLM", "Qwen1.5 and Qwen2 with experts and a shared expert."),
    _spec("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM", "Qwen3 with experts."),
    _spec("olmoe", "OlmoeConfig", "OlmoeForCausalLM", "OLMoE: norms over all queries and all keys."),
    _spec(
        "glm4_moe",
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        "GLM-4.5 and GLM-4.6: routers with groups and a correction bias, shared experts.",
        describe="moe_corrected_describe",
    ),
    _spec(
        "minimax_m2",
        "MinimaxM2Config",
        "MiniMaxM2ForCausalLM",
        "MiniMax-M2: routers with a correction bias.",
        describe="moe_corrected_describe",
    ),
    _spec(
        "ernie_moe",
        "ErnieMoeConfig",
        "Ernie4_5_MoeForCausalLM",
        "ERNIE 4.5 with experts: routers with a correction bias, shared experts.",
        target="ernie_moe:ErnieMoeModel",
        describe="moe_corrected_describe",
    ),
    _spec(
        "gpt_oss",
        "GptOssConfig",
        "GptOssForCausalLM",
        "gpt-oss: attention sinks, alternating windows, clamped activations.",
        target="gpt_oss:GptOssModel",
        describe="gpt_oss_describe",
    ),
    _spec(
        "phi_moe",
        "PhiMoeConfig",
        "PhimoeForCausalLM",
        "Phi-3.5-MoE: LayerNorm, routers that choose by sparsemixer.",
        target="phi_moe:PhiMoeModel",
        describe="phi_moe_describe",
        more=("PhiMoEForCausalLM",),  # as published
    ),
    _spec(
        "granite_moe",
        "GraniteMoeConfig",
        "GraniteMoeForCausalLM",
        "Granite 3 with experts.",
        target="granite:GraniteMoeModel",
        describe="granite_moe_describe",
    ),
    _spec(
        "granite_moe_shared",
        "GraniteMoeSharedConfig",
        "GraniteMoeSharedForCausalLM",
        "Granite with experts and a shared expert.",
        target="granite:GraniteMoeModel",
        describe="granite_moe_describe",
    ),
    _spec(
        "llama4",
        "Llama4Config",
        "Llama4ForCausalLM",
        "Llama 4, the text model.",
        target="llama4:Llama4Model",
        describe="llama4_describe",
        more=("Llama4ForConditionalGeneration",),
    ),
)
"""Hold the specs of the models with experts."""
