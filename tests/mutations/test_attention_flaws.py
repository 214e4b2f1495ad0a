"""Test what the attention suite reports and what it does not; ``mutants_attention`` has the backends for which it must
fail.

Run: python -m pytest tests/mutations/test_attention_flaws.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mutants_attention import OFFERS, Sound, flawed

from dovetail.interfaces.features import Feature
from dovetail.testing.attention import AttentionSuite
from dovetail.testing.attention_cases import STEPS


@pytest.mark.sample(13)  # test_mutations.py runs what a mutant names on this backend too
class TestSound(Sound):
    """Test that everything passes without a flaw; otherwise the list of flaws would prove nothing."""


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
