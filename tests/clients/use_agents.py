"""Use the OpenAI Agents SDK as its users do, and print what it returns. The first argument is the URL of the server."""

import asyncio
import json
import sys
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.shared import Reasoning
from pydantic import BaseModel

FRANCE, PARIS, SUM = "What is the capital of France?", "What is the weather in Paris?", "What is 2 + 3?"
called: list[str] = []


class Value(BaseModel):
    """A number."""

    value: int


@function_tool
def get_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
        city: The city.
    """
    called.append(city)
    return '{"temperature": 21}'


def settings(**given: Any) -> ModelSettings:
    """Return settings of which the answer is always the same."""
    return ModelSettings(temperature=0, **given)


async def streamed(agent: Agent, question: str) -> list[Any]:
    """Return the streamed text, the final output and the names of the events."""
    run = Runner.run_streamed(agent, question)
    text, names = "", set()
    async for event in run.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            text += event.data.delta
        names.add(getattr(event, "name", event.type))
    return [text, run.final_output, sorted(names)]


async def use(model: Any) -> dict[str, Any]:
    """Return the results of agents of this model."""
    plain = Agent(name="plain", instructions="Answer.", model=model, model_settings=settings())
    tool = Agent(name="tool", model=model, tools=[get_weather], model_settings=settings())
    typed = Agent(name="typed", model=model, output_type=Value, model_settings=settings())
    passing = Agent(name="passing", handoffs=[plain], model=model, model_settings=settings(tool_choice="required"))
    efforts = {}
    for effort in ("none", "low", "high"):
        agent = Agent(name="a", model=model, model_settings=settings(reasoning=Reasoning(effort=effort)))
        run = await Runner.run(agent, SUM)
        thought = run.context_wrapper.usage.output_tokens_details.reasoning_tokens
        efforts[effort] = [run.final_output, [item.type for item in run.new_items], thought]
    return {
        "plain": (await Runner.run(plain, FRANCE)).final_output,
        "streamed": await streamed(plain, FRANCE),
        "tool": (await Runner.run(tool, PARIS, max_turns=3)).final_output,
        "tool streamed": await streamed(tool, PARIS),
        "typed": type((await Runner.run(typed, SUM)).final_output).__name__,
        "effort": efforts,
        "handoff": (await Runner.run(passing, "Hand me over", max_turns=3)).last_agent.name,
        "called": called.copy(),
    }


async def main() -> None:
    """Print the results of both of OpenAI's APIs as JSON."""
    set_tracing_disabled(True)
    results = {}
    async with AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", timeout=300) as client:
        for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
            called.clear()
            results[kind.__name__] = await use(kind(model="tiny", openai_client=client))
    sys.stdout.write(json.dumps(results))


asyncio.run(main())
