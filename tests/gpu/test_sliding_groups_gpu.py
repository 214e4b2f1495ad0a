"""Test on a CUDA device that an engine whose windows give pages back answers as one that keeps all pages.

.venv/bin/python -m pytest -q tests/gpu/test_sliding_groups_gpu.py
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import dovetail
from dovetail import LLM, SamplingParams
from dovetail.engine.grouped import pools_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WINDOWS = {
    "alternating": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "all": {"layer_types": ["sliding_attention"] * 4},
}


def checkpoint(directory: Path, settings: dict) -> Path:
    """Write the embedded model with windows of 24 tokens."""
    source = Path(dovetail.__file__).parent / "assets" / "tiny"
    shutil.copytree(source, directory, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    config |= {"architectures": ["SmolLM3ForCausalLM"], "use_sliding_window": True, "sliding_window": 24}
    (directory / "config.json").write_text(json.dumps(config | {"no_rope_layers": [1] * 4} | settings))
    tensors = load_file(source / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if ".layers.4." not in name}, directory / "model.safetensors")
    return directory


def poison(llm: LLM) -> None:
    """Fill the pages that are given back with large numbers from now on. Kernels may multiply what they do not see by zero,
    so that it must be finite."""
    ledger, rank = llm.loop.scheduler.ledger, llm.loop.executor.rank
    pools, free = pools_of(rank.engine.pool), ledger.allocator.free

    def freed(pages):
        free(pages)
        with rank.context:  # steps in flight may still read these pages
            for pool, own in zip(pools, pages, strict=True):
                index = torch.from_numpy(own[own > 0]).long().to(pool.device)
                for layer in range(pool.group.num_layers):
                    pool.keys(layer)[index] = 50.0
                    pool.values(layer)[index] = 50.0

    ledger.allocator.free = freed


@pytest.mark.parametrize("speculative", ["none", "ngram"])
@pytest.mark.parametrize("attention", ["triton", "torch_native"])
@pytest.mark.parametrize("name", WINDOWS)
def test_answers_equal_those_of_the_cpu(tmp_path: Path, name: str, attention: str, speculative: str) -> None:
    """Two rounds, the second of which finds prefixes in the cache, with captured steps and little memory."""
    directory = checkpoint(tmp_path, WINDOWS[name])
    rng = np.random.default_rng(0)
    prefix = rng.integers(16, 4000, 50).tolist()
    prompts = [prefix[: 10 * n] + rng.integers(16, 4000, 20 + 9 * n).tolist() for n in range(6)]
    params = SamplingParams(max_new_tokens=120, temperature=0, ignore_eos=True)
    settings = {"grammar": "none", "model": {"dtype": "float32"}, "speculative": speculative}
    wanted = LLM(str(directory), device="cpu", memory={"page_size": 4, "num_pages": 600}, **settings)
    expected = [output.token_ids for output in wanted.generate(prompts, params)]
    llm = LLM(
        str(directory),
        device="cuda",
        attention=attention,
        memory={"page_size": 4, "num_pages": 160},
        graphs={"capture": "start"},
        **settings,
    )
    poison(llm)
    for _ in range(2):
        found = [output.token_ids for output in llm.generate(prompts, params)]
        assert sum(a != b for a, b in zip(found, expected, strict=True)) <= 1, "a near tie may be decided otherwise"
        llm.loop.scheduler.check_integrity()
        assert llm.loop.stats().pages_used == 0
    llm.close()
