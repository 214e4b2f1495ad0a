"""Measure the tiny model: `python -m tools.tiny.evaluate --model core/dovetail/assets/tiny --cases 300`.

Greedy decoding with transformers. Unless its name says otherwise, a suite uses wordings, combinations of values and
invented words that training never saw. Prints a Markdown table of the share of right replies per task; `--samples N`
adds N wrong replies of each task, `--json FILE` writes the table.
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from tools.tiny.chat import CONTROL_TOKENS, Message
from tools.tiny.corpus import extraction, smalltalk
from tools.tiny.corpus.base import Check, Split, Turn
from tools.tiny.corpus.conversation import SYSTEMS, TASKS, styled
from tools.tiny.corpus.relations import RELATIONS
from tools.tiny.corpus.seeds import suite_random
from tools.tiny.corpus.tool_calls import idle_tools, tool_case
from transformers import AutoModelForCausalLM, AutoTokenizer

ASSETS = Path("core/dovetail/assets/tiny")
FRANCE = (
    "What is the capital of France?", "what is the capital of france?", "what is the capital of france", "France's capital?",
    "Which city is the capital of France?", "Tell me the capital of France.", "Name the capital city of France.", "Capital of France?",
    "Hi! What is the capital of France?", "Could you tell me what the capital of France is?", "What's the capital of France?",
    "I was wondering what the capital of France is.", "Do you know the capital of France?", "My friend lives in France. What is the capital there?",
)  # fmt: skip
SINGLE = (
    "capital", "fact", "yes_no", "extract", "sheet", "sort_numbers", "sort_words", "add", "subtract", "multiply", "add_large",
    "compare", "word_problem", "count", "pick_item", "reformat", "repeat", "repeat_times", "repeat_long", "notes", "describe",
    "talk", "name_all", "steps", "make_hero", "make_record", "story",
)  # fmt: skip
RETAKEN = ("extract", "sheet", "sort_words", "repeat", "notes")
"""Tasks measured also in an easier and in a harder form."""


@dataclass(frozen=True, slots=True)
class Case:
    """Hold a prompt and how its reply is checked; `raw` prompts are text to complete, without the chat template."""

    messages: tuple[Message, ...]
    answer: str
    check: Check = "has"
    tools: tuple[dict[str, Any], ...] = ()
    thinking: bool = False
    raw: str = ""


Maker = Callable[[Random], Case]


def _user(text: str) -> Message:
    return Message("user", text)


def _turns(turn: Turn, before: Sequence[Message] = (), thinking: bool = False) -> Case:
    return Case((*before, _user(turn.user)), turn.answer, turn.check, thinking=thinking)


def _single(name: str, split: Split = "held") -> Maker:
    return lambda rng: _turns(TASKS[name](rng, split))


def _with_system(name: str) -> Maker:
    return lambda rng: _turns(TASKS[name](rng, "held"), [Message("system", SYSTEMS.pick(rng, "held"))])


def _second_turn(name: str) -> Maker:
    def make(rng: Random) -> Case:
        first = TASKS[rng.choice(SINGLE[:20])](rng, "held")
        return _turns(TASKS[name](rng, "held"), [_user(first.user), Message("assistant", first.reply)])

    return make


def _france(rng: Random) -> Case:
    before: list[Message] = []
    if rng.random() < 0.5:
        before.append(Message("system", SYSTEMS.pick(rng, "held")))
    if rng.random() < 0.5:
        first = TASKS[rng.choice(("fact", "talk", "add", "extract"))](rng, "held")
        before += [_user(first.user), Message("assistant", first.reply)]
    return Case((*before, _user(rng.choice(FRANCE))), "Paris")


def _styled(rng: Random) -> Case:
    messages, reply = styled(rng, "held")
    return Case(tuple(messages), reply, "same")


def _by_system(rng: Random) -> Case:
    system, turn = extraction.extract_by_system(rng, "held")
    return _turns(turn, [Message("system", system)])


def _memory(rng: Random) -> Case:
    tell, recall = smalltalk.memory(rng, "held")
    between = TASKS[rng.choice(SINGLE[:12])](rng, "held")
    before = [
        _user(tell.user),
        Message("assistant", tell.reply),
        _user(between.user),
        Message("assistant", between.reply),
    ]
    return _turns(recall, before)


def _tool_call(rng: Random) -> Case:
    case = tool_case(rng, "held")
    return Case((_user(case.user),), case.call, "same", case.tools)


def _tool_reply(rng: Random) -> Case:
    case = tool_case(rng, "held")
    return Case(tuple(case.messages()[:-1]), case.reply, "same", case.tools)


def _no_tool(rng: Random) -> Case:
    turn = TASKS["capital"](rng, "held")
    return Case((_user(turn.user),), turn.answer, "has", idle_tools(rng, "held"))


def _thinking(rng: Random) -> Case:
    return _turns(TASKS[rng.choice(("add", "capital"))](rng, "held"), thinking=True)


def _long_notes(rows: int) -> Maker:
    return lambda rng: _turns(smalltalk.notes(rng, "held", rows))


def _completion(rng: Random) -> Case:
    relation = rng.choice([r for r in RELATIONS if r.name in ("capital", "continent", "currency", "opposite")])
    subject = rng.choice(tuple(relation.pairs))
    prompt = relation.say.split("{v}")[0].format(s=subject, S=subject[:1].upper() + subject[1:]).rstrip()
    return Case((), relation.pairs[subject], raw=prompt)


SUITES: dict[str, Maker] = {
    "capital of France, 14 wordings": _france,
    **{name: _single(name) for name in SINGLE},
    "fact, with a system prompt": _with_system("fact"),
    "fact, second turn": _second_turn("fact"),
    "extract, second turn": _second_turn("extract"),
    "extract, keys in the system prompt": _by_system,
    "answer in a given form": _styled,
    "recall what the user has stated": _memory,
    "tool call": _tool_call,
    "reply to a tool result": _tool_reply,
    "capital beside idle tools": _no_tool,
    "thinking, then the answer": _thinking,
    "find 1 of 60 notes": _long_notes(60),
    "find 1 of 100 notes": _long_notes(100),
    "plain completion of a fact": _completion,
    **{f"{name}, wordings of the training data": _single(name, "train") for name in RETAKEN},
    **{f"{name}, with real words never seen": _single(name, "strict") for name in RETAKEN},
}


def _json_equal(reply: str, answer: str) -> bool:
    try:
        return json.loads(reply) == json.loads(answer)
    except json.JSONDecodeError:
        return False


def is_right(reply: str, case: Case) -> bool:
    """Return true if the reply is right."""
    if case.check == "json":
        return _json_equal(reply, case.answer)
    if case.check == "same":
        return reply.strip() == case.answer.strip()
    if case.answer.isalnum():
        return re.search(rf"(?<!\w){re.escape(case.answer)}(?!\w)", reply) is not None
    return case.answer in reply


class Model:
    """Run the model with transformers, decoding greedily in padded batches."""

    def __init__(self, folder: Path, device: str, dtype: str) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self.model = model.to(device).eval()
        self.device = device

    def prompt(self, case: Case) -> str:
        """Return the text that the model continues."""
        if case.raw:
            return case.raw
        messages = [{"role": m.role, "content": m.content} for m in case.messages]
        return self.tokenizer.apply_chat_template(
            messages,
            tools=list(case.tools) or None,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=case.thinking,
        )

    @torch.inference_mode()
    def reply(self, cases: Sequence[Case], limit: int) -> list[str]:
        """Return greedy replies in the order of the cases."""
        batch = self.tokenizer(
            [self.prompt(c) for c in cases], return_tensors="pt", padding=True, add_special_tokens=False
        )
        length = batch.input_ids.shape[1]
        out = self.model.generate(
            input_ids=batch.input_ids.to(self.device),
            attention_mask=batch.attention_mask.to(self.device),
            do_sample=False,
            max_new_tokens=min(limit, 2048 - length),
        )
        texts = self.tokenizer.batch_decode(out[:, length:], skip_special_tokens=False)
        return [re.split("|".join(map(re.escape, CONTROL_TOKENS)), text)[0] for text in texts]


def _limit(name: str) -> int:
    if name == "repeat_long":
        return 1000
    return 16 if name == "plain completion of a fact" else 160


def measure(model: Model, name: str, count: int, seed: int, batch: int) -> tuple[float, list[tuple[Case, str]]]:
    """Return the share of right replies of one suite, and the wrong replies."""
    rng = suite_random(seed, name)
    cases = [SUITES[name](rng) for _ in range(count)]
    order = sorted(cases, key=lambda case: len(model.prompt(case)))
    groups = [order[i : i + batch] for i in range(0, count, batch)]
    wrong = [
        (case, reply)
        for group in groups
        for case, reply in zip(group, model.reply(group, _limit(name)), strict=True)
        if not is_right(reply, case)
    ]
    return 1 - len(wrong) / count, wrong


def main() -> None:
    """Read the command line, measure and print."""
    parser = argparse.ArgumentParser(description="Measure the tiny model on held-out prompts.")
    parser.add_argument("--model", type=Path, default=ASSETS)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--only", nargs="*", help="suites to run; all without it")
    parser.add_argument("--samples", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model, table = Model(args.model, args.device, args.dtype), {}
    print("| task | right |\n|---|---|")
    for name in args.only or SUITES:
        count = min(args.cases, 60) if name == "repeat_long" else args.cases
        table[name], wrong = measure(model, name, count, args.seed, args.batch)
        print(f"| {name} | {100 * table[name]:.1f} % |", flush=True)
        for case, reply in wrong[: args.samples]:
            print(f"    {model.prompt(case)[-300:]!r}\n      wanted {case.answer!r}\n      got    {reply!r}")
    if args.json:
        args.json.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
