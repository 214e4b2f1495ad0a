"""Test the GPU benchmark: its whole run at tiny shapes on a CPU, and its computations apart from the measurements.

.venv/bin/python -m pytest tests/core/test_gpu_benchmark.py
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dovetail.interfaces.expert_shapes import RoutingRule
from dovetail.layers import experts

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def parts():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from gpubench import breakdown, models, plan, record, serving, supervise, targets
    finally:
        sys.path.pop(0)
    return SimpleNamespace(
        breakdown=breakdown,
        models=models,
        plan=plan,
        record=record,
        serving=serving,
        supervise=supervise,
        targets=targets,
    )


@pytest.mark.slow
def test_the_whole_of_it_runs_on_a_cpu(tmp_path: Path):
    file = tmp_path / "gpu.json"
    options = ["--device", "cpu", "--tiny-shapes", "--quick", "--breakdown", "--set", "threads=1", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "gpu.py", *options], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert found["failed"] == {}
    assert found["left_out"] == []
    rows = {(row["row"], row["case"]): row for row in found["rows"]}
    assert {row for row, _ in rows} == {
        "decode",
        "prefill",
        "mixed",
        "indep",
        "gsp",
        "chat",
        "startup",
        "http",
        "json",
        "compile",
    }
    # a decode row is the difference of two short times: on a busy machine it can come out below zero
    assert all(row["value"] > 0 for (name, _), row in rows.items() if name not in ("decode", "http", "json"))
    assert rows["gsp", "hit"]["value"] == 4 * 48 / (6 * 56)  # each group computes its prefix once
    assert [part["batch"] for part in found["breakdown"]["tiny"]] == [1, 4]
    checks = found["correctness"]["checks"]
    assert {check["passed"] for check in checks} <= {True, None}
    assert any(check["task"] == "torch_native:16" and check["passed"] for check in checks)


FAKE_WORKER = """
import json, os, sys, time
job, tasks = json.loads(sys.argv[1]), json.loads(sys.argv[2])
def send(**message):
    print(json.dumps(message), flush=True)
send(begin="start")
if job["model"] == "broken":
    send(failed="start", error="no engine")
    sys.exit(1)
send(done="start", result={})
for task in tasks:
    send(begin=task)
    if task == "dies":
        print("last words", file=sys.stderr, flush=True)
        os._exit(9)
    if task == "raises":
        send(failed=task, error="wrong")
        sys.exit(1)
    if task == "hangs":
        time.sleep(60)
    send(done=task, result=os.getpid())
