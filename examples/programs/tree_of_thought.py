"""Propose several plans, rate each, continue with the best, twice. Run: python examples/programs/tree_of_thought.py"""

from __future__ import annotations

from typing import Any

import dovetail as sgl


@sgl.function
def tree_of_thought(s, question, width, depth):
    s += sgl.user(question)
    s += sgl.assistant_begin()
    node, plan = s, []
    for step in range(depth):
        forks = node.fork(width)
        for i, fork in enumerate(forks):
            fork += f"Step {step + 1}, idea {i + 1}:" + sgl.gen("idea", max_tokens=10, stop="\n")
            fork += " This idea is " + sgl.select("grade", choices=["good", "bad", "unclear"]) + ".\n"
        best = max(range(width), key=lambda i: goodness(forks[i]))
        node = forks[best]
        plan.append(node["idea"])
    node += "The result is" + sgl.gen("result", max_tokens=10)
    s["plan"], s["result"] = plan, node["result"]


def goodness(state: Any) -> float:
    """Return the log-probability of "good" per token."""
    return state.get_meta_info("grade")["normalized_prompt_logprobs"][0]


def example(**settings: Any) -> dict[str, Any]:
    """Return the chosen path and its result."""
    state = tree_of_thought.run("How do I learn to swim?", width=3, depth=2, **settings)
    return {"plan": state["plan"], "result": state["result"]}


if __name__ == "__main__":
    with sgl.Runtime("tiny") as runtime:
        sgl.set_default_backend(runtime)
        print(example(temperature=0))
