"""Define the config section of the ranks that divide a model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dovetail.config.plugin import Section

MOST_TP = 64
"""The largest number of ranks of one host."""


class ParallelSection(Section):
    """Configure how the ranks of one host divide the model. A rank is one process with one device."""

    tp: int = Field(
        default=1,
        ge=1,
        le=MOST_TP,
        description="Ranks of tensor parallelism: each computes a share of every layer, and the ranks add up their results. It must divide `num_attention_heads` and `intermediate_size`, and divide `num_key_value_heads` or be a multiple of it. On CUDA the ranks use consecutive devices from `device` on.",
    )
    experts: Literal["auto", "tp", "ep"] = Field(
        default="auto",
        description="How the ranks divide the experts of a mixture of experts: `tp` gives each rank a share of every expert, `ep` whole experts. `auto` is what was measured to be faster (docs/parallel.md), otherwise `tp`, if the ranks can divide the experts so. The number or the size of the experts must be a multiple of the ranks.",
    )
    attention: Literal["heads", "data"] = Field(
        default="heads",
        description="How the ranks divide attention: `heads` gives each rank some heads of all requests, `data` all heads of some requests, whose keys and values only this rank keeps (data-parallel attention). With `data` the ranks together hold `tp` times the tokens of a model with latent attention (MLA), or `tp` / KV heads times those of one with fewer KV heads than ranks, less what the weights take: each rank has the whole weights of attention.",
    )

    @property
    def num_pools(self) -> int:
        """Return the number of ranks that keep the keys and values of different requests."""
        return self.tp if self.attention == "data" else 1

    @property
    def head_ranks(self) -> int:
        """Return the number of ranks among which the heads of a request are divided."""
        return self.tp // self.num_pools
