"""Test adapters (LoRA) of embeddings, of heads and of experts, mixed in one batch with others and with none, against checkpoints
into which each is merged.

.venv/bin/python -m pytest -q tests/e2e/test_adapters_modules.py
"""

import json
import re
from dataclasses import replace

import engine_models as models
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GraniteMoeConfig, MixtralConfig, Qwen3MoeConfig

from dovetail import LLM, SamplingParams
from dovetail.cli.explain_adapters import explain_adapters
from dovetail.engine.dry_run import dry_run
from dovetail.errors import ConfigError, RequestError, WeightsError
from dovetail.interfaces.features import Feature
from dovetail.layers import adapters as adapted_layers
from dovetail.layers.experts import layers_of_experts
from lora_adapters import random_pair, stacked_tensors, table_tensors, write_tensors

PARAMS = SamplingParams(max_new_tokens=5, temperature=0, logprobs=3, ignore_eos=True)
PROMPTS = [np.random.default_rng(seed).integers(5, 190, count).tolist() for seed, count in enumerate((9, 3, 14, 6, 4))]
SETTINGS = {"model": {"dtype": "float32"}, "cache": "none", "grammar": "none", "memory": {"kv_gib": 0.02}}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "hidden_size": 32,
    "tie_word_embeddings": False,
}
Q = "model.layers.0.self_attn.q_proj"
MIXED = ["each", None, "stacked", "tables", "each"]
STACKED = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def linear(tensors, deltas, module, weight, rank, scale, random):
    """Add the matrices of a module to ``tensors``, and what they add to its weight to ``deltas``."""
    a, b = random_pair(tuple(weight.shape), rank, random)
    tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = a, b
    deltas[f"{module}.weight"] = scale * b.double() @ a.double()


def write_tables(directory, weights):
    """Write an adapter of the embedding and of the head, with the copies of base weights that PEFT saves with them."""
    embedding = weights["model.embed_tokens.weight"]
    head = weights.get("lm_head.weight", embedding)
    random, deltas = seeded(1), {}
    tensors, deltas["model.embed_tokens.weight"] = table_tensors("model.embed_tokens", embedding.shape, 3, 2.0, random)
    linear(tensors, deltas, "lm_head", head, 3, 2.0, random)
    tensors |= {"model.embed_tokens.base_layer.weight": embedding, "lm_head.base_layer.weight": head.clone()}
    write_tensors(directory, tensors, r=3, lora_alpha=6, target_modules=["embed_tokens", "lm_head"])
    return deltas


def write_each(directory, weights):
    """Write an adapter of projections of some experts, as PEFT does for modules that are lists of experts, and of a linear layer."""
    random, tensors, deltas = seeded(2), {}, {}
    for name, weight in weights.items():
        found = re.fullmatch(r"(.*\.experts\.(\d+)\.(\w+))\.weight", name)
        if found is not None and found[2] != "1":
            rank = 5 if found[2] == "3" else 2
            linear(tensors, deltas, found[1], weight, rank, 4 / rank, random)
    linear(tensors, deltas, Q, weights[f"{Q}.weight"], 2, 2.0, random)
    write_tensors(
        directory, tensors, r=2, lora_alpha=4, target_modules="all-linear", rank_pattern={r".*experts\.3\..*": 5}
    )
    return deltas


def write_stacked(directory, weights, modules="mlp.experts", **kind):
    """Write an adapter of the parameters that hold all experts, and of a linear layer."""
    random, deltas, tensors = seeded(3), {}, {}
    linear(tensors, deltas, Q, weights[f"{Q}.weight"], 2, 1.0, random)
    for layer in range(2):
        module = f"model.layers.{layer}.{modules}"
        if layer == 0:
            own, delta = stacked_tensors(f"{module}.base_layer", (4, 48, 32), 4, 0.5, random, **kind)
            tensors |= own
            merge_experts(deltas, weights, layer, "gate_up", delta)
            own, delta = stacked_tensors(module, (4, 32, 24), 2, 1.0, random, **kind)
        else:  # PEFT does not nest the matrices of a single parameter
            own, delta = stacked_tensors(module, (4, 32, 24), 2, 1.0, random, **kind)
        tensors |= own
        merge_experts(deltas, weights, layer, "down", delta)
    names = [f"{modules}.gate_up_proj", f"{modules}.down_proj"]
    given = {
        "target_parameters": names,
        "rank_pattern": {r".*\.gate_up_proj": 4},
        "target_modules": ["q_proj"],
        **kind.pop("config", {}),
    }
    write_tensors(directory, tensors, r=2, lora_alpha=2, **given)
    return deltas


