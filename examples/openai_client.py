"""Call a running server with OpenAI's client. Run: `dovetail serve`, then python examples/openai_client.py"""

from __future__ import annotations

import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000/v1", api_key="none")
model = client.models.list().data[0].id

answer = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": "What is the capital of France?"}], max_tokens=16, temperature=0
)
print(answer.choices[0].message.content)

stream = client.completions.create(model=model, prompt="Once upon a time", max_tokens=32, temperature=0, stream=True)
for chunk in stream:
    print(chunk.choices[0].text, end="", flush=True)
print()

schema = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Extract the name and the age as JSON: Alice is 30 years old."}],
    response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
    max_tokens=64,
    temperature=0,
)
print(answer.choices[0].message.content)
