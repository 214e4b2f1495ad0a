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
    _spec("gemma2", "gemma:GemmaModel", "Gemma2ForCausalLM", "Gemma 2: norms around attention and MLP, soft caps."),
    _spec(
        "gemma3",
        "gemma:GemmaModel",
        "Gemma3ForCausalLM",
        "Gemma 3, the text model: Gemma 2's layers with norms over heads and two rotary settings.",
        "Gemma3TextModel",
        "Gemma3ForConditionalGeneration",
    ),
)
"""Hold the specs of these models."""