def merge_experts(deltas, weights, layer, product, delta):
    """Note what ``delta`` [experts, out, in], with the rows of gate before those of up, adds to the tensors of a checkpoint."""
    names = {"gate_up": ("gate_up_proj", "input_linear.weight"), "down": ("down_proj", "output_linear.weight")}[product]
    parts = {"w1": 0, "gate_proj": 0, "w3": 1, "up_proj": 1} if product == "gate_up" else {"w2": 0, "down_proj": 0}
    for name, weight in weights.items():
        if not name.startswith(f"model.layers.{layer}."):
            continue
        one = re.search(r"experts\.(\d+)\.(\w+)\.weight", name)
        if one is not None and one[2] in parts:
            own = delta[int(one[1])]
            deltas[name] = own.chunk(2)[parts[one[2]]] if product == "gate_up" else own
        elif one is None and weight.ndim == 3 and name.endswith(names):
            deltas[name] = delta if weight.shape == delta.shape else delta.mT


def merged(model, directory, deltas):
    directory.mkdir()
    config = json.loads((model / "config.json").read_text())
    weights = load_file(model / "model.safetensors")
    if config["tie_word_embeddings"] and "lm_head.weight" in deltas:
        config["tie_word_embeddings"] = False
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    (directory / "config.json").write_text(json.dumps(config))
    for name, delta in deltas.items():
        weights[name] = (weights[name].double() + delta).float().contiguous()
    save_file(weights, directory / "model.safetensors")
    return directory


def generate(model, params=PARAMS, **settings):
    with LLM(str(model), **SETTINGS | settings) as llm:
        return llm.generate(PROMPTS, params)


def assert_same(output, reference, tolerance=1e-4):
    assert output.token_ids == reference.token_ids
    for own, theirs in zip(output.logprobs, reference.logprobs, strict=True):
        np.testing.assert_allclose([p for _, p in own.top], [p for _, p in theirs.top], atol=tolerance)


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """Return a directory with a model with experts, its adapters, and the checkpoints into which they are merged, and what these
    generate by the name of the adapter."""
    directory = tmp_path_factory.mktemp("adapters")
    model = models.save(directory / "model", Qwen3MoeConfig, **MOE)
    weights, expected = load_file(model / "model.safetensors"), {None: generate(model)}
    for name, write in (("tables", write_tables), ("each", write_each), ("stacked", write_stacked)):
        checkpoint = merged(model, directory / f"{name}-merged", write(directory / name, weights))
        expected[name] = generate(checkpoint)
    firsts = [np.array([one.logprobs[0].logprob for one in outputs]) for outputs in expected.values()]
    assert not any(np.abs(a - b).max() < 0.01 for i, a in enumerate(firsts) for b in firsts[:i]), (
        "adapters change outputs"
    )
    return directory, expected


def check_mixed(moe, **settings):
    directory, expected = moe
    section = {"enabled": True, "load": {name: str(directory / name) for name in ("tables", "each", "stacked")}}
    with LLM(str(directory / "model"), **SETTINGS | settings, adapters=section) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, PARAMS, adapter=MIXED)
            for i, (name, output) in enumerate(zip(MIXED, outputs, strict=True)):
                assert_same(output, expected[name][i])
            for output, reference in zip(llm.generate(PROMPTS, PARAMS), expected[None], strict=True):
                assert_same(output, reference)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"scheduler": {"chunk_size": 3}, "memory": {"num_pages": 64, "page_size": 4}},  # chunked prompts
        pytest.param({"speculative": "ngram", "scheduler": {"draft": "always"}}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_mixed_batches_equal_merged_checkpoints(moe, settings):
    check_mixed(moe, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["tp", "ep"])
def test_ranks_divide_adapters(moe, experts):
    check_mixed(moe, parallel={"tp": 2, "experts": experts}, threads=1)


def test_log_probabilities_of_prompts_are_those_of_the_adapted_head(moe):
    directory, _ = moe
    params = SamplingParams(max_new_tokens=1, temperature=0, prompt_logprobs=2)
    references = {name: generate(directory / f"{name}-merged", params) for name in ("tables", "each")}
    section = {"enabled": True, "load": {name: str(directory / name) for name in references}}
    names = ["tables", "each", "tables", "each", "tables"]
    with LLM(str(directory / "model"), **SETTINGS, adapters=section) as llm:
        outputs = llm.generate(PROMPTS, params, adapter=names)
    for i, (name, output) in enumerate(zip(names, outputs, strict=True)):
        for own, theirs in zip(output.prompt_logprobs[1:], references[name][i].prompt_logprobs[1:], strict=True):
            np.testing.assert_allclose([p for _, p in own.top], [p for _, p in theirs.top], atol=1e-4)


def test_a_tied_head_has_adapters_of_its_own(tmp_path):
    model = models.save_llama(tmp_path / "model", tie_word_embeddings=True)
    weights = load_file(model / "model.safetensors")
    deltas = write_tables(tmp_path / "tables", weights)
    alone = {"model.embed_tokens.weight": deltas["model.embed_tokens.weight"]}
    tensors = load_file(tmp_path / "tables" / "adapter_model.safetensors")
    own = {name.removeprefix("base_model.model."): one for name, one in tensors.items() if "lora_embedding" in name}
    write_tensors(tmp_path / "embedding", own, r=3, lora_alpha=6, target_modules=["embed_tokens"])
    references = [generate(merged(model, tmp_path / "both", deltas))]
    references.append(generate(merged(model, tmp_path / "one", alone | {"lm_head.weight": torch.zeros(())})))
    section = {"enabled": True, "load": {name: str(tmp_path / name) for name in ("tables", "embedding")}}
    names = ["tables", "embedding", "embedding", "tables", "tables"]
    with LLM(str(model), **SETTINGS, adapters=section) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, adapter=names)
    for i, (name, output) in enumerate(zip(names, outputs, strict=True)):
        assert_same(output, references[name == "embedding"][i])


