"""Test flash_attn without its libraries: which provider's kernels are used, and what they get, with kernels that do
what they document.

Run: python -m pytest tests/plugins/test_attention_flash.py
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dovetail.config import Config
from dovetail.errors import ConfigError, ResolutionError
from dovetail.registry import Machine, resolve, setup
from dovetail.testing.attention import AttentionSuite
from dovetail.testing.attention_cases import SHARED_STEPS, STEPS
from dovetail.testing.attention_graphs import (
    VERIFY_REPLAYS,
    VERIFY_TOKENS,
    VERIFY_WIDTH,
    copy_inputs,
    static_verify_step,
    verify_step,
)
from dovetail.testing.attention_reference import AttentionCase, AttentionStep
from dovetail.types import SharedPrefixes
from dovetail_attention.config import FlashAttnConfig, FlashAttnMLAConfig
from dovetail_attention.flash_attn import providers
from dovetail_attention.flash_attn.backend import MAX_SPLITS, FlashAttention, probe
from dovetail_attention.flash_attn.latent import FlashAttentionLatent
from dovetail_attention.flash_attn.latent import probe as probe_latents
from dovetail_attention.flash_attn.providers import LIBRARY, open_first

sys.path.insert(0, str(Path(__file__).parent))
from flash_kernels import (
    SCHEDULE_SCHEMA,
    SCHEMA,
    calls,
    kvcache_2,
    kvcache_3,
    kvcache_sgl,
    library_fwd,
    library_schedule,
    varlen_2,
    varlen_3,
    varlen_sgl,
)

HOPPER, AMPERE = (9, 0), (8, 0)
NAMES = ("flash_attn_interface", "vllm", "sgl_kernel", "flash_attn")


@pytest.fixture(scope="module", autouse=True)
def op():
    """Define ``torch.ops._vllm_fa3_C.fwd`` with its schema: torch checks the number and the types of its arguments."""
    with torch.library._scoped_library("_vllm_fa3_C", "DEF") as library:
        library.define(SCHEMA.replace("\n", " "))
        library.impl("fwd", library_fwd, "CPU")
        library.define(SCHEDULE_SCHEMA.replace("\n", " "))
        library.impl("get_scheduler_metadata", library_schedule, "CPU")
        yield


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """Pretend to be on a Hopper GPU on which nothing is installed."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: HOPPER)
    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.ops, "load_library", lambda file: calls.append({"library": file}))
    monkeypatch.setattr(providers, "sys", types.SimpleNamespace(path=[]))
    found = providers.importlib.util.find_spec
    missing = {"flash_attn_interface", "sgl_kernel", "flash_attn"}
    monkeypatch.setattr(
        providers.importlib.util, "find_spec", lambda n: None if n in missing - set(sys.modules) else found(n)
    )
    calls.clear()


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Install a provider by name."""

    def put(name, **functions):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)

    def run(name):
        if name == "vllm":
            (tmp_path / LIBRARY).touch()
            providers.sys.path.append(str(tmp_path))
        elif name == "sgl_kernel":
            put(name)
            put("sgl_kernel.flash_attn", flash_attn_with_kvcache=kvcache_sgl, flash_attn_varlen_func=varlen_sgl)
        elif name == "flash_attn":
            put(name, flash_attn_with_kvcache=kvcache_2, flash_attn_varlen_func=varlen_2)
        else:
            put(name, flash_attn_with_kvcache=kvcache_3, flash_attn_varlen_func=varlen_3)

    return run


class OnCpu(AttentionSuite):
    name = "flash_attn"
    device = "cpu"
    longest = 700  # the kernels here read keys one by one
    provider: str

    @pytest.fixture(autouse=True)
    def installed(self, device, install):
        install(self.provider)

    def make(self, context):
        backend = super().make(context)
        assert backend.provider == self.provider
        return backend


@pytest.mark.sample(3)
class TestOfVllm(OnCpu):
    provider = "vllm"


@pytest.mark.sample(5)
class TestOfTheOfficialPackage(OnCpu):
    provider = "flash_attn_interface"


@pytest.mark.sample(3)
class TestLatentsOfVllm(OnCpu):
    name = "flash_attn_mla"
    provider = "vllm"


suite = TestOfVllm()


def prepare(case, **settings):
    """Return a step, and a backend for it."""
    step = AttentionStep(suite.fit(case), torch.device("cpu"))
    return step, FlashAttention(FlashAttnConfig(**settings), step.context())


@torch.inference_mode()
def check(case, **settings):
    step, backend = prepare(case, **settings)
    backend.plan(step.batch)
    suite.compare_output(step, backend.forward(step.q, step.layer, step.batch))
    return step, backend


PLAIN_STEPS = {name: case for name, (case, _) in STEPS.items() if "tree" not in name}


@pytest.mark.parametrize("provider", ["sgl_kernel", "flash_attn"])
@pytest.mark.parametrize("step", PLAIN_STEPS)
@pytest.mark.parametrize("layer", [{}, {"window": 7}, {"soft_cap": 2.0}], ids=str)
def test_the_other_providers_attend(install, provider, step, layer):
    install(provider)
    _, backend = check(replace(PLAIN_STEPS[step], page_size=256, **layer), provider=provider)
    assert backend.provider == provider


@pytest.mark.parametrize("provider", ["sgl_kernel", "flash_attn"])
@pytest.mark.parametrize("name", [*SHARED_STEPS, "long"])
def test_the_other_providers_share(install, provider, name):
    install(provider)
    long = AttentionCase([1030, 600, 513, 3, 0], [1] * 5, groups=[(1, 1024), (2, 512)], padding=1)
    check(replace(SHARED_STEPS.get(name, long), page_size=256), provider=provider)


def test_a_pool_of_8_bits_is_refused_with_a_reason():
    """The kernels need keys of the queries' dtype."""
    config, registry = setup((), ["memory.kv_dtype=fp8_e4m3", "model.dtype=bfloat16", "model.overrides.head_dim=64"])
    machine = Machine.assume("sm90")
    resolved = resolve(config, registry, machine)
    assert resolved.attention_prefill.name in ("triton", "flashinfer")
    (refused,) = (c for c in resolved.resolution("attention.prefill").candidates if c.spec.name == "flash_attn")
    assert [reason.code for reason in refused.reasons] == ["constraints.kv_dtype"]
    config, registry = setup((), ["memory.kv_dtype=fp8_e4m3", "model.dtype=bfloat16", "attention=flash_attn"])
    with pytest.raises(ResolutionError, match="kv_dtype is fp8_e4m3"):
        resolve(config, registry, machine)


