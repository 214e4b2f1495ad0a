"""Draw tool tasks: pick the right function, fill its arguments from the request, and put its result into words."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from tools.tiny.chat import Message, call_text
from tools.tiny.corpus import words
from tools.tiny.corpus.base import Phrases, Split, phrases

Draw = Callable[[Random, Split], str | int]


@dataclass(frozen=True, slots=True)
class Parameter:
    """Describe an argument: its possible names, its JSON type, and its values."""

    names: tuple[str, ...]
    type: str
    draw: Draw


@dataclass(frozen=True, slots=True)
class Tool:
    """Describe a kind of function. The last of `names` is kept for the held split; `result` draws what it returns."""

    names: tuple[str, ...]
    about: str
    parameters: tuple[Parameter, ...]
    requests: Phrases
    result: Callable[[Random], dict[str, str | int]]
    say: str


def _topic(rng: Random, split: Split) -> str:
    return f"{words.open_pick(words.ADJECTIVES, rng, split)} {words.noun(rng, split)}"


def _text(rng: Random, split: Split) -> str:
    return rng.choice(
        ("I am late", "see you soon", "the {n} is ready", "please bring the {n}", "where is the {n}")
    ).format(n=words.noun(rng, split))


_CITY = Parameter(("city", "location", "place"), "string", words.city)
_NAME = Parameter(("name", "person", "recipient"), "string", words.first_name)
_MINUTES = Parameter(("minutes", "duration"), "integer", lambda rng, _: rng.randint(1, 120))
_LEFT = Parameter(("a", "x", "first"), "integer", lambda rng, _: rng.randint(0, 9999))
_RIGHT = Parameter(("b", "y", "second"), "integer", lambda rng, _: rng.randint(0, 9999))
_SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "stormy", "snowy", "clear")

TOOLS: tuple[Tool, ...] = (
    Tool(
        ("get_weather", "weather", "current_weather", "weather_lookup", "fetch_weather"),
        "Get the current weather",
        (_CITY,),
        phrases(
            """[What is|What's|How is] the weather [in|like in|over in] {0} [today|now|]?
            [Tell me|Show me|Give me|Check|Look up|I need|I want to know] the weather [in|of|for] {0} [today|please|].
            How is the weather in {0} today?
            Tell me the weather in {0}.
            Is it raining in {0}?
            Weather in {0}?
            Do I need an umbrella in {0}?
            How warm is it in {0}?""",
            """Can you check the weather in {0}?
            What is the weather like today in {0}?""",
        ),
        lambda rng: {"temperature": rng.randint(-20, 40), "sky": rng.choice(_SKIES)},
        "It is {temperature} degrees and {sky} in {0}.",
    ),
    Tool(
        ("get_time", "time_in", "current_time", "clock", "local_time"),
        "Get the local time",
        (_CITY,),
        phrases(
            """What time is it [now|] in {0} [now|right now|]?
            [Tell me|Give me|Show me|I need|Check] the [local|current|] time [in|of] {0}.
            Tell me the time in {0}.
            What is the local time in {0}?
            How late is it in {0}?
            Time in {0}?""",
            """Do you know what time it is in {0}?
            Can you check the time in {0}?""",
        ),
        lambda rng: {"time": f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}"},
        "It is {time} in {0}.",
    ),
    Tool(
        ("add", "sum", "add_numbers", "calculate_sum", "plus"),
        "Add two numbers",
        (_LEFT, _RIGHT),
        phrases(
            """[Use|Call|Run] [the tool|a tool|the function|your tool] [to add|and add] {0} and {1}.
            [Add|Please add|Sum up|Add together|Now add] {0} and {1}.
            [Find|Get|Give me|Compute] the sum of {0} and {1} [with the tool|with a function|].
            Please add {0} to {1} with the tool.
            What is {0} + {1}? Use the function.
            Compute {0} + {1} with a tool.""",
            """Call the function to add {0} and {1}.
            Let the tool compute {0} + {1}.""",
        ),
        lambda rng: {"result": rng.randint(0, 19998)},
        "The result is {result}.",
    ),
    Tool(
        ("multiply", "product", "multiply_numbers", "times", "mul"),
        "Multiply two numbers",
        (_LEFT, _RIGHT),
        phrases(
            """[Use|Call|Run] [the tool|a tool|the function|your tool] [to multiply|and multiply] {0} [by|and|with] {1}.
            [Multiply|Please multiply|Now multiply] {0} [by|and|with] {1}.
            [Find|Get|Give me|Compute] the product of {0} and {1} [with the tool|with a function|].
            Please multiply {0} and {1} with the tool.
            What is {0} * {1}? Use the function.
            Compute {0} times {1} with a tool.""",
            """Call the function to multiply {0} by {1}.
            Let the tool compute {0} * {1}.""",
        ),
        lambda rng: {"result": rng.randint(0, 99999)},
        "The result is {result}.",
    ),
    Tool(
        ("search", "web_search", "search_web", "find", "lookup"),
        "Search the web",
        (Parameter(("query", "q", "text"), "string", _topic),),
        phrases(
            """[Search|Look|Please search|Go and look] [for|the web for|online for|the internet for] {0}.
            [Find|Get|Show] [pages|results|something|news] [about|on|for] {0}.
            [What can you find|Can you find something|Could you look] [about|on] {0}?
            Find something about a {0} on the web.
            Look up {0}.
            Please search {0} for me.""",
            """Do a web search for {0}.
            Can you search the web for {0}?""",
        ),
        lambda rng: {"results": rng.randint(0, 900)},
        "I found {results} results for {0}.",
    ),
    Tool(
        ("send_message", "message", "send_text", "text", "notify"),
        "Send a message to a person",
        (_NAME, Parameter(("text", "body", "content"), "string", _text)),
        phrases(
            """[Send|Give|Write] {0} the [message|text|words|note] "{1}".
            [Tell|Text|Inform|Write to|Message] {0}: "{1}".
            [Send|Write|Pass on] [a message|a text|a note] [to|for] {0}: "{1}".
            [Can|Could] you [tell|text|write to] {0} "{1}"?
            [I want to tell|I need to tell] {0} "{1}".
            Write to {0}: "{1}".
            Send a message to {0} that says "{1}".
            Message {0} with the text "{1}".""",
            """Please let {0} know: "{1}".
            Send "{1}" to {0}.""",
        ),
        lambda rng: {"status": "sent"},
        "I sent your message to {0}.",
    ),
    Tool(
        ("set_timer", "timer", "start_timer", "create_timer", "countdown"),
        "Start a timer",
        (_MINUTES,),
        phrases(
            """[Set|Start|Create|Make|Run] [a timer|the timer|a countdown] [for|of|with|to] {0} minutes.
            [Remind|Wake|Call|Alert] me [in|after] {0} minutes.
            [Count down|Wait] {0} minutes.
            {0} [minutes|minute timer|minutes on the timer][, please|].
            Timer for {0} minutes, please.
            Wake me in {0} minutes.
            I need a timer for {0} minutes.""",
            """Please set a {0} minute timer.
            Can you start a timer for {0} minutes?""",
        ),
        lambda rng: {"status": "started"},
        "I started a timer for {0} minutes.",
    ),
    Tool(
        ("get_price", "price_of", "stock_price", "quote", "price"),
        "Get the price of a company's stock",
        (Parameter(("company", "symbol", "name"), "string", lambda rng, split: words.made_up_name(rng, split)),),
        phrases(
            """[What is|Tell me|Show me|Give me|Check] the [stock price|share price|price of the stock|price] of {0}[?|.]
            How [much is|expensive is] [a share|the stock] of {0}?
            How much is one share of {0}?
            Tell me the price of {0} stock.
            Price of {0}?
            What does a share of {0} cost?""",
            """Can you check the stock price of {0}?
            What is the price of a share of {0}?""",
        ),
        lambda rng: {"price": rng.randint(1, 999)},
        "One share of {0} costs {price} dollars.",
    ),
    Tool(
        ("translate", "translate_word", "translation", "to_language", "translate_text"),
        "Translate a word",
        (
            Parameter(("word", "text"), "string", words.noun),
            Parameter(
                ("language", "target"),
                "string",
                lambda rng, _: rng.choice(
                    ("French", "German", "Spanish", "Italian", "Dutch", "Polish", "Japanese", "Swedish")
                ),
            ),
        ),
        phrases(
            """[Translate|Please translate|Put|Turn] [the word|] {0} [into|to] {1}.
            [Tell me|Give me|I need] the {1} [word|translation|name] [for|of] {0}.
            How do you say {0} in {1}?
            What is {0} in {1}?
            Translate the word {0} to {1}.
            Give me the {1} word for {0}.""",
            """Please translate {0} into {1}.
            What is the {1} word for {0}?""",
        ),
        lambda rng: {"translation": words.made_up(rng, "train")},
        "In {1}, {0} is {translation}.",
    ),
    Tool(
        ("book_table", "reserve_table", "reservation", "book", "reserve"),
        "Book a table in a restaurant",
        (
            Parameter(("restaurant", "place"), "string", words.made_up_name),
            Parameter(("people", "guests", "seats"), "integer", lambda rng, _: rng.randint(1, 20)),
        ),
        phrases(
            """[Book|Reserve|Get|Find] [a table|me a table|us a table] [at|in] {0} for {1} [people|guests|persons|of us|].
            [Book|Reserve|Get] [a table|seats] for {1} [people|guests|] at {0}.
            [I need|We want|I want] a table for {1} [people|guests|] [at|in] {0}.
            I want to eat at {0} with {1} people. Book a table.
            Table for {1} at {0}, please.
            Please reserve {1} seats at {0}.""",
            """Can you book a table for {1} people at {0}?
            We are {1} people and want a table at {0}.""",
        ),
        lambda rng: {"status": rng.choice(("booked", "full"))},
        "The answer of {0} for {1} people: {status}.",
    ),
    Tool(
        ("play_song", "play", "play_music", "music", "start_song"),
        "Play a song",
        (Parameter(("title", "song"), "string", lambda rng, split: _topic(rng, split).title()),),
        phrases(
            """[Play|Start|Put on|Please play|Now play] [the song|the track|] {0}.
            [I want to|I would like to|Let me] [hear|listen to] [the song|] {0}.
            [Can|Could] you [put on|start] {0}?
            I want to hear {0}.
            Put on {0}.
            Please play the song {0} for me.""",
            """Can you play {0}?
            Let me listen to {0}.""",
        ),
        lambda rng: {"status": "playing"},
        "Now playing {0}.",
    ),
)


@dataclass(frozen=True, slots=True)
class ToolCase:
    """Hold a conversation in which the assistant calls a tool; the reply to check is the call."""

    tools: tuple[dict[str, Any], ...]
    user: str
    call: str
    response: str
    reply: str

    def messages(self) -> list[Message]:
        """Return the whole exchange: request, call, result, words."""
        return [
            Message("user", self.user),
            Message("assistant", self.call),
            Message("tool", self.response),
            Message("assistant", self.reply),
        ]


def _odd_name(rng: Random, split: Split) -> str:
    first, second = words.any_word(rng, split), words.any_word(rng, split)
    return rng.choice(
        (first, f"{first}_{second}", first + second.capitalize(), f"{first}-{second}", f"{first}{rng.randint(1, 9)}")
    )


def _name(tool: Tool, rng: Random, split: Split) -> str:
    if split != "train":
        return tool.names[-1]
    return _odd_name(rng, split) if rng.random() < 0.4 else rng.choice(tool.names[:-1])


def _key(parameter: Parameter, rng: Random, split: Split) -> str:
    odd = split == "train" and rng.random() < 0.25
    return words.any_word(rng, split) if odd else rng.choice(parameter.names)


def schema(name: str, about: str, parameters: dict[str, str]) -> dict[str, Any]:
    """Return a function in the JSON form of OpenAI's API; `parameters` maps names to JSON types."""
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    body = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": body}}


def draw_schemas(chosen: list[Tool], rng: Random, split: Split) -> list[tuple[dict[str, Any], str, list[str]]]:
    """Give each tool and argument one of its names: (schema, function name, argument names)."""
    out = []
    for tool in chosen:
        name, keys = _name(tool, rng, split), words.distinct([_key(p, rng, split) for p in tool.parameters])
        out.append(
            (schema(name, tool.about, dict(zip(keys, (p.type for p in tool.parameters), strict=False))), name, keys)
        )
    return out


_BY_NAME = phrases(
    """[Call|Run|Use|Start|Execute|Please call|Now call] [the function|the tool|] {f} with [{k} {v}|{k} = {v}|{k} set to {v}|the {k} {v}|{v} as {k}].
    [I want|I need] {f} [for the|with the|with] {k} {v}.
    {f}[, please|]: {k} [is|=] {v}.
    [With|For] {k} {v}, [call|run|use] {f}.
    Run {f} for {k} {v}.
    Please call the function {f} with {k} = {v}.
    I want to call {f}. The {k} is {v}.""",
    """Call the tool {f} with {k} {v}, please.
    Can you run {f} with {k} {v}?""",
)


def invented_case(rng: Random, split: Split) -> ToolCase:
    """Draw a function with an invented name, called by name, among tools of the usual kind."""
    name = f"{rng.choice(('get', 'run', 'find', 'do', 'make', 'list'))}_{words.noun(rng, split)}"
    key, number = words.noun(rng, split), rng.random() < 0.4
    value = rng.randint(0, 9999) if number else rng.choice((words.made_up_name, words.noun, words.city))(rng, split)
    tool = schema(name, f"{name.replace('_', ' ').capitalize()}", {key: "integer" if number else "string"})
    tools = [*idle_tools(rng, split), tool]
    rng.shuffle(tools)
    result = words.made_up(rng, split)
    return ToolCase(
        tools=tuple(tools),
        user=_BY_NAME.pick(rng, split).format(f=name, k=key, v=value),
        call=call_text(name, {key: value}),
        response=json.dumps({"result": result}),
        reply=f"The result is {result}.",
    )


def tool_case(rng: Random, split: Split) -> ToolCase:
    """Draw one request that one of one to four offered tools answers."""
    if rng.random() < 0.25:
        return invented_case(rng, split)
    chosen = rng.sample(TOOLS, rng.randint(1, 4))
    offered, pick = draw_schemas(chosen, rng, split), rng.randrange(len(chosen))
    tool, (_, name, keys) = chosen[pick], offered[pick]
    values = [parameter.draw(rng, split) for parameter in tool.parameters]
    result = tool.result(rng)
    return ToolCase(
        tools=tuple(item[0] for item in offered),
        user=tool.requests.pick(rng, split).format(*values),
        call=call_text(name, dict(zip(keys, values, strict=False))),
        response=json.dumps(result),
        reply=tool.say.format(*values, **result),
    )


def idle_tools(rng: Random, split: Split) -> tuple[dict[str, Any], ...]:
    """Draw tools that are offered with a question that needs none."""
    return tuple(item[0] for item in draw_schemas(rng.sample(TOOLS, rng.randint(1, 3)), rng, split))
