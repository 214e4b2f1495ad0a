"""Register the models of this package. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.registry.hookspecs import hookimpl
from dovetail.registry.specs import ComponentKind, ComponentSpec
from dovetail_models.family_specs import FAMILIES
from dovetail_models.moe_specs import MOE
from dovetail_models.variant_specs import VARIANTS


def _dense(name: str, config: str, architecture: str, summary: str) -> ComponentSpec:
    return ComponentSpec(
        kind=ComponentKind.MODEL,
        name=name,
        target="dovetail_models.dense:DenseModel",
        config=f"dovetail_models.config:{config}",
        describe=f"dovetail_models.dense_describe:describe_{name}",
        # checkpoints that were saved without the head have the second name
        aliases=(architecture, architecture.replace("ForCausalLM", "Model")),
        summary=summary,
    )


@hookimpl
def register_components() -> Sequence[ComponentSpec]:
    """Return the specs of the models."""
    return (
        _dense("llama", "LlamaConfig", "LlamaForCausalLM", "Llama 2 and 3, and models of their shape."),
        _dense("mistral", "MistralConfig", "MistralForCausalLM", "Mistral, with its sliding window."),
        _dense("qwen2", "Qwen2Config", "Qwen2ForCausalLM", "Qwen2 and Qwen2.5, dense."),
        _dense("mimo", "MimoConfig", "MiMoForCausalLM", "MiMo: Qwen2's layers, and one that predicts a further token."),
        _dense("qwen3", "Qwen3Config", "Qwen3ForCausalLM", "Qwen3, dense: norms over query and key heads."),
        *FAMILIES,
        *MOE,
        *VARIANTS,
    )
