"""Generate the points of an answer first, then expand all of them at the same time.

Run: python examples/programs/skeleton_of_thought.py
"""

from __future__ import annotations

from typing import Any

import dovetail as sgl


@sgl.function
def skeleton_of_thought(s, topic, points):
    s += sgl.user(f"Name {points} tips for {topic}.")
    s += sgl.assistant_begin()
    for i in range(points):
        s += f"{i + 1}." + sgl.gen(f"point_{i}", max_tokens=8, stop="\n") + "\n"
    forks = s.fork(points)
    for i, fork in enumerate(forks):
        fork += f"\nMore about {i + 1}:" + sgl.gen("paragraph", max_tokens=16, stop="\n")
    forks.join("concatenate")
    s += sgl.assistant_end()
    for i, fork in enumerate(forks):
        s[f"paragraph_{i}"] = fork["paragraph"]


def example(**settings: Any) -> dict[str, Any]:
    """Return the points, their paragraphs, and the whole answer."""
    state = skeleton_of_thought.run("staying healthy", 3, **settings)
    named = {f"{what}_{i}": state[f"{what}_{i}"] for what in ("point", "paragraph") for i in range(3)}
    return {**named, "answer": state.messages()[-1]["content"]}


if __name__ == "__main__":
    with sgl.Runtime("tiny") as runtime:
        sgl.set_default_backend(runtime)
        print(example(temperature=0)["answer"])
