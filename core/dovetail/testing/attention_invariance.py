"""Test attention backends that offer attention.batch_invariant: the same tokens have the same bits in every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from dovetail.interfaces.attention import AttentionBackend
from dovetail.interfaces.features import Feature
from dovetail.testing.attention_cases import DECODE, EXTEND, GRAPH, GRAPH_ROWS, STEPS, VERIFY
from dovetail.testing.attention_checks import AttentionChecks
from dovetail.testing.attention_divided import (
    DIVISIONS,
    LENGTH,
    LONG,
    OTHER_LENS,
    VARIANTS,
    DividedRows,
    Division,
    RowSpan,
)
from dovetail.testing.attention_graphs import (
    VERIFY_TOKENS,
    VERIFY_WIDTH,
    CapturedDecodeForward,
    CapturedVerifyForward,
    verify_step,
)
from dovetail.testing.attention_reference import AttentionCase, AttentionStep

INVARIANT = Feature.ATTN_BATCH_INVARIANT


class InvarianceCases(AttentionChecks):
    """Compare bits, as a part of ``AttentionSuite``. All backends are built with ``batch_invariant``.

    ``not_invariant`` names the fields of ``AttentionCase`` (such as ``kv_dtype``) that a backend supports only without
    it.
    """

    not_invariant: tuple[str, ...] = ()

    @pytest.mark.parametrize("step", ["extend after a prefix", "decode", "mixed", "verify and extend"])
    @torch.inference_mode()
    def test_batch_invariance(self, step: str) -> None:
        """A row's bits do not depend on the other rows."""
        case, features = STEPS[step]
        for feature in (*features, INVARIANT):
            self.require(feature)
        whole = AttentionStep(self.fit(replace(case, batch_invariant=True)), self.find_device())
        backend = self.make(whole.context())
        together = _output(backend, whole)
        for row in range(len(whole.lens)):
            alone, tokens = self.alone(backend, whole, row)
            assert torch.equal(alone, together[tokens]), f"row {row} has other bits in a batch with other rows"

    @pytest.mark.parametrize("variant", VARIANTS)
    @pytest.mark.parametrize("length", [LENGTH, LONG])
    @torch.inference_mode()
    def test_batch_invariance_of_divided_rows(self, length: int, variant: str) -> None:
        """A query's bits are the same in a prompt, a chunk, a decode step and a chain of drafts, regardless of the
        location of the pages."""
        changes, features = VARIANTS[variant]
        for feature in (EXTEND, DECODE, *features, INVARIANT):
            self.require(feature)
        case, device = self._fitted(changes), self.find_device()
        lens = [min(n, max(LENGTH, self.longest)) for n in (length, *OTHER_LENS)]
        rows = DividedRows(case, lens, device)
        backend = self.make(rows.whole.context())
        queries = 0, max(0, lens[0] - LENGTH), lens[0]
        prompt = rows.step([queries], 1)
        expected = _output(backend, prompt)
        self.compare_output(prompt, expected)
        for title, division in DIVISIONS.items():
            if all(map(self.offers, division.features)):
                _check_division(backend, rows, division, queries, expected, title)
        moved = DividedRows(replace(case, ordered_pages=True), lens, device)
        elsewhere = _output(self.make(moved.whole.context()), moved.step([queries], 1))
        assert torch.equal(elsewhere, expected), "a prompt has other bits where its pages follow each other"

    def _fitted(self, changes: dict[str, Any]) -> AttentionCase:
        """Return a case with these changes. Skips if the component does not allow one of them."""
        for key in self.not_invariant:
            if key in changes:
                pytest.skip(f"{self.name} refuses {key} with batch_invariant")
        if "kv_dtype" in changes:
            self.skip_kv_dtype("fp8_e4m3")
        case = self.fit(AttentionCase([], [], **changes))
        for key, value in changes.items():
            if getattr(case, key) != value:
                pytest.skip(f"{self.name} does not allow {key} {value}")
        return case

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @torch.inference_mode()
    def test_batch_invariance_of_graphs(self, dtype: torch.dtype) -> None:
        """A query's bits are the same in graphs of decode steps and of chains."""
        for feature in (EXTEND, DECODE, GRAPH, INVARIANT):
            self.require(feature)
        self.skip_dtype(dtype)
        device = self.find_device()
        if device.type != "cuda":
            pytest.skip("graphs need CUDA")
        lens = [70, 300, 17, 150, 16, 33, 299, 1500, 260, *[9] * (VERIFY_TOKENS - GRAPH_ROWS)]
        rows = DividedRows(self.fit(AttentionCase([], [], dtype=dtype, page_size=16)), lens, device)
        backend = self.make(rows.whole.context())
        for size, most in ((1, 1), (GRAPH_ROWS, 2), (GRAPH_ROWS, GRAPH_ROWS)):
            graph = CapturedDecodeForward(backend, rows.whole, size, shared=False)
            parts = rows.ends([1] * most)
            step = graph.step(rows.whole.case, [start for _, start, _ in parts], None)
            _check_replay(backend, rows, graph, step, parts)
        if not (self.offers(VERIFY) and self.offers(Feature.ATTN_VERIFY_GRAPH)):
            return
        chains = CapturedVerifyForward(backend, rows.whole, tree=False)
        for counts in ([VERIFY_WIDTH], [1, 5, 2, 4, 1, 2], [1] * VERIFY_TOKENS):
            parts = rows.ends(counts)
            trees = [list(range(-1, count - 2)) for count in counts]
            prefix = [start for _, start, _ in parts]
            step = verify_step(rows.whole.case, rows.whole, prefix, trees, VERIFY_TOKENS)
            _check_replay(backend, rows, chains, step, parts)


def _output(backend: AttentionBackend, step: AttentionStep) -> torch.Tensor:
    backend.plan(step.batch)
    return backend.forward(step.q, step.layer, step.batch)


def _check_division(
    backend: AttentionBackend, rows: DividedRows, division: Division, whole: RowSpan, expected: torch.Tensor, title: str
) -> None:
    """Check that every part of ``whole`` has the bits of ``expected``, which is the output of ``whole``, alone and with
    other rows."""
    _, first, length = whole
    for part in division.parts(first, length):
        _, start, stop = part
        same = expected[start - first : stop - first]
        alone = _output(backend, rows.step([part], int(division.extends)))
        assert torch.equal(alone, same), f"{title}: queries {start} to {stop} have other bits than in one prompt"
        parts, num_extend = division.together(part, rows.lens)
        before = sum(stop - start for _, start, stop in parts[: parts.index(part)])
        together = _output(backend, rows.step(parts, num_extend))[before : before + len(same)]
        assert torch.equal(together, same), (
            f"{title}: queries {start} to {stop} have other bits in a step with other rows"
        )


def _check_replay(
    backend: AttentionBackend,
    rows: DividedRows,
    graph: CapturedDecodeForward | CapturedVerifyForward,
    step: AttentionStep,
    parts: Sequence[RowSpan],
) -> None:
    """Check that what ``graph`` computes for ``step``, which begins with ``parts``, has the bits of prompts."""
    queries = rows.queries(parts)
    step.q[: len(queries)] = queries
    replayed = graph.replay(step).split([stop - start for _, start, stop in parts] + [len(step.q) - len(queries)])
    for (row, start, stop), out in zip(parts, replayed, strict=False):
        first = max(0, stop - LENGTH)
        same = _output(backend, rows.step([(row, first, stop)], 1))[start - first :]
        assert torch.equal(out, same), (
            f"row {row}: queries {start} to {stop} have other bits in a graph than in a prompt"
        )
