"""Run: python -m pytest -q tests/plugins/test_logits.py"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from transformers import NoRepeatNGramLogitsProcessor

from dovetail.interfaces.logits import ProcessedRow, ProcessorContext
from dovetail.testing.logits import LogitsProcessorSuite
from dovetail_logits.config import NoRepeatNgramConfig, NoRepeatNgramParams
from dovetail_logits.no_repeat_ngram import NoRepeatNgram


class TestNoRepeatNgram(LogitsProcessorSuite):
    name = "no_repeat_ngram"
    requests: ClassVar = [{"no_repeat_ngram_size": size} for size in (2, 1, 3, 4)]

    def test_it_forbids_what_transformers_forbids(self) -> None:
        rng = np.random.default_rng(0)
        for size in (1, 2, 3, 5):
            processor = NoRepeatNgram(NoRepeatNgramConfig(), ProcessorContext(torch.device("cpu"), 16))
            params = NoRepeatNgramParams(no_repeat_ngram_size=size)
            state, ids = processor.begin(params), rng.integers(0, 4, 60).astype(np.int32)
            for length in (1, 2, 3, 10, 11, 30, 60):
                given = torch.randn(1, 16)
                logits = given.clone()
                processor.process(logits, [ProcessedRow(params, 1, length, ids[:length], state)])
                expected = NoRepeatNGramLogitsProcessor(size)(torch.from_numpy(ids[None, :length]).long(), given)
                assert torch.equal(logits, expected)
