"""docs/write_a_model.md: its files are a package whose suite passes and whose model runs, its recipes compute what they
should, and its tables name what there is.

Run: python -m pytest -q tests/e2e/test_write_a_model.py
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from test_example_package import DOVETAIL, install, run
from torch.nn import functional

from dovetail.engine.build import as_list, build_model, check_complete
from dovetail.errors import WeightsError
from dovetail.interfaces.attention import AttentionLayer
from dovetail.interfaces.cache import CacheGroup
from dovetail.interfaces.features import BUILT_IN_FEATURES, Feature
from dovetail.interfaces.mesh import SINGLE
from dovetail.interfaces.model import ModelArchitecture, ModelInfo, WeightTarget
from dovetail.layers.attention import AttentionShape
from dovetail.layers.base import Layer
from dovetail.layers.rope import RopeConfig
from dovetail.layers.rotary import Rotary
from dovetail.memory.pool import PagedKVPool
from dovetail.testing.batches import make_batch, make_page_table
from dovetail.testing.eager import EagerAttention
from dovetail.testing.model import ModelSuite, Reference
from dovetail.testing.ranks import run_ranks, thread_meshes
from dovetail_models.dense import DenseModel

PAGE = (Path(__file__).parents[2] / "docs" / "write_a_model.md").read_text("utf-8")

GENERATE = """
import sys
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM
from dovetail.config.checkpoint import locate
from dovetail.llm import LLM
from dovetail.sampling_params import SamplingParams

torch.manual_seed(0)
sizes = dict(hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=12)
made = Gemma2ForCausalLM(Gemma2Config(vocab_size=4096, sliding_window=8, query_pre_attn_scalar=10, initializer_range=0.3, **sizes)).eval()
made.save_pretrained("checkpoint")
prompt = list(range(5, 35))
with torch.no_grad():
    expected = made.generate(torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False)[0, len(prompt):].tolist()
