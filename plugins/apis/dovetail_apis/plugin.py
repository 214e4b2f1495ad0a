"""Register the APIs of this distribution. This module imports little, because the registry reads it at every start."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.registry.hookspecs import hookimpl
from dovetail.registry.specs import ComponentKind, ComponentSpec


def _api(name: str, target: str, config: str, summary: str) -> ComponentSpec:
    return ComponentSpec(
        ComponentKind.API, name, f"dovetail_apis.{target}", f"dovetail_apis.config:{config}", summary, api=(1, 1)
    )


@hookimpl
def register_components() -> Sequence[ComponentSpec]:
    """Return the specs of the APIs."""
    return (
        _api("openai", "openai:OpenAIApi", "OpenAIConfig", "OpenAI's chat completions, completions and models."),
        _api("native", "native:Native", "NativeConfig", "SGLang's /generate."),
        _api("responses", "responses:Responses", "ResponsesConfig", "OpenAI's responses."),
        _api("anthropic", "anthropic:AnthropicApi", "AnthropicConfig", "Anthropic's messages."),
        _api("ollama", "ollama:Ollama", "OllamaConfig", "Ollama's chat, generate, embed, tags, show, version and ps."),
        _api("embeddings", "embeddings:Embeddings", "EmbeddingsConfig", "OpenAI's embeddings."),
        _api(
            "score",
            "score:Score",
            "ScoreConfig",
            "Scores of pairs and of labels, and reranking, as in vLLM and SGLang.",
        ),
        _api("tokenize", "tokenize:Tokenize", "TokenizeConfig", "Text to token ids and back, as in vLLM and SGLang."),
    )
