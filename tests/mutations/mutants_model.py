"""Define broken models: Llama with one fault each. The reference is the same model without the fault, which reads all
tokens at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from mutant import Mutant
from sound_model import SoundSuite

from dovetail.engine.build import as_list
from dovetail.interfaces.attention import AttentionBackend, AttentionLayer
from dovetail.interfaces.features import Feature
from dovetail.interfaces.mesh import SINGLE, Mesh
from dovetail.interfaces.model import ModelArchitecture, ModelInfo, WeightTarget
from dovetail.interfaces.store import KVStore
from dovetail.registry.specs import ComponentSpec
from dovetail.testing.eager import EagerAttention
from dovetail.testing.model import Reference, Tensors, read_tensors
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
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
}


class Sound(SoundSuite):
    """Build the model without a fault."""

    name = "llama"
    configs: ClassVar = {"plain": SMALL}
    model_class = DenseModel


class WrongAlias(Sound):
    """Register another name than checkpoints have."""

    @property
    def spec(self) -> ComponentSpec:
        return replace(super().spec, aliases=("LLaMAForCausalLM",))


class StoresElsewhere(DenseModel):
    """Write K and V to the positions of the tokens."""

    def forward(self, batch: Batch) -> torch.Tensor:
        batch.out_loc = batch.positions
        return super().forward(batch)


class WritesToTheWrongPlace(Sound):
    model_class = StoresElsewhere


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
    def weights_map(self) -> Mapping[str, WeightTarget | list[WeightTarget]]:
        return {
            name: [
                one._replace(shares=tuple(share._replace(start=0) for share in one.shares)) for one in as_list(target)
            ]
            for name, target in super().weights_map().items()
        }


class ReadsTheShareOfRankZero(Sound):
    model_class = FirstShares


class StopsCounting(DenseModel):
    def forward(self, batch: Batch) -> torch.Tensor:
        batch.positions = batch.positions.clamp(max=39)
        return super().forward(batch)


class WrongAfterPosition39(Sound):
    """Rotate later positions as position 39; what a query sees does not change."""

    model_class = StopsCounting

    def make_attention(self, model: ModelArchitecture, pool: KVStore) -> AttentionBackend:
        return CountsItself(pool)


class CountsItself(EagerAttention):
    """Compute positions from the lengths of the rows."""

    def forward(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        rows = zip(batch.prefix_lens.tolist(), batch.extend_lens.tolist(), strict=True)
        own = torch.cat([torch.arange(prefix, prefix + count) for prefix, count in rows]).to(batch.positions)
        rotated, batch.positions = batch.positions, own
        try:
            return super().forward(q, layer, batch)
        finally:
            batch.positions = rotated


class Capped(DenseModel):
    """Have a soft cap and sinks in each layer, as ``constants`` says."""

    def __init__(self, info: ModelInfo, mesh: Mesh) -> None:
        super().__init__(info, mesh)
        for layer in self.layers:
            layer.attn.constants = self.constants(layer.attn.constants)

    @staticmethod
    def constants(layer: AttentionLayer) -> AttentionLayer:
        return replace(layer, soft_cap=1.0, sinks=torch.linspace(-1, 2, SMALL["num_attention_heads"]))


class SoundWithSinks(Sound):
    """Declare a soft cap and sinks. The reference is attention over all tokens, written out."""

    model_class = Capped

    def describe(self, directory: Path) -> ModelInfo:
        info = super().describe(directory)
        return replace(info, needs=info.needs | {Feature.ATTN_SOFT_CAP, Feature.ATTN_SINKS})

    def reference(self, directory: Path) -> Reference:
        sound = SoundWithSinks()
        model = sound.load(directory)

        def logits(tokens: Sequence[int]) -> torch.Tensor:
            sound.make_attention = lambda model, pool: WholeAttention(pool)  # type: ignore[method-assign]
            return sound.logits(model, tokens, len(tokens))

        return logits


class WholeAttention(EagerAttention):
    """Attend from all tokens of one row at once, with matrices."""

    def forward(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        pages, group = batch.page_table[0].long(), q.shape[1] // SMALL["num_key_value_heads"]
        k, v = (
            memory[pages].flatten(0, 1)[: len(q)].repeat_interleave(group, 1)
            for memory in (self._pool.keys(layer.layer_id), self._pool.values(layer.layer_id))
        )
        scores = torch.einsum("qhd,khd->hqk", q, k) * layer.scale
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        scores = scores.masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), float("-inf"))
        weights = scores.exp()
        probs = weights / (weights.sum(-1, keepdim=True) + layer.sinks.exp()[:, None, None])
        return torch.einsum("hqk,khd->qhd", probs, v)


class NoCap(Capped):
    @staticmethod
    def constants(layer: AttentionLayer) -> AttentionLayer:
        return replace(Capped.constants(layer), soft_cap=None)


class NoSinks(Capped):
    @staticmethod
    def constants(layer: AttentionLayer) -> AttentionLayer:
        return replace(Capped.constants(layer), sinks=None)


class WithoutCap(SoundWithSinks):
    model_class = NoCap


class WithoutSinks(SoundWithSinks):
    model_class = NoSinks


class DeclaresNothing(SoundWithSinks):
    """Use a soft cap and sinks, and do not declare them."""

    def describe(self, directory: Path) -> ModelInfo:
        return replace(super().describe(directory), needs=frozenset())


class WatchesTheLayerBefore(DenseModel):
    def forward(self, batch: Batch) -> torch.Tensor:
        watch = batch.watch
        batch.watch = tuple(max(index - 1, 0) if index < self.info.num_layers else index for index in watch)
        hidden = super().forward(batch)
        batch.watch = watch
        return hidden


class StatesOfTheLayerBefore(Sound):
    model_class = WatchesTheLayerBefore


class WatchesInItsOwnOrder(DenseModel):
    def forward(self, batch: Batch) -> torch.Tensor:
        watch = batch.watch
        batch.watch = tuple(sorted(watch))
        hidden = super().forward(batch)
        batch.watch = watch
        return hidden


class StatesInAnotherOrder(Sound):
    model_class = WatchesInItsOwnOrder


class NormsTheLastState(DenseModel):
    def forward(self, batch: Batch) -> torch.Tensor:
        watch = batch.watch
        batch.watch = tuple(min(index, self.info.num_layers) for index in watch)
        hidden = super().forward(batch)
        batch.watch = watch
        return hidden


class StatesAfterTheNorm(Sound):
    model_class = NormsTheLastState


class KeepsNoStates(DenseModel):
    def forward(self, batch: Batch) -> torch.Tensor:
        hidden = super().forward(batch)
        batch.hidden = None
        return hidden


class WithoutStates(Sound):
    model_class = KeepsNoStates


class GivesItsTableAway(DenseModel):
    def embed_tokens(self, input_ids: torch.Tensor) -> torch.Tensor:
        kept = self.__dict__.setdefault("kept", super().embed_tokens(input_ids))
        return kept


class EmbedsIntoItsMemory(Sound):
    model_class = GivesItsTableAway


class NormsInLogits(DenseModel):
    def forward(self, batch: Batch) -> torch.Tensor:
        super().forward(batch)
        batch.watch = (self.info.num_layers + 1,)
        super().forward(batch)
        assert batch.hidden is not None
        return batch.hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits(self.norm.forward(hidden))


class EmbedsBeforeTheNorm(Sound):
    model_class = NormsInLogits


class MultipliesItself(DenseModel):
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.head.weight.T


class ProductOfItsOwn(Sound):
    model_class = MultipliesItself


LOGITS = "test_logits_are_those_of_the_reference"
STATES = "test_hidden_states_are_those_of_the_layers"
MUTANTS = [
    Mutant(
        "registers another name than its checkpoints have",
        "test_its_checkpoints_select_it",
        WrongAlias,
        Sound,
        says="no checkpoint selects it",
    ),
    Mutant("writes K and V to a place of its own", LOGITS, WritesToTheWrongPlace, Sound, [(7,)], "are NaN"),
    Mutant("transposes a weight", LOGITS, Transposed, Sound, [(7,)]),
    Mutant("exchanges two weights", LOGITS, SwapsGateAndUp, Sound, [(7,)]),
    Mutant("rotates by another base", LOGITS, WrongRope, Sound, [(7,)]),
    Mutant("norms with another epsilon", LOGITS, WrongEps, Sound, [(7,)]),
    Mutant("is wrong after position 39", LOGITS, WrongAfterPosition39, Sound, [(64,)], "first at position 4"),
    Mutant("leaves out a soft cap", LOGITS, WithoutCap, SoundWithSinks, [(7,)]),
    Mutant("leaves out attention sinks", LOGITS, WithoutSinks, SoundWithSinks, [(7,)]),
    Mutant(
        "does not declare the soft cap that its layers have",
        LOGITS,
        DeclaresNothing,
        SoundWithSinks,
        [(7,)],
        "does not declare attention.soft_cap",
    ),
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
    Mutant("computes in 8 bits", "test_bfloat16_stays_close", Rough, Sound, says="relative error"),
    Mutant("keeps the states of the layer before", STATES, StatesOfTheLayerBefore, Sound, says="are the same"),
    Mutant(
        "keeps states in an order of its own", STATES, StatesInAnotherOrder, Sound, says="in the order of batch.watch"
    ),
    Mutant("keeps the last state after the norm", STATES, StatesAfterTheNorm, Sound, says="are the same"),
    Mutant("keeps no states", STATES, WithoutStates, Sound, says="forward must set batch.hidden"),
    Mutant(
        "returns embeddings in memory of its own",
        "test_embed_tokens_returns_new_embeddings",
        EmbedsIntoItsMemory,
        Sound,
        says="memory of the model",
    ),
    Mutant(
        "returns hidden states before the final norm",
        "test_hidden_states_serve_as_embeddings",
        EmbedsBeforeTheNorm,
        Sound,
        says="before the final norm",
    ),
    Mutant(
        "computes a product without Linear",
        "test_products_do_not_mix_rows",
        ProductOfItsOwn,
        Sound,
        says="outside of Linear and Experts",
    ),
]
