"""Test the computations of the benchmarks apart from their measurements.

.venv/bin/python -m pytest tests/core/test_benchmarks.py
"""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def peers():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from peers import arms, models, report, worker, workloads
    finally:
        sys.path.pop(0)
    return {"arms": arms, "models": models, "report": report, "worker": worker, "workloads": workloads}


@pytest.fixture
def row(peers):
    row = peers["report"].Row("tiny", "float32", "equal", "16 of 64", useful_tokens=100)
    row.seconds = {"hf": [4.0, 9.0, 6.0], "dovetail": [2.0, 3.0, 1.0]}
    return row


def test_ratios_are_paired_by_round(row):
    assert row.ratio("dovetail", "hf") == (3.0, 2.0, 6.0)  # 4/2, 9/3, 6/1: not median over median, which is 6/2 too few
    assert row.rate("hf") == (pytest.approx(100 / 6), pytest.approx(100 / 9), 25.0)
    assert row.to_json("dovetail")["ratios"] == {"dovetail / hf": {"median": 3.0, "low": 2.0, "high": 6.0}}


def test_an_arm_without_rounds_is_a_dash_and_its_reason_is_reported(peers, row):
    row.failed["vllm"] = "Traceback\nValueError: no `float32` here"
    text = peers["report"].markdown([row], ["hf", "vllm", "dovetail"], "dovetail", {"rounds": "3"})
    assert "| tiny | float32 | 16 of 64 | 17 (11-25) | - | 50 (33-100) | 3.00 (2.00-6.00) | - |" in text
    assert "vllm did not run tiny in float32: `ValueError: no 'float32' here`" in text


def test_agreement_counts_tokens_before_the_first_difference(peers):
    agreement = peers["report"].agreement
    assert agreement([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == 4 / 6
    shares = peers["report"].agreements_with_first({"hf": None, "a": [[1, 2]], "b": [[1, 3]]})
    assert shares == {"a": 1.0, "b": 0.5}


def test_a_section_of_a_page_is_replaced_and_the_rest_kept(peers, tmp_path):
    report, page = peers["report"], tmp_path / "page.md"
    begin, end = report.BEGIN.format(name="cpu"), report.END.format(name="cpu")
    page.write_text(f"# before\n\n{begin}\nold\n{end}\n\nafter\n")
    for text in ("first", "second"):
        report.replace_section(page, "cpu", text)
    assert page.read_text() == f"# before\n\n{begin}\n\nsecond\n\n{end}\n\nafter\n"
    with pytest.raises(ValueError, match="once each"):
        report.replace_section(page, "gpu", "text")


def test_the_page_of_results_has_every_section(peers):
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for name in ("cpu", "step_overhead"):
        assert page.count(peers["report"].BEGIN.format(name=name)) == 1
        assert page.count(peers["report"].END.format(name=name)) == 1


@pytest.mark.parametrize("model", ["tiny", "46m"])
def test_workloads(peers, model):
    module = peers["workloads"]
    found = {w.name: w for w in module.workloads(module.SIZES[model])}
    assert list(found) == ["first", "one", "equal", "mixed", "prefix"]
    for workload in found.values():
        prompts = workload.prompts(4096, seed=1)
        assert prompts == workload.prompts(4096, seed=1)
        assert [len(p) for p in prompts] == list(workload.prompt_lens)
        assert len(workload.output_lens) == len(prompts)
        assert all(16 <= token < 4096 for p in prompts for token in p)
        assert max(a + b for a, b in zip(workload.prompt_lens, workload.output_lens, strict=True)) < 2048
        assert prompts[0][:8] != workload.prompts(4096, seed=2)[0][:8], "a new round must not hit the old one's prefix"
    mixed, prefix = found["mixed"], found["prefix"]
    assert len(set(mixed.prompt_lens)) == len(set(mixed.output_lens)) == 16
    heads = {tuple(p[: prefix.shared]) for p in prefix.prompts(4096, seed=1)}
    assert len(heads) == 1
    assert prefix.shared / prefix.prompt_lens[0] == pytest.approx(0.9, abs=0.005)


def test_models_have_the_size_they_are_called_by(peers):
    def parameters(s):
        d, kv = s["hidden_size"], s["hidden_size"] // s["num_attention_heads"] * s["num_key_value_heads"]
        layer = 2 * d * d + 2 * d * kv + 3 * d * s["intermediate_size"] + 2 * d
        return s["vocab_size"] * d + s["num_hidden_layers"] * layer + d

    shapes = peers["models"].SHAPES
    assert parameters(shapes["46m"]) == pytest.approx(46e6, rel=0.01)
    assert parameters(shapes["tiny"]) == pytest.approx(4e6, rel=0.02)


class Echo:
    """Return outputs that are too short on request."""

    def __init__(self, missing: int) -> None:
        self.missing, self.resets = missing, 0

    def generate(self, prompts, output_lens):
        return [[7] * (n - self.missing) for n in output_lens]

    def reset(self):
        self.resets += 1


def test_a_worker_starts_cold_and_refuses_short_outputs(peers):
    request = {"op": "run", "prompts": [[1], [2]], "output_lens": [2, 3]}
    runner = Echo(missing=0)
    assert peers["worker"].answer(runner, request)["tokens"] == [[7, 7], [7, 7, 7]]
    assert runner.resets == 1
    assert peers["worker"].answer(Echo(missing=1), request)["error"] == "output lengths are [1, 2], asked for [2, 3]"
    assert "NotImplementedError" not in peers["worker"].answer(Echo(missing=0), request)


def test_messages_are_lines(peers):
    stream = io.StringIO()
    peers["worker"].send(stream, {"a": [1]})
    assert json.loads(stream.getvalue()) == {"a": [1]}
    assert stream.getvalue().endswith("\n")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_cpu_time_of_a_session_counts_all_its_processes(peers):
    burn = (
        "import time; t = time.process_time()\nwhile time.process_time() - t < 0.3: pass\nprint(1, flush=True); input()"
    )
    code = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {burn!r}], stdin=0); p.wait()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    seconds = peers["arms"].session_cpu_seconds(process.pid)
    process.communicate(b"\n")
    assert seconds >= 0.29
    assert peers["arms"].session_cpu_seconds(process.pid) == 0.0
    assert os.getsid(0) != process.pid


