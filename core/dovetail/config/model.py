"""Define the config section of the model."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, Literal

from pydantic import Field, model_validator

from dovetail.config.hub_files import parse_hub_name
from dovetail.config.plugin import Section

DEFAULT_MODEL = "default"
"""The name by which requests may always name the served model, as in SGLang."""


class ModelSection(Section):
    """Select the model, and configure how it is loaded. A bare string is short for ``{path: ...}``."""

    path: str = Field(
        default="tiny",
        description="`tiny` (the embedded model), a local directory in Hugging Face layout, a GGUF file, a model of `dovetail pull`, or a hub name: `org/name`, `org/name@revision`, `org/name:Q4_K_M` or `org/name/file.gguf`.",
    )
    arch: str = Field(
        default="auto", description="Model component; `auto` takes one that implements config.json's `architectures`."
    )
    implementation: Literal["auto", "dovetail", "transformers"] = Field(
        default="auto",
        description="What computes the model: `dovetail`, a component written for its architecture; `transformers`, the modules of transformers with Dovetail's attention and linear layers, which are slower; `auto` takes the second only for an architecture that no component lists.",
    )
    served_name: str | tuple[str, ...] | None = Field(
        default=None,
        description="Name in the API, or several; by default the last part of `path`. Answers contain the first one. `default` always names the model too.",
    )
    aliases: dict[str, str] = Field(
        default_factory=dict,
        description="Names that requests may give instead, for tools that insist on a name: patterns (`claude-*`), each with the served name that it stands for.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="`auto` is the checkpoint's dtype on CUDA, float32 on CPU."
    )
    load_format: Literal["safetensors", "dummy"] = Field(
        default="safetensors", description="`dummy` fills random weights, for benchmarks."
    )
    context_len: int | None = Field(
        default=None, ge=8, description="Upper bound on prompt plus output; by default, and at most, the model's own."
    )
    tokenizer: str | None = Field(default=None, description="Directory of tokenizer.json, if not the model's.")
    chat_template: str | None = Field(
        default=None, description="A file with the chat template (Jinja), if not the tokenizer's."
    )
    special_tokens_in_messages: bool = Field(
        default=False,
        description="Let texts of chats that spell special tokens, such as <|im_end|>, become these tokens. A client can then forge turns of others.",
    )
    generation_config: str = Field(
        default="auto",
        description="Where the sampling defaults come from, which apply to requests that set no value of their own: `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`, `max_new_tokens`. `auto`: the checkpoint's generation_config.json; `none`: the defaults of each API; or a directory with such a file, or the file.",
    )
    overrides: dict[str, Any] = Field(default_factory=dict, description="Keys of config.json to replace.")
    seed: int = Field(default=0, description="Seed of dummy weights.")

    @property
    def name(self) -> str:
        """Return the model's name in the API; of several, the first."""
        return self.names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Return all names of the model in the API."""
        given = self.served_name or _name_of(self.path)
        return (given,) if isinstance(given, str) else given

    def is_served(self, name: str) -> bool:
        """Return True if requests may name the model ``name``: by one of its names, as ``default``, or by an alias."""
        return name in (DEFAULT_MODEL, *self.names) or any(fnmatchcase(name, pattern) for pattern in self.aliases)

    @model_validator(mode="after")
    def _aliases_have_targets(self) -> ModelSection:
        allowed = (*self.names, DEFAULT_MODEL)
        for pattern, name in self.aliases.items():
            if name not in allowed:
                raise ValueError(f"aliases.{pattern} is {name!r}; allowed: {', '.join(allowed)}")
        return self


def _name_of(path: str) -> str:
    """Return the last part of a path. A name of the hub loses its revision."""
    hub = parse_hub_name(path)
    if hub is not None and hub.revision is not None:
        label = "" if hub.gguf is None else f"/{hub.gguf}" if hub.gguf.endswith(".gguf") else f":{hub.gguf}"
        path = hub.repository + label
    return path.rstrip("/").rpartition("/")[2].removesuffix(".gguf")
