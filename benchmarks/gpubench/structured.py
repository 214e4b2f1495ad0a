"""Compare decode with a JSON schema with decode without, on one engine, in turns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dovetail import GrammarKind, GrammarSpec
from dovetail.tokenizer import Tokenizer
from gpubench.compiling import compiling
from gpubench.models import CONFIGS
from gpubench.plan import Job, Measure
from gpubench.subject import Subject
from grammarbench.runner import TINY
from grammarbench.vocabulary import enlarged

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "count": {"type": "integer"},
        "names": {"type": "array", "items": {"type": "string"}, "minItems": 400},
    },
    "required": ["title", "count", "names"],
    "additionalProperties": False,
}
"""The schema. No output of the lengths forced here can complete it."""


def model_with_tokenizer(job: Job) -> Path:
    """Return the model's directory with a tokenizer that has as many tokens as the model has logits."""
    tiny, config = Tokenizer.from_dir(TINY), dict(CONFIGS[job.model])
    directory = Path(job.work) / f"{job.model}-with-tokenizer"
    directory.mkdir(parents=True, exist_ok=True)
    config["eos_token_id"] = list(tiny.eos_token_ids)
    (directory / "config.json").write_text(json.dumps(config))
    size = max(config["vocab_size"], tiny.vocab_size)
    (directory / "tokenizer.json").write_text(enlarged(tiny.json, size))
    return directory


def structured(job: Job) -> tuple[Callable[[str], Any], dict[str, Any]]:
    """Return a worker's handler of the tasks ``json:BATCH`` and ``compile:BATCH``.

    ``json:BATCH`` reports TPOT with the schema divided by TPOT without, and both in milliseconds.
    """
    config = json.loads(json.dumps(job.config))
    config["model"]["path"] = str(model_with_tokenizer(job))
    subject = Subject(config)
    grammar = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    rest = subject.rest()

    def handle(task: str) -> list[Measure]:
        row, _, batch = task.partition(":")
        if row == "compile":
            return compiling(subject, job, int(batch))
        return measure(subject, job, int(batch), grammar)

    return handle, {"rest": rest, "engine": subject.llm.loop.info}


def measure(subject: Subject, job: Job, batch: int, grammar: GrammarSpec) -> list[Measure]:
    """Measure both arms in turns by the difference of a long and a short run, in the same way as ``rows.decode``."""
    sizes = job.sizes
    few, many = sizes.decode_short, sizes.decode_long
    prompts = sizes.prompts(f"json {batch}", [sizes.decode_prompt] * batch)
    arms: dict[str, tuple[GrammarSpec | None, list[float], list[float]]] = {
        "free": (None, [], []),
        "json": (grammar, [], []),
    }
    for constraint, *_ in arms.values():
        subject.run(prompts, [many] * batch, constraint)
    for _ in range(job.repeats + 1):
        for constraint, short, long in arms.values():
            short.append(subject.run(prompts, [few] * batch, constraint).seconds)
            long.append(subject.run(prompts, [many] * batch, constraint).seconds)
    scale = 1e3 / (many - few)
    free, json_ms = ((min(long) - min(short)) * scale for _, short, long in arms.values())
    facts = {"free_ms": free, "json_ms": json_ms}
    return [Measure("json", f"bs {batch}", json_ms / free, "ratio", [], facts)]