# the choice of kernels


def test_providers_are_tried_in_the_order_that_config_names_them(install):
    order = []
    for name in reversed(NAMES):
        install(name)
        opened, _ = open_first(HOPPER, 256)
        order.append(opened.name)
    assert order == list(reversed(NAMES))
    assert list(NAMES) == [provider.name for provider in providers.providers()]
    for name in NAMES:
        assert open_first(HOPPER, 256, name)[0].name == name


@pytest.mark.parametrize("page_size", [16, 256])
def test_every_reason_is_reported_where_nothing_is_installed(page_size):
    opened, reasons = open_first(HOPPER, page_size)
    assert opened is None
    for name, reason in zip(NAMES, reasons, strict=True):
        assert reason.startswith(name)
    assert ("256" in reasons[-1]) == (page_size == 16)
    with pytest.raises(ConfigError, match="sgl_kernel"):
        prepare(AttentionCase([3], [1], page_size=page_size))


@pytest.mark.parametrize(("capability", "fits"), [((8, 0), True), ((8, 9), True), ((10, 0), False), ((7, 5), False)])
def test_flash_attention_3_is_for_hopper_only(install, capability, fits):
    for name in NAMES:
        install(name)
    opened, reasons = open_first(capability, 256)
    assert (opened.name if opened else None) == ("flash_attn" if fits else None)
    assert len(reasons) == (3 if fits else 4)
    assert all("compute capability" in reason for reason in reasons)


