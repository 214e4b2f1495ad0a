"""List all broken plugins and the cases of all suites, and write their table in docs/plugins.md.

Write the table: PYTHONPATH=tests python tests/mutations/mutants.py
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import mutants_api
import mutants_attention
import mutants_cache
import mutants_cache_groups
import mutants_data_attention
import mutants_drafter
import mutants_executor
import mutants_expert_backends
import mutants_experts
import mutants_grammar
import mutants_integer
import mutants_logits
import mutants_mixer
import mutants_model
import mutants_parsers
import mutants_policy
import mutants_quantization
import mutants_registration
import mutants_state_store
import mutants_store
import mutants_workers
from mutant import Mutant

from dovetail.testing.api import ApiSuite
from dovetail.testing.attention import AttentionSuite
from dovetail.testing.cache import PrefixCacheSuite
from dovetail.testing.component import ComponentSuite
from dovetail.testing.drafter import DrafterSuite
from dovetail.testing.executor import ExecutorSuite
from dovetail.testing.experts import ExpertsSuite
from dovetail.testing.grammar import GrammarSuite
from dovetail.testing.logits import LogitsProcessorSuite
from dovetail.testing.mixer import MixerSuite
from dovetail.testing.model import ModelSuite
from dovetail.testing.parsers import ReasoningParserSuite, ToolParserSuite
from dovetail.testing.policy import PolicySuite
from dovetail.testing.quantization import QuantizationSuite
from dovetail.testing.store import KVStoreSuite

SUITES: tuple[type[ComponentSuite], ...] = (
    AttentionSuite,
    PrefixCacheSuite,
    GrammarSuite,
    DrafterSuite,
    ModelSuite,
    PolicySuite,
    ToolParserSuite,
    ReasoningParserSuite,
    ApiSuite,
    ExecutorSuite,
    LogitsProcessorSuite,
    QuantizationSuite,
    ExpertsSuite,
    MixerSuite,
    KVStoreSuite,
)
MUTANTS: list[Mutant] = [
    *mutants_registration.MUTANTS,
    *mutants_attention.MUTANTS,
    *mutants_cache.MUTANTS,
    *mutants_cache_groups.MUTANTS,
    *mutants_grammar.MUTANTS,
    *mutants_drafter.MUTANTS,
    *mutants_model.MUTANTS,
    *mutants_data_attention.MUTANTS,
    *mutants_experts.MUTANTS,
    *mutants_policy.MUTANTS,
    *mutants_parsers.MUTANTS,
    *mutants_api.MUTANTS,
    *mutants_executor.MUTANTS,
    *mutants_workers.MUTANTS,
    *mutants_logits.MUTANTS,
    *mutants_integer.MUTANTS,
    *mutants_quantization.MUTANTS,
    *mutants_expert_backends.MUTANTS,
    *mutants_mixer.MUTANTS,
    *mutants_store.MUTANTS,
    *mutants_state_store.MUTANTS,
]
_GPU = "keeps the lengths of its capture: tried where there is a GPU, in tests/gpu"
_INVARIANT = "gives other bits in graphs: tried where there is a GPU, by the backends that offer it"
_ENGINE = "nothing here: it breaks each drafter itself, and tries the engine"
UNPROVEN = {
    ("attention", "test_graphs"): _GPU,
    ("attention", "test_graphs_over_fp8_pools"): _GPU,
    ("attention", "test_graphs_of_shared_prefixes_in_windows"): _GPU,
    ("attention", "test_graphs_over_latents"): _GPU,
    ("attention", "test_graphs_with_scales"): _GPU,
    ("attention", "test_graphs_of_verify_rows"): _GPU,
    ("attention", "test_graphs_of_verify_rows_over_latents"): _GPU,
    ("attention", "test_batch_invariance_of_graphs"): _INVARIANT,
    ("experts", "test_graphs"): "computes what it computed at its capture: tried where there is a GPU",
    ("experts", "test_rehearsal"): "reads what kernels have not written: tried where there is a GPU",
    ("speculative", "test_a_drafter_that_raises_costs_drafts_only"): _ENGINE,
}
"""Cases for which no plugin is broken here, and why."""

DOCS = Path(__file__).parents[2] / "docs" / "plugins.md"
BEGIN, END = "<!-- cases: begin -->\n", "<!-- cases: end -->\n"


def names_of(suite: type[ComponentSuite]) -> list[str]:
    """Return the cases of a suite in the order of their definitions."""
    classes = reversed(suite.__mro__)
    return list(dict.fromkeys(name for cls in classes for name in vars(cls) if name.startswith("test_")))


def cases() -> Iterator[tuple[str, str]]:
    """Return (kind, case) of every suite; kind is "" for the cases that all suites have."""
    common = names_of(ComponentSuite)
    yield from (("", name) for name in common)
    for suite in SUITES:
        yield from ((str(suite.kind), name) for name in names_of(suite) if name not in common)


def table() -> str:
    """Return the table of what each case checks and which faults it finds."""
    common = names_of(ComponentSuite)
    parts = ["### Every suite\n", *_rows(ComponentSuite, common, "")]
    for suite in SUITES:
        parts += [
            f"\n### `{suite.__name__}`\n",
            *_rows(suite, [n for n in names_of(suite) if n not in common], suite.kind),
        ]
    return "\n".join(parts) + "\n"


def _rows(suite: type[ComponentSuite], names: list[str], kind: str) -> Iterator[str]:
    yield "| case | what must hold | it catches a plugin that |"
    yield "|---|---|---|"
    for name in names:
        caught = [m.fault for m in MUTANTS if m.case == name and (not kind or m.sound().kind == kind)]
        holds = (
            (inspect.getdoc(getattr(suite, name)) or "")
            .partition("\n\n")[0]
            .replace("\n", " ")
            .replace("|", "\\|")
            .replace("``", "`")
        )
        what = "; ".join(dict.fromkeys(caught)) or f"({UNPROVEN[kind, name]})"
        yield f"| `{name.removeprefix('test_')}` | {holds} | {what} |"


def with_table(page: str) -> str:
    """Return ``page`` with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    DOCS.write_text(with_table(DOCS.read_text("utf-8")), "utf-8")
