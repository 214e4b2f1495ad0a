"""The attention suite fails on backends that are wrong in one way each, and passes the same backend without the flaw.

Run: python -m pytest tests/plugins/test_attention_suite.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from dovetail.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer
from dovetail.interfaces.features import Feature
from dovetail.plugins.specs import ComponentKind, ComponentSpec
from dovetail.testing.attention import STEPS, AttentionSuite
from dovetail.types import Batch

GRAPHS = {Feature.ATTN_GRAPH, Feature.ATTN_VERIFY_GRAPH}
OFFERS = frozenset(feature for feature in Feature if feature.startswith("attention.")) - GRAPHS


class Flawed(AttentionBackend):
    """Row by row and dense; ``flaw`` names what it does wrong."""

    def __init__(self, context: AttentionContext, flaw: str = "") -> None:
        self.pool, self.flaw = context.pool, flaw

    def plan(self, batch: Batch) -> None:
        if self.flaw != "plans once" or not hasattr(self, "batch"):
            self.batch = batch

    def forward(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        if self.flaw == "adds to q":
            q += 1
        out = torch.empty_like(q)
        for row, (start, end) in enumerate(zip(batch.qo_indptr.tolist(), batch.qo_indptr[1:].tolist(), strict=False)):
            out[start:end] = self.attend(row, slice(start, end), q[start:end], layer)
        if self.flaw == "writes to the pool":
            self.pool.keys(layer.layer_id)[1] = 0
        return out.float() if self.flaw == "returns float32" else out

    def attend(self, row: int, tokens: slice, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        batch, flaw = self.batch, self.flaw
        length = int(batch.kv_lens[row])
        places = self.places(row, length)
        layer_id = 0 if flaw == "reads layer 0" else layer.layer_id
        if flaw == "reads the tail of the page":
            places = self.places(row, -(-length // self.pool.page_size) * self.pool.page_size)
        k, v = (memory(layer_id).flatten(0, 1)[places].float() for memory in (self.pool.keys, self.pool.values))
        group = q.shape[1] // k.shape[1]
        k, v = (self.per_query_head(x, group) for x in (k, v))
        scores = layer.scale * torch.einsum("qhd,khd->hqk", q.float(), k)
        if layer.soft_cap is not None and flaw != "no soft cap":
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        scores = scores.masked_fill(~self.seen(row, tokens, len(places), length, layer), float("-inf"))
        return torch.einsum("hqk,khd->qhd", self.softmax(scores, q.dtype, layer), v).to(q.dtype)

    def places(self, row: int, length: int) -> torch.Tensor:
        table, size = self.pages(row).long(), self.pool.page_size
        places = torch.arange(length)
        if self.flaw == "takes pages to be consecutive":
            return table[0] * size + places
        return table[places // size] * size + places % size

    def pages(self, row: int) -> torch.Tensor:
        shared = self.batch.shared
        if shared is None or self.flaw == "ignores what is shared":
            return self.batch.page_table[row]
        group = 0 if self.flaw == "knows one group" else int((shared.indptr <= row).sum()) - 1
        count = int(shared.group_lens[group]) // self.pool.page_size
        return torch.cat([shared.group_table[group, :count], shared.own_table[row]])

    def per_query_head(self, x: torch.Tensor, group: int) -> torch.Tensor:
        if self.flaw == "groups heads the other way":
            return x.repeat(1, group, 1)
        return x.repeat_interleave(group, 1)

    def seen(self, row: int, tokens: slice, keys: int, length: int, layer: AttentionLayer) -> torch.Tensor:
        batch, flaw = self.batch, self.flaw
        position = batch.positions[tokens, None]
        key, prefix = torch.arange(keys), length - len(position)
        seen = key <= position + int(flaw == "one key too many")
        if flaw == "one key too few":
            seen = key < position.clamp(min=1)
        if flaw == "causal from the top left":
            seen = key <= position - prefix
        if batch.tree_mask is not None and flaw != "no tree mask":
            seen = seen | (key >= prefix)
            own = slice(prefix, length)
            seen[:, own] = batch.tree_mask[tokens, : len(position)]
        if layer.window is None or flaw == "no window":
            return seen & (key < length)
        place = key.clone()
        if flaw != "windows count places":
            place[prefix:length] = batch.positions[tokens]
        return seen & (key < length) & (place > position - layer.window - int(flaw == "window one too wide"))

    def softmax(self, scores: torch.Tensor, dtype: torch.dtype, layer: AttentionLayer) -> torch.Tensor:
        if self.flaw == "softmax in 16 bits":
            scores = scores.to(dtype)
        top = 0 if self.flaw == "subtracts no maximum" else scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        if layer.sinks is not None and self.flaw != "no sinks":
            total = total + torch.exp(layer.sinks[:, None, None] - top)
        return (weights / total).float()


class Sound(AttentionSuite):
    name = "sound"
    flaw = ""
    offered = OFFERS

    @property
    def spec(self) -> ComponentSpec:
        return ComponentSpec(ComponentKind.ATTENTION, self.name, "", "", "", offers=self.offered)

    def make(self, context: AttentionContext) -> AttentionBackend:
        return Flawed(context, self.flaw)


class TestSound(Sound):
    """Without a flaw everything passes, or none of what follows would mean anything."""


Check = Callable[[AttentionSuite], None]
CAUGHT: dict[str, Check] = {
    "one key too many": lambda suite: suite.test_phases_and_page_sizes("extend", 4),
    "one key too few": lambda suite: suite.test_phases_and_page_sizes("decode", 16),
    "causal from the top left": lambda suite: suite.test_phases_and_page_sizes("extend after a prefix", 1),
    "takes pages to be consecutive": lambda suite: suite.test_phases_and_page_sizes("decode", 4),
    "reads the tail of the page": lambda suite: suite.test_phases_and_page_sizes("mixed", 4),
    "reads layer 0": lambda suite: suite.test_phases_and_page_sizes("decode one row", 1),
    "groups heads the other way": lambda suite: suite.test_grouped_heads("decode", 8, 4),
    "no window": lambda suite: suite.test_sliding_window("decode", 16),
    "window one too wide": lambda suite: suite.test_sliding_window("extend", 16),
    "windows count places": lambda suite: suite.test_sliding_window("trees", 1),
    "no tree mask": lambda suite: suite.test_phases_and_page_sizes("trees beside extend", 4),
    "no soft cap": lambda suite: suite.test_soft_cap("extend"),
    "no sinks": lambda suite: suite.test_sinks("decode one row"),
    "subtracts no maximum": lambda suite: suite.test_softmax_in_float32("decode", torch.float32, 50.0),
    "softmax in 16 bits": lambda suite: suite.test_softmax_in_float32("extend after a prefix", torch.bfloat16, 6.0),
    "plans once": lambda suite: suite.test_plans_leave_nothing_behind(),
    "ignores what is shared": lambda suite: suite.test_shared_prefixes("one group", 4),
    "knows one group": lambda suite: suite.test_shared_prefixes("groups and single rows", 16),
    "adds to q": lambda suite: suite.test_phases_and_page_sizes("decode", 1),
    "writes to the pool": lambda suite: suite.test_phases_and_page_sizes("decode", 1),
    "returns float32": lambda suite: suite.test_dtypes("decode", torch.bfloat16),
}


def flawed(flaw: str) -> AttentionSuite:
    suite = Sound()
    suite.flaw = flaw
    return suite


@pytest.mark.parametrize("flaw", CAUGHT)
def test_the_suite_catches(flaw: str):
    CAUGHT[flaw](flawed(""))
    with pytest.raises(Exception) as caught:  # noqa: PT011
        CAUGHT[flaw](flawed(flaw))
    assert not isinstance(caught.value, pytest.skip.Exception)


def test_nan_is_called_by_its_name():
    with pytest.raises(AssertionError, match="NaN from places that no row owns"):
        flawed("reads the tail of the page").test_phases_and_page_sizes("decode", 16)


def test_undeclared_and_passing_is_noted_and_skipped():
    suite = Sound()
    suite.offered = OFFERS - {Feature.ATTN_SINKS}
    with pytest.raises(pytest.skip.Exception, match=r"does not declare attention\.sinks, yet this case passes"):
        suite.test_sinks("decode")
    assert ("sound", Feature.ATTN_SINKS) in AttentionSuite.undeclared


def test_undeclared_and_failing_is_skipped():
    suite = flawed("no sinks")
    suite.name, suite.offered = "humble", OFFERS - {Feature.ATTN_SINKS}
    with pytest.raises(pytest.skip.Exception, match=r"does not declare attention\.sinks$"):
        suite.test_sinks("decode")
    assert ("humble", Feature.ATTN_SINKS) not in AttentionSuite.undeclared


def test_cases_move_to_what_the_component_allows():
    class Narrow(Sound):
        @property
        def constraints(self):
            return replace(self.spec.constraints, dtypes=("bfloat16",), head_dims=(64, 128), page_sizes=(16,))

    fitted = Narrow().fit(replace(STEPS["decode"][0], head_dim=16, page_size=4))
    assert (fitted.dtype, fitted.head_dim, fitted.page_size) == (torch.bfloat16, 64, 16)


def test_cases_are_the_same_every_time():
    first, second = (Sound(), Sound())
    case = STEPS["trees"][0]
    outputs = []
    for suite in (first, second):
        compared = []
        suite.compare_output = lambda step, out, kept=compared: kept.append(out)
        suite.compare(case)
        outputs.append(compared[0])
    assert torch.equal(*outputs)
