"""Make the config that leaves no choice to the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from dovetail.config import Config, PluginConfig, Section, Selection
from dovetail.config.kinds import KindSection
from dovetail.errors import ConfigError
from dovetail.registry.kinds import Kinds
from dovetail.registry.machine import Machine
from dovetail.registry.model_choice import ModelChoice, chosen_model
from dovetail.registry.specs import KindDescriptor


def concrete_config(
    config: Config,
    machine: Machine,
    model: ModelChoice,
    kinds: Kinds,
    named: Mapping[str, Sequence[PluginConfig]],
    overlap: bool,
    graphs: bool,
    division: Literal["tp", "ep"],
) -> Config:
    """Return a new config that leaves no choice to the engine. ``named`` holds, by slot, the settings of the components
    that serve requests that name none."""
    section = config.model.model_copy(
        update={
            **chosen_model(model.candidate.component),
            "dtype": model.dtype,
            "context_len": _context_len(config, model),
            "served_name": config.model.served_name or config.model.name,
        }
    )
    on_cuda = machine.device_type == "cuda"
    scheduler = {
        "overlap": overlap,
        "max_running": config.scheduler.max_running or (512 if on_cuda else 256),
        "chunk_size": config.scheduler.chunk_size or (8192 if on_cuda else 2048),
    }
    selections = {d.section.key: _selected(config, d, d.section, named) for d in kinds if d.section is not None}
    open_kinds = {key: selection for key, selection in selections.items() if key not in type(config).model_fields}
    return config.model_copy(
        update={
            "model": section,
            "device": machine.device,
            **{key: selection for key, selection in selections.items() if key not in open_kinds},
            "kinds": open_kinds,
            "scheduler": config.scheduler.model_copy(update=scheduler),
            "graphs": config.graphs.model_copy(update={"decode": graphs}),
            "parallel": config.parallel.model_copy(update={"experts": division}),
            "memory": config.memory.model_copy(update={"kv_dtype": model.kv_dtype}),
        }
    )


def _selected(
    config: Config, descriptor: KindDescriptor, section: KindSection, named: Mapping[str, Sequence[PluginConfig]]
) -> Section:
    """Return the selection of exactly the components that were chosen."""
    given = config.selection(section)
    if isinstance(given, Selection):
        return _exactly(given, named[str(descriptor.kind)])
    phases = {phase: f"{descriptor.kind}.{phase}" for phase in section.phases}
    update = {phase: _exactly(getattr(given, phase), named[slot]) for phase, slot in phases.items()}
    return given.model_copy(update=update)


def _exactly(selection: Selection, chosen: Sequence[PluginConfig]) -> Selection:
    return selection.model_copy(update={"candidates": tuple(chosen), "disabled": not chosen})


def _context_len(config: Config, model: ModelChoice) -> int:
    given, own = config.model.context_len, model.info.context_len
    if given is not None and given > own:
        raise ConfigError(
            f"model.context_len is {given}; allowed: at most {own}, the limit in config.json. For a model that is known to reach "
            "further, set model.overrides: {max_position_embeddings: ...}"
        )
    return given or own