def test_small_pages_rule_flash_attention_2_out_before_anything_is_built(install, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: AMPERE)
    install("flash_attn")
    assert "memory.page_size, which is 16" in probe(FlashAttnConfig(), Config())
    assert probe(FlashAttnConfig(), Config(memory={"page_size": 512})) is None


def test_a_provider_that_does_not_load_is_a_reason_and_the_next_is_taken(install, monkeypatch):
    def broken(file):
        raise OSError("undefined symbol: built for another torch")

    monkeypatch.setattr(torch.ops, "load_library", broken)
    install("vllm")
    assert "another torch" in probe(FlashAttnConfig(), Config())
    install("sgl_kernel")
    opened, reasons = open_first(HOPPER, 16)
    assert opened.name == "sgl_kernel"
    assert any("another torch" in reason for reason in reasons)
    with pytest.raises(ConfigError, match="another torch"):
        prepare(AttentionCase([3], [1]), provider="vllm")


def test_a_package_without_the_functions_is_a_reason(monkeypatch):
    """FlashAttention-4 is such a package, under the name of FlashAttention-2."""
    other = types.ModuleType("flash_attn")
    other.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn", other)
    opened, reasons = open_first(HOPPER, 256)
    assert opened is None
    assert "flash_attn_with_kvcache" in reasons[-1]


def test_the_library_that_config_names_is_the_one(install, tmp_path):
    install("flash_attn_interface")
    file = tmp_path / "mine.so"
    section = FlashAttnConfig(library=file)
    assert "mine.so" in probe(section, Config())
    file.touch()
    assert probe(section, Config()) is None
    step, backend = prepare(STEPS["decode"][0], library=file)
    assert backend.provider == "vllm"
    assert {"library": str(file)} in calls
    backend.plan(step.batch)
    suite.compare_output(step, backend.forward(step.q, step.layer, step.batch))


def test_the_provider_that_config_names_is_the_one(install):
    install("flash_attn_interface")
    assert probe(FlashAttnConfig(), Config()) is None
    reason = probe(FlashAttnConfig(provider="sgl_kernel"), Config())
    assert "sglang-kernel" in reason
    assert "flash_attn_interface" not in reason


def test_the_library_is_found_within_vllm(tmp_path):
    folder = tmp_path / "vllm" / "vllm_flash_attn"
    folder.mkdir(parents=True)
    (folder / LIBRARY).touch()
    providers.sys.path.append(str(tmp_path))
    assert open_first(HOPPER, 16)[0].name == "vllm"
    assert calls == [{"library": str(folder / LIBRARY)}]


def test_flash_attention_2_is_refused_where_bits_must_not_depend_on_the_batch(install):
    install("flash_attn")
    config = Config(batch_invariant=True, memory={"page_size": 256})
    assert "batch_invariant is true" in probe(FlashAttnConfig(), config)
    with pytest.raises(ConfigError, match=r"flash_attn sums in another order .* batch_invariant is true"):
        prepare(AttentionCase([3], [1], page_size=256, batch_invariant=True))
    install("sgl_kernel")
    assert probe(FlashAttnConfig(), config) is None
    assert prepare(AttentionCase([3], [1], page_size=256, batch_invariant=True))[1].provider == "sgl_kernel"


def test_flash_attention_2_refuses_sinks(install):
    install("flash_attn")
    step, backend = prepare(AttentionCase([3, 9], [1, 1], sinks=True, page_size=256))
    backend.plan(step.batch)
    with pytest.raises(ConfigError, match="sinks"):
        backend.forward(step.q, step.layer, step.batch)


# the arguments of the kernels


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ("extend", [33]),
        ("decode", [None]),
        ("mixed", [19, None]),
        ("verify chains", [4]),
        ("verify and extend", [40]),
    ],
)
def test_one_call_for_each_kind_of_row(install, step, expected):
    install("vllm")
    check(STEPS[step][0])
    assert [call["max_q"] for call in calls if "max_q" in call] == expected


