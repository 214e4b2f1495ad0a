"""Ask many questions about one document: run_batch finds that all rows share it and sends it once before the rows.

Run: python examples/programs/rag.py
"""

from __future__ import annotations

from typing import Any

import dovetail as sgl

DOCUMENT = " ".join(
    f"Office {100 + i} is used by team {chr(65 + i)}; it has {4 + i % 7} desks and {1 + i % 3} windows."
    for i in range(20)
)
QUESTIONS = [f"How many desks does office {100 + i} have?" for i in range(6)]


@sgl.function
def answer_from(s, document, question):
    s += sgl.system("Answer from this document:\n" + document)
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=12))


def example(**settings: Any) -> dict[str, Any]:
    """Return the answers in the order of the questions."""
    rows = [{"document": DOCUMENT, "question": question} for question in QUESTIONS]
    states = answer_from.run_batch(rows, **settings)
    return {question: state["answer"] for question, state in zip(QUESTIONS, states, strict=True)}


if __name__ == "__main__":
    with sgl.Runtime("tiny") as runtime:
        sgl.set_default_backend(runtime)
        for question, answer in example(temperature=0).items():
            print(question, answer)
