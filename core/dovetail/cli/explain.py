"""Show what would be chosen, and why: ``dovetail explain``."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli.explain_adapters import adapters_line, explain_adapters
from dovetail.cli.explain_memory import explain_memory, memory_line
from dovetail.cli.serve import Words, read_arguments, with_flags
from dovetail.cli.sources import Json, Sets
from dovetail.interfaces.cache import CacheGroupKind

if TYPE_CHECKING:
    from rich.table import Table

    from dovetail.interfaces.cache import CacheGroup
    from dovetail.registry import Resolution, Resolved
    from dovetail.registry.resolution import Candidate

NARROW = 110
"""The width of the terminal below which the table has fewer columns."""
MOST_UNUSED = 6
"""The number of unused tuning records that are shown."""

Assume = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICE",
        help="Explain for this device instead of the devices of this machine: cpu, sm80, sm90, ... Nothing is probed.",
    ),
]


def _explain(
    words: Words = None, sets: Sets = None, as_json: Json = False, assume: Assume = None, **given: Any
) -> None:
    """Show every component that a config chooses, every other candidate, and the reasons. Loads no weights. The arguments
    are those of `dovetail serve`."""
    from dovetail.registry import Machine, resolve

    config, registry = read_arguments(words or (), sets or (), given, dict(os.environ))
    machine = Machine.assume(assume) if assume else Machine.detect(config.device)
    resolved = resolve(config, registry, machine)
    if as_json:
        more = {
            "ranks": _ranks(resolved),
            "cache_groups": _cache_groups(resolved),
            "memory": explain_memory(resolved),
            "adapters": explain_adapters(resolved),
            "kernel_cache": _kernel_cache(resolved),
        }
        typer.echo(json.dumps({**resolved.to_json(), **more}, indent=2))
    else:
        _print(resolved)


explain = with_flags(_explain)
"""Show what would be chosen, and why. See ``_explain``."""


def _print(resolved: Resolved) -> None:
    from dovetail.cli.tables import console

    out = console()
    out.print(_headline(resolved), soft_wrap=True)
    if resolved.config.parallel.tp > 1:
        out.print(_ranks_line(resolved), soft_wrap=True, markup=False, highlight=False)
    out.print(memory_line(explain_memory(resolved)), soft_wrap=True, markup=False, highlight=False)
    if (adapters := explain_adapters(resolved)) is not None:
        out.print(adapters_line(adapters), soft_wrap=True, markup=False, highlight=False)
    out.print(_sampling_line(resolved), soft_wrap=True, markup=False, highlight=False)
    if (format_line := _gguf_line(resolved)) is not None:
        out.print(format_line, soft_wrap=True, markup=False, highlight=False)
    out.print("", _grid(resolved, narrow=out.width < NARROW))
    for line in _unused(resolved):
        out.print(line, style="yellow", soft_wrap=True, markup=False)
    cache = _kernel_cache(resolved)
    if cache is not None:
        out.print(_kernel_cache_line(cache), markup=False, highlight=False)


def _cache_groups(resolved: Resolved) -> list[dict[str, Any]]:
    """Return of each cache group of the model what it keeps, in how many layers, its window if it has one, and its bytes
    on one rank: for each token, or for each running request and each snapshot if it keeps states."""
    import torch

    from dovetail.interfaces.store import StoreContext
    from dovetail.memory.pool import pool_dtype

    config, cpu = resolved.config, torch.device("cpu")
    dtype, own = pool_dtype(config.memory.kv_dtype), pool_dtype(config.model.dtype)
    context = StoreContext(config.memory.page_size, dtype, cpu, resolved.model_info.quantization, own)
    stores = resolved.store.build(context)

    def size(group: CacheGroup) -> dict[str, int]:
        if group.kind is CacheGroupKind.STATE:
            return {"bytes_per_snapshot": stores.slot_bytes(group)}
        return {"bytes_per_token": stores.page_bytes(group, 1).page}

    return [
        {
            "kind": str(group.kind),
            "layers": group.num_layers,
            **({} if group.window is None else {"window": group.window}),
            **size(group.share(config.parallel.head_ranks)),
        }
        for group in resolved.model_info.cache_groups
    ]


def _ranks(resolved: Resolved) -> dict[str, Any]:
    """Return how many ranks there are, their devices, what each of them has of the model, and how many there may be."""
    from dovetail.engine.mesh import rank_device
    from dovetail.registry.ranks import divisions

    info, parallel = resolved.model_info, resolved.config.parallel
    tp, head_ranks = parallel.tp, parallel.head_ranks
    own = {
        "heads": [info.num_heads // head_ranks, info.num_heads],
        "kv_heads": [max(1, info.num_kv_heads // head_ranks), info.num_kv_heads],
    }
    if info.expert_sizes is not None:
        (_, number), (_, size) = info.expert_sizes
        own["experts"] = [number // tp if parallel.experts == "ep" else number, number]
        own["expert_size"] = [size if parallel.experts == "ep" else size // tp, size]
    devices = [str(rank_device(resolved.machine.device, rank)) for rank in range(tp)]
    return {"tp": tp, "devices": devices, "of_each": own, "possible": divisions(info)}


def _ranks_line(resolved: Resolved) -> str:
    """Return the line that describes the ranks."""
    found = _ranks(resolved)
    names = {"heads": "heads", "kv_heads": "KV heads", "experts": "experts", "expert_size": "channels of an expert"}
    parts = [f"{own:,} of {count:,} {names[name]}" for name, (own, count) in found["of_each"].items()]
    where, possible = ", ".join(found["devices"]), ", ".join(map(str, found["possible"]))
    return f"ranks on {where}; each has {', '.join(parts)}; parallel.tp may be {possible}"


def _kernel_cache(resolved: Resolved) -> dict[str, Any] | None:
    """Return what Triton's cache holds, and whether it has all kernels that a start with this config compiles ahead. None
    on a CPU and without Triton."""
    from dovetail.cli.doctor_facts import read_cache
    from dovetail.engine.kernel_set import kernel_set
    from dovetail.ops.triton.kernel_cache import cache_directory, mark_file, triton_version

    capability, triton = resolved.machine.compute_capability, triton_version()
    if capability is None or not triton:
        return None
    facts = read_cache("Triton", cache_directory(), "*/*.cubin")
    major, minor = capability
    return {
        "path": str(facts.path),
        "kernels": facts.kernels,
        "bytes": facts.size,
        "filled_for": {"compute_capability": [major, minor], "triton": triton},
        "filled": mark_file(10 * major + minor, kernel_set(resolved)).exists(),
    }


def _kernel_cache_line(cache: dict[str, Any]) -> str:
    major, minor = cache["filled_for"]["compute_capability"]
    this = f"this config on compute capability {major}.{minor} with Triton {cache['filled_for']['triton']}"
    state = f"filled for {this}" if cache["filled"] else f"not filled for {this}: the next start compiles what it lacks"
    return f"kernel cache {cache['path']}: {cache['kernels']} kernels, {cache['bytes'] / 2**20:.1f} MiB; {state}"


def _grid(resolved: Resolved, *, narrow: bool) -> Table:
    """Return a table with a row for each candidate. A ``narrow`` table gives each slot its own row and omits the stages,
    so that the reasons have enough space."""
    from dovetail.cli.tables import VERDICT_STYLE, add, styled, table

    grid = table("part", "verdict", "why") if narrow else table("part", "candidate", "verdict", "stage", "why")
    for title, resolution in _merged(resolved.resolutions):
        rows = [_row(resolution, candidate) for candidate in resolution.candidates]
        if resolution.chosen is None:
            rows.insert(0, ("-", "none", "", resolution.note))
        if narrow:
            add(grid, title, "", "")
        for index, (name, verdict, stage, why) in enumerate(rows):
            shown = styled(verdict, VERDICT_STYLE)
            if narrow:
                add(grid, f"  {name}", shown, why)
            else:
                add(grid, "" if index else title, name, shown, stage, why)
        grid.add_section()
    return grid


def _unused(resolved: Resolved) -> list[str]:
    """Return a line for each of the user's tuning records that is not used, with the reason."""
    lines = list(dict.fromkeys(line for resolution in resolved.resolutions for line in resolution.unused))
    more = [f"and {len(lines) - MOST_UNUSED} more; --json has them all"] if len(lines) > MOST_UNUSED else []
    return [*(f"tuning record not used: {line}" for line in lines[:MOST_UNUSED]), *more]


