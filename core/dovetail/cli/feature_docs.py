"""Write docs/features.md: ``python -m dovetail.cli.feature_docs > docs/features.md``."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dovetail.api.embeddings import pooling_kind
from dovetail.cli.sources import load_registry
from dovetail.config import Config, read, validate
from dovetail.errors import ConfigError, RequestError, ResolutionError
from dovetail.interfaces.features import Feature
from dovetail.registry import ComponentKind, Machine, Registry, Resolved, resolve
from dovetail.registry.model_choice import choose_model
from dovetail.registry.sharing import why_not_shared

DEVICE = "sm90"
_REASON = "  - "
_CHOSEN = {"attention": "triton", "cache": "radix", "policy": "fcfs", "grammar": "none"}
"""Hold settings of all rows that do not have others. Every choice that is left to the negotiation takes time."""

_INTRODUCTION = """\
# Which features work with which cache groups

<!-- Written by `python -m dovetail.cli.feature_docs`; a test compares. -->

A model keeps what it needs of earlier tokens in cache groups: `full` (keys and values of all tokens), `sliding` (those within a window),
`latent` (one vector for each token) and `state` (one state for each request). This page is the result of the negotiation of components, which
`dovetail explain` shows for any model. A cell is the answer for a small model with these groups, in bfloat16, with the settings of the row,
`attention: triton` and `cache: radix`, on a device of compute capability 9.0. "no" and numbers name the reasons below the table, with which the start of an engine
refuses these settings, or with which a feature of the first rows is off.

