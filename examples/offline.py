"""Generate text in this process, without a server. Run: python examples/offline.py"""

from __future__ import annotations

import json

from dovetail import LLM, GrammarKind, GrammarSpec, SamplingParams

llm = LLM("tiny")

prompts = ["What is the capital of France?", "What is the capital of Italy?"]
chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
for chat in chats:
    print(chat[0]["content"], "->", llm.chat(chat, SamplingParams(max_new_tokens=16, temperature=0)).text)

schema = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
as_json = SamplingParams(
    max_new_tokens=64, temperature=0, grammar=GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))
)
question = "Extract the name and the age as JSON: Alice is 30 years old."
print(llm.chat([{"role": "user", "content": question}], as_json).text)

llm.close()
