"""Test that requests get their adapters (LoRA), mixed in one batch with each other and with none: log-probabilities are those
of checkpoints into which each adapter is merged.

.venv/bin/python -m pytest -q tests/e2e/test_adapters.py
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from dovetail.config.checkpoint import locate
from dovetail.errors import ConfigError, EngineError, RequestError
from dovetail.interfaces.quantization import LinearProduct
from dovetail.layers.base import prepare_layers
from dovetail.llm import LLM
from dovetail.ops.activation import GATES
from dovetail.sampling_params import SamplingParams
from lora_adapters import ALL, ATTENTION, merged_checkpoint, module_shapes, write_adapter

TINY = locate("tiny")
PROMPTS = [
    "The capital of France is",
    "Alice walks beside",
    "Sort the numbers in ascending order: 3 1 2",
    "Hello",
    "A list of",
]
KINDS = {
    "all": {"modules": ALL, "rank": 8, "seed": 1},
    "queries": {"modules": ATTENTION[:1], "rank": 1, "seed": 2, "alpha": 12},
    "patterns": {
        "modules": ATTENTION + ALL[-1:],
        "rank": 4,
        "seed": 3,
        "ranks": {"k_proj": 2, "layers.0.self_attn.q_proj": 7},
        "alphas": {"down_proj": 20},
        "use_rslora": True,
    },
}
PARAMS = SamplingParams(max_new_tokens=6, temperature=0, logprobs=5, ignore_eos=True)
SETTINGS = {"cache": "none", "memory": {"kv_gib": 0.02}, "grammar": "none"}


def write(directory, name):
    given = dict(KINDS[name])
    return write_adapter(directory / name, module_shapes(TINY, given.pop("modules")), **given)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Return a directory with the adapters, and with checkpoints into which they are merged."""
    directory = tmp_path_factory.mktemp("adapters")
    for name in KINDS:
        merged_checkpoint(TINY, directory / f"{name}-merged", write(directory, name))
    return directory


@pytest.fixture(scope="module")
def expected(adapters):
    """Return what each merged checkpoint generates, by the name of the adapter."""
    found = {}
    for name in [None, *KINDS]:
        with LLM(str(TINY if name is None else adapters / f"{name}-merged"), **SETTINGS) as llm:
            found[name] = llm.generate(PROMPTS, PARAMS)
    return found


def serve(adapters, names=tuple(KINDS), section=(), **sections):
    load = {name: str(adapters / name) for name in names}
    return LLM(str(TINY), **{**SETTINGS, **sections}, adapters={"enabled": True, "load": load, **dict(section)})


def assert_same(output, reference, tolerance=1e-4):
    assert output.token_ids == reference.token_ids
    for own, theirs in zip(output.logprobs, reference.logprobs, strict=True):
        assert [i for i, _ in own.top] == [i for i, _ in theirs.top]
        np.testing.assert_allclose([p for _, p in own.top], [p for _, p in theirs.top], atol=tolerance)


MIXED = ["all", None, "queries", "patterns", "all"]


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"scheduler": {"chunk_size": 3}, "memory": {"num_pages": 64, "page_size": 4}},  # chunked prompts
        {"cache": "radix", "scheduler": {"overlap": False}},
        pytest.param({"speculative": "ngram", "scheduler": {"draft": "always"}}, marks=pytest.mark.full),
        {"section": {"max_resident": 1}},  # the adapters take turns
    ],
    ids=str,
)
def test_mixed_batches_equal_merged_checkpoints(adapters, expected, sections):
    with serve(adapters, **sections) as llm:
        for _ in range(2):  # the second time prefixes are cached, if there is a cache
            outputs = llm.generate(PROMPTS, PARAMS, adapter=MIXED)
            for i, (name, output) in enumerate(zip(MIXED, outputs, strict=True)):
                assert_same(output, expected[name][i])


def test_the_adapters_change_what_is_generated(expected):
    firsts = [np.array([output.logprobs[0].logprob for output in outputs]) for outputs in expected.values()]
    close = [np.abs(a - b).max() < 0.01 for i, a in enumerate(firsts) for b in firsts[:i]]
    assert not any(close), "otherwise these tests show nothing"