"""


@pytest.fixture
def run(parts, monkeypatch, tmp_path):
    (tmp_path / "fake_gpu_worker.py").write_text(FAKE_WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(parts.supervise, "WORKER", "fake_gpu_worker")

    def run(tasks: list[str], seconds: float | None = None, model: str = "fine"):
        job = parts.plan.Job("engine", model, {}, str(tmp_path))
        ended = parts.supervise.run_tasks(job, tasks, parts.supervise.Deadline(seconds))
        return [one for one in ended if one.task != "start" or one.error]

    return run


def test_a_crash_costs_one_task(run):
    a, dies, b, raises, c, d = run(["a", "dies", "b", "raises", "c", "d"])
    assert "last words" in dies.error
    assert raises.error == "wrong"
    assert len({a.result, b.result, c.result}) == 3, "the tasks after a failure have a process of their own"
    assert c.result == d.result


def test_the_time_limit_ends_what_hangs_and_names_what_is_left(run):
    a, hangs, b = run(["a", "hangs", "b"], seconds=2)
    assert a.result
    assert (hangs.task, hangs.left_out, b.task, b.left_out) == ("hangs", True, "b", True)


def test_an_engine_that_does_not_start_is_not_started_again(run):
    start, a, b = run(["a", "b"], model="broken")
    assert (start.task, start.error) == ("start", "no engine")
    assert a.left_out
    assert b.left_out


def test_workloads_are_those_of_the_peers(parts):
    sizes = parts.plan.FULL
    assert sizes.prompts("x", [3, 4]) == sizes.prompts("x", [3, 4])
    assert sizes.prompts("x", [8]) != sizes.prompts("y", [8])
    assert all(1000 <= token < 30000 for token in sizes.prompts("x", [5000])[0])
    groups, each, prefix, question, _ = sizes.gsp
    possible = (groups * each - groups) * prefix / (groups * each * (prefix + question))
    assert round(possible, 3) == parts.targets.TARGETS["8b", "gsp", "hit"].must
    tasks = parts.plan.engine_tasks("8b", parts.plan.ROWS, quick=False, breakdown=False)
    assert tasks[:4] == ["decode:1", "decode:16", "decode:64", "decode:256"]
    assert parts.plan.engine_tasks("8b", ("http",), quick=False, breakdown=False) == ["decode:64"]


def test_every_target_belongs_to_a_row(parts):
    for model, row, _ in parts.targets.TARGETS:
        assert row in parts.plan.USUAL_ROWS[model]


def test_models_have_the_size_they_are_called_by(parts):
    def parameters(name: str) -> float:
        c = parts.models.CONFIGS[name]
        embeddings = c["vocab_size"] * c["hidden_size"]
        matrices = (parts.models.multiplications(name, 1) - 2 * embeddings) / 2  # except one token's attention
        return matrices + embeddings * (1 if c["tie_word_embeddings"] else 2)

    assert parameters("8b") == pytest.approx(8.03e9, rel=0.001)
    assert parameters("0.6b") == pytest.approx(0.596e9, rel=0.001)
    active = parts.models.multiplications("deepseek-v2-lite", 1) / 2
    assert active == pytest.approx(2.4e9, rel=0.03), "of DeepSeek-V2-Lite, as it is published"


def test_better_is_less_for_times_and_more_for_rates(parts):
    reached, gain = parts.targets.reached, parts.targets.gain
    assert reached(4.0, 4.09, "ms")
    assert not reached(4.1, 4.09, "ms")
    assert reached(10300, 10271, "tok/s")
    assert reached(0.8824, 0.882, "hit")
    assert not reached(0.862, 0.882, "hit")
    assert reached(1.0, None, "ms") is None
    assert (gain(2.0, 4.0, "ms"), gain(2.0, 4.0, "tok/s")) == (2.0, 0.5)


@pytest.mark.parametrize(
    ("kernel", "family"),
    [
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<...>>>", "attention"),
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<...>", "attention"),
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT", "matmul"),
        ("void gemmSN_TN_kernel<...>", "matmul"),
        ("_add_rms_norm_kernel", "norm"),
        ("_norm_rope_store_kernel", "rope, store"),
        ("_silu_mul_kernel", "act"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>", "sample"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("something_else", "other"),
    ],
)
def test_kernels_have_families(parts, kernel, family):
    assert parts.breakdown.family(kernel) == family


def test_a_trace_becomes_busy_and_idle_time(parts):
    def event(name: str, start: float, length: float, cat: str = "kernel"):
        return {"cat": cat, "name": name, "ts": start, "dur": length}

    events = [
        event("gemm", 100, 10),
        event("attn", 105, 15),  # overlaps on another stream
        event("gemm", 123, 7),
        event("Memcpy", 200, 10, "gpu_memcpy"),
        event("cudaGraphLaunch", 0, 40, "cuda_runtime"),
        {"ph": "M", "name": "process_name"},
    ]
    kernels, calls = parts.breakdown.read_trace(reversed(events))
    found = parts.breakdown.device_parts(kernels, calls, steps=2, step_us=100)
    assert found["gpu_busy_ms"] == pytest.approx(37 / 2 / 1e3)
    assert found["gpu_idle_ms"] == pytest.approx((100 - 37 / 2) / 1e3)
    assert found["gaps_ms"] == pytest.approx({"under 5 us": 0.0015, "5 to 50 us": 0, "over 50 us": 0.035})
    assert found["families_ms"] == pytest.approx({"matmul": 0.0085, "attention": 0.0075, "copy": 0.005})
    assert found["cuda_calls_ms"] == {"cudaGraphLaunch": 0.02}
    assert (found["kernels"], found["top"][0]["name"]) == (2, "gemm")


def test_a_backend_is_wrong_beyond_what_bfloat16_explains(parts):
    def check(extend: float, decode: float):
        return {"extend_max": extend, "decode_max": decode, "extend_mean": extend / 5, "decode_mean": decode / 5}

    record = parts.record.Record()
    record.checks = {
        "torch_native:16": check(0.08, 0.06),
        "good:16": check(0.1, 0.08),
        "off:16": check(0.08, 0.4),
        "nan:16": check(float("inf"), 0.06),
        "absent:16": {"unusable": "no GPU"},
        "good:tokens": {"same": 3, "of": 4},
    }
    assert record.wrong == ["off:16", "nan:16"]
    assert record.verdict("absent:16") is None
    assert record.verdict("good:tokens") is False


def test_a_stream_is_timed_from_its_first_event_to_its_last(parts):
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    body = [b'data: {"completion_tokens":1}\n\n', b'data: {"completion_tokens":3}\n\ndata: [DONE]\n\n']
    stream = parts.serving.measured([(0.1, head), (0.2, body[0]), (0.6, body[1])], 3)
    assert stream.tpot == pytest.approx(200)
    with pytest.raises(parts.serving.ServingError, match="3 tokens, asked for 4"):
        parts.serving.measured([(0.1, head), (0.2, body[0]), (0.6, body[1])], 4)
    with pytest.raises(parts.serving.ServingError, match="500"):
        parts.serving.measured([(0.1, b"HTTP/1.1 500 no\r\n\r\nwhy")], 3)


def test_rows_are_checked(parts):
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import gpu
    finally:
        sys.path.pop(0)
    assert gpu.row_names("decode, gsp") == ("decode", "gsp")
    with pytest.raises(argparse.ArgumentTypeError, match="decod: there is no such row; allowed: decode"):
        gpu.row_names("decod")


def test_a_model_with_uniform_routing_uses_all_experts_equally_often(parts, monkeypatch):
    """The routers still compute: only which experts they choose is replaced, in the worker of such a model alone."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from gpubench import worker
    finally:
        sys.path.pop(0)
    rule = RoutingRule(8, 2, renormalize=True)
    router = experts.Router(4, rule)
    router.gate.weight.data.copy_(torch.arange(32.0).view(8, 4))
    x = torch.ones(12, 4)  # all tokens prefer the last experts
    own = router.forward(x)
    found = {}

    def probe(job):
        found[job.model] = router.forward(x)
        return str, {}

    monkeypatch.setattr(experts, "route", experts.route)  # restored afterwards
    monkeypatch.setattr(worker, "HANDLERS", {"probe": probe})
    monkeypatch.setattr(worker, "claim_stdout", io.StringIO)
    for model in ("qwen3-30b-a3b", "qwen3-30b-a3b-uniform"):
        job = parts.plan.Job("probe", model, {}, "")
        monkeypatch.setattr(sys, "argv", ["worker", json.dumps(dataclasses.asdict(job)), "[]"])
        worker.main()
    usual, uniform = found["qwen3-30b-a3b"], found["qwen3-30b-a3b-uniform"]
    assert usual.ids.unique().tolist() == [6, 7]
    assert uniform.ids.flatten().bincount(minlength=8).tolist() == [3] * 8
    assert (uniform.ids[:, 0] != uniform.ids[:, 1]).all()
    assert (uniform.ids.dtype, uniform.ids.is_contiguous()) == (own.ids.dtype, True)
    torch.testing.assert_close(uniform.weights, own.weights)