model = {"path": "checkpoint", "dtype": "float32", "tokenizer": str(locate("tiny"))}
llm = LLM(model=model, device="cpu", threads=1)
(output,) = llm.generate([prompt], SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True))
llm.close()
assert list(output.token_ids) == expected, (output.token_ids, expected)
"""


def rows_after(heading: str) -> list[str]:
    """Return the rows of the first table after ``heading``, without its head."""
    table = re.search(r"^\|.*?(?=\n\n)", PAGE.partition(heading)[2], re.MULTILINE | re.DOTALL)
    assert table is not None, heading
    return table[0].splitlines()[2:]


def named(row: str) -> list[str]:
    """Return the words in backticks of a row's first cell, without arguments."""
    return [word.partition("(")[0] for word in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


@pytest.mark.slow
def test_the_page_builds_a_model_that_runs(tmp_path: Path) -> None:
    files = re.findall(r"^`([\w/.]+)`\n\n```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in files] == [
        "dovetail_gemma2/describe.py",
        "dovetail_gemma2/model.py",
        "tests/test_gemma2.py",
    ]
    first, *_ = re.findall(r"^dovetail (plugins new .*)$", PAGE, re.MULTILINE)
    run(tmp_path, [*DOVETAIL, *shlex.split(first)], tmp_path)
    project, target = tmp_path / "dovetail-gemma2", tmp_path / "installed"
    for name, text in files:
        assert (project / name).exists(), name
        (project / name).write_text(text, "utf-8")
    install(project, target)
    (commands,) = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    printed = []
    for line in commands.splitlines():
        program, *arguments = shlex.split(line)
        printed.append(run(target, arguments if program == "python" else [*DOVETAIL, *arguments], project))
    tested, doctor, shown = printed
    assert re.search(r"\d+ passed", tested), tested
    assert "model/gemma2" in doctor
    assert "Gemma2ForCausalLM" in shown
    run(target, ["-c", GENERATE], tmp_path)
    explained = run(target, [*DOVETAIL, "explain", "checkpoint"], tmp_path)
    assert "gemma2" in explained


# -- recipes -----------------------------------------------------------------------------------------------------------


def python_blocks() -> list[str]:
    """Return the code of the page that is in no file of the example."""
    return re.findall(r"^```py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def recipes() -> dict[str, Any]:
    made: dict[str, Any] = {"__name__": "recipes"}
    exec(python_blocks()[0], made)
    return made


def filled(layer: Layer) -> Layer:
    torch.manual_seed(0)
    for tensor in layer.parameters():
        tensor.copy_(torch.randn_like(tensor) * 0.3)
    return layer


def test_transposed_weight(recipes: dict[str, Any]) -> None:
    x, linear = torch.randn(5, 12), filled(recipes["TransposedLinear"](12, 7))
    torch.testing.assert_close(linear(x), functional.linear(x, linear.weight.T, linear.bias))


@pytest.mark.parametrize("division", ["tp", "ep"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_experts(recipes: dict[str, Any], ranks: int, division: Any) -> None:
    """Each token goes through its two best experts, one after the other here, with the checkpoint's own tensors."""
    count, size, hidden = 4, 6, 10
    torch.manual_seed(0)
    tensors = {"moe.gate.weight": torch.randn(count, hidden)}
    for expert in range(count):
        for name, shape in {"w1": (size, hidden), "w2": (hidden, size), "w3": (size, hidden)}.items():
            tensors[f"moe.experts.{expert}.{name}.weight"] = torch.randn(shape) * 0.5
    meshes = thread_meshes(ranks, division)
    layers = [recipes["mixtral_experts"](hidden, size, count, 2, mesh) for mesh in meshes]
    for layer in layers:
        fill_from(layer, dict(recipes["mixtral_targets"](layer, "m", "moe")), tensors)
    x = torch.randn(7, hidden)
    for result in run_ranks(meshes, lambda layer: layer.forward(x), layers):
        for token, got in zip(x, result, strict=True):
            probs = (tensors["moe.gate.weight"] @ token).softmax(0)
            best = probs.argsort(descending=True)[:2].tolist()
            expected = torch.zeros(hidden)
            for expert in best:
                w1, w2, w3 = (tensors[f"moe.experts.{expert}.w{i}.weight"] for i in (1, 2, 3))
                expected += probs[expert] / probs[best].sum() * (w2 @ (functional.silu(w1 @ token) * (w3 @ token)))
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("rotated", [False, True])
def test_own_attention(recipes: dict[str, Any], rotated: bool, ranks: int) -> None:
    """Two rows, cut into chunks, attend as whole texts do, on one rank and divided over two."""
    heads, kv_heads, head_dim, hidden = 4, 2, 8, 20
    torch.manual_seed(0)
    shapes = {"q": (heads * head_dim, hidden), "k": (kv_heads * head_dim, hidden), "v": (kv_heads * head_dim, hidden)}
    tensors = {f"{n}_proj.weight": torch.randn(s) * 3 for n, s in {**shapes, "o": (hidden, heads * head_dim)}.items()}
    meshes = thread_meshes(ranks)
    layers = [recipes["OwnAttention"](hidden, heads, kv_heads, head_dim, 0, mesh) for mesh in meshes]
    for layer in layers:
        fill_from(layer, dict(layer.targets("m", "attn")), {f"attn.{name}": one for name, one in tensors.items()})
    rope = RopeConfig(head_dim, 100.0, 32, 32)
    lens = [9, 6]
    texts = [torch.randn(n, hidden) for n in lens]

    def attended(layer: Any) -> list[torch.Tensor]:
        pool = PagedKVPool(CacheGroup(1, kv_heads // ranks, head_dim), 12, 4, torch.float32, "cpu")
        attention, table = EagerAttention(pool), make_page_table(lens, 4, 12)
        outputs: list[list[torch.Tensor]] = [[], []]
        for prefix, extend in (([0, 0], [5, 2]), ([5, 2], [4, 4])):
            batch = make_batch(4, table, prefix, extend, input_ids=[0] * sum(extend), attn=(attention,), kv=(pool,))
            attention.plan(batch)
            x = torch.cat([text[a : a + n] for text, a, n in zip(texts, prefix, extend, strict=True)])
            rotation = Rotary(rope).forward(batch.positions) if rotated else None
            for row, part in enumerate(layer.forward(x, rotation, batch).split(extend)):
                outputs[row].append(part)
        return [torch.cat(parts) for parts in outputs]

    for found in run_ranks(meshes, attended, layers):
        for text, got in zip(texts, found, strict=True):
            q, k, v = (functional.linear(text, tensors[f"{name}_proj.weight"]).clamp(-8, 8) for name in "qkv")
            q, k, v = (one.unflatten(1, (-1, head_dim)).transpose(0, 1) for one in (q, k, v))
            if rotated:
                q, k = turned(q), turned(k)
            whole = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            expected = functional.linear(whole.transpose(0, 1).flatten(1), tensors["o_proj.weight"])
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)


def fill_from(layer: Layer, targets: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Fill the parameters of ``layer``, which the targets call ``m``, with this rank's parts of ``tensors``."""
    assert targets.keys() == tensors.keys()
    parameters = {f"m.{name}": parameter for name, parameter in layer.named_parameters()}
    check_complete(parameters, targets)
    for name, target in ((name, one) for name, entry in targets.items() for one in as_list(entry)):
        part = tensors[name]
        for share in target.shares:
            part = part.narrow(share.dim, share.start, share.size)
        rows = slice(None) if target.start is None else slice(target.start, target.start + target.size)
        parameters[target.parameter][rows].copy_(part)


def test_a_norm_without_weights(recipes: dict[str, Any]) -> None:
    x = torch.randn(5, 12)
    y = recipes["PlainNorm"]()(x)
    torch.testing.assert_close(y, (x - x.mean(1, True)) / (x.var(1, keepdim=True, correction=0) + 1e-5).sqrt())


class TestTheModelThatIsWatched(ModelSuite):
    """The forward pass that the page shows for ``batch.last`` and ``batch.watch``, with the layers of Llama."""

    name = "llama"
    configs = {  # noqa: RUF012
        "small": {
            "architectures": ["LlamaForCausalLM"], "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        }
    }  # fmt: skip

    def new_model(self, info: ModelInfo, dtype: torch.dtype = torch.float32, mesh: Any = SINGLE) -> ModelArchitecture:
        made: dict[str, Any] = {"__name__": "watched"}
        exec(python_blocks()[2], made)
        members = {name: made["WatchedModel"].__dict__[name] for name in ("forward", "attend")}
        members["blocks"] = property(lambda model: list(model.layers))
        return build_model(type("Watched", (DenseModel,), members), info, torch.device("cpu"), dtype, mesh)

    def reference(self, directory: Path) -> Reference:
        model = ModelSuite.load(sound := Plain(), directory)
        return lambda tokens: sound.logits(model, tokens, len(tokens))


class Plain(ModelSuite):
    name = "llama"


Plain.__test__ = False  # type: ignore[attr-defined]


def turned(x: torch.Tensor) -> torch.Tensor:
    """Rotate ``x [heads, tokens, 8]`` with theta 100, as pairs of complex numbers: element i turns with element i + 4."""
    angles = torch.arange(x.shape[1])[:, None] * 100.0 ** -(torch.arange(4) / 4)
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag), -1)


def test_queries_of_another_shape_are_named(recipes: dict[str, Any]) -> None:
    pool = PagedKVPool(CacheGroup(1, 2, 8), 12, 4, torch.float32, "cpu")
    attention = EagerAttention(pool)
    batch = make_batch(4, make_page_table([5], 4, 12), [0], [5], input_ids=[0] * 5, attn=(attention,), kv=(pool,))
    with pytest.raises(ValueError, match=r"q is \[5, 32\]; expected .*\[5, heads, 8\]"):
        attention.forward(torch.zeros(5, 32), AttentionLayer(0, 1.0), batch)


def test_a_misspelt_parameter_is_named_with_the_nearest() -> None:
    with pytest.raises(
        WeightsError, match=r"position, which is not a parameter of the model; did you mean 'positions'"
    ):
        check_complete({"positions": torch.empty(4, 5)}, {"transformer.wpe.weight": WeightTarget("position")})


# -- tables ------------------------------------------------------------------------------------------------------------


def test_the_tables_are_complete() -> None:
    fields = [name for row in rows_after("with wrong text and no error") for name in named(row)]
    assert fields == [field.name for field in dataclasses.fields(ModelInfo)]
    methods = [name for row in rows_after("and a `ModelArchitecture`:") for name in named(row)]
    assert set(methods) >= ModelArchitecture.__abstractmethods__ | {"ignored_weights"}
    features = {
        f"MODEL_{name.partition('.')[2].upper()}"
        for name in (f.name for f in BUILT_IN_FEATURES if f.namespace == "model")
    }
    assert {name for row in rows_after("`offers` are optional") for name in named(row)} == features
    for row in rows_after("needs` are checked"):
        assert getattr(AttentionLayer(0, 1.0), *named(row)) is None
        assert hasattr(Feature, re.findall(r"Feature\.(\w+)", row)[0])
    options = [name for row in rows_after("It builds models on the CPU") for name in named(row)]
    own = {"configs", "ignores", "tolerance", "bfloat16_tolerance", "write_checkpoint", "reference", "make_attention"}
    own |= {"without_effect"}
    assert own <= set(vars(ModelSuite))
    assert set(options) == own | {"name", "settings"}
    assert f"`tolerance` | logits may differ by this much: `{ModelSuite.tolerance:.0e}`".replace("e-0", "e-") in PAGE


def test_the_layers_have_the_named_fields() -> None:
    import inspect

    for cls in (AttentionShape, AttentionLayer):
        (written,) = re.findall(rf"^`{cls.__name__}\((.*?)\)`", PAGE, re.MULTILINE)
        parameters = inspect.signature(cls).parameters.values()
        expected = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
        assert written.split(", ") == expected


def test_a_layer_in_a_list_is_checked_too() -> None:
    """A need that is not declared is an error, as the page says, and names layer and feature."""

    class Model(Layer):
        def __init__(self, info: ModelInfo, mesh: object) -> None:
            super().__init__()
            self.constants = AttentionLayer(0, 1.0, window=4)

    info = ModelInfo("X", 9, 8, 1, 1, 1, 8, 32, (CacheGroup(1, 1, 8),))
    with pytest.raises(Exception, match=r"attention\.sliding_window.*constants"):
        build_model(Model, info, torch.device("cpu"), torch.float32, SINGLE)  # type: ignore[arg-type]
