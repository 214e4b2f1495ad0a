"""The names that a new package gets, and which are refused."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import keyword
import re
from dataclasses import dataclass

import yaml

from dovetail.config.longform import reserved_words
from dovetail.config.problems import suggest
from dovetail.errors import ConfigError
from dovetail.registry.installed import Registry
from dovetail.registry.specs import ComponentKind
from dovetail.scaffold.kinds import FACTS

LONGEST_NAME, LONGEST_PACKAGE = 30, 48
ALIASES = {"drafter": "speculative"}
TAKEN_CLASSES = frozenset(facts.interface for facts in FACTS.values())


@dataclass(frozen=True, slots=True)
class Names:
    """Of a component, and of the package, the distribution and the class that it comes in. ``replaces`` is the distribution
    whose component of this name it takes the place of."""

    kind: ComponentKind
    name: str
    package: str
    replaces: str | None = None

    @property
    def distribution(self) -> str:
        """``my_cache`` is installed as ``my-cache``."""
        return self.package.replace("_", "-")

    @property
    def pascal(self) -> str:
        """``longest_wait`` is ``LongestWait``."""
        return "".join(word[:1].upper() + word[1:] for word in self.name.split("_"))

    @property
    def class_name(self) -> str:
        """``LongestWaitPolicy``."""
        return self.pascal + FACTS[self.kind].suffix


def named(registry: Registry, kind: str, name: str, package: str | None = None, *, replace: bool = False) -> Names:
    """The names of a new component. Raises ``ConfigError`` for a kind that does not exist, and for names that are no names or
    are taken; with ``replace`` the component's own must be."""
    found = read_kind(kind)
    _check_name(found, name)
    names = Names(found, name, package or f"dovetail_{name}", _replaced(registry, found, name, replace))
    if names.class_name in TAKEN_CLASSES:
        raise ConfigError(
            f"a {found} called {name!r} would be the class {names.class_name}, as its interface is called"
        )
    _check_package(names)
    return names


def read_kind(word: str) -> ComponentKind:
    """``attention``, ``tool-parser``, ``drafter``. Raises ``ConfigError`` that lists them all."""
    plain = word.lower().replace("-", "_")
    plain = ALIASES.get(plain, plain)
    if plain not in list(ComponentKind):
        kinds = [kind.value for kind in ComponentKind]
        raise ConfigError(f"there is no kind {word!r}; kinds: {', '.join(kinds)}{suggest(plain, kinds)}")
    return ComponentKind(plain)


def _check_name(kind: ComponentKind, name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or len(name) > LONGEST_NAME:
        raise ConfigError(
            f"{name!r} is no name of a component; allowed: lower-case letters, digits and single underscores, a letter first, "
            f"{LONGEST_NAME} characters at most, as in page_tree"
        )
    if not isinstance(yaml.safe_load(name), str):
        raise ConfigError(f"{name!r} is a word of YAML, so a config file could not name it; choose another name")
    if name in reserved_words(kind):
        raise ConfigError(f"{name!r} is a word that the section {kind} already uses; choose another name")


def _replaced(registry: Registry, kind: ComponentKind, name: str, replace: bool) -> str | None:
    """Whose component of this name is to be replaced."""
    owner = next((c for c in registry.components(kind) if name in (c.spec.name, *c.spec.aliases)), None)
    if owner is None:
        if replace:
            raise ConfigError(f"--replace, but no {kind} is called {name!r}; installed: {_listed(registry, kind)}")
        return None
    if not replace:
        raise ConfigError(
            f"{kind} {name!r} is already there, from {owner.distribution} {owner.version}; choose another name, or --replace to "
            f'take its place (the generated ComponentSpec then says replace="{owner.distribution}"). Taken: '
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
            f"{package!r} is no name of a package; allowed: lower-case letters, digits and underscores, a letter first, "
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
