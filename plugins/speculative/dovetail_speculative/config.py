"""Config sections of the drafters."""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator

from dovetail.config.plugin import PluginConfig


class WeightsConfig(PluginConfig):
    """Of drafters that run a model."""

    load_format: Literal["safetensors", "dummy"] = Field(
        default="safetensors", description="`dummy`: random weights, to measure speed."
    )


class CheckpointConfig(WeightsConfig):
    """Of drafters whose model has a checkpoint of its own. ``folder`` is where it is inside the target's."""

    folder: ClassVar[str]
    path: str = Field(
        default="auto",
        description="The drafter's checkpoint: a directory in Hugging Face layout, or a hub name. `auto`: the folder of the drafter's name inside the target's checkpoint (`eagle3` for `eagle3_tree`).",
    )


class NgramConfig(PluginConfig):
    """Draft what followed the last occurrence of the latest tokens, in the request's own text or in what others said."""

    kind: Literal["ngram"] = "ngram"  # pyright: ignore[reportIncompatibleVariableOverride]
    num_draft_tokens: int = Field(default=8, ge=1, le=64, description="The most tokens that are drafted at once.")
    min_ngram: int = Field(
        default=1,
        ge=1,
        description="Tokens that must have occurred before for a draft; after a single one, what followed is drafted only where that was right before.",
    )
    max_ngram: int = Field(default=4, ge=1, le=16, description="More tokens than this are not compared.")
    memory: int = Field(
        default=16384,
        ge=1,
        description="Occurrences are remembered for at least this many of the request's latest tokens, and for at most twice as many.",
    )
    shared: int = Field(
        default=65536,
        ge=0,
        description="Tokens of recent outputs that are remembered for later requests of the same namespace (adapter, tenant). About 0.5 kB each. 0: none.",
    )
    share_prompts: bool = Field(default=False, description="Prompts are remembered for later requests too.")

    @model_validator(mode="after")
    def _check_range(self) -> NgramConfig:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram is {self.min_ngram}; allowed: 1 up to max_ngram, {self.max_ngram}")
        return self


class DFlashConfig(CheckpointConfig):
    """Draft a block of tokens in one pass of a small model over hidden states of the target."""

    folder: ClassVar[str] = "dflash"
    kind: Literal["dflash"] = "dflash"  # pyright: ignore[reportIncompatibleVariableOverride]
    num_draft_tokens: int | None = Field(
        default=None, ge=1, description="The most tokens that are drafted at once. Null: a block of the drafter's."
    )


class MtpConfig(WeightsConfig):
    """Draft with the target's own layers that predict further tokens."""

    kind: Literal["mtp"] = "mtp"  # pyright: ignore[reportIncompatibleVariableOverride]
    num_draft_tokens: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="The most tokens that are drafted at once. Null: 3 with a single layer, which is applied to its own output; else as many as there are layers.",
    )


class DraftModelConfig(CheckpointConfig):
    """Draft with a smaller model of the same vocabulary."""

    folder: ClassVar[str] = "draft_model"
    kind: Literal["draft_model"] = "draft_model"  # pyright: ignore[reportIncompatibleVariableOverride]
    num_draft_tokens: int = Field(default=4, ge=1, le=64, description="The most tokens that are drafted at once.")
    chunk_size: int = Field(
        default=2048,
        ge=16,
        description="Tokens of texts that the smaller model reads at most before a draft. Of a longer prompt it reads a part in each step, while its request is decoded without drafts.",
    )


class TreeShape(NamedTuple):
    """How draft trees grow: ``topk`` children of each of ``topk`` nodes of a level, ``depth`` levels."""

    topk: int
    depth: int

    @property
    def nodes(self) -> int:
        """Nodes that the drafter's model runs on: all that are expanded."""
        return self.topk * (self.depth - 1)


class _Tree(CheckpointConfig):
    topk: int = Field(
        default=4,
        ge=1,
        le=32,
        description="Nodes of a level that get children, and how many children each gets. 1 makes chains.",
    )
    depth: int = Field(
        default=5, ge=1, le=32, description="Levels of a tree: the most tokens accepted at once, but one."
    )
    num_draft_tokens: int = Field(
        default=16, ge=1, le=256, description="Nodes that are verified: the most probable ones of all levels."
    )

    @property
    def tree(self) -> TreeShape | None:
        """The tree's shape; None makes chains."""
        return None if self.topk == 1 else TreeShape(self.topk, self.depth)

    @property
    def most(self) -> int:
        """The most tokens drafted at once."""
        return min(self.num_draft_tokens, self.depth) if self.topk == 1 else self.num_draft_tokens


class EagleConfig(_Tree):
    """Draft trees with an EAGLE-1 or EAGLE-2 head, which predicts the target's hidden states."""

    folder: ClassVar[str] = "eagle"
    kind: Literal["eagle"] = "eagle"  # pyright: ignore[reportIncompatibleVariableOverride]


class Eagle3Config(CheckpointConfig):
    """Draft chains with an EAGLE-3 head, which reads hidden states of three of the target's layers."""

    folder: ClassVar[str] = "eagle3"
    kind: Literal["eagle3"] = "eagle3"  # pyright: ignore[reportIncompatibleVariableOverride]
    num_draft_tokens: int = Field(default=4, ge=1, le=64, description="The most tokens that are drafted at once.")

    @property
    def tree(self) -> TreeShape | None:
        """None: chains."""
        return None

    @property
    def most(self) -> int:
        """The most tokens drafted at once."""
        return self.num_draft_tokens


class Eagle3TreeConfig(_Tree):
    """Draft trees with an EAGLE-3 head."""

    folder: ClassVar[str] = "eagle3"
    kind: Literal["eagle3_tree"] = "eagle3_tree"  # pyright: ignore[reportIncompatibleVariableOverride]