@torch.inference_mode()
@pytest.mark.parametrize("provider", NAMES)
@pytest.mark.parametrize("window", [None, 30])
def test_a_graph_of_verify_rows_makes_the_same_calls_in_every_step(install, provider, window):
    """The calls are the same however the tokens are divided among rows."""
    install(provider)
    base = suite.fit(AttentionCase([200] * VERIFY_TOKENS, [VERIFY_WIDTH] * VERIFY_TOKENS, page_size=256, window=window))
    whole, backend = prepare(base, provider=provider)
    static = static_verify_step(base, whole, VERIFY_TOKENS, VERIFY_WIDTH, tree=False)
    backend.plan_capture(static.batch)
    asked = []
    for prefix, trees in VERIFY_REPLAYS:
        step = verify_step(base, whole, prefix, trees, VERIFY_TOKENS)
        if step.drafts.is_chain:
            copy_inputs(step, static)
            calls.clear()
            backend.plan_replay(static.batch)
            suite.compare_output(step, backend.forward(static.q, static.layer, static.batch))
            asked.append([{name: value for name, value in call.items() if name != "cu_q"} for call in calls])
    assert len(asked) > 2
    assert all(one == asked[0] for one in asked)


@torch.inference_mode()
@pytest.mark.parametrize("shared", [False, True])
def test_a_graph_makes_the_same_calls_in_every_step(install, shared):
    """What is captured serves all lengths: only tensors depend on them."""
    install("vllm")
    whole, backend = prepare(AttentionCase([1900, 300, 20, 20], [1] * 4))
    longest = whole.context().max_context

    def decode(prefix):
        case = replace(whole.case, prefix=prefix, padding=prefix.count(0), groups=[(2, 16)] if shared else None)
        return AttentionStep(case, whole.device, whole)

    static = decode([40, 33, 20, 0])
    static.batch.prefix_lens = np.full(4, longest - 1, np.int32)
    backend.plan_capture(static.batch)
    asked = []
    for prefix in ([40, 33, 20, 0], [16, 300, 0, 0], [1900, 17, 5, 0]):
        step = decode(prefix)
        copy_inputs(step, static)
        backend.plan_replay(static.batch)
        calls.clear()
        suite.compare_output(step, backend.forward(static.q, static.layer, static.batch))
        asked.append([(c["causal"], c["max_q"], c["max_k"], c["splits"], c["rows"]) for c in calls])
    assert asked[0] == asked[1] == asked[2]
    if not shared:
        return
    (causal, max_q, max_k, splits, rows), (own_causal, *_) = asked[0]
    assert (causal, own_causal) == (False, True)
    assert (max_q, max_k, rows) == (4, longest, 4), "a group may have all rows, and the longest prefix"
    assert 1 <= splits <= MAX_SPLITS


@torch.inference_mode()
@pytest.mark.parametrize("provider", ["vllm", "flash_attn_interface"])
def test_every_step_makes_the_same_calls_where_bits_must_not_depend_on_the_batch(install, provider):
    """The calls are the same in graphs too, because the kernels choose their tiles by their arguments."""
    install(provider)
    verify = AttentionCase([200] * VERIFY_TOKENS, [VERIFY_WIDTH] * VERIFY_TOKENS, batch_invariant=True)
    whole, backend = prepare(verify, provider=provider)
    static = static_verify_step(whole.case, whole, VERIFY_TOKENS, VERIFY_WIDTH, tree=False)
    backend.plan_capture(static.batch)
    step = verify_step(whole.case, whole, *VERIFY_REPLAYS[0], VERIFY_TOKENS)
    copy_inputs(step, static)
    backend.plan_replay(static.batch)
    suite.compare_output(step, backend.forward(static.q, static.layer, static.batch))
    for name in ("extend", "extend after a prefix", "decode", "mixed", "verify chains", "verify and extend"):
        step, backend = check(replace(PLAIN_STEPS[name], batch_invariant=True), provider=provider)
        if name == "decode":
            backend.plan_capture(step.batch)
            suite.compare_output(step, backend.forward(step.q, step.layer, step.batch))
    asked = [
        tuple(call[key] for key in ("causal", "max_q", "max_k", "splits", "window")) for call in calls if "rows" in call
    ]
    assert len(asked) == 8, "one call for each step"
    assert set(asked) == {(True, 2048, 2048 if provider == "vllm" else None, 1, (-1, -1))}
    assert all(call["cu_q"] is not None for call in calls if "rows" in call)


