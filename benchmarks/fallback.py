"""Measure how much slower a model is through transformers' modules than through its own component, on the same Llama.

    python benchmarks/fallback.py [--model 46m] [--device cpu] [--dtype float32] [--rounds 5] [--json FILE]

Two engines with the same random weights are in one process: ``model.implementation`` is ``dovetail`` in one and ``transformers``
in the other. They are measured in turns, and a ratio is the median of the ratios of the rounds. On a GPU use ``--model 8b --device cuda
--dtype bfloat16``. ``--model`` is 46m (12 layers of 512), 135m (30 layers of 576), 0.6b or 8b.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import dovetail

SHAPES = {  # hidden, inner, layers, heads, KV heads, head_dim, vocabulary
    "46m": (512, 1408, 12, 8, 4, 64, 8192),
    "135m": (576, 1536, 30, 9, 3, 64, 49152),
    "0.6b": (1024, 3072, 28, 16, 8, 128, 151936),
    "8b": (4096, 14336, 32, 32, 8, 128, 128256),
}
ARMS = ("dovetail", "transformers")
ROWS = (("decode, batch 1", 1, 64, 64), ("decode, batch 16", 16, 64, 32), ("prompts, 512 tokens", 1, 512, 1))
"""Names of rows, and their numbers of requests, of prompt tokens and of output tokens."""


def write_config(directory: Path, model: str) -> None:
    """Write the config.json of a Llama."""
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = dict(zip((*keys, "head_dim", "vocab_size"), SHAPES[model], strict=True))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config))


def new_engine(directory: Path, arm: str, options: argparse.Namespace) -> dovetail.LLM:
    """Return an engine with random weights that computes the model as ``arm`` says."""
    model = {
        "path": str(directory),
        "implementation": arm,
        "load_format": "dummy",
        "dtype": options.dtype,
        "tokenizer": "tiny",
    }
    return dovetail.LLM(model=model, device=options.device, grammar="none", memory={"kv_gib": options.kv_gib})


def seconds(llm: dovetail.LLM, requests: int, prompt: int, tokens: int, seed: int) -> float:
    """Return the time in which new prompts get their tokens, less that of the first token if there are several."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, 250, (requests, prompt), generator=generator).tolist()
    params = dovetail.SamplingParams(temperature=0, max_new_tokens=tokens, ignore_eos=True)
    first = dovetail.SamplingParams(temperature=0, max_new_tokens=1, ignore_eos=True)
    start = time.perf_counter()
    if tokens > 1:
        llm.generate(prompts, first)  # the prefix cache has the prompts afterwards
        start = time.perf_counter()
        llm.generate(prompts, first)
        short = time.perf_counter() - start
        start = time.perf_counter()
        llm.generate(prompts, params)
        return time.perf_counter() - start - short
    llm.generate(prompts, params)
    return time.perf_counter() - start


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the rows, with milliseconds of each arm, and print them."""
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), options.model)
        engines = {arm: new_engine(Path(folder), arm, options) for arm in ARMS}
        found: dict[str, Any] = {}
        for name, requests, prompt, tokens in ROWS:
            times: dict[str, list[float]] = {arm: [] for arm in ARMS}
            for round_number in range(-2, options.rounds):
                for arm in ARMS if round_number % 2 else reversed(ARMS):
                    spent = seconds(engines[arm], requests, prompt, tokens, seed=round_number + 10)
                    if round_number >= 0:
                        times[arm].append(spent * 1e3 / max(tokens - 1, 1))
                    else:
                        engines[arm].loop.finish_idle_work()
            ratios = [own / other for own, other in zip(times["dovetail"], times["transformers"], strict=True)]
            found[name] = {arm: statistics.median(values) for arm, values in times.items()}
            found[name] |= {"ratio": statistics.median(ratios), "ratios": [min(ratios), max(ratios)]}
            own, other = (found[name][arm] for arm in ARMS)
            print(
                f"| {name} | {own:.2f} ms | {other:.2f} ms | {found[name]['ratio']:.2f} ({min(ratios):.2f}-{max(ratios):.2f}) |",
                flush=True,
            )
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="46m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kv-gib", type=float, default=1, help="memory of each engine's KV pool")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"{datetime.date.today()} {options.model} {options.device} {options.dtype}, torch {torch.__version__}")
    print("| row | own component | transformers' modules | speed (min-max) |\n|---|---|---|---|")
    found = measure(options)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
