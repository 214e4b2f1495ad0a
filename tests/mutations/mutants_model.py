"""Define broken models: Llama with one fault each. The reference is the same model without the fault, which reads all
tokens at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from mutant import Mutant

from dovetail.engine.build import as_module, build_model
from dovetail.interfaces.mesh import SINGLE, Mesh
from dovetail.interfaces.model import ModelArchitecture, ModelInfo, WeightTarget
from dovetail.testing.model import ModelSuite, Reference, Tensors, read_tensors
from dovetail.types import Batch
from dovetail_models.dense import DenseModel

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
}


class Sound(ModelSuite):
    """Build the model without a fault."""

    name = "llama"
    configs: ClassVar = {"plain": SMALL}
    model_class: ClassVar[type[DenseModel]] = DenseModel

    def new_model(self, info: ModelInfo, dtype: torch.dtype = torch.float32, mesh: Mesh = SINGLE) -> ModelArchitecture:
        model = build_model(self.model_class, info, torch.device("cpu"), dtype, mesh)
        for parameter in as_module(model).parameters():
            parameter.fill_(float("nan"))
        return model

    def write_checkpoint(self, config: Mapping[str, Any], directory: Path) -> None:
        ModelSuite.write_checkpoint(self if type(self) is Sound else Sound(), config, directory)

    def reference(self, directory: Path) -> Reference:
        sound = Sound()
        model = sound.load(directory)
        return lambda tokens: sound.logits(model, tokens, len(tokens))


class Transposed(Sound):
    """Load a square weight transposed."""

    def load(
        self,
        directory: Path,
        tensors: Tensors | None = None,
        dtype: torch.dtype = torch.float32,
        mesh: Mesh = SINGLE,
    ) -> ModelArchitecture:
        tensors = dict(read_tensors(directory) if tensors is None else tensors)
        name = "model.layers.0.self_attn.o_proj.weight"
        return super().load(directory, {**tensors, name: tensors[name].t()}, dtype, mesh)


class Swapped(DenseModel):
    """Swap two weights of one shape."""

    swaps: ClassVar[tuple[str, str]] = ("gate_proj.weight", "up_proj.weight")

    def weights_map(self) -> Mapping[str, WeightTarget]:
        targets = dict(super().weights_map())
        a, b = (f"model.layers.1.mlp.{name}" for name in self.swaps)
        return {**targets, a: targets[b], b: targets[a]}


class SwapsGateAndUp(Sound):
    model_class = Swapped


class Misread(Sound):
    """Read one setting of config.json wrongly."""

    change: ClassVar[Mapping[str, Any]]

    def describe(self, directory: Path) -> ModelInfo:
        info = super().describe(directory)
        return replace(info, config=replace(info.config, **self.change))


class WrongRope(Sound):
    def describe(self, directory: Path) -> ModelInfo:
        info = super().describe(directory)
        return replace(info, config=replace(info.config, rope=replace(info.config.rope, theta=500.0)))


class WrongEps(Misread):
    change: ClassVar = {"norm_eps": 1e-2}


class SwallowsBiases(DenseModel):
    def ignored_weights(self) -> Iterable[str]:
        return (r".*\.bias",)


class WithoutBiases(Misread):
    """Have no biases, and accept a checkpoint that has them."""

    model_class = SwallowsBiases
    change: ClassVar = {"qkv_bias": False, "out_bias": False}


class Swallows(DenseModel):
    def ignored_weights(self) -> Iterable[str]:
        return (".*",)


class SwallowsAnything(Sound):
    model_class = Swallows


class SkipsANorm(DenseModel):
    def forward(self, batch: Batch) -> torch.Tensor:
        return super().forward(batch) / self.norm.weight


class UsesNotAll(Sound):
    """Divide by the weights by which the last norm has multiplied."""

    model_class = SkipsANorm


class CountsFromTheChunk(DenseModel):
    def forward(self, batch: Batch) -> torch.Tensor:
        starts = torch.tensor(batch.prefix_lens).repeat_interleave(torch.tensor(batch.extend_lens))
        batch.input_ids = (batch.input_ids + (starts > 0)) % self.info.vocab_size
        return super().forward(batch)


class DependsOnChunks(Sound):
    """Change the tokens of a second chunk."""

    model_class = CountsFromTheChunk


class MixesRows(DenseModel):
    def forward(self, batch: Batch) -> torch.Tensor:
        return super().forward(batch) * (1 + 0.1 * (len(batch.reqs) > 1))


class DependsOnRows(Sound):
    model_class = MixesRows


class TakesTheRowBefore(DenseModel):
    def forward(self, batch: Batch) -> torch.Tensor:
        hidden = super().forward(batch)
        return hidden.roll(1, 0) if batch.last is not None else hidden


class LastRowsMixedUp(Sound):
    model_class = TakesTheRowBefore


class EightBits(DenseModel):
    def forward(self, batch: Batch) -> torch.Tensor:
        hidden = super().forward(batch)
        return hidden if hidden.dtype == torch.float32 else hidden.to(torch.float8_e5m2).to(hidden.dtype)


class Rough(Sound):
    model_class = EightBits


class FirstShares(DenseModel):
    def weights_map(self) -> Mapping[str, WeightTarget]:
        return {
            name: target if target.share is None else target._replace(share=target.share._replace(start=0))
            for name, target in super().weights_map().items()
        }


class ReadsTheShareOfRankZero(Sound):
    model_class = FirstShares


LOGITS = "test_logits_are_those_of_the_reference"
MUTANTS = [
    Mutant("transposes a weight", LOGITS, Transposed, Sound, [(7,)]),
    Mutant("exchanges two weights", LOGITS, SwapsGateAndUp, Sound, [(7,)]),
    Mutant("rotates by another base", LOGITS, WrongRope, Sound, [(7,)]),
    Mutant("norms with another epsilon", LOGITS, WrongEps, Sound, [(7,)]),
    Mutant("depends on how a prompt is cut", "test_logits_do_not_depend_on_chunks", DependsOnChunks, Sound),
    Mutant("depends on the other rows", "test_logits_do_not_depend_on_other_rows", DependsOnRows, Sound),
    Mutant(
        "mixes up the sampled rows",
        "test_the_last_layer_computes_only_the_sampled_rows",
        LastRowsMixedUp,
        Sound,
    ),
    Mutant(
        "loads a weight and does not use it",
        "test_logits_depend_on_every_tensor",
        UsesNotAll,
        Sound,
        says="does not matter",
    ),
    Mutant(
        "leaves a tensor of the checkpoint unused",
        "test_the_weight_map_is_complete",
        WithoutBiases,
        Sound,
        says="the model ignores",
    ),
    Mutant(
        "ignores unknown tensors",
        "test_missing_and_surplus_tensors_are_refused",
        SwallowsAnything,
        Sound,
        says="DID NOT RAISE",
    ),
    Mutant("reads the share of another rank", "test_ranks_compute_the_logits_of_one", ReadsTheShareOfRankZero, Sound),
    Mutant("computes in 8 bits", "test_bfloat16_stays_close", Rough, Sound),
]
