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
) -> ComponentSpec:
    return ComponentSpec(
        kind=ComponentKind.MODEL,
        name=name,
        target=f"dovetail_models.{target}",
        config=f"dovetail_models.moe_config:{config}",
        describe=f"dovetail_models.{describe}:describe_{name}",
        # checkpoints that were saved without the head have the second name
        aliases=(architecture, architecture.replace("ForCausalLM", "Model")),
        summary=summary,
    )


MOE = (
    _spec("mixtral", "MixtralConfig", "MixtralForCausalLM", "Mixtral: experts in every layer."),
    _spec("qwen2_moe", "Qwen2MoeConfig", "Qwen2MoeForCausalLM", "Qwen1.5 and Qwen2 with experts and a shared expert."),
    _spec("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM", "Qwen3 with experts."),
    _spec("olmoe", "OlmoeConfig", "OlmoeForCausalLM", "OLMoE: norms over all queries and all keys."),
)
"""Hold the specs of the models with experts."""
