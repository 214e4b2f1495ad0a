"""Test SDKs of other projects, unmodified, against a server of the embedded model: LiteLLM, LangChain, the OpenAI Agents
SDK, Outlines, and the frontend language of SGLang.

.venv/bin/python -m pytest -q -p no:xdist tests/clients/test_sdks.py
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from client_environments import SDKS, SGLANG

pytestmark = [pytest.mark.full, pytest.mark.timeout(2400)]

SUM = "2 + 3 = 5."
THOUGHT = "Column by column: 2 + 3 = 5. So 2 + 3 = 5."
PARIS = "The capital of France is Paris."
CALL = ["get_weather", {"city": "Paris"}]
EFFORTS = {"none": False, "low": True, "high": True}


def test_litellm(url: str, tmp_path: Path):
    """Each provider separates reasoning, calls tools and enforces a format, with a reasoning_effort or without."""
    results = SDKS.results("use_litellm.py", url, folder=tmp_path, LITELLM_LOCAL_MODEL_COST_MAP="True")
    assert set(results) == {"hosted_vllm/tiny", "openai/tiny"}
    for found in results.values():
        for effort, thinks in EFFORTS.items():
            expected = [THOUGHT if thinks else "", SUM]
            assert found["effort"][effort] == {"whole": expected, "streamed": expected}, effort
        assert found["call"] == CALL
        assert found["shaped"]["city"] == "Paris"
        prompt, completion, total = found["tokens"]
        assert 0 < prompt < total == prompt + completion


def test_langchain(url: str, tmp_path: Path):
    results = SDKS.results("use_langchain.py", url, folder=tmp_path)
    for api in ("chat", "responses"):
        found = results[api]
        for effort, thinks in EFFORTS.items():
            text, thought = found["effort"][effort]
            assert (text, thought > 0) == (SUM, thinks), (api, effort)
        assert (found["streamed"], found["call"]) == (SUM, CALL)
        assert found["object"] == {"json_schema": {"city": "Paris"}, "function_calling": {"city": "Paris"}}
    whole, streamed = results["completions"]
    assert whole == streamed
    assert whole.startswith(" Paris")


def test_agents(url: str, tmp_path: Path):
    """Agents answer, stream, call tools and go on with the result, return objects, reason, and hand over."""
    results = SDKS.results("use_agents.py", url, folder=tmp_path)
    for found in results.values():
        assert found["plain"] == PARIS
        assert found["streamed"][:2] == [PARIS, PARIS]
        assert found["called"] == ["Paris", "Paris"]
        text, final, names = found["tool streamed"]
        assert final == found["tool"]
        assert "21" in final
        assert text.endswith(final)
        assert {"tool_called", "tool_output", "message_output_created"} <= set(names)
        assert (found["typed"], found["handoff"]) == ("Value", "plain")
        for effort, thinks in EFFORTS.items():
            answer, items, thought = found["effort"][effort]
            assert answer == SUM
            assert items == (["reasoning_item"] if thinks else []) + ["message_output_item"]
            assert (thought > 0) == thinks


def test_outlines(url: str, tmp_path: Path):
    """Both adapters enforce each output type, whole, streamed and asynchronously."""
    results = SDKS.results("use_outlines.py", url, folder=tmp_path)
    shapes = {
        "text": re.compile(re.escape(PARIS)),
        "regex": re.compile("[A-Z]{3}-[0-9]{2}"),
        "choice": re.compile("Rome|Paris"),
        "grammar": re.compile("Rome|Paris"),
    }
    for found in results.values():
        for name, outputs in found.items():
            assert len(outputs) == 3
            for output in outputs:
                if name == "object":
                    assert isinstance(json.loads(output)["city"], str)
                else:
                    assert shapes[name].fullmatch(output), (name, output)


def test_sglang_frontend(url: str, tmp_path: Path):
    """Programs generate, select with each method, fork, stream and constrain through a RuntimeEndpoint."""
    results: dict[str, Any] = SGLANG.results("use_sglang_frontend.py", url, folder=tmp_path)
    (france, sum_of_france), (italy, sum_of_italy) = results["chat"]
    assert (france, italy) == (PARIS, "The capital of Italy is Rome.")
    assert sum_of_france == sum_of_italy == SUM.rstrip(".")
    text, parts = results["streamed"]
    assert text == PARIS
    assert parts > 1
    assert set(results["select"]) == {
        "token_length_normalized",
        "greedy_token_selection",
        "unconditional_likelihood_normalized",
    }
    for cities in results["select"].values():
        assert cities == [" Paris", " Rome"]
    shaped = results["shaped"]
    assert re.fullmatch("(19|20)[0-9]{2}", shaped["year"])
    assert int(shaped["number"]) is not None
    assert set(json.loads(shaped["object"])) == {"city"}
    chosen, top = results["logprobs"]
    assert len(chosen) == len(top) == 4
    assert "".join(entry[2] for entry in chosen).endswith(shaped["scored"])  # special tokens are not in the text
    assert all(entry == best[0] for entry, best in zip(chosen, top, strict=True))
    nexts, end = results["forked"]
    assert nexts[1].startswith(nexts[0])
    assert end
    assert results["model"] == "tiny"
