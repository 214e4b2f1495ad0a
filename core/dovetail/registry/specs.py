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
    """Name a kind of component. ``ComponentKind("prompt_rewriter")`` names a kind that a plugin adds."""

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
    EXECUTOR = _kind("executor")
    LOGITS_PROCESSOR = _kind("logits_processor")
    QUANTIZATION = _kind("quantization")
    EXPERTS = _kind("experts")
    MIXER = _kind("mixer")
    STORE = _kind("store")


class Selects(enum.StrEnum):
    """Enumerate how many components of a kind are in use, and how they are chosen."""

    ONE = "one"
    """The resolver chooses one that fits together with the other components."""
    ONE_AND_OTHERS = "one and others"
    """The resolver chooses a default; every other component that can be used serves the requests that name it or need it."""
    LIST = "list"
    """Every component that config names is used, in this order; with ``auto`` all that can be used, by priority."""
    SERVED = "served"
    """Like LIST, but chosen in the server's process, without a device and a model."""
    BY_TEMPLATE = "by template"
    """The model's chat template decides, by the specs' ``template``."""
    BY_CHECKPOINT = "by checkpoint"
    """The checkpoint's ``architectures`` decide, by the specs' ``aliases``."""


@dataclass(frozen=True, slots=True)
class RuntimeNeed:
    """Describe a feature that the runtime needs of the components of a kind.

    It is needed always, or only while the boolean setting ``when`` is on. With ``if_model_needs``, it is needed only
    for models that need that feature. The components of ``phases`` must offer it; by default these are the phases of
    the feature's descriptor.
    """

    feature: Feature
    when: str = ""
    if_model_needs: Feature | None = None
    phases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KindDescriptor:
    """Describe a kind of component. The resolver, config, the CLI and the scaffold read here everything that differs
    between kinds.

    ``interface`` is the "module:attribute" of the class that components implement, ``api`` its version (major, minor):
    a plugin built for another major version is incompatible, and so is one built for a newer minor version, which may
    call functions that do not exist here.

    ``section`` is the config section that selects components. Only the built-in kind of models has none; its components
    are named at ``named_at``, a key of another section. ``selects`` determines how many components are in use, and how
    they are chosen. ``one_for_all_phases`` is the key of a boolean setting; while it is on, all phases of a built-in
    kind's section have the same component. ``screen`` is the "module:function" that is called for each candidate before
    the negotiation, with the candidate, its ``ResolveRequest`` and whether config names it, and yields the reasons why
    the candidate cannot be used. ``concerns`` is the "module:function" that is called with the ``ModelInfo`` and returns
    False for a model that has no use for the kind: nothing is chosen then, a config that names a component is refused, and
    ``dovetail explain`` does not show the kind. All other models need a component.

    ``namespaces`` are the namespaces of the features that the kind's components offer. ``runtime_needs`` lists the
    features that the runtime needs from them. ``rules`` is the "module:function" of the kind's further rules: a
    function that takes a ``registry.fit.Situation`` and yields ``Need`` and ``Reason``. ``check`` is the
    "module:function" that is called with the config, the slots by name and the chosen combination, and raises
    ``ConfigError`` for settings that the chosen components cannot have.

    ``suite`` is the "module:attribute" of the conformance suite, and ``scaffold`` the "module:attribute" of the
    ``scaffold.KindTemplate`` from which ``dovetail plugins new`` writes a package; ``aliases`` are other names for the
    kind in that command.

    The specs of ``described`` kinds must have a ``describe``. Components of a kind with ``light_target`` run in the
    server's process, so importing one must cost as little as importing its config. Components of a kind with
    ``for_prompts`` are built where prompts are tokenized, with a ``PromptContext``, and passed to the hook
    ``on_prompt``.

    ``sample_context`` is the "module:function" that returns, without arguments, a context in which a component can be
    built with its default settings, without a device and a model; ``dovetail plugins check`` and ``doctor`` build each
    component with it. Kinds whose components need more have none.

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
    screen: str | None = None
    concerns: str | None = None
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
    sample_context: str | None = None
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
    """Enumerate how far a component has been proven."""

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

    ``min_compute_capability`` is (major, minor) and applies on CUDA only. A component with ``latent_dims`` serves models
    only all of whose cache groups keep latents, with one of these pairs of ``head_dim`` and ``value_dim``.
    """

    devices: tuple[str, ...] = ()
    min_compute_capability: tuple[int, int] | None = None
    max_compute_capability: tuple[int, int] | None = None
    dtypes: tuple[str, ...] = ()
    kv_dtypes: tuple[str, ...] = ()
    head_dims: tuple[int, ...] = ()
    page_sizes: tuple[int, ...] = ()
    latent_dims: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ComponentSpec:
    """Describe one component. ``target``, ``config`` and ``describe`` are "module:attribute" and are imported only when needed.

    ``target`` is the class that implements the kind's interface; ``config`` is a ``PluginConfig`` whose ``kind`` is a
    Literal of ``name``. This class is imported to validate config, so its module must be light. ``describe`` of a model
    is a function from config.json (a dict) to ``ModelInfo``; ``aliases`` of a model are the ``architectures`` entries
    of config.json that it implements, and those of a drafter the names that other engines' flags have for it: the name of another
    drafter that drafts chains is an alias of the one that drafts trees with the same weights. For ``describe`` and ``expert_format`` of a quantization see ``interfaces.quantization``. ``offers`` and ``needs`` are registered features. ``replace`` names a
    distribution whose component of the same name this one overrides. ``probe`` is an optional "module:function" that
    returns None, or the reason why the component cannot work here; it is called only for candidates that passed every
    other stage. It may take the arguments ``section`` (the component's own config) and ``config`` (the whole config). ``opens`` of a
    drafter is the "module:function" that takes both arguments and returns the directory of the checkpoint that it passes to
    ``DraftRuntime.open``, or None if there is none on this machine; None if the drafter opens none.
    ``template`` of a parser is a regular expression that matches the chat templates of the models whose outputs the
    parser reads; ``auto`` chooses by it. A model that is a ``fallback`` reads checkpoints of any architecture: it is
    chosen if no component lists the architecture in its ``aliases``.
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
    expert_format: str | None = None
    deprecated: str | None = None
    replace: str | None = None
    probe: str | None = None
    template: str | None = None
    fallback: bool = False
    opens: str | None = None
