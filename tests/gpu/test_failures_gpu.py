"""What a GPU can do to the engine: memory that runs out, wild kernels, a pool that does not fit. Nothing may hang.

.venv/bin/python -m pytest -q tests/gpu/test_failures_gpu.py

A device that is lost is lost to its process, so each case has a process of its own. They all start at once.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
import troubled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SMALL = (
    "device=cuda",
    "model.dtype=float32",
    "memory.kv_gib=0.25",
    "scheduler.max_running=16",
    "scheduler.chunk_size=512",
)

OFFLINE = """
import os, sys
from dovetail import LLM, SamplingParams
from dovetail.errors import EngineDeadError, EngineError
from dovetail.messages import GenerateMsg

where, overlap, graphs = sys.argv[1], sys.argv[2] == "overlap", sys.argv[3] == "graphs"
sections = dict(attention="trouble", grammar="none", memory={"kv_gib": 0.25},
                scheduler={"overlap": overlap, "max_running": 16, "chunk_size": 512},
                graphs={"decode": graphs, "piecewise_tokens": 64 if graphs else 0,
                        "capture": "start" if where == "start" else "idle"})
try:
    llm = LLM("tiny", device="cuda", **sections)
    print("fine", len(llm.generate([5, 6, 7], SamplingParams(max_new_tokens=4, ignore_eos=True))[0].token_ids))
    if where == "idle":
        import trouble_attention

        trouble_attention.TROUBLE = "capture"
        graphs = llm.loop.executor.rank.engine.graphs
        graphs._graphs.clear()  # those that were captured before, with a filled cache of kernels
        print("missing before idle work:", list(graphs.missing()), "refused:", graphs.refused)
        llm.loop.finish_idle_work()
        print("captured in idle work:", graphs.num_captured, "refused:", graphs.refused)
    else:
        params = SamplingParams(max_new_tokens=64, temperature=0, ignore_eos=True)
        llm.loop.handle(GenerateMsg("it", [5, 6, 7], params, 0, f"wild {where}"))
        while llm.loop.has_work:
            llm.loop.step()
    print("nothing was raised")
except EngineDeadError as error:
    print("dead:", error)
    try:
        llm.generate([5, 6, 7])
    except EngineDeadError as error:
        print("again:", error)
except EngineError as error:
    print("not built:", error)
os._exit(0)
"""

PLACES = [
    ("prompt", "overlap", "graphs"),
    ("prompt", "plain", "eager"),
    ("decode", "overlap", "graphs"),
    ("decode", "overlap", "eager"),
    ("decode", "plain", "graphs"),
    ("idle", "overlap", "graphs"),
    ("start", "overlap", "graphs"),
]

START_UPS = {
    "too large": (("memory.kv_gib=4000",), 2, "memory.kv_gib is 4000", "does not fit; lower it"),
    "no share": (("memory.fraction=0.00001",), 2, "memory for the KV pool is", "raise memory.fraction"),
    "small": ((), 1, "too little memory to build the engine", "Tried to allocate"),
}
"""For each start that fails its settings, the exit status (2: the settings cannot work on this device), and what the
message contains."""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Start everything that runs, by its name. All of it is killed in the end."""
    directory = tmp_path_factory.mktemp("failures")
    found = {"server": troubled.serve(directory / "server", *SMALL)}
    for name, (sets, *_) in START_UPS.items():
        folder = directory / name.replace(" ", "_")
        found[name] = troubled.serve(folder, "device=cuda", *sets, TROUBLE="small" if name == "small" else "")
    for place in PLACES:
        trouble = {"start": "capture", "idle": "later"}.get(place[0], "")
        found[place] = troubled.run(directory / "_".join(place), ["-c", OFFLINE, *place], TROUBLE=trouble)
    yield found
    for program in found.values():
        program.process.kill()
        program.process.wait(troubled.PATIENCE)


def test_a_server_survives_its_memory_errors_and_ends_with_its_device(programs):
    server = programs["server"]
    with troubled.client_of(server) as client:
        troubled.check_illegal_requests(client)
        troubled.check_memory_errors(client, "out of memory")
        two = {"max_new_tokens": 64, "temperature": 0, "ignore_eos": True, "n": 2}
        first, second = (answer["output_ids"] for answer in troubled.tell(client, sampling_params=two).json())
        assert len(first) == len(second) == 64
        assert "could not be captured" in server.log
        assert client.get("/health_generate").status_code == 200
        assert troubled.stats(client)["pages_used"] == 0
        troubled.check_lost_device(client, server, "wild decode")


@pytest.mark.parametrize("name", START_UPS)
def test_too_little_memory_is_reported_in_one_message(programs, name):
    _, status, *texts = START_UPS[name]
    troubled.check_start_up_failure(programs[name], *texts, expected=status)


@pytest.mark.parametrize("place", PLACES, ids="-".join)
def test_a_wild_write_is_the_end_of_the_engine_wherever_it_surfaces(programs, place):
    program = programs[place]
    assert program.wait(troubled.START_SECONDS) == 0, program.log[-4000:]
    assert "nothing was raised" not in program.log, program.log
    expected = "not built: the device was lost" if place[0] == "start" else "dead: the device was lost"
    assert expected in program.log, program.log[-4000:]
    assert "illegal memory access" in program.log
    if place[0] != "start":
        assert "fine 4" in program.log
        assert "again: the device was lost" in program.log
