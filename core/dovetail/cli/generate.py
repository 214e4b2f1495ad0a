"""Continue one prompt, without a server: ``dovetail generate``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from dovetail.cli.sources import FileOptions, Json, Model, Sets, Tp, load, shortcuts

MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", help="The maximum number of output tokens.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token each time.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text.")]


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    files: FileOptions = None,
    sets: Sets = None,
    model: Model = None,
    tp: Tp = None,
    max_new_tokens: MaxNewTokens = 64,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="A file with a JSON schema that the output must follow.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Continue a text, offline."""
    config, _ = load(files, [*(sets or ()), *shortcuts({"model.path": model, "parallel.tp": tp})])
    from dovetail.llm import LLM
    from dovetail.sampling_params import GrammarKind, GrammarSpec, SamplingParams

    grammar = GrammarSpec(GrammarKind.JSON_SCHEMA, json_schema.read_text(encoding="utf-8")) if json_schema else None
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, grammar=grammar)
    llm = LLM(config)
    try:
        if as_json:
            typer.echo(json.dumps(dataclasses.asdict(llm.generate(prompt, params)[0]), ensure_ascii=False))
            return
        for text in llm.stream(prompt, params):
            typer.echo(text, nl=False)
        typer.echo()
    finally:
        llm.close()
