"""Test model architectures: the conformance suite of their interface.

class TestMine(ModelSuite):
    name = "mine"
    configs = {"small": {...config.json...}}

    def reference(self, directory):      # optional: an independent implementation of the checkpoint
        model = ...
        return lambda token_ids: model(token_ids)    # logits [len(token_ids), vocab_size]
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail.engine.build import WeightFiller, as_module, build_model
from dovetail.errors import WeightsError
from dovetail.interfaces.attention import AttentionBackend
from dovetail.interfaces.features import Feature
from dovetail.interfaces.mesh import SINGLE, Mesh
from dovetail.interfaces.model import ModelArchitecture, ModelInfo
from dovetail.interfaces.store import KVStore
from dovetail.layers.base import Layer
from dovetail.registry.ranks import divisions, expert_division
from dovetail.registry.specs import ComponentKind
from dovetail.registry.targets import load_attribute
from dovetail.testing.component import ComponentSuite
from dovetail.testing.eager import EagerAttention
from dovetail.testing.model_features import AllowedAttention, ForeignProducts, changed, tensors_of_layer
from dovetail.testing.model_rows import ModelRows
from dovetail.testing.ranks import run_ranks, thread_meshes

Reference = Callable[[Sequence[int]], torch.Tensor]
"""A function that returns the logits ``[tokens, vocab_size]`` of a token sequence."""

Tensors = Mapping[str, torch.Tensor]
PROMPT, STEPS = 23, 16
LONG_TEXT, LONG_CHUNK = 200, 64
SEEDS = 4
MOST_RANKS = 4
_CHECKPOINTS = pytest.StashKey[dict[tuple[type, str], Path]]()


class ModelSuite(ComponentSuite):
    """Test a model architecture. ``name`` and ``configs`` are required; with ``reference`` the suite also checks the
    mathematics."""

    kind: ClassVar[ComponentKind] = ComponentKind.MODEL
    configs: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """The contents of config.json to test, by a name for the test report. Configs should be small, because every test
    runs each of them."""
    ignores: ClassVar[Sequence[str]] = ()
    """Regular expressions of the tensors in checkpoints that the model may ignore, such as the tensors of drafters."""
    without_effect: ClassVar[Sequence[str]] = ()
    """Regular expressions of tensors that do not change logits, such as the bias of keys that are not rotated: it adds
    the same number to all logits of a query."""
    tolerance: ClassVar[float] = 1e-4
    """Logits in float32 may differ by at most this much."""
    bfloat16_tolerance: ClassVar[float] = 0.05
    """The relative error of logits in bfloat16. A router that chooses among experts needs more: rounding changes its
    choice for some tokens."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run the tests that take a ``case`` once per config."""
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", list(self.configs))

    def write_checkpoint(self, config: Mapping[str, Any], directory: Path) -> None:
        """Write config.json and safetensors. By default, the weights are random, with the names of ``weights_map``."""
        (directory / "config.json").write_text(json.dumps(config))
        filler = WeightFiller(self.new_model(self.describe(directory)))
        torch.manual_seed(0)
        tensors = {name: torch.randn(filler.whole_shape(name)) * 0.2 for name in filler.targets if filler.targets[name]}
        save_file(tensors, directory / "model.safetensors")

    def reference(self, directory: Path) -> Reference | None:
        """Return an independent implementation of the checkpoint in float32, or None."""
        return None

    def make_attention(self, model: ModelArchitecture, pool: KVStore) -> AttentionBackend:
        """Return the attention backend with which the model is tested; by default an eager one."""
        return EagerAttention(pool)

    def describe(self, directory: Path) -> ModelInfo:
        """Return the component's description of the checkpoint's config.json."""
        assert self.spec.describe is not None
        config = json.loads((directory / "config.json").read_text())
        return load_attribute(self.spec.describe, self.component.label)(config)

    def new_model(self, info: ModelInfo, dtype: torch.dtype = torch.float32, mesh: Mesh = SINGLE) -> ModelArchitecture:
        """Return a model, or this rank's share of it, whose weights are all NaN."""
        target = load_attribute(self.spec.target, self.component.label)
        model = build_model(target, info, torch.device("cpu"), dtype, mesh)
        for parameter in as_module(model).parameters():
            parameter.fill_(float("nan"))
        return model

    def load(
        self,
        directory: Path,
        tensors: Tensors | None = None,
        dtype: torch.dtype = torch.float32,
        mesh: Mesh = SINGLE,
    ) -> ModelArchitecture:
        """Return the checkpoint's model, or the model of ``tensors`` if they are given; with ``mesh``, this rank's
        share of it."""
        filler = WeightFiller(self.new_model(self.describe(directory), dtype, mesh))
        for name, tensor in (read_tensors(directory) if tensors is None else tensors).items():
            filler.fill(name, lambda tensor=tensor: tensor)
        filler.finish()
        return filler.model

    def rows(
        self,
        model: ModelArchitecture,
        lens: Sequence[int],
        page_size: int = 4,
        mesh: Mesh = SINGLE,
        attention: Callable[[AttentionBackend], AttentionBackend] = lambda backend: backend,
    ) -> ModelRows:
        """Return ``model``, which was built with ``mesh``, over new pools for rows of up to ``lens`` tokens.
        ``attention`` may wrap the attention backends."""

        def make_attention(model: ModelArchitecture, pool: KVStore) -> AttentionBackend:
            return attention(self.make_attention(model, pool))

        return ModelRows(model, lens, page_size, mesh, make_attention)

    def logits(self, model: ModelArchitecture, tokens: Sequence[int], chunk: int, decode: int = 0) -> torch.Tensor:
        """Return the logits of every token of one row: prefilled in chunks, with the last ``decode`` tokens one at a
        time."""
        rows, prompt = self.rows(model, [len(tokens)]), len(tokens) - decode
        pieces = [tokens[i : min(i + chunk, prompt)] for i in range(0, prompt, chunk)]
        pieces += [tokens[i : i + 1] for i in range(prompt, len(tokens))]
        return torch.cat([rows.enter({0: piece})[0] for piece in pieces])

    @pytest.fixture(autouse=True)
    def one_thread(self) -> Iterator[None]:
        """Use one thread, because small models are computed faster by one thread than by several."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)

    @pytest.fixture
    def checkpoint(self, request: pytest.FixtureRequest, case: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Return a directory that holds the case's checkpoint. It is written once for all tests of a class, which must
        not change it."""
        written = request.session.stash.setdefault(_CHECKPOINTS, {})
        if (type(self), case) not in written:
            directory = tmp_path_factory.mktemp("checkpoint")
            self.write_checkpoint(self.configs[case], directory)
            written[type(self), case] = directory
        return written[type(self), case]

    def test_its_checkpoints_select_it(self, case: str, checkpoint: Path) -> None:
        """The ``architectures`` of config.json, if it has any, are among the component's ``aliases``, by which a config
        with ``model.arch: auto`` finds the component."""
        self.registered()
        given = json.loads((checkpoint / "config.json").read_text()).get("architectures")
        if not given:
            pytest.skip("config.json names no architectures")
        assert set(given) & set(self.spec.aliases), (
            f"config.json has architectures {given}, and the component's aliases are {list(self.spec.aliases)}: no "
            "checkpoint selects it. Put the name into the aliases of its ComponentSpec (plugin.py)"
        )

    @pytest.mark.parametrize("chunk", [LONG_CHUNK, PROMPT, 7, 1])
    def test_logits_are_those_of_the_reference(self, case: str, checkpoint: Path, chunk: int) -> None:
        """The logits agree for every token of a chunked prefill and for every decode step, once over 200 positions (or
        the whole context of the config)."""
        reference = self.reference(checkpoint)
        if reference is None:
            pytest.skip("no reference given")
        model = self.load(checkpoint)
        count = min(LONG_TEXT, model.info.context_len) if chunk == LONG_CHUNK else PROMPT + STEPS
        tokens = random_tokens(model.info, count)
        logits = self.logits(model, tokens, chunk, STEPS)
        assert not logits.isnan().any(), (
            f"the logits of {int(logits.isnan().any(1).sum())} of {count} positions are NaN. Entries of the KV pool that were "
            "never written are NaN here: each layer writes K and V of its own layer_id to batch.out_loc before it attends"
        )
        difference = (logits - reference(tokens)).abs().amax(1)
        wrong = (difference >= self.tolerance) | difference.isnan()
        first = int(wrong.int().argmax())
        assert not wrong.any(), (
            f"the logits of {int(wrong.sum())} of {count} positions differ from the reference, first at position {first} "
            f"by {difference[first]:.2e}; tolerance is {self.tolerance:.0e}"
        )

    def test_logits_do_not_depend_on_chunks(self, case: str, checkpoint: Path) -> None:
        """A prompt gives the same logits in one piece and in many."""
        model = self.load(checkpoint)
        tokens = random_tokens(model.info, PROMPT)
        whole = self.logits(model, tokens, PROMPT)
        assert whole.isfinite().all()
        for chunk in (1, 3, 8):
            assert (self.logits(model, tokens, chunk) - whole).abs().max() < self.tolerance

    def test_logits_do_not_depend_on_other_rows(self, case: str, checkpoint: Path) -> None:
        """A row gives the same logits alone and in a batch with other rows that extend and decode."""
        model = self.load(checkpoint)
        lens = [PROMPT, 5, 11]
        texts = [random_tokens(model.info, n, seed) for seed, n in enumerate(lens)]
        alone = [self.logits(model, text, len(text)) for text in texts]
        rows = self.rows(model, lens)
        first = rows.enter({0: texts[0][:9], 1: texts[1][:4]})
        mixed = rows.enter({0: texts[0][9:], 1: texts[1][4:], 2: texts[2]})
        together = [torch.cat((first[0], mixed[0])), torch.cat((first[1], mixed[1])), mixed[2]]
        for got, expected in zip(together, alone, strict=True):
            assert (got - expected).abs().max() < self.tolerance

    def test_the_last_layer_computes_only_the_sampled_rows(self, case: str, checkpoint: Path) -> None:
        """With ``batch.last``, the logits of the sampled rows are the same as without it, and K and V of all tokens are
        written."""
        model = self.load(checkpoint)
        if Feature.MODEL_LAST_ROWS not in model.info.offers:
            pytest.skip("the model does not offer model.last_rows")
        self.proves(Feature.MODEL_LAST_ROWS)
        lens = [PROMPT, 7, 11]
        texts = [random_tokens(model.info, n + 1, seed) for seed, n in enumerate(lens)]
        expected = [self.logits(model, text, len(text)) for text in texts]
        rows = self.rows(model, [n + 1 for n in lens])
        assert rows.enter_for([], {0: texts[0][:9]}).shape == (0, model.info.vocab_size)
        some = rows.enter_for([0, 2], {0: texts[0][9:-1], 1: texts[1][:4], 2: texts[2][:-1]})
        for got, row in zip(some, (0, 2), strict=True):
            assert (got - expected[row][lens[row] - 1]).abs().max() < self.tolerance
        after = rows.enter({0: texts[0][-1:], 1: texts[1][4:], 2: texts[2][-1:]})
        for row, text in enumerate(expected):
            assert (after[row][-1] - text[-1]).abs().max() < self.tolerance

    def test_hidden_states_are_those_of_the_layers(self, case: str, checkpoint: Path) -> None:
        """``batch.hidden`` has the states that ``batch.watch`` names, in its order, and watching changes nothing else. A
        state depends on the layers before it and on no other, whatever the chunks. Needs two layers."""
        model, tensors = self.load(checkpoint), read_tensors(checkpoint)
        if Feature.MODEL_HIDDEN_STATES not in model.info.offers:
            pytest.skip("the model does not offer model.hidden_states")
        if model.info.num_layers < 2:
            pytest.skip("the config has one layer; states are compared with two or more")
        self.proves(Feature.MODEL_HIDDEN_STATES)
        tokens, count = random_tokens(model.info, PROMPT), model.info.num_layers
        everything = tuple(range(count + 2))

        def states_of(model: ModelArchitecture, watch: tuple[int, ...] = everything) -> torch.Tensor:
            return self.rows(model, [PROMPT]).enter_watching(tokens, watch)[1]

        hidden, states = self.rows(model, [PROMPT]).enter_watching(tokens, everything)
        assert hidden.equal(self.rows(model, [PROMPT]).enter_watching(tokens, ())[0]), "watching changes the result"
        assert states[count].equal(hidden), f"state {count} is what forward returns"
        backwards = states_of(model, everything[::-1])
        assert (backwards.flip(0) - states).abs().max() < self.tolerance, (
            "the states are not in the order of batch.watch"
        )
        rows = self.rows(model, [PROMPT])
        pieces = [rows.enter_watching(piece, everything)[1] for piece in (tokens[:9], tokens[9:])]
        assert (torch.cat(pieces, 1) - states).abs().max() < self.tolerance, "states depend on chunks"
        differ = [bool((states[i] - states[i + 1]).abs().max() > self.tolerance) for i in range(count + 1)]
        assert all(differ), f"the states {differ.index(False)} and {differ.index(False) + 1} are the same"
        for layer in {0, count - 1}:
            other = states_of(self.load(checkpoint, changed(tensors, tensors_of_layer(tensors, layer))))
            after = [bool((other[i] - states[i]).abs().max() > self.tolerance) for i in everything]
            assert after == [i > layer for i in everything], (
                f"with other weights of layer {layer}, the states {[i for i in everything if after[i]]} change; expected: "
                f"those above {layer}, because state i is what enters layer i"
            )

    def test_embed_tokens_returns_new_embeddings(self, case: str, checkpoint: Path) -> None:
        """``embed_tokens`` returns ``[tokens, hidden_size]`` in a new tensor: a drafter may change it."""
        model = self.load(checkpoint)
        if Feature.MODEL_HIDDEN_STATES not in model.info.offers:
            pytest.skip("the model does not offer model.hidden_states")
        ids = torch.tensor([*random_tokens(model.info, PROMPT), 1, 2, 1])
        first = model.embed_tokens(ids)
        assert first.shape == (len(ids), model.info.hidden_size)
        kept = first.clone()
        first.zero_()
        assert model.embed_tokens(ids).equal(kept), "embed_tokens returns memory of the model"
        assert kept[-1].equal(kept[-3])
        assert not kept[-1].equal(kept[-2])

    def test_hidden_states_serve_as_embeddings(self, case: str, checkpoint: Path) -> None:
        """``forward`` returns hidden states after the final norm: with much larger weights of the last layer they are about
        as large as before. They are those of the text, in one piece or in several."""
        model, tensors = self.load(checkpoint), read_tensors(checkpoint)
        if Feature.MODEL_EMBED not in model.info.offers:
            pytest.skip("the model does not offer model.embed")
        self.proves(Feature.MODEL_EMBED)
        tokens = random_tokens(model.info, PROMPT)
        whole = self.rows(model, [PROMPT]).enter_watching(tokens, ())[0]
        assert whole.shape == (PROMPT, model.info.hidden_size)
        assert whole.isfinite().all()
        rows = self.rows(model, [PROMPT])
        pieces = [rows.enter_watching(piece, ())[0] for piece in (tokens[:9], tokens[9:])]
        assert (torch.cat(pieces) - whole).abs().max() < self.tolerance
        last = tensors_of_layer(tensors, model.info.num_layers - 1)
        last = [name for name in last if not name.endswith("A_log")]  # its exponential would be infinite
        large = self.load(checkpoint, changed(tensors, last, factor=100.0))
        ratio = self.rows(large, [PROMPT]).enter_watching(tokens, ())[0].norm(dim=1) / whole.norm(dim=1)
        assert ratio.max() < 10, (
            f"with weights of the last layer that are 100 times as large, hidden states are {float(ratio.max()):.0f} times as "
            "large: forward returns them before the final norm"
        )

    def test_products_do_not_mix_rows(self, case: str, checkpoint: Path) -> None:
        """With model.batch_invariant, every product is that of a ``Linear`` or of ``Experts``, which have kernels whose bits do
        not depend on the other rows, and no module but layers has parameters."""
        model = self.load(checkpoint)
        if Feature.MODEL_BATCH_INVARIANT not in model.info.offers:
            pytest.skip("the model does not offer model.batch_invariant")
        self.proves(Feature.MODEL_BATCH_INVARIANT)
        modules = as_module(model).named_modules()
        own = [n for n, m in modules if not isinstance(m, Layer) and any(True for _ in m.parameters(recurse=False))]
        assert not own, f"{', '.join(own)} have parameters and are no layers (dovetail.layers.base.Layer)"
        found = ForeignProducts()
        found.watch(model)
        rows = self.rows(model, [PROMPT], attention=lambda backend: AllowedAttention(backend, found))
        with found:
            rows.enter({0: random_tokens(model.info, PROMPT)})
        assert not found.names, (
            f"the model computes {', '.join(sorted(found.names))} outside of Linear and Experts, where the bits of a row may depend on the "
            "other rows. Use Linear, or do not offer model.batch_invariant"
        )

    def test_ranks_compute_the_logits_of_one(self, case: str, checkpoint: Path) -> None:
        """The ranks of tensor parallelism together return the logits that one rank computes, all of them the same."""
        whole = self.load(checkpoint)
        if Feature.MODEL_TENSOR_PARALLEL not in whole.info.offers:
            pytest.skip("the model does not offer model.tensor_parallel")
        counts = [count for count in divisions(whole.info) if 1 < count <= MOST_RANKS]
        if not counts:
            pytest.skip(f"2 to {MOST_RANKS} ranks cannot divide this config evenly")
        self.proves(Feature.MODEL_TENSOR_PARALLEL)
        tokens = random_tokens(whole.info, PROMPT)
        expected = self.logits(whole, tokens, PROMPT)
        ways = [("tp", count) for count in counts]
        if whole.info.expert_sizes is not None:
            (_, number), (_, size) = whole.info.expert_sizes
            ways = [("tp", count) for count in counts if size % count == 0]
            ways += [("ep", count) for count in counts if number % count == 0]
        for experts, count in ways:
            meshes = thread_meshes(count, "ep" if experts == "ep" else "tp")
            models = [self.load(checkpoint, mesh=mesh) for mesh in meshes]
            places = [self.rows(m, [PROMPT], mesh=mesh) for m, mesh in zip(models, meshes, strict=True)]
            results = run_ranks(
                meshes, lambda rows: torch.cat([rows.enter({0: tokens[:9]})[0], rows.enter({0: tokens[9:]})[0]]), places
            )
            for logits in results:
                assert (logits - expected).abs().max() < self.tolerance
                assert logits.equal(results[0])

    def test_ranks_attend_for_requests_of_their_own(self, case: str, checkpoint: Path) -> None:
        """With data-parallel attention, each rank has keys and values of its own rows only. All ranks return the logits that
        one rank computes, also of rows of other ranks, and in steps in which a rank has no rows."""
        whole = self.load(checkpoint)
        if Feature.MODEL_DATA_ATTENTION not in whole.info.offers:
            pytest.skip("the model does not offer model.data_attention")
        count = next((count for count in divisions(whole.info) if 1 < count <= MOST_RANKS), None)
        if count is None:
            pytest.skip(f"2 to {MOST_RANKS} ranks cannot divide this config evenly")
        self.proves(Feature.MODEL_DATA_ATTENTION)
        meshes = thread_meshes(count, expert_division("auto", whole.info, count), "data")
        lens, models = [PROMPT] * 3, [self.load(checkpoint, mesh=mesh) for mesh in meshes]
        places = [self.rows(m, lens, mesh=mesh) for m, mesh in zip(models, meshes, strict=True)]
        texts = [random_tokens(whole.info, PROMPT, seed) for seed in range(3)]
        steps = [
            {0: texts[0][:9], 1: texts[1][:2]},
            {0: texts[0][9:10]},
            {2: texts[2][:7], 0: texts[0][10:11], 1: texts[1][2:3]},
        ]
        results = run_ranks(meshes, lambda rows: [rows.enter(step) for step in steps], places)
        alone = self.rows(whole, lens)
        for number, expected in enumerate(map(alone.enter, steps)):
            for row, logits in expected.items():
                for found in (result[number][row] for result in results):
                    assert (found - logits).abs().max() < self.tolerance
                    assert found.equal(results[0][number][row])

    def test_logits_depend_on_every_tensor(self, case: str, checkpoint: Path) -> None:
        """Logits change with every tensor of the checkpoint that the model does not ignore. A tensor that does not matter
        for a short text may belong to an expert that no token chose: it must matter for one of several longer texts."""
        tensors = read_tensors(checkpoint)
        model = self.load(checkpoint)
        texts = [random_tokens(model.info, PROMPT)]
        texts += [random_tokens(model.info, min(LONG_TEXT, model.info.context_len), seed) for seed in range(1, SEEDS)]
        before: dict[int, torch.Tensor] = {}
        matters = [n for n in model.weights_map() if not any(re.fullmatch(p, n) for p in self.without_effect)]
        for name in matters:
            torch.manual_seed(1)
            changed = self.load(checkpoint, {**tensors, name: tensors[name] + torch.randn_like(tensors[name])})
            for number, tokens in enumerate(texts):
                if number not in before:
                    before[number] = self.logits(model, tokens, len(tokens))
                difference = self.logits(changed, tokens, len(tokens)) - before[number]
                if difference.abs().max() > self.tolerance:
                    break
            else:
                count = sum(map(len, texts))
                raise AssertionError(
                    f"{name} does not matter for any of {count} tokens. If it belongs to an expert: none of them chose it, so that "
                    "its place is not tested. Use fewer experts, or weights of the router that choose all of them"
                )

    def test_the_weight_map_is_complete(self, case: str, checkpoint: Path) -> None:
        """Every tensor of the checkpoint is used once, and together they fill all parameters. Only tensors that match
        ``ignores`` are ignored, no tensor overwrites another, and no element keeps its initial value."""
        model = self.new_model(self.describe(checkpoint), torch.float64)
        filler, tensors = WeightFiller(model), read_tensors(checkpoint)
        for number, (name, tensor) in enumerate(tensors.items()):  # a transform may add one
            value = 4 * number
            filler.fill(name, lambda tensor=tensor, value=value: torch.full_like(tensor, value, dtype=torch.float64))
        unused = [n for n in tensors if n not in filler.used and not any(re.fullmatch(p, n) for p in self.ignores)]
        assert not unused, f"the model ignores {', '.join(unused)}"
        held = torch.cat([parameter.flatten() for parameter in as_module(model).parameters()])
        assert not held.isnan().any(), "a parameter is not filled"
        for number, (name, tensor) in enumerate(tensors.items()):
            count = int((held // 4 == number).sum())
            assert count == tensor.numel() * (name in filler.used), f"{name} fills {count} of {tensor.numel()} elements"

    def test_missing_and_surplus_tensors_are_refused(self, case: str, checkpoint: Path) -> None:
        """A checkpoint that lacks a mapped tensor is refused, and so is one with a tensor that the model does not
        know."""
        tensors = read_tensors(checkpoint)
        for name in self.load(checkpoint).weights_map():
            with pytest.raises(WeightsError, match=name.replace(".", r"\.")):
                self.load(checkpoint, {k: v for k, v in tensors.items() if k != name})
        with pytest.raises(WeightsError, match="surplus"):
            self.load(checkpoint, {**tensors, "surplus.weight": torch.zeros(1)})

    def test_bfloat16_stays_close(self, case: str, checkpoint: Path) -> None:
        """Logits in bfloat16 differ from those in float32 by a few roundings only."""
        exact, rough = self.load(checkpoint), self.load(checkpoint, dtype=torch.bfloat16)
        tokens = random_tokens(exact.info, PROMPT + STEPS)
        expected = self.logits(exact, tokens, 8, STEPS)
        got = self.logits(rough, tokens, 8, STEPS)
        assert got.dtype == torch.bfloat16
        error = (got.float() - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
        assert error < self.bfloat16_tolerance, (
            f"the logits in bfloat16 have a relative error of {error:.3f}; bfloat16_tolerance is {self.bfloat16_tolerance:g}. "
            "Compute sums and norms in float32; raise the tolerance only for models that choose among experts"
        )


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of the checkpoint in ``directory``."""
    return {name: t for file in sorted(directory.glob("*.safetensors")) for name, t in load_file(file).items()}


def random_tokens(info: ModelInfo, count: int, seed: int = 0) -> list[int]:
    """Return token ids of the model's vocabulary; the same ids for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(info.vocab_size, (count,), generator=generator).tolist()
