"""Use Outlines with its adapters for servers, and print what they return. The first argument is the URL."""

import asyncio
import json
import sys
from typing import Any, Literal

import openai
import outlines
from outlines.types import CFG, Regex
from pydantic import BaseModel

GIVEN: dict[str, Any] = {"base_url": f"{sys.argv[1]}/v1", "api_key": "none"}
FRANCE = "What is the capital of France?"


class City(BaseModel):
    """A city."""

    city: str


TYPES = {
    "text": None,
    "object": City,
    "regex": Regex(r"[A-Z]{3}-[0-9]{2}"),
    "choice": Literal["Rome", "Paris"],
}
GRAMMARS = {"from_vllm": 'root ::= "Rome" | "Paris"', "from_sglang": 'root ::= "Rome" | "Paris"'}


def use(adapter: str) -> dict[str, Any]:
    """Return what each output type gives with the synchronous and the asynchronous client, whole and streamed."""
    make = getattr(outlines, adapter)
    model = make(openai.OpenAI(**GIVEN), "tiny")
    later = make(openai.AsyncOpenAI(**GIVEN), "tiny")
    kinds = {**TYPES, "grammar": CFG(GRAMMARS[adapter])}
    given = {"temperature": 0, "max_tokens": 40}

    async def ask() -> list[str]:
        """Return the outputs of the asynchronous client, whose connections belong to one event loop."""
        return [await later(FRANCE, kind, **given) for kind in kinds.values()]

    return {
        name: [model(FRANCE, kind, **given), "".join(model.stream(FRANCE, kind, **given)), output]
        for (name, kind), output in zip(kinds.items(), asyncio.run(ask()), strict=True)
    }


sys.stdout.write(json.dumps({adapter: use(adapter) for adapter in GRAMMARS}))