def _row(resolution: Resolution, candidate: Candidate) -> tuple[str, str, str, str]:
    verdict = candidate.verdict.value
    if verdict == "chosen":
        why = _rule(resolution)
    elif verdict == "available":
        why = "used if the components before it refuse" if candidate.asked else "used if a request names it"
    else:
        why = "\n".join(map(str, candidate.reasons)) or _not_chosen(resolution, candidate.asked)
    return candidate.spec.name, verdict, candidate.stage.value, why


def _headline(resolved: Resolved) -> str:
    from dovetail.config import config_hash

    config, info = resolved.config, resolved.model_info
    overlap = "on" if config.scheduler.overlap else "off"
    tp = config.parallel.tp
    experts = f", experts {config.parallel.experts}" if info.expert_sizes is not None else ""
    attention = ", attention data" if config.parallel.attention == "data" else ""
    ranks = f" x {tp} (tensor parallel{experts}{attention})" if tp > 1 else ""
    groups = _cache_groups(resolved)
    kv_bytes = sum(group.get("bytes_per_token", 0) for group in groups)
    states = sum(group.get("bytes_per_snapshot", 0) for group in groups)
    sliding = sum(group["bytes_per_token"] for group in groups if "window" in group)
    per = ("token and rank" if config.parallel.head_ranks > 1 else "token") + (
        f", {sliding:,} in layers with a window" if sliding else ""
    )
    per += f", states of {states:,} bytes per request and snapshot" if states else ""
    return (
        f"[bold]{info.architecture}[/] ({config.model.name}) on [bold]{resolved.machine.device_name}[/]{ranks}, "
        f"{config.model.dtype}, KV {config.memory.kv_dtype} ({kv_bytes:,} bytes per {per}), context {config.model.context_len}, overlap {overlap}\n"
        f"[dim]config {config_hash(config)}[/]"
    )


