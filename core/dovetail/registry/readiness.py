"""Check that a component can be imported, implements its interface and can be built, before anything selects it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from dovetail.config import PluginConfig
from dovetail.config.problems import suggest
from dovetail.errors import ConfigError, EngineError, PluginError, PluginLoadError
from dovetail.registry.installed import RegisteredComponent, load_config_class
from dovetail.registry.specs import ComponentKind
from dovetail.registry.targets import load_attribute


def readiness_fault(component: RegisteredComponent) -> str | None:
    """Return in one line why ``component`` cannot be used, with its name; None if nothing was found.

    Imports its config class, its class, its interface, its ``describe`` and its ``probe``. A component whose kind has a
    ``sample_context`` is built with its default settings, unless a setting has no default. The component's requirements
    must be met.
    """
    spec, label = component.spec, component.label
    try:
        section = load_config_class(component)
        cls = load_attribute(spec.target, label)
        interface = load_attribute(component.descriptor.interface, f"the interface of kind {spec.kind!r}")
        for field in ("describe", "expert_format", "probe"):
            target = getattr(spec, field)
            if target and not callable(load_attribute(target, label)):
                return f"{label}: {field} {target!r} is not a function"
    except PluginLoadError as error:
        return " ".join(str(error).split())
    fault = next(interface_faults(cls, interface, spec.kind), None) or _build_fault(component, cls, interface, section)
    return f"{label}: {spec.target} {fault}" if fault else None


def interface_faults(cls: Any, interface: type, kind: str = "") -> Iterator[str]:
    """Yield what ``cls`` lacks to be a component with ``interface``, as text that follows the name of the class."""
    if not isinstance(cls, type):
        yield f"is {cls!r:.80}; expected a class"
        return
    if not issubclass(cls, interface):
        yield f"is no subclass of {interface.__module__}.{interface.__qualname__}"
        return
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        own = [name for name in vars(cls) if not name.startswith("_")]
        hints = "".join(dict.fromkeys(suggest(name, own) for name in missing))
        yield f"does not define {', '.join(missing)}, which {interface.__name__} requires{hints.replace('; did', '. Did')}"
    arguments = _constructor_arguments(interface, kind)
    if not _binds(cls, [None] * len(arguments), {}):
        yield f"has the constructor {_signature(cls)}; the core calls it with ({', '.join(arguments)})"
    for name in dir(interface):
        if not name.startswith("_") and name not in missing:
            yield from _member_faults(cls, interface, name)


def _constructor_arguments(interface: type, kind: str) -> list[str]:
    if kind == ComponentKind.MODEL:
        return ["info", "mesh"]
    if interface.__init__ is object.__init__:
        return ["config", "context"]
    return list(inspect.signature(interface.__init__).parameters)[1:]


def _member_faults(cls: type, interface: type, name: str) -> Iterator[str]:
    """Yield why the core cannot use ``cls.name`` as it uses ``interface.name``."""
    theirs, ours = inspect.getattr_static(interface, name), inspect.getattr_static(cls, name)
    if theirs is ours:
        return
    if isinstance(theirs, property) and inspect.isfunction(ours):
        yield f"defines {name} as a method; {interface.__name__} has a property: put @property above it"
    if not inspect.isfunction(theirs):
        return
    method = getattr(cls, name)
    if not callable(method):
        yield f"has {method!r:.80} as {name}; {interface.__name__} has a method"
        return
    if inspect.iscoroutinefunction(theirs) != inspect.iscoroutinefunction(method) and inspect.isfunction(ours):
        expected = "async def" if inspect.iscoroutinefunction(theirs) else "def, not async def"
        yield f"defines {name} otherwise than {interface.__name__}, which has {expected}"
    own = [] if isinstance(ours, staticmethod | classmethod) else [None]
    positional, keywords = _calls_of(theirs)
    by_name = {key: None for key, has_default in positional if has_default}
    everything = [None for _ in positional]
    required = [None for _, has_default in positional if not has_default]
    if not (_binds(method, own + everything, keywords) and _binds(method, own + required, {**by_name, **keywords})):
        yield f"defines {name}{_signature(method)}; the core calls it as {interface.__name__}.{name}{_signature(theirs)}"


def _calls_of(function: Any) -> tuple[list[tuple[str, bool]], dict[str, None]]:
    """Return the positional parameters after self, each with True if it has a default, and the keyword-only ones."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    positional = [
        (parameter.name, parameter.default is not parameter.empty)
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return positional, {parameter.name: None for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def _binds(function: Any, positional: list[None], keywords: dict[str, None]) -> bool:
    try:
        inspect.signature(function).bind(*positional, **keywords)
    except TypeError:
        return False
    except ValueError:  # a signature that cannot be read, as of functions in C
        return True
    return True


def _signature(function: Any) -> str:
    names = [str(parameter).partition(":")[0].strip() for parameter in inspect.signature(function).parameters.values()]
    return f"({', '.join(names)})"


def _build_fault(component: RegisteredComponent, cls: type, interface: type, section: type[PluginConfig]) -> str | None:
    """Return why the component cannot be built with its default settings, where that needs no device and no model."""
    descriptor, spec = component.descriptor, component.spec
    if descriptor.sample_context is None:
        return None
    try:
        config = section(kind=spec.name)
    except ValidationError:
        return None  # it has settings without a default, so that nothing selects it by its name alone
    context = load_attribute(descriptor.sample_context, f"the sample_context of kind {spec.kind!r}")()
    arguments = (config, context)[: len(_constructor_arguments(interface, spec.kind))]
    try:
        cls(*arguments)
    except (ConfigError, EngineError, PluginError):
        return None  # it says what it lacks here: a device, a model, a setting
    except Exception as error:
        return f"cannot be built with its default settings: {type(error).__name__}: {error}"
    return None
