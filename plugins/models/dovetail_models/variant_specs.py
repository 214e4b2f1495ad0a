"""Specify the components of dense models whose layers have another topology than Llama's. Imports nothing heavy."""

from __future__ import annotations

from dovetail.registry.specs import ComponentKind, ComponentSpec


def _spec(name: str, target: str, architecture: str, summary: str, *more: str) -> ComponentSpec:
    file, _ = target.split(":")
    return ComponentSpec(
        kind=ComponentKind.MODEL,
        name=name,
        target=f"dovetail_models.{target}",
        config=f"dovetail_models.variant_config:{name.capitalize()}Config",
        describe=f"dovetail_models.{file}_describe:describe_{name}",
        # checkpoints that were saved without the head have the second name
        aliases=(architecture, architecture.replace("ForCausalLM", "Model"), *more),
        summary=summary,
    )


VARIANTS = (
    _spec("gemma", "gemma:GemmaModel", "GemmaForCausalLM", "Gemma: Llama's layers with GELU and scaled embeddings."),
    _spec("gemma2", "gemma:GemmaModel", "Gemma2ForCausalLM", "Gemma 2: norms around attention and MLP, soft caps."),
    _spec(
        "gemma3",
        "gemma:GemmaModel",
        "Gemma3ForCausalLM",
        "Gemma 3, the text model: Gemma 2's layers with norms over heads and two rotary settings.",
        "Gemma3TextModel",
        "Gemma3ForConditionalGeneration",
    ),
    _spec("olmo2", "olmo:OlmoModel", "Olmo2ForCausalLM", "OLMo 2: norms after attention and MLP only."),
    _spec("olmo3", "olmo:OlmoModel", "Olmo3ForCausalLM", "OLMo 3: OLMo 2's layers, some with a window."),
    _spec("glm", "glm:GlmModel", "GlmForCausalLM", "GLM-4-9B: Llama's layers, which rotate half of each head."),
    _spec("glm4", "glm:GlmModel", "Glm4ForCausalLM", "GLM-4-0414: norms around attention and MLP."),
    _spec("cohere", "cohere:CohereModel", "CohereForCausalLM", "Command R: attention and MLP side by side."),
    _spec(
        "cohere2",
        "cohere:CohereModel",
        "Cohere2ForCausalLM",
        "Command R7B and Command A: layers with a window and positions, and layers with neither.",
    ),
)
"""Hold the specs of these models."""