def _gguf_line(resolved: Resolved) -> str | None:
    """Return the line that names the GGUF file and the types of its tensors; None for another checkpoint."""
    from collections import Counter

    from dovetail.gguf.directory import gguf_files, is_gguf_directory
    from dovetail.gguf.reader import read_gguf

    if not is_gguf_directory(resolved.model_dir):
        return None
    file = gguf_files(resolved.model_dir)[0]
    checkpoint = read_gguf(file)
    counts = Counter(tensor.type.name for tensor in checkpoint.tensors.values())
    types = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    more = f" and {len(checkpoint.files) - 1} more" if len(checkpoint.files) > 1 else ""
    how = (
        "matrices stay in blocks"
        if resolved.quantization is not None
        else f"dequantized to {resolved.config.model.dtype} while loading"
    )
    return f"GGUF {file}{more}: {checkpoint.architecture}, tensors {types}; {how}"


def _sampling_line(resolved: Resolved) -> str:
    """Return the line that shows the sampling defaults of the model."""
    setting = resolved.config.model.generation_config
    source = {"auto": "the model's generation_config.json"}.get(setting, setting)
    values = ", ".join(f"{name} {value:g}" for name, value in resolved.sampling_defaults.items())
    if values:
        return f"sampling defaults: {values} ({source})"
    reason = "model.generation_config is none" if setting == "none" else f"{source} has none"
    return f"sampling defaults: each API's ({reason})"


def _rule(resolution: Resolution) -> str:
    rule = f"by {resolution.rule.value}" if resolution.rule.value == "priority" else resolution.rule.value
    return f"{rule}; {resolution.note}" if resolution.note else rule


def _not_chosen(resolution: Resolution, asked: bool) -> str:
    if asked:
        return "would fit; another is preferred"
    return "would fit; config names another" if resolution.chosen else "would fit; not configured"


def _merged(resolutions: tuple[Resolution, ...]) -> list[tuple[str, Resolution]]:
    """Return the resolutions with their titles, without kinds for which the model has no use. Phases of one kind with the same resolution become one entry."""
    rows: list[tuple[str, Resolution]] = []
    for resolution in (one for one in resolutions if one.concerned):
        same = {**resolution.to_json(), "slot": ""}
        if rows and {**rows[-1][1].to_json(), "slot": ""} == same:
            rows[-1] = (str(resolution.kind), resolution)
        else:
            rows.append((resolution.slot, resolution))
    return rows
