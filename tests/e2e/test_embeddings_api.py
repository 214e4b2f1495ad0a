"""Compare /v1/embeddings with OpenAI's client to transformers' hidden states; wrong requests are refused in OpenAI's
format.

.venv/bin/python -m pytest -q -p no:xdist tests/e2e/test_embeddings_api.py
"""

import base64
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModel

from dovetail.config.checkpoint import locate
from dovetail.tokenizer import Tokenizer

TEXTS = ["The capital of France", "Paris is the capital of France", "Bananas are yellow and " * 40, "x"]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_dir(locate("tiny"))


@pytest.fixture(scope="module")
def reference(tokenizer):
    model = AutoModel.from_pretrained(locate("tiny"), dtype=torch.float32).eval()

    @torch.inference_mode()
    def pooled(text, pooling="last"):
        ids = tokenizer.encode(text) if isinstance(text, str) else text
        states = model(torch.tensor([ids])).last_hidden_state[0]
        return (states[-1] if pooling == "last" else states.mean(0)).numpy()

    return pooled


@pytest.fixture(scope="module")
def client(tiny_url):
    return openai.OpenAI(base_url=f"{tiny_url}/v1", api_key="none", max_retries=0)


def unit(vector):
    return vector / np.linalg.norm(vector)


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_a_text_with_the_clients_defaults(client, reference, tokenizer):
    answer = client.embeddings.create(model="tiny", input=TEXTS[0])  # asks for base64, and decodes it
    (item,) = answer.data
    close(item.embedding, unit(reference(TEXTS[0])))
    assert (answer.object, item.object, item.index, answer.model) == ("list", "embedding", 0, "tiny")
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == len(tokenizer.encode(TEXTS[0]))


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("kind", ["texts", "ids"])
def test_several_in_their_order(client, reference, tokenizer, kind, pooling):
    given = TEXTS if kind == "texts" else [tokenizer.encode(text) for text in TEXTS]
    answer = client.embeddings.create(
        model="tiny", input=given, encoding_format="float", extra_body={"pooling": pooling, "normalize": False}
    )
    assert [item.index for item in answer.data] == [0, 1, 2, 3]
    for item, text in zip(answer.data, TEXTS, strict=True):
        np.testing.assert_allclose(item.embedding, reference(text, pooling), atol=1e-3, rtol=1e-3)


def test_token_ids_dimensions_and_both_encodings(tiny, reference, tokenizer):
    ids = tokenizer.encode(TEXTS[1])
    wanted = unit(reference(TEXTS[1])[:16])
    found = {}
    for encoding in ("float", "base64"):
        body = {"model": "tiny", "input": ids, "dimensions": 16, "encoding_format": encoding}
        found[encoding] = tiny.post("/v1/embeddings", json=body).raise_for_status().json()["data"][0]["embedding"]
    close(found["float"], wanted)
    np.testing.assert_array_equal(
        np.frombuffer(base64.b64decode(found["base64"]), "<f4"), np.array(found["float"], np.float32)
    )


def test_beside_requests_that_generate(client, reference):
    def write(_):
        return client.completions.create(model="tiny", prompt="Once", max_tokens=24, temperature=0).choices[0].text

    alone = write(0)
    with ThreadPoolExecutor(8) as pool:
        written = [pool.submit(write, i) for i in range(4)]
        vectors = [pool.submit(client.embeddings.create, model="tiny", input=TEXTS) for _ in range(4)]
        assert {future.result().strip() for future in written} == {alone.strip()}
        for future in vectors:
            for item, text in zip(future.result().data, TEXTS, strict=True):
                close(item.embedding, unit(reference(text)))


def test_a_cached_prefix_is_counted(tiny):
    body = {"input": TEXTS[2] + "and then some", "cache_salt": "embeddings-1"}
    for cached in (False, True):
        usage = tiny.post("/v1/embeddings", json=body).raise_for_status().json()["usage"]
        assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) == cached


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"input": []}, "input", "input is empty"),
        ({"input": ["a", ""]}, "input", "input.1 has an empty text"),
        ({"input": [[]]}, "input", "input has an empty text"),
        ({"input": ["a", 1]}, "input", "string"),
        ({"input": [10**6]}, "input", "input has the token id 1000000, which is outside of"),
        ({"input": [[1], [2, 10**6]]}, "input", "input.1 has the token id 1000000, which is outside of"),
        ({"dimensions": 0}, "dimensions", "allowed: 1 to 256"),
        ({"dimensions": 257}, "dimensions", "allowed: 1 to 256"),
        ({"encoding_format": "int8"}, "encoding_format", "float"),
        ({"pooling": "cls"}, "pooling", "last"),
        ({"model": "other"}, "model", "does not exist"),
        ({"input": "word " * 20000}, "input", "context"),
        ({"input": ["a", "word " * 3000]}, "input", "input.1 has 3001 tokens; the context holds 2048"),
        ({"input": [[1], [2], ["a"]]}, "input", "input.2.0 is 'a': input should be a valid integer"),
    ],
)
def test_what_is_wrong_is_named(tiny: httpx.Client, change, param, message):
    answer = tiny.post("/v1/embeddings", json={"input": "a", **change})
    assert answer.status_code == (404 if param == "model" else 400)
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert message in error["message"]


def test_the_client_raises_its_own_error(client):
    with pytest.raises(openai.BadRequestError, match="dimensions is 1000"):
        client.embeddings.create(model="tiny", input="a", dimensions=1000)


def test_nothing_is_left_running(tiny):
    stats = tiny.get("/server_info").json()["stats"]
    assert stats["running"] == stats["waiting"] == stats["pages_used"] == 0