FAMILIES = [
    (MixtralConfig, {"intermediate_size": 24, "num_local_experts": 4}, "mlp.experts", {}),
    (GraniteMoeConfig, {"intermediate_size": 24, "num_local_experts": 4}, "block_sparse_moe.experts", {}),
    (
        GptOssConfig,
        {"intermediate_size": 24, "num_local_experts": 4, "layer_types": ["full_attention"] * 2},
        "mlp.experts",
        {},
    ),
    (Qwen3MoeConfig, MOE, "mlp.experts", {"exchanged": True}),
]


@pytest.mark.parametrize(
    ("config", "sizes", "modules", "kind"),
    [pytest.param(*family, marks=[] if i == 2 else pytest.mark.full) for i, family in enumerate(FAMILIES)],
    ids=[f"{family[0].__name__}{family[3]}" for family in FAMILIES],
)
def test_parameters_of_all_experts_are_read_in_the_order_of_each_family(tmp_path, config, sizes, modules, kind):
    fixed = {"hidden_size": 32, "num_experts_per_tok": 2, "tie_word_embeddings": False}
    model = models.save(tmp_path / "model", config, **fixed | sizes)
    weights = load_file(model / "model.safetensors")
    deltas = write_stacked(tmp_path / "stacked", weights, modules, **kind)
    references = generate(merged(model, tmp_path / "merged", deltas))
    section = {"enabled": True, "load": {"stacked": str(tmp_path / "stacked")}}
    with LLM(str(model), **SETTINGS, adapters=section) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, adapter="stacked")
        plain = llm.generate(PROMPTS, PARAMS)
    for output, reference, without in zip(outputs, references, plain, strict=True):
        assert_same(output, reference)
        assert not np.allclose(output.logprobs[0].logprob, without.logprobs[0].logprob, atol=1e-3)


def test_adapters_are_added_to_experts_of_quantized_weights(moe):
    """The reference adds the whole matrices to the weights that are dequantized on a CPU."""
    directory, _ = moe
    settings = SETTINGS | {"quantization": "fp8"}
    _, deltas = stacked_tensors("x", (4, 32, 24), 2, 1.0, seeded(5))
    tensors, _ = stacked_tensors("model.layers.1.mlp.experts", (4, 32, 24), 2, 1.0, seeded(5))
    target = directory / "quantized"
    write_tensors(
        target, tensors, r=2, lora_alpha=2, target_modules=[], target_parameters=STACKED["target_parameters"][1:]
    )
    with LLM(str(directory / "model"), **settings) as llm:
        layer = layers_of_experts(llm.loop.executor.rank.engine.model)[1]
        layer.product.weights.down.add_(deltas.float())
        references = llm.generate(PROMPTS, PARAMS)
    with LLM(str(directory / "model"), **settings, adapters={"enabled": True, "load": {"a": str(target)}}) as llm:
        for output, reference in zip(llm.generate(PROMPTS, PARAMS, adapter="a"), references, strict=True):
            assert_same(output, reference, 1e-3)


def test_the_step_whose_memory_is_measured_computes_adapters_of_all_kinds(moe, monkeypatch):
    directory, _ = moe
    called = []
    for name in ("add_low_rank", "add_embedding", "adapted_experts"):
        kept = getattr(adapted_layers, name)

        def noted(*args, kept=kept, name=name):
            called.append(name)
            return kept(*args)

        monkeypatch.setattr(adapted_layers, name, noted)
    section = {"enabled": True, "modules": ["linear", "embedding", "experts", "head"]}
    with LLM(str(directory / "model"), **SETTINGS, adapters=section) as llm:
        engine, lens = llm.loop.executor.rank.engine, [20, 9, 1]
        layers = len(layers_of_experts(engine.model))
        with engine.adapters.rehearsed(sum(lens), 6):
            dry_run(engine.model, engine.eager_runner.prefill, engine.pool, lens, 6)
        assert {name: called.count(name) for name in set(called)} == {
            "add_embedding": 1, "adapted_experts": layers, "add_low_rank": 1 + 3 * layers
        }  # fmt: skip
        dry_run(engine.model, engine.eager_runner.prefill, engine.pool, lens, 6)
        assert called.count("add_embedding") == 1, "the next step has no adapter"


