"""Draw training documents, each with a position from which the target continues, and held-out prompts for measuring
acceptance. Everything here runs on the host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer
from tools.tiny.chat import START, Segment, render
from tools.tiny.corpus.conversation import document
from tools.tiny.corpus.seeds import suite_random
from tools.tiny.make_data import CONTEXT, ID_MASK, LEARN

JOB = 1000
"""Number of documents that a worker draws in one job."""
LONGEST_PROMPT = 448
TASKS_SEEN = ("plain completion of a fact", "wordings of the training data")
"""Suites of tools.tiny.evaluate whose prompts are not held out."""


class Document(NamedTuple):
    """Hold a document. ``tokens`` (uint16) have the flag LEARN where a model must produce them. The target continues
    ``tokens[:cut]``; a text without a suitable position has a ``cut`` of 0."""

    tokens: np.ndarray
    cut: int


class Prompt(NamedTuple):
    """Hold a held-out prompt of a suite."""

    suite: str
    tokens: np.ndarray


class HeldOut(NamedTuple):
    """Hold prompts for measuring, and the user turns in them, which training texts must not contain."""

    prompts: list[Prompt]
    turns: frozenset[str]


def held_out(tokenizer_file: Path, cases: int, seed: int) -> HeldOut:
    """Return ``cases`` prompts of every suite of tools.tiny.evaluate that was not used to train the target."""
    from tools.tiny.evaluate import SUITES

    tokenizer, prompts, turns = Tokenizer.from_file(str(tokenizer_file)), [], set()
    for name in SUITES:
        if name.endswith(TASKS_SEEN):
            continue
        rng = suite_random(seed, name)
        for case in [SUITES[name](rng) for _ in range(cases)]:
            segments = render(case.messages, case.tools)
            turns.update(segment.text for segment in segments if _is_user(segment))
            head = f"{START}assistant\n" + ("<think>\n" if case.thinking else "")
            text = "".join(segment.text for segment in segments) + head
            prompts.append(Prompt(name, np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.uint16)))
    return HeldOut(prompts, frozenset(turns))


def _is_user(segment: Segment) -> bool:
    return segment.text.startswith(f"{START}user")


def documents(tokenizer_file: Path, count: int, workers: int, seed: int, banned: frozenset[str]) -> list[Document]:
    """Return ``count`` training documents (rounded up to whole jobs), none with a user turn in ``banned``. They do not
    depend on the number of ``workers`` (0: only this process). Call it before CUDA is used, because workers are forked.
    """
    jobs = [(str(tokenizer_file), f"{seed}-{job}", min(JOB, count), banned) for job in range(-(-count // JOB))]
    if not workers:
        return [document for job in jobs for document in _work(job)]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with get_context("fork").Pool(workers) as pool:
        return [document for part in pool.imap(_work, jobs) for document in part]


@cache
def _tokenizer(file: str) -> Tokenizer:
    return Tokenizer.from_file(file)


def _work(job: tuple[str, str, int, frozenset[str]]) -> list[Document]:
    tokenizer_file, seed, count, banned = job
    rng, tokenizer = Random(seed), _tokenizer(tokenizer_file)
    drawn = list(_allowed(rng, count, banned))
    ids = iter(tokenizer.encode_batch_fast([s.text for segments in drawn for s in segments], add_special_tokens=False))
    out = []
    for segments in drawn:
        parts = [np.array(next(ids).ids, np.uint16) | (LEARN if segment.learn else 0) for segment in segments]
        tokens = np.concatenate(parts)[:CONTEXT]
        out.append(Document(tokens, _cut(segments, parts, rng)))
    return out


def _allowed(rng: Random, count: int, banned: frozenset[str]) -> Iterator[list[Segment]]:
    while count:
        segments = document(rng)
        if not any(segment.text in banned for segment in segments):
            count -= 1
            yield segments


def _cut(segments: list[Segment], parts: list[np.ndarray], rng: Random) -> int:
    """Return a position from which the target continues: the start of a reply, or a position near the start of a plain
    text."""
    if len(segments) == 1:
        return min(rng.randint(4, 24), len(parts[0]) - 1)
    starts = np.cumsum([0, *map(len, parts)]).tolist()
    cuts = [start for start, s in zip(starts, segments, strict=False) if s.learn and start <= LONGEST_PROMPT]
    return rng.choice(cuts) if cuts else 0


def continued(before: np.ndarray, text: np.ndarray) -> np.ndarray:
    """Return the flagged tokens of ``text``, which continues the flagged tokens ``before``. The new tokens are to be
    learned."""
    out = text | np.uint16(LEARN)
    out[: len(before)] = before
    return out


def plain(tokens: np.ndarray) -> np.ndarray:
    """Return the ids of flagged tokens."""
    return tokens & np.uint16(ID_MASK)
