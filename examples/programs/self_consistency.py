"""Vote among eight chains of thought from one prompt, which is computed once for all of them.

Run: python examples/programs/self_consistency.py
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import dovetail as sgl


@sgl.function
def self_consistency(s, question, paths):
    s += sgl.user(question)
    forks = s.fork(paths)
    for i, fork in enumerate(forks):
        fork += sgl.assistant_begin()
        fork += sgl.gen("thought", max_tokens=16, temperature=0 if i == 0 else None, seed=i)
        fork += " The answer is " + sgl.gen("vote", dtype=int, max_tokens=1, temperature=0) + "."
        fork += sgl.assistant_end()
    forks.join()


def example(**settings: Any) -> dict[str, Any]:
    """Return the thoughts, the votes and the winner."""
    state = self_consistency.run("What is 3 + 4?", 8, **settings)
    votes = Counter(state["vote"])
    return {"thoughts": state["thought"], "votes": dict(votes), "winner": max(sorted(votes), key=votes.__getitem__)}


if __name__ == "__main__":
    with sgl.Runtime("tiny") as runtime:
        sgl.set_default_backend(runtime)
        print(example(temperature=0.8))
