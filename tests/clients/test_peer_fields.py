"""Check that the table of request fields has every field that the newest SGLang and vLLM declare, with its default.

.venv/bin/python -m pytest -q -p no:xdist tests/clients/test_peer_fields.py
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from client_environments import SGLANG, VLLM, Client

from dovetail_apis.fields import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    GENERATE,
    RERANK,
    RESPONSES,
    SAMPLING_PARAMS,
    SCORE,
    RequestFields,
)

pytestmark = [pytest.mark.full, pytest.mark.timeout(2400)]

_OF_SGLANG = "srt/entrypoints/openai/protocol.py"
_OF_POOLING = "entrypoints/pooling/**/protocol.py"
_OF_ENGINE = "entrypoints/openai/**/protocol.py"
BODIES: list[tuple[Client, str, str, tuple[str, ...], RequestFields]] = [
    (SGLANG, "sglang", "ChatCompletionRequest", (_OF_SGLANG,), CHAT),
    (SGLANG, "sglang", "CompletionRequest", (_OF_SGLANG,), COMPLETIONS),
    (SGLANG, "sglang", "ResponsesRequest", (_OF_SGLANG,), RESPONSES),
    (SGLANG, "sglang", "EmbeddingRequest", (_OF_SGLANG,), EMBEDDINGS),
    (SGLANG, "sglang", "ScoringRequest", (_OF_SGLANG,), SCORE),
    (SGLANG, "sglang", "V1RerankReqInput", (_OF_SGLANG,), RERANK),
    (SGLANG, "sglang", "GenerateReqInput", ("srt/managers/io_struct.py",), GENERATE),
    (SGLANG, "sglang", "SamplingParams", ("srt/sampling/sampling_params.py",), SAMPLING_PARAMS),
    (VLLM, "vllm", "ChatCompletionRequest", (_OF_ENGINE,), CHAT),
    (VLLM, "vllm", "CompletionRequest", (_OF_ENGINE,), COMPLETIONS),
    (VLLM, "vllm", "ResponsesRequest", (_OF_ENGINE,), RESPONSES),
    *(
        (VLLM, "vllm", f"Embedding{kind}Request", (_OF_POOLING,), EMBEDDINGS)
        for kind in ("Completion", "Chat", "BatchChat", "ChatInput")
    ),
    *(
        (VLLM, "vllm", f"Score{kind}Request", (_OF_POOLING,), SCORE)
        for kind in ("Text", "Data", "QueriesDocuments", "QueriesItems")
    ),
    (VLLM, "vllm", "RerankRequest", (_OF_POOLING,), RERANK),
]
INTERNAL = {
    "stop_strs",
    "stop_regex_strs",
    "stop_str_max_len",
    "stop_regex_max_len",
    "is_normalized",
    "ebnf_full_assistant",
}
"""Fields that SGLang's ``SamplingParams`` sets itself."""


class Declared(NamedTuple):
    """Hold the bases of a class, and the defaults of its fields as source text (None: no default)."""

    bases: list[str]
    fields: dict[str, ast.expr | None]


def classes(package: Path, patterns: tuple[str, ...]) -> dict[str, Declared]:
    """Return the classes of the files by name, without importing them."""
    found: dict[str, Declared] = {}
    for path in (path for pattern in patterns for path in sorted(package.glob(pattern))):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base).split("[")[0].rpartition(".")[2] for base in node.bases]
                found.setdefault(node.name, Declared(bases, dict(_fields(node))))
    return found


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr | None]]:
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            name = line.target.id
            if not name.startswith("_") and "ClassVar" not in ast.unparse(line.annotation):
                yield name, line.value


def with_bases(found: dict[str, Declared], name: str) -> dict[str, ast.expr | None]:
    inherited = [with_bases(found, base) for base in found[name].bases if base in found and base != name]
    return {field: value for fields in (*inherited, found[name].fields) for field, value in fields.items()}


def default_of(value: ast.expr | None) -> object:
    """Return a default that is a literal, or None."""
    if isinstance(value, ast.Call):
        named = {keyword.arg: keyword.value for keyword in value.keywords}
        value = named.get("default", value.args[0] if value.args else None)
    try:
        return None if value is None else ast.literal_eval(value)
    except ValueError:
        return None


@pytest.mark.parametrize(
    ("client", "package", "name", "patterns", "table"),
    BODIES,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_field_is_in_the_table(
    client: Client, package: str, name: str, patterns: tuple[str, ...], table: RequestFields
):
    declared = with_bases(classes(client.package(package), patterns), name)
    known = {field for group in table.groups for field in group.defaults}
    assert len(declared) >= 5
    assert declared.keys() - INTERNAL <= known, f"{table.title} of docs/apis.md"
    for field, value in declared.items():
        default = default_of(value)
        if default not in (None, ..., "") and field in known - {"model"}:
            assert default in table.defaults(field), (field, default)