The first row stands for what needs no setting and no feature of a component: `n` > 1, groups of requests, sessions, log-probabilities of
outputs and of prompts. Layers that predict further tokens are a matter of the checkpoint, not of its cache groups: two models with a full group
show both.
"""

_SMALL: Mapping[str, Any] = {
    "dtype": "bfloat16",
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "LlamaForCausalLM": _SMALL,
    "MiMoForCausalLM": {**_SMALL, "num_nextn_predict_layers": 1},
    "Gemma3ForCausalLM": {**_SMALL, "num_hidden_layers": 6, "sliding_window": 1024},
    "MistralForCausalLM": {**_SMALL, "sliding_window": 1024},
    "DeepseekV3ForCausalLM": {
        **_SMALL,
        **_EXPERTS,
        "num_key_value_heads": 8,
        "q_lora_rank": 256,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 1,
    },
    "Qwen3NextForCausalLM": {**_SMALL, **_EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 256},
    "KimiLinearForCausalLM": {**_SMALL, **_EXPERTS, "num_hidden_layers": 6, "num_key_value_heads": 8, "num_experts": 8},
    "Mamba2ForCausalLM": {"dtype": "bfloat16", "vocab_size": 1024, "hidden_size": 512, "num_hidden_layers": 4}
    | {"num_heads": 16, "head_dim": 64, "n_groups": 8},
}
"""Map architectures to the settings of a small model: one for each combination of cache groups, and one more where models with layers
that predict further tokens differ."""


Check = Callable[[Resolved], str | None]
"""Return why a model that fits the settings of a row does not have its feature, or None if it has."""


@dataclass(frozen=True, slots=True)
class Row:
    """Hold a feature and the settings that switch it on."""

    title: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    check: Check | None = None


def feature_rows(registry: Registry) -> Iterator[Row]:
    """Yield the rows of the table. Drafters and grammar backends are those of ``registry``."""
    yield Row("requests with any fields")
    yield Row("shared prefixes read once (`scheduler.shared_prefixes`)", check=why_not_shared)
    yield Row("embeddings, scores (pooling)", check=_why_not_pooled)
    yield Row("prefixes reused (`cache: radix`)", {"cache": "radix"})
    yield Row("`scheduler.overlap`", {"scheduler": {"overlap": True}})
    yield Row("CUDA graphs of decode and verify steps (`graphs.decode`)", {"graphs": {"decode": True}})
    yield Row("CUDA graphs of prompts in pieces (`graphs.piecewise_tokens`)", {"graphs": {"piecewise_tokens": 512}})
    yield Row("`batch_invariant`", {"batch_invariant": True})
    for dtype in ("fp8_e4m3", "fp8_e5m2"):
        yield Row(f"`memory.kv_dtype: {dtype}`", {"memory": {"kv_dtype": dtype}})
    yield Row("tensor parallelism (`parallel.tp: 2`)", {"parallel": {"tp": 2}})
    yield Row("data-parallel attention (`parallel.attention: data`)", {"parallel": {"tp": 2, "attention": "data"}})
    adapters = {"adapters": {"enabled": True}}
    yield Row("adapters (LoRA, `adapters.enabled`)", adapters)
    yield Row("adapters and data-parallel attention", {**adapters, "parallel": {"tp": 2, "attention": "data"}})
    for component in registry.components(ComponentKind.GRAMMAR):
        yield Row(f"`grammar: {component.spec.name}`", {"grammar": component.spec.name})
    for component in registry.components(ComponentKind.DRAFTER):
        name, kind = component.spec.name, "trees" if Feature.DRAFT_TREE in component.spec.offers else "chains"
        yield Row(f"`speculative: {name}` ({kind})", {"speculative": name})
    drafts = {"speculative": "ngram"}
    yield Row("drafts and a grammar", {**drafts, "grammar": "xgrammar"})
    yield Row("drafts and `scheduler.overlap`", {**drafts, "scheduler": {"overlap": True}})
    yield Row("drafts and `batch_invariant`", {**drafts, "batch_invariant": True})
    data = {"parallel": {"tp": 2, "attention": "data"}}
    yield Row("drafts and data-parallel attention", {**drafts, **data})
    for name, kind in (("mtp", "chains"), ("eagle3_tree", "trees")):
        yield Row(f"`speculative: {name}` ({kind}) and data-parallel attention", {"speculative": name, **data})


def feature_docs(registry: Registry) -> str:
    """Return the page. ``registry`` has the components of this distribution only."""
    numbers: dict[str, int] = {}
    lines, groups = [], []
    with tempfile.TemporaryDirectory() as directory:
        paths = [_written(Path(directory), name, config) for name, config in MODELS.items()]
        groups = [_groups_of(path, registry) for path in paths]
        for row in feature_rows(registry):
            answers = [why_not(path, row, registry) for path in paths]
            lines.append([row.title, *(_cell(reasons, numbers) for reasons in answers)])
    head = ["feature", *(f"{kinds}: `{name}`" for kinds, name in zip(groups, MODELS, strict=True))]
    listed = "".join(f"{number}. {reason}\n" for reason, number in numbers.items())
    return f"{_INTRODUCTION}\n{_table(head, lines)}\n## Reasons\n\n{listed}"


def why_not(path: Path, row: Row, registry: Registry) -> list[str]:
    """Return why the model in ``path`` does not have the feature of ``row``. It has if there is no reason."""
    try:
        resolved = _resolved(path, row.settings, registry)
    except ResolutionError as error:
        title, *lines = str(error).splitlines()
        reasons = itertools.takewhile(lambda line: line.startswith(_REASON), lines)
        return [reason.removeprefix(_REASON) for reason in reasons] or [title]
    except ConfigError as error:
        return [str(error)]
    reason = None if row.check is None else row.check(resolved)
    return [] if reason is None else [reason]


def _cell(reasons: Iterable[str], numbers: dict[str, int]) -> str:
    """Return what the table says of a feature. Gives numbers to reasons that have none."""
    found = [numbers.setdefault(reason, len(numbers) + 1) for reason in reasons]
    return f"no: {', '.join(map(str, found))}" if found else "works"


def _written(directory: Path, name: str, config: Mapping[str, Any]) -> Path:
    """Write the config.json of a model, and return its directory."""
    path = directory / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": [name], **config}))
    return path


def _config(path: Path, settings: Mapping[str, Any], registry: Registry) -> Config:
    given = {"model": {"path": str(path)}, **_CHOSEN, **settings}
    return validate(read((), (), {}, given), registry)


def _resolved(path: Path, settings: Mapping[str, Any], registry: Registry) -> Resolved:
    return resolve(_config(path, settings, registry), registry, Machine.assume(DEVICE), tuning={})


def _groups_of(path: Path, registry: Registry) -> str:
    """Return the kinds of the cache groups of a model."""
    info = choose_model(_config(path, {}, registry), registry, Machine.assume(DEVICE), {}).info
    return " + ".join(dict.fromkeys(str(group.kind) for group in info.cache_groups))


def _why_not_pooled(resolved: Resolved) -> str | None:
    """Return what a request for embeddings is answered if the model has none."""
    if Feature.MODEL_EMBED in resolved.model_info.offers:
        return None
    try:
        pooling_kind(None, None)
    except RequestError as error:
        return str(error)
    return None


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *lines))


if __name__ == "__main__":
    print(feature_docs(load_registry((), ["plugins.allow=dovetail"])), end="")
