"""Run programs of SGLang's frontend language on a RuntimeEndpoint, and print what they return. The first argument is
the URL of the server.

Only the modules of the frontend are imported: the whole package would need a build of torch for CUDA.
"""

import importlib.util
import json
import sys
import types
from typing import Any

found = importlib.util.find_spec("sglang")
for name, folder in (("sglang", ""), ("sglang.srt.utils", "/srt/utils")):
    module = types.ModuleType(name)
    module.__path__ = [path + folder for path in found.submodule_search_locations]
    sys.modules[name] = module

from sglang.lang import api as sgl  # noqa: E402
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint  # noqa: E402
from sglang.lang.choices import (  # noqa: E402
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)

CITY = '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": false}'
METHODS = {
    "token_length_normalized": token_length_normalized,
    "greedy_token_selection": greedy_token_selection,
    "unconditional_likelihood_normalized": unconditional_likelihood_normalized,
}
backend = RuntimeEndpoint(sys.argv[1], chat_template_name="chatml")


@sgl.function
def chat(s: Any, question: str) -> None:
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=20, temperature=0))
    s += sgl.user("What is 2 + 3?")
    s += sgl.assistant(sgl.gen("sum", max_tokens=20, temperature=0, stop="."))


@sgl.function
def capital(s: Any, country: str, method: Any) -> None:
    s += f"The capital of {country} is"
    s += sgl.select("city", [" Rome", " Paris", " Berlin"], choices_method=method)


@sgl.function
def shaped(s: Any) -> None:
    s += "The year is " + sgl.gen("year", regex=r"(19|20)[0-9]{2}", temperature=0)
    s += ". The number is " + sgl.gen("number", dtype=int, max_tokens=8, temperature=0)
    s += sgl.user("What is the weather in Paris?")
    s += sgl.assistant(sgl.gen("object", json_schema=CITY, max_tokens=40, temperature=0))
    s += sgl.gen(
        "scored", max_tokens=4, temperature=0, return_logprob=True, top_logprobs_num=2, return_text_in_logprobs=True
    )


@sgl.function
def forked(s: Any) -> None:
    s += "The capital of France is"
    forks = s.fork(2)
    for n, fork in enumerate(forks):
        fork += sgl.gen("next", max_tokens=2 + n, temperature=0)
    forks.join()
    s["nexts"] = [fork["next"] for fork in forks]
    s += sgl.gen("end", max_tokens=4, temperature=0, stop_regex=r"[.,]")


def main() -> None:
    """Print the results of all programs as JSON."""
    state = shaped.run(backend=backend)
    meta = state.get_meta_info("scored")
    stream = chat.run("What is the capital of France?", backend=backend, stream=True)
    parts = list(stream.text_iter("answer"))
    stream["sum"]  # wait for the last call: the cache is not flushed while one runs
    batch = chat.run_batch(
        [{"question": f"What is the capital of {name}?"} for name in ("France", "Italy")],
        backend=backend,
        num_threads=2,
    )
    branches = forked.run(backend=backend)
    branches["end"]  # wait for its last call too
    backend.flush_cache()
    sys.stdout.write(
        "\n"
        + json.dumps(
            {
                "chat": [[each["answer"], each["sum"]] for each in batch],
                "streamed": ["".join(parts), len(parts)],
                "select": {
                    name: [capital.run(country, method, backend=backend)["city"] for country in ("France", "Italy")]
                    for name, method in METHODS.items()
                },
                "shaped": {name: state[name] for name in ("year", "number", "object", "scored")},
                "logprobs": [meta["output_token_logprobs"], meta["output_top_logprobs"]],
                "forked": [branches["nexts"], branches["end"]],
                "model": backend.get_model_name(),
                "info": backend.get_server_info()["version"],
            }
        )
    )


main()
