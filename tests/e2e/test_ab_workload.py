"""Test the default workload of `dovetail ab`: large batches, and page ids above 4,096 where outputs are compared.

Run: pytest tests/e2e/test_ab_workload.py
"""

from __future__ import annotations

import numpy as np

from dovetail.bench.specs import parse_workload
from dovetail.bench.workloads import PromptVocabulary, make_workload
from dovetail.cli.ab_options import WORKLOAD, AbOptions
from dovetail.experiment.trace import answer
from dovetail.experiment.worker import LOW_PAGES, use_low_pages_last
from dovetail.llm import LLM

MANY_ROWS = 64


def test_the_default_workload_has_many_rows_on_pages_with_large_numbers():
    """One step of the calls that are compared: with the default config, all of them run together."""
    llm = LLM("tiny", device="cpu", memory={"num_pages": LOW_PAGES + 3000})
    assert llm.tokenizer is not None
    workload = make_workload(parse_workload(WORKLOAD), 0, PromptVocabulary.of(llm.tokenizer))
    roots = [call for call in workload.calls if call.parent is None]
    assert len(roots) > MANY_ROWS
    assert AbOptions().settings().compared > MANY_ROWS
    short = [call.model_copy(update={"max_tokens": 3}) for call in roots]
    prompts = [list(call.token_ids or ()) for call in short]
    low = [given.token_ids for given in answer(llm, short, prompts)]
    llm.flush_cache()
    seen: list[tuple[int, int]] = []
    step = llm.loop.step

    def watched():
        answers = step()
        running = llm.loop.scheduler.running
        rows = [llm.loop.scheduler.ledger.table.pages[0, req.slot, : req.num_pages] for req in running]
        if rows:
            seen.append((len(rows), int(np.concatenate(rows).min())))
        return answers

    llm.loop.step = watched
    use_low_pages_last(llm)
    assert [given.token_ids for given in answer(llm, short, prompts)] == low
    llm.loop.scheduler.check_integrity()
    assert max(rows for rows, _ in seen) > MANY_ROWS
    assert min(page for _, page in seen) > LOW_PAGES
    llm.close()


def test_a_small_pool_is_used_as_it_is():
    llm = LLM("tiny", device="cpu", memory={"num_pages": 200})
    use_low_pages_last(llm)
    pages = llm.loop.scheduler.ledger.allocator.alloc(3)
    assert pages is not None
    assert pages.tolist() == [[1, 2, 3]]
    llm.close()
