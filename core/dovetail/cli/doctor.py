"""Show what this machine has and what it lacks, with the command for each: ``dovetail doctor``."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from dovetail.cli.plugins_doctor import Finding, examined_plugins
from dovetail.cli.serve import Words, read_arguments, split_words, with_flags
from dovetail.cli.serve_values import settings_of
from dovetail.cli.sources import Json, Sets, shortcuts

if TYPE_CHECKING:
    from dovetail.registry import Resolution, Resolved
    from dovetail.registry.resolution import Candidate

KINDS = ("attention", "experts", "mixer", "grammar", "executor")
"""The kinds whose candidates are shown: they depend on what is installed and on the machine."""
USES = {
    "chosen": "used",
    "available": "used for what the one before refuses, or if a request names it",
    "passed over": "can be used; the config prefers another",
}


def _doctor(words: Words = None, sets: Sets = None, as_json: Json = False, **given: Any) -> None:
    """Show what this machine has and what it lacks: Python, torch and the driver, GPUs, kernels, compilers, caches and
    limits; the backends of attention, experts, layers with a state and grammars, and the executors, that a config can use
    here; plugins with problems. Each with the command that helps. The arguments are those of `dovetail serve`. The exit status is 1 if something is
    broken."""
    from dovetail.cli.doctor_checks import machine_findings
    from dovetail.cli.doctor_facts import read_machine

    facts = read_machine()
    groups = {"machine": list(machine_findings(facts)), "components": [], "plugins": []}
    summary = "Nothing can be served without torch."
    if facts.torch.version:  # all components import it
        summary, groups["components"] = _components(words or (), sets or (), given)
        groups["plugins"] = _plugins(words or (), sets or (), given)
    broken = any(finding.broken for group in groups.values() for finding in group)
    if as_json:
        rows: dict[str, Any] = {name: [dataclasses.asdict(f) for f in group] for name, group in groups.items()}
        typer.echo(json.dumps({"summary": summary, **rows, "broken": broken}, indent=2))
    else:
        _print(groups, summary)
    if broken:
        raise typer.Exit(1)


doctor = with_flags(_doctor)
"""Show what this machine has and what it lacks. See ``_doctor``."""


def _components(words: Sequence[str], sets: Sequence[str], given: Mapping[str, Any]) -> tuple[str, list[Finding]]:
    """Return what would serve under this config, in one line, and a finding for each candidate of ``KINDS``."""
    from dovetail.errors import ConfigError, PluginError
    from dovetail.registry import Machine, resolve

    try:
        config, registry = read_arguments(words, sets, given, dict(os.environ))
        resolved = resolve(config, registry, Machine.detect(config.device))
    except (ConfigError, PluginError) as error:
        return "The config does not fit this machine.", [Finding("config", "failed", str(error), broken=True)]
    return _headline(resolved), list(_candidates(resolved))


def _plugins(words: Sequence[str], sets: Sequence[str], given: Mapping[str, Any]) -> list[Finding]:
    """Return the plugins and components that cannot be used."""
    _, files = split_words(words)
    findings, _ = examined_plugins(files, [*sets, *shortcuts(settings_of(given, files, sets))])
    return [finding for finding in findings if finding.broken]


def _headline(resolved: Resolved) -> str:
    chosen = [resolved.attention_prefill.name, resolved.attention_decode.name]
    attention = " and ".join(dict.fromkeys(chosen))
    optional = ("quantization", "experts", "mixer")  # models have them or not
    named = {slot: part.name for slot in optional if (part := resolved.part(slot)) is not None}
    grammar = ", ".join(part.name for part in resolved.grammars) or "none"
    parts = {"attention": attention, **named, "grammar": grammar, "executor": resolved.executor.name}
    listed = ", ".join(f"{slot} {name}" for slot, name in parts.items())
    return f"`dovetail serve` runs {resolved.config.model.name} on {resolved.machine.device_name} with {listed}."


def _candidates(resolved: Resolved) -> Iterator[Finding]:
    seen: set[Finding] = set()
    for resolution in resolved.resolutions:
        if str(resolution.kind) not in KINDS or not resolution.concerned:
            continue
        for candidate in resolution.candidates:
            finding = _candidate(resolution, candidate, resolved.machine.device_type)
            if finding not in seen:  # phases of a kind mostly agree
                seen.add(finding)
                yield finding


def _candidate(resolution: Resolution, candidate: Candidate, device: str) -> Finding:
    what = f"{resolution.kind}/{candidate.spec.name}"
    if candidate.usable:
        return Finding(what, "ready", USES[candidate.verdict.value])
    if device not in (candidate.spec.constraints.devices or (device,)):
        return Finding(what, "unneeded", f"for {' and '.join(candidate.spec.constraints.devices)} only")
    why = "; ".join(f"{reason.expected}, and {reason.got}" for reason in candidate.reasons)
    return Finding(what, "unusable", why, "; ".join(reason.fix for reason in candidate.reasons if reason.fix))


def _print(groups: dict[str, list[Finding]], headline: str) -> None:
    from dovetail.cli.tables import STATUS_STYLE, add, console, styled, table

    out = console()
    for title, findings in groups.items():
        if findings:
            grid = table(title, "status", "what was found", "to change it")
            for finding in findings:
                add(grid, finding.what, styled(finding.status, STATUS_STYLE), finding.why, finding.fix)
            out.print(grid, "")
    out.print(
        headline, _verdict(finding for group in groups.values() for finding in group), soft_wrap=True, markup=False
    )


def _verdict(findings: Iterable[Finding]) -> str:
    """Return how many findings need something."""
    found = list(findings)
    broken = sum(finding.broken for finding in found)
    lacks = sum(finding.status in ("missing", "low") for finding in found)
    if broken:
        return f"\n{broken} broken, {lacks} missing or low."
    return f"\nNothing is broken, {lacks} missing or low." if lacks else "\nNothing is missing."
