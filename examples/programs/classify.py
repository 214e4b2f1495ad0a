"""Classify many texts: the instructions are computed once, then the labels are compared; nothing is generated.

Run: python examples/programs/classify.py
"""

from __future__ import annotations

from typing import Any

import dovetail as sgl

LABELS = ["positive", "negative", "neutral"]
REVIEWS = [
    "I loved every minute of it.",
    "A waste of time.",
    "It is a film about a dog.",
    "The best film that I have seen this year.",
    "It broke after two days.",
    "It comes in a box.",
]


@sgl.function
def classify(s, review):
    s += sgl.system("Decide whether the review is positive, negative or neutral. Answer with one word.")
    s += sgl.user(f"Review: {review}")
    s += sgl.assistant(sgl.select("label", choices=LABELS))


def example(**settings: Any) -> dict[str, Any]:
    """Return the label of each review."""
    rows = [{"review": review} for review in REVIEWS]
    states = classify.run_batch(rows, num_threads=4, **settings)
    return {review: state["label"] for review, state in zip(REVIEWS, states, strict=True)}


if __name__ == "__main__":
    with sgl.Runtime("tiny") as runtime:
        sgl.set_default_backend(runtime)
        for review, label in example().items():
            print(f"{label}: {review}")
