"""Extract JSON by a schema, check what a schema cannot express, and request it again if it is wrong.

Run: python examples/programs/extract_json.py
"""

from __future__ import annotations

import json
from typing import Any

import dovetail as sgl

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@sgl.function
def extract(s, text, tries):
    s += sgl.user(f"Extract the name and the age as JSON: {text}")
    for _ in range(tries):
        s += sgl.assistant(sgl.gen("json", json_schema=PERSON, max_tokens=48))
        person = json.loads(s["json"])
        problem = find_problem(person, text)
        if problem is None:
            break
        s += sgl.user(f"That is wrong: {problem} Try again.")
    s["person"], s["problem"] = person, problem


def find_problem(person: dict[str, Any], text: str) -> str | None:
    """Return a sentence for the model that describes what is wrong, or None if nothing is wrong."""
    if person["name"] not in text:
        return f"{person['name']!r} is not in the text."
    return None if str(person["age"]) in text else f"{person['age']} is not in the text."


def example(**settings: Any) -> dict[str, Any]:
    """Return the person, and what is still wrong."""
    state = extract.run("Alice is 30 years old.", tries=2, **settings)
    return {"person": state["person"], "problem": state["problem"], "turns": len(state.messages())}


if __name__ == "__main__":
    with sgl.Runtime("tiny") as runtime:
        sgl.set_default_backend(runtime)
        print(example(temperature=0))
