"""Choose the names of a new package, and refuse those that cannot be used."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import keyword
import re
from dataclasses import dataclass

import yaml

from dovetail.config.problems import suggest
from dovetail.errors import ConfigError
from dovetail.registry.installed import Registry
from dovetail.registry.kinds import Kinds
from dovetail.registry.specs import ComponentKind, KindDescriptor
from dovetail.registry.targets import load_attribute
from dovetail.scaffold.kinds import KindTemplate

LONGEST_NAME, LONGEST_PACKAGE = 30, 48


@dataclass(frozen=True, slots=True)
class Names:
    """Hold the names of a component, and of its package, distribution and class. ``replaces`` is the distribution whose
    component of the same name it replaces."""

    descriptor: KindDescriptor
    template: KindTemplate
    name: str
    package: str
    replaces: str | None = None

    @property
    def kind(self) -> ComponentKind:
        """Return the kind of the component."""
        return self.descriptor.kind

    @property
    def distribution(self) -> str:
        """Return the name under which the package is installed: ``my_cache`` is ``my-cache``."""
        return self.package.replace("_", "-")

    @property
    def pascal(self) -> str:
        """Return the name as a class: ``longest_wait`` is ``LongestWait``."""
        return "".join(word[:1].upper() + word[1:] for word in self.name.split("_"))

    @property
    def class_name(self) -> str:
        """Return the name of the class, as in ``LongestWaitPolicy``."""
        return self.pascal + self.template.suffix


def named(registry: Registry, kind: str, name: str, package: str | None = None, *, replace: bool = False) -> Names:
    """Return the names of a new component. Raises ``ConfigError`` for a kind that does not exist or has no template,
    and for names that are malformed or taken; with ``replace``, a component of this name must be installed."""
    found = read_kind(registry.kinds, kind)
    template = _template(found)
    _check_name(found, name)
    replaced = _replaced(registry, found.kind, name, replace)
    names = Names(found, template, name, package or f"dovetail_{name}", replaced)
    if names.class_name in {descriptor.interface.partition(":")[2] for descriptor in registry.kinds}:
        raise ConfigError(
            f"a {found.kind} called {name!r} would be the class {names.class_name}, which is the name of an interface; choose another name"
        )
    _check_package(names)
    return names


def read_kind(kinds: Kinds, word: str) -> KindDescriptor:
    """Return the kind that a word such as ``attention``, ``tool-parser`` or ``drafter`` stands for. Raises
    ``ConfigError``, which lists all kinds."""
    plain = word.lower().replace("-", "_")
    found = next((descriptor for descriptor in kinds if plain in (descriptor.kind, *descriptor.aliases)), None)
    if found is None:
        names = kinds.names
        raise ConfigError(f"there is no kind {word!r}; kinds: {', '.join(names)}{suggest(plain, names)}")
    return found


def _template(descriptor: KindDescriptor) -> KindTemplate:
    if descriptor.scaffold is None:
        raise ConfigError(f"the kind {descriptor.kind} has no template; the package that adds the kind may add one")
    template = load_attribute(descriptor.scaffold, f"the template of kind {descriptor.kind!r}")
    if not isinstance(template, KindTemplate):
        raise ConfigError(f"{descriptor.scaffold} is {template!r:.80}; expected a dovetail.scaffold.KindTemplate")
    return template


def _check_name(descriptor: KindDescriptor, name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or len(name) > LONGEST_NAME:
        raise ConfigError(
            f"{name!r} is not a name of a component; allowed: lower-case letters, digits and single underscores, beginning with a letter, "
            f"{LONGEST_NAME} characters at most, as in page_tree"
        )
    if not isinstance(yaml.safe_load(name), str):
        raise ConfigError(f"{name!r} is a word of YAML, so a config file could not name it; choose another name")
    if name in descriptor.reserved:
        raise ConfigError(f"{name!r} is a reserved word of the section {descriptor.where}; choose another name")


def _replaced(registry: Registry, kind: ComponentKind, name: str, replace: bool) -> str | None:
    """Return the distribution whose component of this name is to be replaced, if any. Raises ``ConfigError``."""
    owner = next((c for c in registry.components(kind) if name in (c.spec.name, *c.spec.aliases)), None)
    if owner is None:
        if replace:
            raise ConfigError(f"--replace, but no {kind} is called {name!r}; installed: {_listed(registry, kind)}")
        return None
    if not replace:
        raise ConfigError(
            f"{kind} {name!r} is already installed, from {owner.distribution} {owner.version}; choose another name, or --replace to "
            f'take its place (the generated ComponentSpec then has replace="{owner.distribution}"). Taken: '
            f"{_listed(registry, kind)}"
        )
    return owner.distribution


def _listed(registry: Registry, kind: ComponentKind) -> str:
    return ", ".join(registry.names(kind)) or "none"


def _check_package(names: Names) -> None:
    package = names.package
    word = re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]|[a-z]", package)
    if not word or keyword.iskeyword(package) or len(package) > LONGEST_PACKAGE:
        raise ConfigError(
            f"{package!r} is not a name of a package; allowed: lower-case letters, digits and underscores, beginning with a letter, "
            f"{LONGEST_PACKAGE} characters at most, as in dovetail_page_tree"
        )
    if importlib.util.find_spec(package) is not None or _is_installed(names.distribution):
        raise ConfigError(f"a package {package} is already installed here; give another name with --package")


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