def test_a_backend_of_experts_in_whose_place_adapters_may_not_be_computed_is_refused(moe):
    """The config does not name the kinds of modules: the files of the adapters have matrices of experts."""
    directory, _ = moe
    for name, refused in (("each", True), ("tables", False)):
        section = {"enabled": True, "load": {name: str(directory / name)}}
        with LLM(str(directory / "model"), **SETTINGS, adapters=section) as llm:
            resolved = llm.resolved
        own = resolved.experts.spec
        spec = replace(own, offers=own.offers - {Feature.EXPERTS_ADAPTERS})
        component = replace(resolved.experts.component, spec=spec)
        chosen = {"experts": (replace(resolved.experts, component=component),)}
        other = replace(resolved, parts={**resolved.parts, **chosen})
        assert "experts" in explain_adapters(resolved)["modules"] or not refused
        if refused:
            with pytest.raises(ConfigError, match=r"experts 'torch_native' does not offer experts\.adapters"):
                explain_adapters(other)
        else:
            assert "experts" not in explain_adapters(other)["modules"]


def test_modules_without_memory_in_slots_and_wrong_matrices_are_refused_by_name(moe, tmp_path):
    directory, _ = moe
    weights = load_file(directory / "model" / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    tables, _ = table_tensors("model.embed_tokens", embedding.shape, 3, 2.0, seeded(1))
    short, _ = table_tensors("model.embed_tokens", (7, 32), 3, 2.0, seeded(1))
    changed = {"model.embed_tokens.base_layer.weight": embedding + 1}
    grown = {"model.embed_tokens.base_layer.weight": torch.cat([embedding, embedding[:1]])}
    whole = {"model.embed_tokens.base_layer.weight": embedding.int()}
    expert = "model.layers.0.mlp.experts.3.gate_proj"
    beside = {f"{expert}.lora_A.weight": torch.ones(3, 32), f"{expert}.lora_B.weight": torch.ones(24, 3)}
    beside[f"{expert}.base_layer.weight"] = weights[f"{expert}.weight"]
    square, _ = stacked_tensors("model.layers.0.mlp.experts", (4, 32, 30), 2, 1.0, seeded(1))
    one, _ = stacked_tensors("model.layers.0.mlp.experts", (4, 32, 24), 2, 1.0, seeded(1))
    given = {"r": 3, "lora_alpha": 3, "target_modules": ["embed_tokens"]}
    experts = {"r": 2, "lora_alpha": 2, "target_modules": [], **STACKED}
    cases = [
        (short, given, "7 inputs and 32 outputs; the model has 199 and 32"),
        (tables | changed, given, "differs from the weight of the model"),
        (tables | grown, given, "change the vocabulary"),
        (changed, given, "no tensors of adapters"),
        (
            tables,
            given | {"target_modules": ["embed_tokens", "3.gate_proj"]},
            r"3\.gate_proj, and there are no matrices of",
        ),
        (tables | whole, given, "of dtype torch.int32, a base weight"),
        (beside, given | {"target_modules": ["gate_proj"]}, "a base weight; allowed beside the matrices"),
        (square, experts, r"the model has 32 and 48 \(gate_up_proj\) and 24 and 32 \(down_proj\)"),
        (one, experts | {"r": 3}, "the rank in adapter_config.json is 3, and the model has 4 experts"),
        (one, experts | {"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters does not name"),
        (
            one,
            experts | {"target_parameters": None, "target_modules": ["experts"]},
            "the rank in adapter_config.json is 2",
        ),
    ]
    section = {"enabled": True, "modules": ["embedding", "experts"]}
    with LLM(str(directory / "model"), **SETTINGS, adapters=section) as llm:
        reader = llm.loop.executor.rank.engine.adapters
        for i, (tensors, config, text) in enumerate(cases):
            write_tensors(tmp_path / str(i), tensors, **config)
            with pytest.raises(WeightsError, match=text):
                reader.read(str(tmp_path / str(i)))
        with pytest.raises(RequestError, match=r"the head; .* Set adapters.modules: \[embedding, experts, head\]"):
            llm.load_adapter("tables", directory / "tables")
        with pytest.raises(RequestError, match="which is a linear layer; slots have no memory"):
            llm.load_adapter("each", directory / "each")
