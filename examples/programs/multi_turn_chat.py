"""Run a conversation of several turns: each answer is part of the next prompt. Run: python
examples/programs/multi_turn_chat.py"""

from __future__ import annotations

from typing import Any

import dovetail as sgl


@sgl.function
def multi_turn_chat(s, questions):
    s += sgl.system("You are a helpful assistant. Answer in one sentence.")
    for i, question in enumerate(questions):
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen(f"answer_{i}", max_tokens=24))


def example(**settings: Any) -> dict[str, Any]:
    """Return the answers and the messages."""
    state = multi_turn_chat.run(questions=["What is the capital of France?", "And of Italy?"], **settings)
    return {"answers": [state["answer_0"], state["answer_1"]], "messages": state.messages()}


if __name__ == "__main__":
    with sgl.Runtime("tiny") as runtime:
        sgl.set_default_backend(runtime)
        for message in example(temperature=0)["messages"]:
            print(f"{message['role']}: {message['content']}")
