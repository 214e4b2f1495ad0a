"""Use LangChain's OpenAI integration as its users do, and print what it returns. The first argument is the URL."""

import json
import sys
from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

GIVEN: dict[str, Any] = {"model": "tiny", "base_url": f"{sys.argv[1]}/v1", "api_key": "none", "temperature": 0}
SUM = "What is 2 + 3?"
PARIS = "What is the weather in Paris?"


class City(BaseModel):
    """A city."""

    city: str


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return city


def use(**given: Any) -> dict[str, Any]:
    """Return answers to questions with each effort, with a tool and as an object."""
    model = ChatOpenAI(**GIVEN, **given)
    effort = {}
    for name in ("none", "low", "high"):
        answer = ChatOpenAI(**GIVEN, **given, reasoning_effort=name).invoke(SUM)
        effort[name] = [answer.text, answer.usage_metadata["output_token_details"].get("reasoning", 0)]
    (call,) = model.bind_tools([get_weather]).invoke(PARIS).tool_calls
    return {
        "effort": effort,
        "streamed": "".join(part.text for part in model.stream(SUM)),
        "call": [call["name"], call["args"]],
        "object": {
            method: model.with_structured_output(City, method=method).invoke(PARIS).model_dump()
            for method in ("json_schema", "function_calling")
        },
    }


def main() -> None:
    """Print the results of chat, responses and completions as JSON."""
    text = OpenAI(**GIVEN, max_tokens=8)
    results = {
        "chat": use(),
        "responses": use(use_responses_api=True),
        "completions": [text.invoke("The capital of France is"), "".join(text.stream("The capital of France is"))],
    }
    sys.stdout.write(json.dumps(results))


main()
