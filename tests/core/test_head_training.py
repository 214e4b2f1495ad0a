"""Test that tools/speculative trains what the drafters compute: the same drafts, of which the engine accepts the same
number.

.venv/bin/python -m pytest -q tests/core/test_head_training.py
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dovetail import LLM, SamplingParams
from dovetail.testing.drafter import text_of

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from tools.speculative import train  # noqa: E402
from tools.speculative.acceptance import greedy_replies, measure  # noqa: E402
from tools.speculative.install import install  # noqa: E402
from tools.speculative.llama import Llama  # noqa: E402
from tools.speculative.prompts import Document, Prompt, documents, held_out  # noqa: E402
from tools.speculative.texts import Texts, View  # noqa: E402

TINY = ROOT / "core/dovetail/assets/tiny"
CPU = torch.device("cpu")
QUESTIONS = ("What is the capital of France?", "Sort: 5, 3, 9, 1", "Repeat: a bird sings a song")


@pytest.fixture(scope="module")
def target():
    return Llama.load(TINY, CPU)


@pytest.fixture(scope="module")
def texts(target):
    rng = np.random.default_rng(1)
    made = [rng.integers(20, 4000, length).astype(np.uint16) for length in (30, 60, 90, 300)]
    for text in made:
        text[10:] |= 0x8000
    return Texts(target, made, batch_tokens=400, batch_anchors=60, seed=1)


@pytest.fixture(scope="module")
def prompts():
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    chats = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
    return [Prompt(chat, np.array(tokenizer.encode(chat, add_special_tokens=False).ids)) for chat in chats]


@pytest.fixture(scope="module")
def heads(target, texts, tmp_path_factory):
    """Return drafters with large random weights, the folder that has them, and the target's folder with them
    installed."""
    out, model = tmp_path_factory.mktemp("heads"), tmp_path_factory.mktemp("target") / "tiny"
    shutil.copytree(TINY, model)
    settings = train.parse(["--out", str(out), "--device", "cpu", "--draft-vocab", "700"])
    made = {}
    for name in train.SHARES:
        drafter = train.build(name, target, texts, settings)
        for parameter in drafter.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[1] ** -0.5)
            else:
                parameter.data.mul_(1 + 0.3 * torch.randn_like(parameter))
        drafter.save(out / name, target)
        drafter.load(out / name)
        made[name] = drafter
    install(out, model)
    return made, out, model


def engine(model, name):
    return LLM(
        str(model),
        device="cpu",
        grammar="none",
        speculative={"kind": name},
        scheduler={"draft": "always", "chunk_size": 16},
        memory={"page_size": 16, "num_pages": 200},
    )


@pytest.mark.parametrize("name", train.SHARES)
def test_the_engine_drafts_the_same(target, heads, prompts, name):
    drafter, model = heads[0][name], heads[2]
    llm = engine(model, name)
    proposals = []
    propose = llm.loop.executor.rank.drafter.propose

    def recorded(batch):
        tree = propose(batch)
        if tree is not None:
            rows = np.flatnonzero(tree.lens).tolist()
            proposals.extend((text_of(batch, row), tree.token_ids[row, : tree.lens[row]].tolist()) for row in rows)
        return tree

    llm.loop.executor.rank.drafter.propose = recorded
    llm.generate([prompt.tokens.tolist() for prompt in prompts], SamplingParams(max_new_tokens=30, temperature=0))
    assert llm.loop.drafter_errors == 0
    assert len(proposals) >= 20
    assert len({tuple(drafts) for _, drafts in proposals}) > 5
    for known, drafts in proposals:
        ids = torch.tensor([known])
        view = View(ids, target.read(ids)[0])
        ours = drafter.draft(target, view, torch.tensor([[len(known) - 1]]))[0, 0].tolist()
        assert drafts == ours[: len(drafts)]


@pytest.mark.parametrize("name", train.SHARES)
def test_drafts_depend_on_the_text_up_to_their_anchor_alone(target, heads, name):
    drafter = heads[0][name]
    ids = torch.randint(20, 4000, (2, 40), generator=torch.Generator().manual_seed(3))
    anchors = torch.tensor([[5, 20, 30], [1, 7, 33]])
    together = drafter.draft(target, View(ids, target.read(ids)[0]), anchors)
    for row, column in np.ndindex(2, 3):
        anchor = int(anchors[row, column])
        cut = ids[row : row + 1, : anchor + 1]
        alone = drafter.draft(target, View(cut, target.read(cut)[0]), torch.tensor([[anchor]]))
        assert torch.equal(alone[0, 0], together[row, column])


def walk(drafter, target, replies):
    """Return the number of steps for all replies, one after the other, and the number of tokens that drafts add to one
    token per step."""
    steps = taken = 0
    for part in replies:
        for row, (start, end) in enumerate(zip(part.starts.tolist(), part.ends.tolist(), strict=True)):
            text = part.ids[row, :end]
            while start < end - 1:
                view = View(text[None, : start + 1], target.read(text[None, : start + 1])[0])
                drafts = drafter.draft(target, view, torch.tensor([[start]]))[0, 0].tolist()
                follow = text[start + 1 :].tolist()
                right = next(
                    (i for i, pair in enumerate(zip(drafts, follow, strict=False)) if pair[0] != pair[1]), None
                )
                right = min(len(drafts), len(follow)) if right is None else right
                start, steps, taken = start + right + 1, steps + 1, taken + min(right, len(follow) - 1)
    return steps, taken


def test_acceptance_is_what_the_engine_accepts(target, texts, prompts, heads, tmp_path):
    """The draft model was trained a little on these replies, so some drafts are accepted, not all."""
    replies = greedy_replies(target, prompts, limit=40)
    settings = train.parse(["--out", str(tmp_path), "--device", "cpu"])
    drafter = train.build("draft_model", target, texts, settings)
    learned = [
        row[:end].numpy().astype(np.uint16)
        for part in replies
        for row, end in zip(part.ids, part.ends.tolist(), strict=True)
    ]
    for row, start in zip(learned, (start for part in replies for start in part.starts.tolist()), strict=True):
        row[start:] |= 0x8000
    train.fit(drafter, target, Texts(target, learned, 192, 32, 1), train.Clock(1, 25), 3e-3)
    drafter.save(tmp_path / "draft_model", target)
    drafter.load(tmp_path / "draft_model")
    result = measure(drafter, target, replies)
    model = heads[2].parent / "measured"
    shutil.copytree(TINY, model)
    install(tmp_path, model)
    llm = engine(model, "draft_model")
    outputs = llm.generate(
        [prompt.tokens.tolist() for prompt in prompts], SamplingParams(max_new_tokens=40, temperature=0)
    )
    said = [
        part.ids[row, start:end].tolist()
        for part in replies
        for row, (start, end) in enumerate(zip(part.starts, part.ends, strict=True))
    ]
    assert sorted(map(tuple, said)) == sorted(tuple(output.token_ids) for output in outputs)
    total = sum(len(reply) - 1 for reply in said)
    steps, taken = walk(drafter, target, replies)
    assert 5 < taken < total - 5
    assert llm.loop.stats().accepted_tokens == taken == total - steps
    assert result.tokens_per_step == pytest.approx(total / steps)


@pytest.mark.parametrize("name", train.SHARES)
def test_training_lowers_the_loss(target, texts, name, tmp_path):
    settings = train.parse(["--out", str(tmp_path), "--device", "cpu"])
    drafter = train.build(name, target, texts, settings)
    with torch.no_grad():
        before = drafter.loss(target, texts.sample()).item()
    report = train.fit(drafter, target, texts, train.Clock(1, 12), 3e-3)
    with torch.no_grad():
        after = drafter.loss(target, texts.sample()).item()
    assert report["steps"] == 12
    assert after < 0.9 * before


def test_published_layouts(heads):
    _, out, model = heads
    eagle = load_file(out / "eagle3" / "model.safetensors")
    assert {name.split(".")[0] for name in eagle} == {"fc", "midlayer", "norm", "lm_head", "d2t", "t2d"}
    chosen = eagle["d2t"] + torch.arange(700)
    assert torch.equal(eagle["t2d"].nonzero()[:, 0], chosen)
    assert json.loads((model / "config.json").read_text())["num_nextn_predict_layers"] == 1
    before, after = load_file(TINY / "model.safetensors"), load_file(model / "model.safetensors")
    own = {name for name in before if not name.startswith("model.layers.4.")}
    assert all(torch.equal(before[name], after[name]) for name in own)
    assert {name.removeprefix("model.layers.4.").split(".")[0] for name in set(after) - own} == {
        "enorm", "hnorm", "eh_proj", "shared_head", "input_layernorm", "self_attn", "post_attention_layernorm", "mlp",
    }  # fmt: skip
    files = [out / name / "model.safetensors" for name in train.SHARES]
    assert sum(file.stat().st_size for file in files) < 8_000_000


def test_texts_that_the_target_goes_on_with_are_its_own(target):
    """The tokens equal those of decoding one by one without a cache. The prompt keeps its flags, and new tokens are
    marked for training."""
    drawn = documents(TINY / "tokenizer.json", 6, 0, 5, frozenset())
    short = [Document(d.tokens, d.cut) for d in drawn if 0 < d.cut < 60]
    assert len(short) > 1
    texts = target.continue_texts([d.tokens[: d.cut] & 0x0FFF for d in short], 12, 0.0, torch.Generator())
    for document, text in zip(short, texts, strict=True):
        ids = [int(token) for token in document.tokens[: document.cut] & 0x0FFF]
        while len(ids) < document.cut + 12 and (len(ids) == document.cut or ids[-1] not in (0, 2)):
            states, _ = target.read(torch.tensor([ids]))
            ids.append(int(target.logits(states[-1][0, -1]).argmax()))
        assert text.tolist() == ids


def test_held_out_prompts_are_in_no_training_text():
    held = held_out(TINY / "tokenizer.json", 1, 7)
    banned = held.turns | {f"<|im_start|>user\n{QUESTIONS[0]}<|im_end|>\n"}
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    said = [
        tokenizer.decode((d.tokens & 0x0FFF).tolist(), skip_special_tokens=False)
        for d in documents(TINY / "tokenizer.json", 300, 0, 2, banned)
    ]
    assert not [turn for turn in banned if any(turn in text for text in said)]
