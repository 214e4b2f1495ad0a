"""Reason, act and observe: the model selects a tool, plain Python runs it, and its result is appended to the prompt.

Run: python examples/programs/react.py
"""

from __future__ import annotations

from typing import Any

import dovetail as sgl

TOOLS = {"add": lambda a, b: a + b, "multiply": lambda a, b: a * b}


@sgl.function
def react(s, question, steps):
    s += sgl.system("Use the tools add and multiply, one at a time, then finish.")
    s += sgl.user(question)
    s += sgl.assistant_begin()
    log = []
    for _ in range(steps):
        s += "Thought:" + sgl.gen("thought", max_tokens=12, stop="\n")
        s += "\nAction: " + sgl.select("tool", choices=[*TOOLS, "finish"] if log else list(TOOLS))
        if s["tool"] == "finish":
            break
        s += "\nInput: " + sgl.gen("input", regex=r"[0-9]{1,3}, [0-9]{1,3}", max_tokens=12)
        a, b = map(int, s["input"].split(", "))
        result = TOOLS[s["tool"]](a, b)
        log.append((s["tool"], a, b, result))
        s += f"\nObservation: {result}\n"
    s += "\nAnswer: " + sgl.gen("answer", regex="[0-9]{1,6}", max_tokens=8)
    s += sgl.assistant_end()
    s["log"] = log


def example(**settings: Any) -> dict[str, Any]:
    """Return the tool calls and the answer."""
    state = react.run("What is 3 + 4?", steps=3, **settings)
    return {"log": state["log"], "answer": int(state["answer"]), "text": state.text()}


if __name__ == "__main__":
    with sgl.Runtime("tiny") as runtime:
        sgl.set_default_backend(runtime)
        print(example(temperature=0)["text"])
