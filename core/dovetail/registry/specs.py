"""Define how a plugin describes its kinds and components, before any of them is imported."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import cast

from dovetail.config.kinds import KindSection
from dovetail.interfaces.features import Feature
from dovetail.interfaces.names import BuiltIn


def _kind(name: str) -> ComponentKind:
    return cast("ComponentKind", BuiltIn(name))


class ComponentKind(str):
    """Name a kind of component. ``ComponentKind("prompt_rewriter")`` names a plugin's own."""

    __slots__ = ()

    ATTENTION = _kind("attention")
    CACHE = _kind("cache")
    GRAMMAR = _kind("grammar")
    DRAFTER = _kind("speculative")
    POLICY = _kind("policy")
    MODEL = _kind("model")
    TOOL_PARSER = _kind("tool_parser")
    REASONING_PARSER = _kind("reasoning_parser")
    API = _kind("api")


class Selects(enum.StrEnum):
    """Say how many components of a kind are in use, and who chooses them."""

    ONE = "one"
    """The resolver chooses one that fits together with the other components."""
    ONE_AND_OTHERS = "one and others"
    """The resolver chooses a default; every other component that can be used serves the requests that name it or need it."""
    LIST = "list"
    """Every component that config names is used, in this order; with ``auto`` all that can be used, by priority."""
    SERVED = "served"
    """As LIST, and chosen in the server's process, without a device and a model."""
    BY_TEMPLATE = "by template"
    """The model's chat template decides, by the specs' ``template``."""
    BY_CHECKPOINT = "by checkpoint"
    """The checkpoint's ``architectures`` decide, by the specs' ``aliases``."""


@dataclass(frozen=True, slots=True)
class RuntimeNeed:
    """Describe a feature that the runtime needs of the components of a kind.

    It is needed always, or only while the boolean setting ``when`` is on; and with ``if_model_needs``, only for models that
    need that feature. ``phases`` are those whose component must offer it; empty: those of the feature's descriptor.
    """

    feature: Feature
    when: str = ""
    if_model_needs: Feature | None = None
    phases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KindDescriptor:
    """Describe a kind of component. Whatever the resolver, config, the CLI and the scaffold do with a kind, they read here.

    ``interface`` is the "module:attribute" of the class that components implement, ``api`` its version (major, minor): a
    plugin built for another major version is incompatible, and so is one built for a newer minor version, which may call
    what is missing here.

    ``section`` is the config section that selects components. Only the built-in kind of models has none: it is named at
    ``named_at``, a key of another section. ``selects`` says how many components are in use, and who chooses them. With the
    boolean setting ``one_for_all_phases``, the phases of a built-in kind's section have one component.

    ``namespaces`` are those of the features that the kind's components offer. ``runtime_needs`` lists what the runtime needs
    of them. ``rules`` is the "module:function" of the kind's further rules: a function from a ``registry.fit.Situation`` to
    ``Need`` and ``Reason``. ``check`` is the "module:function" that is called with the config, the slots by name and the chosen
    combination, and raises ``ConfigError`` for settings that the chosen components cannot have.

    ``suite`` is the "module:attribute" of the conformance suite, and ``scaffold`` that of the ``scaffold.KindTemplate`` from
    which ``dovetail plugins new`` writes a package; ``aliases`` are other words for the kind there.

    ``described`` kinds need a ``describe`` in their specs. ``light_target`` says that components run in the server's process,
    so that importing one must cost as little as importing its config. Components of a kind with ``for_prompts`` are built where
    prompts are tokenized, with a ``PromptContext``, and passed to the hook ``on_prompt``.

    ``order`` is the kind's place in resolutions and their explanation. In the search for components that fit together, the
    components of kinds with a lower ``search_order`` are given up last.
    """

    kind: ComponentKind
    summary: str
    interface: str
    api: tuple[int, int] = (1, 0)
    section: KindSection | None = None
    named_at: str = ""
    selects: Selects = Selects.ONE
    one_for_all_phases: str = ""
    namespaces: tuple[str, ...] = ()
    runtime_needs: tuple[RuntimeNeed, ...] = ()
    rules: str | None = None
    check: str | None = None
    suite: str = ""
    scaffold: str | None = None
    aliases: tuple[str, ...] = ()
    described: bool = False
    light_target: bool = False
    for_prompts: bool = False
    order: int = 1000
    search_order: int = 1000

    @property
    def reserved(self) -> tuple[str, ...]:
        """Return the words that no component of the kind may have as its name."""
        return self.section.reserved if self.section is not None else ("auto",)

    @property
    def where(self) -> str:
        """Return the config key at which a component is named."""
        return self.section.key if self.section is not None else self.named_at

    @property
    def slots(self) -> tuple[str, ...]:
        """Return the slots of the kind: its name, or one for each phase, as in ``attention.decode``."""
        phases = self.section.phases if self.section is not None else ()
        return tuple(f"{self.kind}.{phase}" for phase in phases) or (str(self.kind),)


class Stability(enum.StrEnum):
    """Say how far a component has been proven."""

    STABLE = "stable"
    BETA = "beta"
    EXPERIMENTAL = "experimental"


@dataclass(frozen=True, slots=True)
class Requirement:
    """Name a distribution that must be installed, a range of its versions (PEP 440), and the command that installs it.
    The resolver checks it with importlib.metadata, never by importing."""

    distribution: str
    versions: str = ""
    install: str = ""


@dataclass(frozen=True, slots=True)
class Constraints:
    """Restrict where a component can run. An empty tuple allows everything.

    ``min_compute_capability`` is (major, minor) and applies on CUDA only.
    """

    devices: tuple[str, ...] = ()
    min_compute_capability: tuple[int, int] | None = None
    max_compute_capability: tuple[int, int] | None = None
    dtypes: tuple[str, ...] = ()
    kv_dtypes: tuple[str, ...] = ()
    head_dims: tuple[int, ...] = ()
    page_sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ComponentSpec:
    """Describe one component. ``target``, ``config`` and ``describe`` are "module:attribute" and are imported only when needed.

    ``target`` is the class that implements the kind's interface; ``config`` is a ``PluginConfig`` whose ``kind`` is a Literal
    of ``name``. It is imported to validate config, so its module must be light. ``describe`` of a model is a function from
    config.json (a dict) to ``ModelInfo``; ``aliases`` of a model are the ``architectures`` entries of config.json that it
    implements. ``offers`` and ``needs`` are registered features. ``replace`` names a distribution whose component of the same
    name this one overrides. ``probe`` is an optional "module:function" that returns None, or the reason why the component
    cannot work here; it is called only for candidates that passed every other stage. Of the arguments ``section``, the
    component's own config, and ``config``, the whole, it takes those that it needs. ``template`` of a parser is a regular
    expression that is found in the chat templates of the models that write what the parser reads; ``auto`` chooses by it.
    """

    kind: ComponentKind
    name: str
    target: str
    config: str
    summary: str
    api: tuple[int, int] = (1, 0)
    requires: tuple[Requirement, ...] = ()
    offers: frozenset[Feature] = frozenset()
    needs: frozenset[Feature] = frozenset()
    constraints: Constraints = Constraints()
    priority: int = 0
    stability: Stability = Stability.STABLE
    aliases: tuple[str, ...] = ()
    describe: str | None = None
    deprecated: str | None = None
    replace: str | None = None
    probe: str | None = None
    template: str | None = None
