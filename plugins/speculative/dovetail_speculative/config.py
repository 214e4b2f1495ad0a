"""Define the config sections of the drafters."""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator

from dovetail.config.plugin import PluginConfig


class WeightsConfig(PluginConfig):
    """Configure the weights of drafters that run a model."""

    load_format: Literal["safetensors", "dummy"] = Field(
        default="safetensors", description="`dummy` uses random weights, to measure speed."
    )


class CheckpointConfig(WeightsConfig):
    """Configure drafters whose model has a separate checkpoint. ``folder`` is its default folder within the target's
    checkpoint."""

    folder: ClassVar[str]
    path: str = Field(
        default="auto",
        description="The drafter's checkpoint: a directory in Hugging Face layout, or a hub name. `auto`: the folder with the drafter's name inside the target's checkpoint (`eagle3` for `eagle3_tree`).",
    )


class NgramConfig(PluginConfig):
    """Draft what followed the last occurrence of the latest tokens, in the request's own text or in outputs of other
    requests."""

    kind: Literal["ngram"] = "ngram"  # pyright: ignore[reportIncompatibleVariableOverride]
    num_draft_tokens: int = Field(default=8, ge=1, le=64, description="The largest number of tokens drafted at once.")
    min_ngram: int = Field(
        default=1,
        ge=1,
        description="The smallest number of latest tokens that must have occurred before. If only the last token has, a draft is made only if earlier guesses after that token were right.",
    )
    max_ngram: int = Field(default=4, ge=1, le=16, description="The largest number of latest tokens that are compared.")
    memory: int = Field(
        default=16384,
        ge=1,
        description="Occurrences are remembered for at least this number of the request's latest tokens, and for at most twice this number.",
    )
    shared: int = Field(
        default=65536,
        ge=0,
        description="The number of tokens of recent outputs that are remembered for later requests of the same namespace (adapter, tenant). Each takes about 0.5 kB. 0: none.",
    )
    share_prompts: bool = Field(default=False, description="Also remember prompts for later requests.")

    @model_validator(mode="after")
    def _check_range(self) -> NgramConfig:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram is {self.min_ngram}; allowed: 1 up to max_ngram, {self.max_ngram}")
        return self


class DFlashConfig(CheckpointConfig):
    """Draft a block of tokens in one pass of a small model over the target's hidden states."""

    folder: ClassVar[str] = "dflash"
    kind: Literal["dflash"] = "dflash"  # pyright: ignore[reportIncompatibleVariableOverride]
    num_draft_tokens: int | None = Field(
        default=None, ge=1, description="The largest number of tokens drafted at once. Null: one block of the drafter."
    )


class MtpConfig(WeightsConfig):
    """Draft with the target's own layers for further tokens."""

    kind: Literal["mtp"] = "mtp"  # pyright: ignore[reportIncompatibleVariableOverride]
    num_draft_tokens: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="The largest number of tokens drafted at once. Null: 3 with a single layer, which is applied to its own output; otherwise the number of layers.",
    )


class DraftModelConfig(CheckpointConfig):
    """Draft with a smaller model that has the same vocabulary."""

    folder: ClassVar[str] = "draft_model"
    kind: Literal["draft_model"] = "draft_model"  # pyright: ignore[reportIncompatibleVariableOverride]
    num_draft_tokens: int = Field(default=4, ge=1, le=64, description="The largest number of tokens drafted at once.")
    chunk_size: int = Field(
        default=2048,
        ge=16,
        description="The largest number of tokens that the smaller model reads before a draft. It reads a part of a longer prompt in each step, and the request is decoded without drafts meanwhile.",
    )


class TreeShape(NamedTuple):
    """Describe how draft trees grow: they have ``depth`` levels, and ``topk`` nodes of a level get ``topk`` children
    each."""

    topk: int
    depth: int

    @property
    def nodes(self) -> int:
        """Return the number of nodes that are expanded, which are the nodes that the drafter's model runs on."""
        return self.topk * (self.depth - 1)


class _Tree(CheckpointConfig):
    topk: int = Field(
        default=4,
        ge=1,
        le=32,
        description="The number of nodes of a level that get children, and the number of children of each. 1 makes chains.",
    )
    depth: int = Field(
        default=5,
        ge=1,
        le=32,
        description="The number of levels of a tree, which is the largest number of accepted drafts of a step.",
    )
    num_draft_tokens: int = Field(
        default=16,
        ge=1,
        le=256,
        description="The number of nodes that are verified: the most probable nodes of all levels.",
    )

    @property
    def tree(self) -> TreeShape | None:
        """Return the shape of the tree, or None for chains."""
        return None if self.topk == 1 else TreeShape(self.topk, self.depth)

    @property
    def most(self) -> int:
        """Return the largest number of tokens drafted at once."""
        return min(self.num_draft_tokens, self.depth) if self.topk == 1 else self.num_draft_tokens


class EagleConfig(_Tree):
    """Draft trees with an EAGLE-1 or EAGLE-2 head, which predicts the target's hidden states."""

    folder: ClassVar[str] = "eagle"
    kind: Literal["eagle"] = "eagle"  # pyright: ignore[reportIncompatibleVariableOverride]


class Eagle3Config(CheckpointConfig):
    """Draft chains with an EAGLE-3 head, which reads the hidden states of three layers of the target."""

    folder: ClassVar[str] = "eagle3"
    kind: Literal["eagle3"] = "eagle3"  # pyright: ignore[reportIncompatibleVariableOverride]
    num_draft_tokens: int = Field(default=4, ge=1, le=64, description="The largest number of tokens drafted at once.")

    @property
    def tree(self) -> TreeShape | None:
        """Return None: this drafter makes chains."""
        return None

    @property
    def most(self) -> int:
        """Return the largest number of tokens drafted at once."""
        return self.num_draft_tokens


class Eagle3TreeConfig(_Tree):
    """Draft trees with an EAGLE-3 head."""

    folder: ClassVar[str] = "eagle3"
    kind: Literal["eagle3_tree"] = "eagle3_tree"  # pyright: ignore[reportIncompatibleVariableOverride]
