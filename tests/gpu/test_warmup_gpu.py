"""Test that a fresh process compiles no kernel that was noted, that an engine with a filled cache starts with captured
steps, and that captures change no token.

Run on a GPU: python -m pytest tests/gpu/test_warmup_gpu.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.engine.graphs import GraphKey
from dovetail.engine.warmup import LAYERS, likely_keys

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MEMORY = {"kv_gib": 0.5}
GREEDY = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
TEXTS = ["One", "Two words", "Three more words"]

FRESH = """
import json, sys
from triton import knobs
misses = []
knobs.compilation.listener = lambda *, src, cache_hit, **_: None if cache_hit else misses.append(src.name)
from dovetail import LLM, SamplingParams
sections = {"memory": {"kv_gib": 0.5}, "scheduler": {"max_running": 16}} | json.loads(sys.argv[2])
llm = LLM("tiny", device="cuda", grammar="none", attention="triton", **sections)
engine = llm.loop.executor.rank.engine
started = engine.graphs.num_captured
outputs = llm.generate(json.loads(sys.argv[1]), SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True))
llm.loop.finish_idle_work()
progress = engine.progress._asdict()
print(json.dumps({"misses": misses, "started": started, "tokens": [o.token_ids for o in outputs], "progress": progress}))
"""


def fresh(cache, **sections):
    """Run an engine in a new process, with Triton's cache in ``cache``."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    ended = subprocess.run(
        [sys.executable, "-c", FRESH, json.dumps(TEXTS), json.dumps(sections)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


def test_a_fresh_engine_has_its_kernels_compiled_elsewhere(tmp_path):
    first, second = fresh(tmp_path), fresh(tmp_path)
    assert first["progress"]["kernels"] > 5
    assert first["progress"]["kernels_compiled"] == first["progress"]["kernels"]
    noted = {"_decode_inputs", "_rms_norm", "_rotate_and_store", "_greedy_kernel", "_stats_kernel", "_decode"}
    assert not noted & set(first["misses"])
    assert second["misses"] == []
    assert second["started"] >= 5, "no step was captured at the start, though all kernels were in the cache"
    assert first["tokens"] == second["tokens"]
    for run in (first, second):
        assert run["progress"]["graphs_missing"] == 0
        assert run["progress"]["graphs_refused"] == 0


def test_the_kernels_of_verify_steps_are_compiled_elsewhere(tmp_path):
    run = fresh(tmp_path, speculative="ngram")
    assert not {"_verify_inputs", "_fetch", "_walk", "_schedule"} & set(run["misses"])
    assert run["progress"]["graphs_refused"] == 0


DRAFTING = """
import json, sys
from triton import knobs
misses = []
from dovetail import LLM, SamplingParams
sections = {"memory": {"kv_gib": 0.5}, "scheduler": {"max_running": 16, "draft": "always"}}
llm = LLM("tiny", device="cuda", grammar="none", attention="triton", speculative=sys.argv[1], **sections)
engine = llm.loop.executor.rank.engine
assert engine.warm_up._kernels.wait(120.0)
knobs.compilation.listener = lambda *, src, cache_hit, **_: None if cache_hit else misses.append(src.name)
captured = 0
for graphs in engine._draft_runtime.graphs:
    for key in graphs.likely((0,)):
        graphs.capture(key)
        captured += 1
outputs = llm.generate("Once upon a time", SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True))
stats = llm.loop.stats()
found = {"misses": misses, "captured": captured, "accepted": stats.accepted_tokens, "errors": llm.loop.drafter_errors}
print(json.dumps(found))
"""


@pytest.mark.parametrize("drafter", ["draft_model", "eagle3_tree", "mtp", "dflash"])
def test_the_kernels_of_a_drafters_passes_are_compiled_elsewhere(drafter, tmp_path):
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    words = [sys.executable, "-c", DRAFTING, drafter]
    ended = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["captured"] >= 4
    assert found["misses"] == []
    assert found["accepted"] > 0
    assert found["errors"] == 0


def test_steps_in_larger_graphs_give_the_same_tokens():
    eager = LLM(
        "tiny", device="cuda", model={"dtype": "float32"}, grammar="none", graphs={"decode": False}, memory=MEMORY
    )
    expected = [o.token_ids for o in eager.generate(TEXTS, GREEDY)]
    llm = LLM("tiny", device="cuda", model={"dtype": "float32"}, grammar="none", memory=MEMORY)
    graphs = llm.loop.executor.rank.engine.graphs
    assert graphs is not None
    graphs._graphs.clear()
    graphs.capture(GraphKey(8, shared=False))
    graphs.refused.update(key for key in graphs.missing() if key.rows < 8)
    ran = []
    launch = graphs.launch
    graphs.launch = lambda graph, *rest: ran.append(graph.rows) or launch(graph, *rest)
    texts = TEXTS * 2  # six rows; the other prompts are repeated, so that rows of one request are equal
    assert [o.token_ids for o in llm.generate(texts, GREEDY)] == expected * 2
    assert set(ran) == {8}


def test_a_failed_capture_is_repeated_and_leaves_the_memory_usable():
    llm = LLM("tiny", device="cuda", model={"dtype": "float32"}, grammar="none", memory=MEMORY)
    graphs = llm.loop.executor.rank.engine.graphs
    assert graphs is not None
    recorder, calls = graphs._recorder, []
    recorder._warm = True
    buffer = torch.zeros(4, device="cuda")

    def step():
        calls.append(torch.cuda.is_current_stream_capturing())
        if calls == [True]:
            buffer.cpu()  # waits for the device, which is not allowed in a capture
        return buffer + 1

    graph, result = recorder.record(step, loaded=True)
    assert calls == [True, False, True]
    buffer.fill_(2)
    graph.replay()
    assert result.tolist() == [3] * 4
    graphs.capture(next(iter(graphs.missing()), GraphKey(1, shared=False)))


def test_rehearsals_launch_what_captures_need():
    """Captures of rehearsed steps need no step before them: nothing is compiled or loaded in them."""
    llm = LLM("tiny", device="cuda", grammar="none", attention="triton", memory=MEMORY)
    graphs, warm_up = llm.loop.executor.rank.engine.graphs, llm.loop.executor.rank.engine.warm_up
    assert graphs is not None
    keys = list(likely_keys(graphs))
    assert len(keys) == len(set(keys)) >= len(graphs.sizes)
    assert warm_up._layers == LAYERS
    for rows in graphs.sizes[:4]:
        logits = graphs.rehearse(GraphKey(rows, shared=False), LAYERS)
        assert logits.shape == (rows, llm.loop.executor.rank.engine.info.vocab_size)
    torch.cuda.synchronize()
