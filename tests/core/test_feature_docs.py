"""Test docs/features.md, the table of features by kind of cache group, and why shared prefixes are not read once.

Run: python -m pytest tests/core/test_feature_docs.py
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dovetail.cli.feature_docs import MODELS, Row, feature_docs, why_not
from dovetail.cli.sources import load_registry
from dovetail.config import read, validate
from dovetail.engine.sharing import PrefixSharing
from dovetail.interfaces.cache import CacheGroupKind
from dovetail.interfaces.features import Feature
from dovetail.registry import ComponentKind, Machine, Registry, resolve
from dovetail.registry.sharing import why_not_shared

PAGE = Path(__file__).parents[2] / "docs" / "features.md"


def write_config(directory: Path, architecture: str, **config: Any) -> None:
    (directory / "config.json").write_text(json.dumps({"architectures": [architecture], **config}))


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry((), ["plugins.allow=dovetail"])


def test_the_page_is_what_the_negotiation_answers(registry: Registry) -> None:
    page = feature_docs(registry)
    assert PAGE.read_text("utf-8") == page, "run: python -m dovetail.cli.feature_docs > docs/features.md"
    head, _, *rows = [line for line in page.splitlines() if line.startswith("|")]
    groups = [title.partition(":")[0].strip() for title in head.split("|")[2:-1]]
    assert {kind for title in groups for kind in title.split(" + ")} == set(CacheGroupKind)
    for kind in (ComponentKind.DRAFTER, ComponentKind.GRAMMAR):
        for component in registry.components(kind):
            assert any(f": {component.spec.name}`" in row for row in rows), component.spec.name
    numbers = {int(number) for row in rows for cell in re.findall(r"no: ([\d, ]+)", row) for number in cell.split(",")}
    listed = re.findall(r"^(\d+)\. \S", page.partition("## Reasons")[2], re.MULTILINE)
    assert sorted(numbers) == [int(number) for number in listed] == list(range(1, len(listed) + 1))


def test_a_cell_names_every_reason_of_the_refusal(registry: Registry, tmp_path: Path) -> None:
    write_config(tmp_path, "Gemma3nForCausalLM", num_hidden_layers=6, num_kv_shared_layers=1, dtype="bfloat16")
    row = Row("", {"batch_invariant": True, "speculative": "eagle3"})
    batch_invariant, drafter = sorted(why_not(tmp_path, row, registry))
    assert batch_invariant.startswith("batch_invariant needs model.batch_invariant; the model offers")
    assert drafter.startswith("speculative 'eagle3' needs model.hidden_states; the model offers")
    assert why_not(tmp_path, Row("", {"speculative": "ngram"}), registry) == []
    contradiction = why_not(tmp_path, Row("", {"speculative": "ngram", "grammar": {"jump_forward": True}}), registry)
    assert re.match(r"grammar.jump_forward is true", contradiction[0])


@pytest.mark.parametrize(
    ("architecture", "settings", "reason"),
    [
        ("LlamaForCausalLM", {}, None),
        ("DeepseekV3ForCausalLM", {}, None),
        ("LlamaForCausalLM", {"scheduler": {"shared_prefixes": False}}, "scheduler.shared_prefixes is false"),
        ("LlamaForCausalLM", {"batch_invariant": True}, "batch_invariant is true"),
        ("LlamaForCausalLM", {"speculative": "ngram"}, "speculative is not none"),
        ("LlamaForCausalLM", {"cache": "none"}, f"cache 'none' does not offer {Feature.CACHE_SHARED_PREFIXES}"),
        ("Gemma3ForCausalLM", {}, None),
        ("Qwen3NextForCausalLM", {}, None),
        ("KimiLinearForCausalLM", {}, None),
        ("MistralForCausalLM", {}, None),
        ("Mamba2ForCausalLM", {}, "the model has no cache group with pages"),
    ],
)
def test_why_shared_prefixes_are_not_read_once(
    registry: Registry, tmp_path: Path, architecture: str, settings: dict[str, Any], reason: str | None
) -> None:
    write_config(tmp_path, architecture, **MODELS[architecture])
    chosen = {"model": {"path": str(tmp_path)}, "attention": "triton", "policy": "fcfs", "grammar": "none"}
    config = validate(read((), (), {}, chosen | settings), registry)
    assert why_not_shared(resolve(config, registry, Machine.assume("sm90"))) == reason


@pytest.mark.parametrize(
    ("architecture", "window", "attention", "order", "reason"),
    [
        ("MistralForCausalLM", 1024, "triton", (0,), None),
        ("MistralForCausalLM", 1023, "triton", (), "the first cache group has a window of 1023 tokens, less than 1024"),
        ("MistralForCausalLM", 1024, "flash_attn", (), f"'flash_attn' does not offer {Feature.ATTN_SHARED_WINDOW}"),
        ("Gemma3ForCausalLM", 1024, "triton", (0, 1), None),
        ("Gemma3ForCausalLM", 1023, "triton", (0,), None),
        ("Gemma3ForCausalLM", 1024, "flash_attn", (0,), None),
    ],
)
def test_layers_with_windows_share_if_these_are_long_and_the_backend_can(
    registry: Registry,
    tmp_path: Path,
    architecture: str,
    window: int,
    attention: str,
    order: tuple[int, ...],
    reason: str | None,
) -> None:
    """All layers of the first model have windows; the second one also has layers without, which share anyway."""
    write_config(tmp_path, architecture, **{**MODELS[architecture], "sliding_window": window})
    chosen = {"model": {"path": str(tmp_path)}, "attention": attention, "policy": "fcfs", "grammar": "none"}
    resolved = resolve(validate(read((), (), {}, chosen), registry), registry, Machine.assume("sm90"))
    assert PrefixSharing.of(resolved, resolved.model_info.cache_groups).order == order
    found = why_not_shared(resolved)
    assert found is None if reason is None else reason in (found or "")


def test_layers_with_a_window_in_a_full_group_read_every_row(registry: Registry, tmp_path: Path) -> None:
    """A model may keep all tokens for layers with a window, in its only cache group."""
    write_config(tmp_path, "MistralForCausalLM", **MODELS["MistralForCausalLM"])
    chosen = {"model": {"path": str(tmp_path)}, "attention": "triton", "policy": "fcfs", "grammar": "none"}
    resolved = resolve(validate(read((), (), {}, chosen), registry), registry, Machine.assume("sm90"))
    (group,) = resolved.model_info.cache_groups
    info = replace(resolved.model_info, cache_groups=(replace(group, kind=CacheGroupKind.FULL, window=None),))
    assert (
        why_not_shared(replace(resolved, model_info=info)) == "layers with a sliding window are in a full cache group"
    )
    behind = replace(info, cache_groups=(group, *info.cache_groups))
    assert (
        why_not_shared(replace(resolved, model_info=behind))
        == "a sliding cache group of the model comes before the full or latent one"
    )
    plain = replace(info, needs=info.needs - {Feature.ATTN_SLIDING_WINDOW})
    assert why_not_shared(replace(resolved, model_info=plain)) is None
