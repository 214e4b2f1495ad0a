"""Let the model think first and then generate only the number. Run: python examples/programs/chain_of_thought.py"""

from __future__ import annotations

from typing import Any

import dovetail as sgl


@sgl.function
def chain_of_thought(s, question):
    s += sgl.user(question + " Think step by step.")
    s += sgl.assistant_begin()
    s += "Let us think. " + sgl.gen("thought", max_tokens=40, stop="\n")
    s += "\nSo the answer is " + sgl.gen("answer", dtype=int, max_tokens=1) + "."
    s += sgl.assistant_end()


def example(**settings: Any) -> dict[str, Any]:
    """Return the thought and the number."""
    state = chain_of_thought.run("What is 3 + 4?", **settings)
    return {"thought": state["thought"], "answer": int(state["answer"]), "text": state.text()}


if __name__ == "__main__":
    with sgl.Runtime("tiny") as runtime:
        sgl.set_default_backend(runtime)
        print(example(temperature=0)["text"])
