"""Check each candidate separately: its interface version, its requirements and constraints, and last its probe."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Iterator

from packaging.specifiers import SpecifierSet

from dovetail.config import Config
from dovetail.errors import PluginLoadError
from dovetail.interfaces.cache import CacheGroupKind
from dovetail.interfaces.model import ModelInfo
from dovetail.registry.resolution import Candidate, Reason, ResolveRequest, Stage
from dovetail.registry.specs import Constraints, Requirement
from dovetail.registry.targets import load_attribute


def examine(candidate: Candidate, request: ResolveRequest) -> None:
    """Check ``candidate`` at every stage except features and probe, and stop at the first stage that rejects it."""
    component = candidate.component
    if component.incompatible:
        expected = "interface version " + ".".join(map(str, component.descriptor.api))
        fix = f"pip install --upgrade {component.distribution}"
        candidate.reject(Stage.API, Reason("api.version", expected, component.incompatible, fix))
        return
    for stage, reasons in (
        (Stage.REQUIRES, [r for requirement in candidate.spec.requires for r in unmet(requirement)]),
        (Stage.CONSTRAINTS, list(constraint_reasons(candidate.spec.constraints, request))),
    ):
        candidate.stage = stage
        if reasons:
            candidate.reject(stage, *reasons)
            return


def unmet(requirement: Requirement) -> Iterator[Reason]:
    """Yield the reason why the installed distributions do not meet a requirement, if they do not."""
    wanted = f"{requirement.distribution}{requirement.versions}"
    fix = requirement.install or f"pip install '{wanted}'"
    try:
        version = importlib.metadata.version(requirement.distribution)
    except importlib.metadata.PackageNotFoundError:
        yield Reason("requires.missing", f"needs {wanted}", f"{requirement.distribution} is not installed", fix)
        return
    if not SpecifierSet(requirement.versions).contains(version, prereleases=True):
        yield Reason("requires.version", f"needs {wanted}", f"{requirement.distribution} {version} is installed", fix)


def constraint_reasons(constraints: Constraints, request: ResolveRequest) -> Iterator[Reason]:
    """Yield a reason for every constraint that the machine, the model or the config does not meet."""
    machine = request.machine
    yield from _one_of("device", constraints.devices, machine.device_type, "device")
    yield from _capability(constraints, request)
    if request.model_info is not None:
        yield from _one_of("dtype", constraints.dtypes, request.dtype, "model.dtype")
        yield from _one_of("kv_dtype", constraints.kv_dtypes, request.kv_dtype, "memory.kv_dtype")
        for dim in sorted(kernel_dims(request.model_info)):
            yield from _one_of("head_dim", constraints.head_dims, dim, None)
        yield from latent_reasons(constraints, request.model_info)
    yield from _one_of("page_size", constraints.page_sizes, request.config.memory.page_size, "memory.page_size")


def latent_reasons(constraints: Constraints, info: ModelInfo) -> Iterator[Reason]:
    """Yield a reason if the component serves other latents than those of the model."""
    if not constraints.latent_dims:
        return
    paged = [group for group in info.cache_groups if group.kind is not CacheGroupKind.STATE]
    have = {(group.head_dim, group.value_dim) for group in paged}
    if not have or not have <= set(constraints.latent_dims):
        allowed = ", ".join(f"{head_dim} with {value_dim} of values" for head_dim, value_dim in constraints.latent_dims)
        latents = all(group.kind is CacheGroupKind.LATENT for group in paged)
        got = f"the model has {sorted(have)}" if latents else "the model keeps keys and values"
        yield Reason("constraints.latent_dims", f"serves latents of {allowed} only", got)


def kernel_dims(info: ModelInfo) -> set[int]:
    """Return the head dims for which a model needs kernels over plain keys and values. Groups of latents have none: the
    backends that offer ``attention.latent`` have kernels for them. Neither have groups of states."""
    others = (CacheGroupKind.LATENT, CacheGroupKind.STATE)
    groups = [group for group in info.cache_groups if group.kind not in others]
    return {group.head_dim for group in groups} | ({info.head_dim} if groups or not info.cache_groups else set())


def _one_of(what: str, allowed: tuple[object, ...], given: object, key: str | None) -> Iterator[Reason]:
    if not allowed or given in allowed:
        return
    values = ", ".join(map(str, allowed))
    fix = f"{key}: {allowed[0]}" if key else f"choose a component for {what} {given}"
    yield Reason(f"constraints.{what}", f"allows {what} {values}", f"{what} is {given}", fix)


def _capability(constraints: Constraints, request: ResolveRequest) -> Iterator[Reason]:
    low, high = constraints.min_compute_capability, constraints.max_compute_capability
    have = request.machine.compute_capability
    if have is None or ((low is None or have >= low) and (high is None or have <= high)):
        return
    bounds = [f"at least {low[0]}.{low[1]}"] if low else []
    bounds += [f"at most {high[0]}.{high[1]}"] if high else []
    yield Reason(
        "constraints.compute_capability",
        f"needs compute capability {' and '.join(bounds)}",
        f"{request.machine.device_name} has {have[0]}.{have[1]}",
        f"choose another {request.kind} component for this device",
    )


def probe(candidate: Candidate, config: Config) -> None:
    """Call the component's probe, which is the last stage. A probe that raises an exception rejects the component
    too."""
    target = candidate.spec.probe
    assert target is not None
    candidate.stage = Stage.PROBE
    offered = {"section": candidate.config, "config": config}
    try:
        function = load_attribute(target, candidate.component.label)
        reason = function(**{name: offered[name] for name in inspect.signature(function).parameters if name in offered})
    except PluginLoadError as error:
        reason = str(error)
    except Exception as error:
        reason = f"{target} raised {type(error).__name__}: {error}"
    if reason is not None:
        candidate.reject(Stage.PROBE, Reason("probe", "its probe must succeed", str(reason)))
