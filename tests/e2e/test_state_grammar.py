"""Constrained outputs of models with states: valid, and the same as without a prefix cache, overlap and lack of memory.

.venv/bin/python -m pytest -q -p no:xdist tests/e2e/test_state_grammar.py
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from engine_runs import check_idle, results
from state_models import save

import dovetail
from dovetail import LLM, SamplingParams
from dovetail.sampling_params import GrammarKind, GrammarSpec
from dovetail.scheduler import admission

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "long tag"]}, "minItems": 1, "maxItems": 3},
        "n": {"type": "integer", "minimum": -5, "maximum": 2000},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "tags", "n"],
    "additionalProperties": False,
}
GRAMMAR = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
LITTLE = {"mamba2": 9, "qwen3_next": 45}
"""Pages, or slots of states, that are too few for all rows at once."""
ROWS = 12


@pytest.fixture(scope="module", params=LITTLE)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Return a random model with states and with the tokenizer of the embedded model."""
    directory = tmp_path_factory.mktemp(request.param)
    save(request.param, directory, vocab_size=4096, initializer_range=0.05)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(Path(dovetail.__file__).parent / "assets" / "tiny" / name, directory)
    return request.param, directory


def engine(directory: Path, **sections: Any) -> LLM:
    grammar = {"backend": {"kind": "xgrammar", "max_whitespace": 1}, "isolation": "thread"}
    return LLM(str(directory), device="cpu", threads=1, grammar=grammar, attention="torch_native", **sections)


def jobs() -> tuple[list[str], list[SamplingParams]]:
    """Return prompts with a common beginning, of which every third has no constraint."""
    prompts = [f"Describe a wizard of level {row // 2} as JSON, please." for row in range(ROWS)]
    specs = [None if row % 3 == 2 else GRAMMAR for row in range(ROWS)]
    return prompts, [
        SamplingParams(max_new_tokens=80, temperature=1.0, seed=row, grammar=spec) for row, spec in enumerate(specs)
    ]


@pytest.mark.parametrize("drafter", ["none", pytest.param("ngram", marks=pytest.mark.full)])
def test_outputs_are_valid_and_those_without_a_cache(
    model: tuple[str, Path], drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overlap, prefix hits, retraction, chunks and drafts change nothing."""
    name, directory = model
    plain = engine(directory, cache="none", memory={"page_size": 4, "num_pages": 500}, scheduler={"overlap": False})
    expected = plain.generate(*jobs())
    plain.close()
    monkeypatch.setattr(admission, "DECODE_HEADROOM", 0)
    llm = engine(
        directory,
        memory={"page_size": 4, "num_pages": LITTLE[name], "state_snapshot_tokens": 4},
        scheduler={"overlap": True, "chunk_size": 17, "max_running": 6, "draft": "always"},
        speculative=drafter,
    )
    llm.generate(*jobs())
    outputs = llm.generate(*jobs())  # from the cache
    assert results(outputs) == results(expected)
    assert any(output.cached_tokens > 0 for output in outputs)
    ended = 0
    for output, params in zip(outputs, jobs()[1], strict=True):
        assert output.finish is not None
        if params.grammar is not None and output.finish.kind == "stop":
            jsonschema.validate(json.loads(output.text), SCHEMA)
            ended += 1
    assert ended > ROWS // 3
    stats = llm.loop.stats()
    assert (stats.accepted_tokens > 0) == (drafter == "ngram")
    assert stats.retractions > 0 or name == "mamba2", "without pages, requests wait for slots"
    check_idle(llm)
    llm.close()
