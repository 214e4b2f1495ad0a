"""Use LiteLLM as its users do, and print what it returns. The first argument is the URL of the server."""

import json
import sys
from typing import Any

import litellm

URL = f"{sys.argv[1]}/v1"
SUM = [{"role": "user", "content": "What is 2 + 3?"}]
PARIS = [{"role": "user", "content": "What is the weather in Paris?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the weather", "parameters": CITY},
}
PROVIDERS: dict[str, dict[str, Any]] = {
    "hosted_vllm/tiny": {},
    "openai/tiny": {"allowed_openai_params": ["reasoning_effort"]},
}


def ask(model: str, messages: list[dict[str, str]], **given: Any) -> Any:
    """Return the answer of the server."""
    given = {"temperature": 0, "api_base": URL, "api_key": "none", **PROVIDERS[model], **given}
    return litellm.completion(model, messages, **given)


def thoughts(model: str) -> dict[str, Any]:
    """Return the reasoning and the answer for each effort, whole and streamed."""
    found = {}
    for effort in ("none", "low", "high"):
        answer = ask(model, SUM, reasoning_effort=effort).choices[0].message
        parts = [chunk.choices[0].delta for chunk in ask(model, SUM, reasoning_effort=effort, stream=True)]
        streamed = [
            "".join(getattr(part, name, None) or "" for part in parts) for name in ("reasoning_content", "content")
        ]
        found[effort] = {
            "whole": [getattr(answer, "reasoning_content", None) or "", answer.content],
            "streamed": streamed,
        }
    return found


def main() -> None:
    """Print the results of each provider as JSON."""
    results: dict[str, Any] = {}
    for model in PROVIDERS:
        (call,) = ask(model, PARIS, tools=[WEATHER]).choices[0].message.tool_calls
        form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
        shaped = ask(model, PARIS, response_format=form, max_tokens=60).choices[0].message.content
        usage = ask(model, SUM).usage
        results[model] = {
            "effort": thoughts(model),
            "call": [call.function.name, json.loads(call.function.arguments)],
            "shaped": json.loads(shaped),
            "tokens": [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens],
        }
    sys.stdout.write(json.dumps(results))


main()
