"""Define the supported request bodies of Ollama's API, and the fields that Dovetail adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from dovetail.api.body import ApiModel, Int32, examples
from dovetail.api.placement import PlacementFields, SessionFields
from dovetail.chat.requests import ToolSpec


class Options(ApiModel):
    """Describe ``options``, which control how tokens are sampled. None stands for the default."""

    temperature: float | None = None
    top_k: Int32 | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = Field(None, ge=-1, description="-1 stands for no seed.")
    num_predict: Int32 | None = Field(None, ge=-2, description="0 or less: generate until the context is full.")
    num_ctx: Int32 | None = Field(None, ge=1, description="At most the context length of this server.")
    stop: str | list[str] | None = None
    repeat_penalty: float | None = Field(None, description="Applies to the prompt and the whole output.")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    ignored = frozenset(
        [
            "numa",
            "num_batch",
            "num_gpu",
            "main_gpu",
            "low_vram",
            "f16_kv",
            "logits_all",
            "vocab_only",
            "use_mmap",
            "use_mlock",
            "embedding_only",
            "num_thread",
            "num_keep",
            "mirostat_tau",
            "mirostat_eta",
        ]
    )
    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "mirostat": (0,),
        "tfs_z": (1, 1.0),
        "typical_p": (1, 1.0),
        "repeat_last_n": (-1,),
        "penalize_newline": (True,),
    }


class TextRequestFields(SessionFields):
    """Describe the common fields of /api/chat and /api/generate. None stands for the default."""

    model: str = Field(min_length=1)
    stream: bool | None = Field(None, description="True by default.")
    format: Literal["", "json"] | dict[str, Any] | None = Field(None, description="`json`, or a JSON schema.")
    options: dict[str, Any] | None = Field(None, description="See `Options`.")
    think: bool | Literal["low", "medium", "high", "max"] | None = Field(
        None, description="Switch the model's reasoning on or off. By default the chat template decides."
    )
    keep_alive: float | str | None = Field(None, description="Accepted, but has no effect: the model stays loaded.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {"truncate": (False,), "shift": (False,)}


class OllamaMessage(ApiModel):
    """Describe one message. ``thinking``, ``tool_name`` (formerly ``name``) and ``tool_call_id`` are passed to the chat
    template."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = Field(
        None,
        description="Must be empty or null: this server supports only text.",
        json_schema_extra={"maxItems": 0},  # not max_length, whose error would not say why
    )
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None
    name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(TextRequestFields):
    """Describe the body of POST /api/chat. Without messages, it is a request to load the model."""

    model_config = examples(
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Hello"}],
            "options": {"num_predict": 8},
            "stream": False,
        },
        {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "options": {"num_predict": 8}},
    )

    messages: list[OllamaMessage] | None = Field(None, max_length=4096)
    tools: list[ToolSpec] | None = Field(None, max_length=256)


class GenerateRequest(TextRequestFields):
    """Describe the body of POST /api/generate. Without a prompt, it is a request to load the model."""

    model_config = examples(
        {
            "model": "tiny",
            "prompt": "The capital of France is",
            "raw": True,
            "options": {"num_predict": 8},
            "stream": False,
        },
        {"model": "tiny", "prompt": "Hello", "options": {"num_predict": 8}},
    )

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = Field(None, description="If true, the prompt is continued as it is, without the chat template.")

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **TextRequestFields.refused,
        "suffix": ("",),
        "template": ("",),
        "context": (),
        "images": (),
        "width": (0,),
        "height": (0,),
        "steps": (0,),
    }


class EmbedFields(PlacementFields):
    """Describe the common fields of /api/embed and /api/embeddings."""

    model: str = Field(min_length=1)
    options: dict[str, Any] | None = Field(None, description="See `Options`; nothing is sampled.")
    keep_alive: float | str | None = Field(None, description="Accepted, but has no effect: the model stays loaded.")


class EmbedRequest(EmbedFields):
    """Describe the body of POST /api/embed. Without a text, it is a request to load the model."""

    model_config = examples({"model": "tiny", "input": ["A text", "Another one"]})

    input: str | list[str] = ""
    truncate: bool | None = Field(None, description="Cut off the end of texts that are too long; true by default.")
    dimensions: Int32 | None = Field(None, description="Keep only the first `dimensions` numbers of each vector.")


class OllamaEmbeddingsRequest(EmbedFields):
    """Describe the body of POST /api/embeddings, the old form of /api/embed."""

    model_config = examples({"model": "tiny", "prompt": "A text"})

    prompt: str | None = None


class ShowRequest(ApiModel):
    """Describe the body of POST /api/show."""

    model_config = examples({"model": "tiny"})

    model: str | None = None
    name: str | None = Field(None, description="The old name of `model`.")

    ignored = frozenset({"verbose"})
    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {"template": ("",), "system": ("",), "options": ({},)}
