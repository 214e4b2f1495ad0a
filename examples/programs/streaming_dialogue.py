"""Stream a dialogue of two speakers as it is generated. Run: python examples/programs/streaming_dialogue.py"""

from __future__ import annotations

from typing import Any

import dovetail as sgl


@sgl.function
def dialogue(s, topic, rounds):
    s += f"Ann and Bob talk about {topic}.\n"
    for i in range(rounds):
        s += "Ann:" + sgl.gen(f"ann_{i}", max_tokens=12, stop="\n") + "\n"
        s += "Bob:" + sgl.gen(f"bob_{i}", max_tokens=12, stop="\n") + "\n"


def example(**settings: Any) -> dict[str, Any]:
    """Return the whole text as it was streamed, and the text of one sentence."""
    state = dialogue.run("the weather", rounds=2, stream=True, **settings)
    whole = "".join(state.text_iter())
    return {"text": whole, "ann_0": "".join(state.text_iter("ann_0"))}


if __name__ == "__main__":
    with sgl.Runtime("tiny") as runtime:
        sgl.set_default_backend(runtime)
        for piece in dialogue.run("the weather", rounds=2, stream=True, temperature=0).text_iter():
            print(piece, end="", flush=True)
