"""Compare /tokenize and /detokenize to the tokenizers library and the chat template.

.venv/bin/python -m pytest -q -p no:xdist tests/e2e/test_tokenize_api.py
"""

import pytest
from tokenizers import Tokenizer as Library
from transformers import AutoTokenizer

from dovetail.config.checkpoint import locate

TEXTS = ["Hello, world!", "naïve café ☕ and more", "<|im_start|>user", ""]


@pytest.fixture(scope="module")
def library():
    return Library.from_file(str(locate("tiny") / "tokenizer.json"))


def posted(client, path, **body):
    return client.post(path, json=body).raise_for_status().json()


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
@pytest.mark.parametrize("text", TEXTS)
def test_there_and_back(fake, library, path, text):
    answer = posted(fake, path, model="tiny", prompt=text, return_token_strs=True)
    wanted = library.encode(text).ids
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (wanted, len(wanted), 2048)
    assert len(answer["token_strs"]) == len(wanted)
    back = posted(fake, path.replace("token", "detoken"), tokens=wanted)
    assert back["prompt"] == text
    assert back["text"] == library.decode(wanted)


def test_several_at_once(fake, library):
    answer = posted(fake, "/tokenize", prompt=TEXTS[:2])
    assert answer["tokens"] == [library.encode(text).ids for text in TEXTS[:2]]
    assert answer["count"] == [len(ids) for ids in answer["tokens"]]
    assert answer["token_strs"] is None
    assert posted(fake, "/detokenize", tokens=answer["tokens"])["text"] == TEXTS[:2]


def test_the_strings_of_the_tokens_are_the_text(fake):
    assert "".join(posted(fake, "/tokenize", prompt=TEXTS[0], return_token_strs=True)["token_strs"]) == TEXTS[0]


@pytest.mark.parametrize("opened", [True, False])
def test_a_conversation_as_the_model_sees_it(fake, library, opened):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    answer = posted(fake, "/tokenize", messages=messages, add_generation_prompt=opened)
    template = AutoTokenizer.from_pretrained(locate("tiny"))
    text = template.apply_chat_template(messages, tokenize=False, add_generation_prompt=opened)
    assert answer["tokens"] == library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "high"},
        {"enable_thinking": False},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"continue_final_message": True, "add_generation_prompt": False},
    ],
)
def test_a_conversation_has_the_tokens_of_the_chat(tiny, fields):
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "He"}]
    counted = posted(tiny, "/tokenize", messages=messages, **fields)["tokens"]
    chat = posted(tiny, "/v1/chat/completions", messages=messages, max_tokens=1, return_prompt_token_ids=True, **fields)
    assert counted == chat["choices"][0]["prompt_token_ids"]


def test_longer_than_the_context_is_counted_all_the_same(fake):
    answer = posted(fake, "/tokenize", prompt="word " * 4000)
    assert answer["count"] > answer["max_model_len"]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a", "word " * 40_000]},
        {"messages": [{"role": "user", "content": "word " * 40_000}]},
    ],
)
def test_what_no_request_could_use_is_not_tokenized(fake, body):
    answer = fake.post("/tokenize", json=body)
    assert answer.status_code == 400
    assert "holds 2048 tokens" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "give one of prompt and messages"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "give one of"),
        ("/tokenize", {"messages": []}, "at least 1"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "requests cannot contain templates"),
        ("/detokenize", {"tokens": [-1]}, "outside of"),
        ("/detokenize", {"tokens": [[10**6]]}, "outside of"),
        ("/detokenize", {"tokens": "a"}, "valid list"),
        ("/detokenize", {}, "tokens is missing"),
    ],
)
def test_what_is_wrong_is_named(fake, path, body, message):
    answer = fake.post(path, json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