def test_a_server_with_uniform_routing_is_refused(parts, capsys):
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import gpu
    finally:
        sys.path.pop(0)
    with pytest.raises(SystemExit):
        gpu.arguments(["--model", "qwen3-30b-a3b-uniform", "--rows", "decode,http"])
    assert "leave http out of --rows" in capsys.readouterr().err


@pytest.mark.parametrize(("tokens", "before"), [(1024, 4), (2048, 4), (8192, 0)])
def test_prompts_are_timed_once_their_pieces_are_captured(parts, tokens, before):
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from gpubench import rows
    finally:
        sys.path.pop(0)
    calls = []
    runs = iter(range(100, 0, -1))

    def run(prompts, lens):
        calls.append("run")
        assert (list(map(len, prompts)), lens) == ([tokens], [1])
        return SimpleNamespace(seconds=next(runs))

    subject = SimpleNamespace(run=run, flush=lambda: calls.append("flush"), rest=lambda: calls.append("rest"))
    job = parts.plan.Job("engine", "8b", {}, "", repeats=2)
    (measure,) = rows.prefill(subject, job, tokens)
    assert calls == ["flush", "run"] * before + ["rest"] * bool(before) + ["flush", "run"] * 3
    assert measure.samples == [(100 - before - turn) * 1e3 for turn in range(3)]