def test_the_host_time_of_a_step_is_measured(tmp_path):
    """The benchmark's stand-in engine has everything of an engine that the loop uses."""
    found, script = tmp_path / "found.json", ROOT / "benchmarks" / "step_overhead.py"
    command = [sys.executable, script, "--requests", "1", "3", "--steps", "4", "--rounds", "1", "--json", found]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    for row, requests in zip(json.loads(found.read_text()), (1, 3), strict=True):
        assert row["requests"] == requests
        assert all(row[part] > 0 for part in ("schedule", "commit", "prepare", "rest"))


def test_the_host_time_of_steps_is_compared():
    """Every part of an engine that the comparison replaces exists."""
    code = (
        "import json, host_time as h; h.STEPS, h.SIZES, h.VERIFY_ROUNDS = 3, {2: 1}, 1; "
        "print(json.dumps({**h.decode_steps(), **h.verify_steps()}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "benchmarks", check=True, capture_output=True, timeout=120
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 4
    assert all(value > 0 for value in found.values())


@pytest.mark.parametrize("rows", [1, 8, 16, 64])
def test_tiles_that_compete_for_weights_with_zero_points_serve_them(monkeypatch, rows):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    integer_gpu = pytest.importorskip("integer_gpu", exc_type=ImportError)
    without = set(integer_gpu.candidates(rows, 4096, 4096, 128))
    serving = {tile for tile in without if not isinstance(tile, integer_gpu.SliceTile | integer_gpu.BytesTile)}
    assert set(integer_gpu.candidates(rows, 4096, 4096, 128, zeros=True)) == serving
    assert (serving < without) == (rows in (8, 16)), "tiles of slices and of bytes are those that do not"


@pytest.mark.full
def test_an_attack_is_run_and_its_row_printed():
    """Whether the times are kept depends on the machine; that no innocent request fails does not."""
    script = ROOT / "benchmarks" / "attack.py"
    command = [sys.executable, str(script), "--only", "answers", "--calm", "1", "--seconds", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    *_, row, verdict = done.stdout.splitlines()
    assert row.startswith("| answers | "), done.stdout + done.stderr
    assert " | 0 of " in row
    assert (verdict, done.returncode) in (("PASS", 0), ("FAIL: answers", 1))
