"""Test adapters (LoRA) whose files change or are damaged, and random traffic for many adapters in few slots.

.venv/bin/python -m pytest -q tests/e2e/test_adapters_careless.py
"""

import os
import random

import pytest
from safetensors.torch import load_file, save_file

from dovetail.engine import adapter_files
from dovetail.errors import EngineError, RequestError
from dovetail.llm import LLM
from dovetail.messages import (
    AbortLoadsMsg,
    AbortMsg,
    CommandReply,
    GenerateMsg,
    LoadAdapterMsg,
    TokenOutput,
    UnloadAdapterMsg,
)
from dovetail.sampling_params import SamplingParams
from lora_adapters import write_adapter

Q = "model.layers.0.self_attn.q_proj"
SHAPES = {Q: (256, 256)}
PARAMS = SamplingParams(max_new_tokens=4, temperature=0, ignore_eos=True)
TENSORS = "adapter_model.safetensors"


def serve(section=(), **sections):
    settings = {"memory": {"kv_gib": 0.02}, "grammar": "none", "cache": "radix", **sections}
    return LLM("tiny", **settings, adapters={"enabled": True, **dict(section)})


def generate(llm, name):
    (output,) = llm.generate(list(range(100, 180)), PARAMS, adapter=name)
    return output


def test_files_that_could_not_be_read_at_first_may_not_change_after_they_were_read(tmp_path):
    """Otherwise prefixes cached with the old files would be used with the new ones."""
    write_adapter(tmp_path / "a", SHAPES, seed=1)
    write_adapter(tmp_path / "b", SHAPES, seed=2)
    (tmp_path / "a" / TENSORS).rename(tmp_path / "aside")
    section = {"max_resident": 1, "max_host": 1}
    with serve(section) as llm:
        llm.loop.scheduler.adapters.add("a", str(tmp_path / "a"))  # as a request to an engine that was started again
        with pytest.raises(EngineError, match="a could not be read"):
            generate(llm, "a")
        (tmp_path / "aside").rename(tmp_path / "a" / TENSORS)
        generate(llm, "a")
        llm.load_adapter("b", tmp_path / "b")
        generate(llm, "b")  # "a" gives way, and is read again when it is needed
        write_adapter(tmp_path / "a", SHAPES, seed=3, size=2)
        with pytest.raises(EngineError, match="have changed since the adapter was loaded"):
            generate(llm, "a")


@pytest.mark.parametrize("change", ["other", "shorter"])
def test_files_that_change_while_they_are_read_are_refused(tmp_path, monkeypatch, change):
    write_adapter(tmp_path, SHAPES, seed=1)
    read_header = adapter_files.read_adapter

    def changed(directory, note):
        adapter = read_header(directory, note)
        if change == "shorter":
            os.truncate(tmp_path / TENSORS, 1000)
        else:
            write_adapter(tmp_path, SHAPES, seed=2)
        return adapter

    with serve() as llm:
        monkeypatch.setattr(adapter_files, "read_adapter", changed)
        with pytest.raises(RequestError, match="changed while"):
            llm.load_adapter("a", tmp_path)
        assert generate(llm, None).token_ids, "the engine goes on"


def test_products_with_the_scale_that_are_too_large_for_the_dtype_are_refused(tmp_path):
    write_adapter(tmp_path, SHAPES, alpha=9e5, rank=1)
    tensors = load_file(tmp_path / TENSORS)
    tensors[f"base_model.model.{Q}.lora_B.weight"].fill_(1e36)  # finite in float32, and not once multiplied
    save_file(tensors, tmp_path / TENSORS)
    with serve() as llm, pytest.raises(RequestError, match=r"lora_B.weight has numbers that are not finite, or not in"):
        llm.load_adapter("a", tmp_path)


def test_random_traffic_for_40_adapters_in_3_slots_ends_and_leaves_nothing(tmp_path):
    """Requests end, are aborted and are retracted; adapters are loaded, replaced, unloaded and damaged meanwhile."""
    rng = random.Random(7)
    names = [f"a/{i}ß" for i in range(40)]
    for i in range(40):
        write_adapter(tmp_path / str(i), SHAPES, rank=1 + i % 4, seed=i)
    write_adapter(tmp_path / "bad", SHAPES, size=float("nan"))
    section = {"max_resident": 3, "max_host": 4, "load": {name: str(tmp_path / str(i)) for i, name in enumerate(names)}}
    with serve(section, memory={"num_pages": 28, "page_size": 4}, scheduler={"max_running": 6}) as llm:
        loop, table, ended, calls = llm.loop, llm.loop.scheduler.adapters, {}, set()
        write_adapter(tmp_path / "39", SHAPES, seed=77)  # changed since it was loaded: its requests end with an error

        def step():
            for answer in loop.step():
                if isinstance(answer, CommandReply):
                    calls.remove(answer.call_id)
                elif not isinstance(answer, TokenOutput) or answer.finish is not None:
                    assert answer.rid not in ended
                    ended[answer.rid] = answer

        count = 150
        for i in range(count):
            params = SamplingParams(max_new_tokens=rng.randrange(1, 60), temperature=0, ignore_eos=True)
            name = rng.choice([*names, "", names[0], names[39], "unknown"])
            loop.handle(
                GenerateMsg(str(i), [rng.randrange(200) for _ in range(rng.randrange(1, 40))], params, 0, adapter=name)
            )
            event = rng.random()
            if event < 0.2:
                loop.handle(AbortMsg(str(rng.randrange(i + 1))))
            elif event < 0.47:
                name, directory = rng.choice(names[:39]), rng.choice(["bad", "missing", str(rng.randrange(39))])
                load = LoadAdapterMsg(f"call {i}", name, str(tmp_path / directory))
                unload, end = UnloadAdapterMsg(f"call {i}", name), AbortLoadsMsg(f"call {i}", "no more loads")
                calls.add(f"call {i}")
                loop.handle(load if event < 0.4 else unload if event < 0.45 else end)
            for _ in range(rng.randrange(3)):
                step()
        for _ in range(50_000):
            if not loop.has_work:
                break
            step()
        assert len(ended) == count, "each request has one answer"
        assert not calls, "each command has an answer"
        step()
        assert loop.stats().retractions > 0
        loop.scheduler.check_integrity()
        images = loop.executor.rank.adapters
        assert loop._adapters._stamps.keys() <= {adapter.key for adapter in table.known.values()}
        assert len(images._images) <= 4
        assert not images._reading
        known = {adapter.key for adapter in table.known.values()}
        assert {adapter.key for adapter in table.slots if adapter} <= known
        assert images._images.keys() <= known
        assert not table.wanted
        assert not table._reserved
        assert all(not adapter.running and not adapter.requests for adapter in table.known.values())