@pytest.mark.slow
def test_ranks_divide_adapters(adapters, expected):
    with serve(adapters, parallel={"tp": 2}, threads=1) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, adapter=MIXED)
        for i, (name, output) in enumerate(zip(MIXED, outputs, strict=True)):
            assert_same(output, expected[name][i])


def test_retracted_requests_keep_their_adapters(adapters, expected):
    params = SamplingParams(max_new_tokens=60, temperature=0, ignore_eos=True)
    names = [*KINDS, None] * 2
    tight = {"memory": {"num_pages": 90, "page_size": 4}, "cache": "radix"}
    with serve(adapters, section={"max_resident": 3}, **tight) as llm:
        together = llm.generate([PROMPTS[1]] * len(names), params, adapter=names)
        assert llm.loop.stats().retractions > 0
        alone = {name: llm.generate(PROMPTS[1], params, adapter=name)[0] for name in (*KINDS, None)}
    assert [output.token_ids for output in together] == [alone[name].token_ids for name in names]


def test_all_outputs_of_a_prompt_have_its_adapter(adapters, expected):
    params = SamplingParams(n=3, max_new_tokens=6, temperature=0, logprobs=5, ignore_eos=True)
    with serve(adapters) as llm:
        outputs = llm.generate(PROMPTS[:2], params, adapter=["all", "patterns"])
    for i, output in enumerate(outputs):
        assert_same(output, expected[("all", "patterns")[i // 3]][i // 3])


class Added(LinearProduct):
    """Add ``x @ delta.T`` to a product."""

    weights = None  # what kernels for few rows on a GPU would add

    def __init__(self, delta):
        self.delta = delta

    def around(self, product, rows):
        assert rows is None, "there are no such kernels on a CPU"
        self.product = product
        return self

    def forward(self, x, bias):
        return self.product.forward(x, bias) + functional.linear(x, self.delta)

    def gated(self, x, bias, activation):
        return GATES[activation](self.forward(x, bias))

    @property
    def describe(self):
        return "added"


def test_adapters_are_added_to_products_of_quantized_weights(adapters, tmp_path):
    """The reference adds the whole matrix to the product of each quantized layer."""
    deltas = write(tmp_path, "all")
    fused = {"attn.qkv": ATTENTION[:3], "attn.out": ATTENTION[3:], "mlp.gate_up": ALL[4:6], "mlp.down": ALL[6:]}
    with LLM(str(TINY), quantization="fp8", **SETTINGS) as llm:
        model = llm.loop.executor.rank.engine.model
        for index in range(llm.resolved.model_info.num_layers):
            for name, parts in fused.items():
                delta = torch.cat([deltas[f"model.layers.{index}.{part}"] for part in parts]).float()
                model.get_submodule(f"layers.{index}.{name}").adapters = Added(delta)
        prepare_layers(model)
        references = llm.generate(PROMPTS, PARAMS)
    with serve(adapters, quantization="fp8") as llm:
        for output, reference in zip(llm.generate(PROMPTS, PARAMS, adapter="all"), references, strict=True):
            assert_same(output, reference, 1e-3)


def cached(output):
    return output.cached_tokens


def test_no_prefix_is_found_across_adapters_or_versions(adapters, tmp_path):
    params = SamplingParams(max_new_tokens=2, temperature=0, ignore_eos=True)
    prompt = list(range(100, 180))
    with serve(adapters, cache="radix") as llm:

        def hit(name):
            return cached(llm.generate(prompt, params, adapter=name)[0])

        assert [hit(None), hit("all"), hit("queries")] == [0, 0, 0]
        assert min(hit(None), hit("all"), hit("queries")) >= 64
        llm.load_adapter("all", adapters / "patterns")  # another version of the name
        assert hit("all") == 0
        assert hit("queries") >= 64


def test_adapters_come_and_go_while_requests_run(adapters, expected):
    with serve(adapters, names=["all"]) as llm:
        stream = llm.stream(
            PROMPTS[0], SamplingParams(max_new_tokens=80, temperature=0, ignore_eos=True), adapter="all"
        )
        text = next(stream)
        llm.load_adapter("queries", adapters / "queries")
        assert_same(llm.generate(PROMPTS[2], PARAMS, adapter="queries")[0], expected["queries"][2])
        llm.load_adapter("all", adapters / "patterns")  # the request that runs keeps the version that it has
        assert_same(llm.generate(PROMPTS[3], PARAMS, adapter="all")[0], expected["patterns"][3])
        llm.unload_adapter("all")
        with pytest.raises(
            RequestError, match="adapter names the adapter 'all', which the engine does not know"
        ) as refused:
            llm.generate(PROMPTS[0], PARAMS, adapter="all")
        assert refused.value.param == "adapter"
        text += "".join(stream)
        alone = serve(adapters, names=["all"])
        with alone:
            (reference,) = alone.generate(
                PROMPTS[0], SamplingParams(max_new_tokens=80, temperature=0, ignore_eos=True), adapter="all"
            )
        assert text == reference.text
        assert llm.loop.stats().adapters_known == 1


def test_an_object_with_name_and_path_is_loaded_when_it_is_first_used(adapters, expected):
    request = SimpleNamespace(lora_name="mine", lora_int_id=1, lora_path=str(adapters / "all"))
    with serve(adapters, names=[]) as llm:
        for _ in range(2):
            assert_same(llm.generate(PROMPTS[0], PARAMS, adapter=request)[0], expected["all"][0])
        assert llm.loop.stats().adapters_known == 1
        same = SimpleNamespace(lora_name="mine", lora_path=adapters / "missing" / ".." / "all")
        other = SimpleNamespace(lora_name="mine", lora_path=str(adapters / "other"))
        (adapters / "missing").mkdir()
        assert_same(llm.generate(PROMPTS[0], PARAMS, adapter=same)[0], expected["all"][0])
        with pytest.raises(RequestError, match=r"was loaded from .*all'; give another lora_name, or replace"):
            llm.generate(PROMPTS[0], PARAMS, adapter=other)
        with pytest.raises(RequestError, match="2 entries and there are 1 prompts"):
            llm.generate(PROMPTS[:1], PARAMS, adapter=["mine", None])
        with pytest.raises(RequestError, match="allowed: a name"):
            llm.generate(PROMPTS[:1], PARAMS, adapter=3)


def test_known_adapters_cost_no_step_time(adapters, monkeypatch):
    """Steps do nothing for each known adapter: the table of 1,000 of them is only indexed by name."""

    class Indexed(dict):
        def __iter__(self):
            raise AssertionError("a step looks at all known adapters")

        keys = values = items = __iter__

    with serve(adapters) as llm:
        table = llm.loop.scheduler.adapters
        for i in range(1000):
            table.add(f"other-{i}", str(adapters / "all"))
        table.known = Indexed(table.known)
        calls = []
        call = llm.loop.executor.call
        monkeypatch.setattr(llm.loop.executor, "call", lambda *args: calls.append(args) or call(*args))
        llm.generate(PROMPTS, PARAMS, adapter=MIXED)
        assert sorted(args[1][0] for args in calls if args[1][0] != "poll") == ["install"] * 3 + ["read"] * 3
        calls.clear()
        llm.generate(PROMPTS, PARAMS, adapter=MIXED)
        assert calls == [], "resident adapters need nothing"
        stats = llm.loop.stats()
        assert (stats.adapters_known, stats.adapters_resident, stats.adapters_running) == (1003, 3, 0)


def test_batches_without_adapters_run_the_code_of_a_model_without_them(adapters, monkeypatch):
    def never(*args):
        raise AssertionError("no token has an adapter")

    with serve(adapters) as llm:
        llm.generate(PROMPTS[0], PARAMS, adapter="all")
        monkeypatch.setattr("dovetail.layers.adapters.add_low_rank", never)
        monkeypatch.setattr(llm.loop.executor.rank.engine.adapters, "active", never)
        llm.generate(PROMPTS, PARAMS)


@pytest.mark.parametrize(
    ("modules", "text"),
    [
        ({"model.layers.0.self_attn.q_proj": (8, 8)}, "8 inputs and 8 outputs; the model has 256 and 256"),
        ({"model.layers.9.self_attn.q_proj": (256, 256)}, "which the model does not have"),
        ({"model.embed_tokens": (256, 4096)}, r"which is an embedding; .* Set adapters.modules: \[linear, embedding\]"),
        ({"lm_head": (4096, 256)}, r"lm_head, which is the head; slots have no memory"),
    ],
)
def test_adapters_that_do_not_fit_are_refused_by_name(adapters, tmp_path, modules, text):
    write_adapter(tmp_path, modules)
    with serve(adapters, names=[]) as llm:
        with pytest.raises(RequestError, match=text):
            llm.load_adapter("bad", tmp_path)
        assert llm.generate("Hello", PARAMS)[0].token_ids, "the engine goes on"
    with pytest.raises(ConfigError, match=f"adapters.load: bad cannot be loaded.*{text}"):
        serve(tmp_path.parent, names=[], section={"load": {"bad": str(tmp_path)}, "modules": ["linear"]})


def test_numbers_that_are_not_finite_ranks_and_changed_files_are_refused(adapters, tmp_path):
    shapes = {"model.layers.0.self_attn.q_proj": (256, 256)}
    write_adapter(tmp_path / "inf", shapes, size=float("inf"))
    write_adapter(tmp_path / "large", shapes, rank=17)
    write_adapter(tmp_path / "good", shapes)
    load = {"good": str(tmp_path / "good"), "inf": str(tmp_path / "inf")}
    with serve(adapters, section={"load": load}) as llm:
        with pytest.raises(RequestError, match="rank 17; allowed: at most 16"):
            llm.load_adapter("large", tmp_path / "large")
        with pytest.raises(RequestError, match="no adapter saved by PEFT"):
            llm.load_adapter("missing", tmp_path / "missing")
        with pytest.raises(EngineError, match=r"adapter inf could not be read.*not finite"):
            llm.generate("Hello", PARAMS, adapter="inf")
        write_adapter(tmp_path / "good", shapes, seed=9)
        with pytest.raises(EngineError, match="have changed since the adapter was loaded"):
            llm.generate("Hello", PARAMS, adapter="good")
        assert llm.loop.stats().adapters_failed == 4
        assert llm.loop.scheduler.adapters.wanted == {}


def test_adapters_are_off_by_default():
    with LLM("tiny", **SETTINGS) as llm:
        with pytest.raises(RequestError, match="adapter names the adapter 'all', which the engine does not know"):
            llm.generate("Hello", PARAMS, adapter="all")
        with pytest.raises(RequestError, match=r"adapters\.enabled: true"):
            llm.load_adapter("all", "/nowhere")
        assert llm.loop.executor.rank.engine.adapters is None


@pytest.mark.filterwarnings("ignore")
def test_peft_merges_to_the_same_weights(adapters):
    """The checkpoints of the other tests are merged by these tests; here PEFT merges."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    transformers = pytest.importorskip("transformers")
    for name in KINDS:
        base = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
        merged = peft.PeftModel.from_pretrained(base, adapters / name).merge_and_unload().state_dict()
        ours = load_file(adapters / f"{name}-merged" / "model.safetensors")
        for key in merged.keys() & ours.keys():
            torch.testing.assert_close(ours[key], merged[key], rtol=0, atol=1e-6)


def test_settings_that_do_not_fit_are_refused(adapters):
    with pytest.raises(ConfigError, match="batch_invariant"):
        serve(adapters, batch_invariant=True)
    with pytest.raises(ConfigError, match=r"adapters\.enabled: true"):
        serve(adapters, section={"enabled": False})
    with pytest.raises(ConfigError, match="is also a name of the model"):
        serve(adapters, section={"load": {"tiny": str(adapters / "all")}})
    with pytest.raises(ConfigError, match="without @"):
        serve(adapters, section={"load": {"a@1": str(adapters / "all")}})