def test_keys_are_split_until_the_device_is_busy(install):
    install("vllm")
    _, backend = prepare(AttentionCase([3], [1], heads=32, kv_heads=8))
    splits = [backend._splits(rows) for rows in range(1, 600)]
    assert splits == sorted(splits, reverse=True)
    assert 1 < splits[0] <= MAX_SPLITS
    assert splits[-1] == splits[131] == 1, "the rows alone keep 132 multiprocessors busy"
    _, narrow = prepare(AttentionCase([3], [1], heads=1, kv_heads=1))
    assert narrow._splits(1) == MAX_SPLITS


def sharing(starts, lens):
    step = AttentionStep(suite.fit(AttentionCase([1], [1], heads=32, kv_heads=8, head_dim=128)), torch.device("cpu"))
    step.batch.shared = SharedPrefixes(np.array(starts, np.int32), np.array(lens, np.int32))
    return FlashAttention(FlashAttnConfig(), step.context()), step.batch


@pytest.mark.parametrize(
    ("starts", "lens", "expected"),
    [
        (range(0, 257, 16), [2048] * 16, True),  # 383 us flat, 150 us shared on an H200
        ([0, 64], [8192], True),  # 313 us of 61
        ([0, 1], [100_000], False),  # no row to share with
        ([0, 2], [16], False),
        ([0, 2, 4], [0, 0], False),
    ],
)
def test_prefixes_are_shared_where_their_bytes_outweigh_two_more_launches(install, starts, lens, expected):
    install("vllm")
    backend, batch = sharing(starts, lens)
    assert backend.shares(batch) is expected


def test_more_to_save_never_turns_sharing_off(install):
    install("vllm")
    answers = []
    for rows in range(2, 40):
        backend, batch = sharing([0, rows], [512])
        answers.append(backend.shares(batch))
    assert answers == sorted(answers)
    assert set(answers) == {False, True}


def test_a_library_of_one_provider_is_refused_beside_another(tmp_path):
    for provider in ("auto", "vllm"):
        assert FlashAttnConfig(provider=provider, library=tmp_path / "mine.so").library is not None
    with pytest.raises(ValueError, match="allowed with it: auto, vllm"):
        FlashAttnConfig(provider="sgl_kernel", library=tmp_path / "mine.so")


# latents


class Latents(AttentionSuite):
    name = "flash_attn_mla"
    device = "cpu"


@pytest.mark.parametrize("provider", ["flash_attn_interface", "sgl_kernel"])
def test_the_other_providers_attend_over_latents(install, provider):
    """And over expanded prompts, for which each has a function of its own."""
    install(provider)
    latents = Latents()
    for step in ("extend after a prefix", "decode", "mixed", "verify chains", "verify and extend"):
        latents.test_latents_of_16_bits(step, torch.bfloat16)
    latents.test_prompts_over_expanded_latents("extend after a prefix", 192, 128, torch.bfloat16)


def test_only_flash_attention_3_reads_latents(install):
    install("flash_attn")
    opened, reasons = open_first(HOPPER, 256, latents=True)
    assert opened is None
    assert reasons[-1] == "flash_attn has no kernels over latents"
    assert "flash_attn has no kernels over latents" in probe_latents(FlashAttnMLAConfig(), Config())
    install("vllm")
    assert probe_latents(FlashAttnMLAConfig(), Config()) is None


def test_other_latents_are_refused_by_their_sizes(install):
    install("vllm")
    case = replace(STEPS["decode"][0], head_dim=24, value_dim=16, kv_heads=1)
    step = AttentionStep(case, torch.device("cpu"))
    with pytest.raises(
        ConfigError, match=r"latents of 512 .* rotated keys of 64; this group has head_dim 24 and value_dim 16"
    ):
        FlashAttentionLatent(FlashAttnMLAConfig(), step.context())
