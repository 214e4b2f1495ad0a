"""Define the rules and checks of the built-in kinds, which their descriptors name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dovetail.config import Config, PluginConfig
from dovetail.errors import ConfigError
from dovetail.gguf.block_types import QUANT_METHOD as GGUF
from dovetail.interfaces.cache import CacheGroupKind
from dovetail.interfaces.expert_shapes import ADAPTED_ON_CUDA
from dovetail.interfaces.features import Feature
from dovetail.interfaces.model import ModelInfo
from dovetail.registry.candidates import Slot
from dovetail.registry.fit import Combination, Need, Situation, show
from dovetail.registry.negotiable import ATTENTION_DIVISION, BATCH_INVARIANT, MIN_PROBABILITY, TENSOR_PARALLEL
from dovetail.registry.quantizations import cannot_load, expert_feature
from dovetail.registry.ranks import indivisible
from dovetail.registry.resolution import Candidate, Reason, ResolveRequest
from dovetail.registry.specs import ComponentKind, ComponentSpec
from dovetail.registry.targets import load_attribute

PREFILL, DECODE = "attention.prefill", "attention.decode"
POLICY, GRAMMAR, DRAFTER = ComponentKind.POLICY, ComponentKind.GRAMMAR, ComponentKind.DRAFTER


def attention(situation: Situation) -> Iterator[Need | Reason]:
    """Require backends that attend over latents if the model keeps latents. Require one backend for both phases with
    ``batch_invariant``, because two backends give a token different bits even if each of them is invariant."""
    if any(group.kind is CacheGroupKind.LATENT for group in situation.model.cache_groups):
        needed_by = f"model {situation.model.architecture!r}"
        yield from situation.needs(Feature.ATTN_LATENT, needed_by, "it keeps latents instead of keys and values")
    prefill, decode = situation.candidate(PREFILL), situation.candidate(DECODE)
    if not situation.combo[BATCH_INVARIANT] or prefill is None or decode is None:
        return
    if _identity(prefill) != _identity(decode):
        yield Reason(
            "batch_invariant.attention",
            f"{BATCH_INVARIANT} needs one attention backend, with the same settings, for both phases (what decode steps have "
            "computed, a prompt may compute again)",
            f"{PREFILL} is {_settings(prefill)}, {DECODE} is {_settings(decode)}",
        )


def _identity(candidate: Candidate) -> tuple[str, PluginConfig]:
    return candidate.spec.name, candidate.config


def _settings(candidate: Candidate) -> str:
    given = candidate.config.model_dump(exclude_defaults=True, exclude={"kind"})
    return repr(show(candidate)) + (f" with {given}" if given else "")


def model(situation: Situation) -> Iterator[Need | Reason]:
    """Refuse a model without cache groups, and one whose state groups are not the last. Require with several ranks a model that they can
    divide, and refuse ``batch_invariant``, because the kernels that add up the results of ranks depend on the number of
    rows."""
    kinds = [group.kind for group in situation.model.cache_groups]
    first = kinds[: len(kinds) - kinds.count(CacheGroupKind.STATE)]
    if not kinds or CacheGroupKind.STATE in first:
        yield Reason(
            "model.cache_groups",
            "the engine runs models with cache groups, of which those of states are the last",
            f"model {situation.model.architecture!r} has groups of kind {', '.join(kinds) or 'none'}",
        )
    if situation.combo[ATTENTION_DIVISION] == "data":
        yield from _data_attention(situation)
    tp = situation.combo[TENSOR_PARALLEL]
    assert isinstance(tp, int)
    if tp == 1:
        return
    setting = f"{TENSOR_PARALLEL} {tp}"
    yield from situation.needs(Feature.MODEL_TENSOR_PARALLEL, setting)
    for needed, got in indivisible(situation.model, tp):
        yield Reason(TENSOR_PARALLEL, f"{setting} needs {needed}", f"model {situation.model.architecture!r} has {got}")
    if situation.combo[BATCH_INVARIANT]:
        yield Reason(
            f"{TENSOR_PARALLEL}.{BATCH_INVARIANT}",
            f"{BATCH_INVARIANT} needs {TENSOR_PARALLEL} 1 (ranks add up their results in an order that may depend on the rows)",
            f"{TENSOR_PARALLEL} is {tp}",
        )


def _data_attention(situation: Situation) -> Iterator[Need | Reason]:
    """Require for data-parallel attention several ranks, and a model whose layers can attend for some of the requests, as those of
    the drafter's model must."""
    setting = f"{ATTENTION_DIVISION} data"
    yield from situation.needs(Feature.MODEL_DATA_ATTENTION, setting)
    if situation.combo[TENSOR_PARALLEL] == 1:
        expected = f"{setting} needs {TENSOR_PARALLEL} 2 or more"
        yield Reason(f"{ATTENTION_DIVISION}.ranks", expected, f"{TENSOR_PARALLEL} is 1")
    drafter = situation.candidate(DRAFTER)
    if drafter is None:
        return
    runs_model = drafter.spec.needs & {Feature.KV_DRAFT_CACHE, Feature.MODEL_HIDDEN_STATES, Feature.MODEL_MTP_HEAD}
    if runs_model and Feature.DRAFT_DATA_ATTENTION not in drafter.spec.offers:
        expected = f"{setting} needs a drafter without a model, or one that offers {Feature.DRAFT_DATA_ATTENTION}"
        yield Reason(f"{ATTENTION_DIVISION}.drafts", expected, f"speculative is {show(drafter)!r}")


def screen_quantization(candidate: Candidate, request: ResolveRequest, named: bool) -> Iterator[Reason]:
    """Require a component that can load the checkpoint. An unquantized checkpoint is quantized only if config names the
    component."""
    assert request.model_info is not None
    checkpoint, name = request.model_info.quantization, candidate.spec.name
    if checkpoint is None and not named:
        expected = "auto takes it for a checkpoint with a quantization_config that it can load"
        yield Reason("quantization.checkpoint", expected, "the checkpoint is not quantized", f"quantization: {name}")
        return
    reason = cannot_load(candidate.component, candidate.config, checkpoint)
    if reason is not None:
        yield Reason("quantization.checkpoint", "it must be able to load the checkpoint", reason)


def quantization(situation: Situation) -> Iterator[Need | Reason]:
    """Require a component for a checkpoint that is quantized, unless the loader dequantizes it, and one that stores the weights of experts if the model
    has experts."""
    checkpoint = situation.model.quantization
    chosen = situation.candidate(ComponentKind.QUANTIZATION)
    if chosen is not None and situation.model.expert_sizes is not None:
        why = "most of its weights are those of experts"
        needed_by = f"model {situation.model.architecture!r}"
        yield from situation.needs(Feature.QUANTIZATION_EXPERTS, needed_by, why)
        if Feature.EXPERTS_UNGATED in situation.model.needs:
            yield Reason(
                "quantization.ungated",
                f"{needed_by} has experts without a gate, whose weights must have 16 or 32 bits",
                f"quantization is {show(chosen)!r}",
            )
    if checkpoint is not None and chosen is None:
        method = checkpoint.get("quant_method", "an unnamed method")
        if method == GGUF:  # the loader dequantizes
            return
        yield Reason(
            "quantization.none",
            "the checkpoint is quantized and needs a component of kind quantization that can load it",
            f"quantization is none (the checkpoint's quantization_config has quant_method {method!r})",
        )


def concerns_experts(model: ModelInfo) -> bool:
    """Return True for models that have experts."""
    return model.expert_sizes is not None


def experts(situation: Situation) -> Iterator[Need | Reason]:
    """Require a backend that multiplies the weights of experts as they are stored, if the model has experts."""
    if not concerns_experts(situation.model):
        return
    needed_by = f"model {situation.model.architecture!r}"
    if situation.candidate(ComponentKind.EXPERTS) is None:
        yield Reason("experts.none", f"{needed_by} has experts and needs a backend of kind experts", "experts is none")
        return
    quantization = situation.candidate(ComponentKind.QUANTIZATION)
    stored = expert_feature(quantization, situation.model.quantization)
    plain = stored is Feature.EXPERTS_PLAIN
    how = "its experts are not quantized" if plain else f"quantization {show(quantization)} stores its experts so"
    yield from situation.needs(stored, needed_by, how)


def check_experts(config: Config, slots: Mapping[str, Slot], combo: Combination) -> None:
    """Refuse ``graphs.piecewise_tokens`` with a backend of experts that cannot be captured, and adapters of experts with one in whose place they
    may not be computed, and in a format whose kernels do not compute them. Raises ``ConfigError``."""
    chosen = combo[ComponentKind.EXPERTS]
    _check_adapted_experts(config, slots[ComponentKind.EXPERTS].request, combo)
    captured = not isinstance(chosen, Candidate) or Feature.EXPERTS_GRAPH in chosen.spec.offers
    if config.graphs.piecewise_tokens and not captured:
        raise ConfigError(
            f"graphs.piecewise_tokens is {config.graphs.piecewise_tokens}, and experts {show(chosen)!r} does not offer "
            f"{Feature.EXPERTS_GRAPH}; allowed with it: 0, null. Set graphs.piecewise_tokens: 0, or another backend of experts"
        )


def _check_adapted_experts(config: Config, request: ResolveRequest, combo: Combination) -> None:
    """Refuse ``experts`` in ``adapters.modules`` with a backend that does not offer ``experts.adapters``, and on CUDA if the quantization stores
    experts in a format without such kernels."""
    model, adapters = request.model_info, config.adapters
    wanted = adapters.enabled and adapters.modules is not None and "experts" in adapters.modules
    if not wanted or model is None or not concerns_experts(model):
        return
    backend, quantization = combo[ComponentKind.EXPERTS], combo[ComponentKind.QUANTIZATION]
    if isinstance(backend, Candidate):
        check_adapted_backend(backend.spec)
    if request.machine.device_type != "cuda":
        return
    chosen = quantization if isinstance(quantization, Candidate) else None
    stored = expert_feature(chosen, model.quantization).removeprefix("experts.")
    if stored not in ADAPTED_ON_CUDA:
        raise ConfigError(
            f"adapters.modules has experts, and quantization {show(quantization)} stores those of {model.architecture} as {stored}; allowed with "
            f"adapters on CUDA: {', '.join(ADAPTED_ON_CUDA)}. Leave experts out of adapters.modules, or load a checkpoint whose experts are stored so"
        )


def check_adapted_backend(spec: ComponentSpec) -> None:
    """Raise ``ConfigError`` if adapters of experts may not be computed in the place of this backend of experts."""
    if Feature.EXPERTS_ADAPTERS not in spec.offers:
        raise ConfigError(
            f"there are adapters of experts, and experts {spec.name!r} does not offer {Feature.EXPERTS_ADAPTERS}: it would not compute the steps "
            "in which a token has an adapter. Set adapters.modules without experts, or another backend of experts"
        )


def concerns_mixer(model: ModelInfo) -> bool:
    """Return True for models that have layers with a state."""
    return any(group.kind is CacheGroupKind.STATE for group in model.cache_groups)


def mixer(situation: Situation) -> Iterator[Need | Reason]:
    """Require a backend if the model has layers with a state, and one that leaves out rejected drafts if there is a
    drafter. The model itself needs the operations that its layers call."""
    if not concerns_mixer(situation.model):
        return
    if situation.candidate(ComponentKind.MIXER) is None:
        needed = f"model {situation.model.architecture!r} has layers with a state and needs a backend of kind mixer"
        yield Reason("mixer.none", needed, "mixer is none")
        return
    if (drafter := situation.candidate(DRAFTER)) is not None:
        why = "rejected drafts must leave states as they are"
        yield from situation.needs(Feature.MIXER_DRAFTS, f"{DRAFTER} {drafter.spec.name!r}", why)


def policy(situation: Situation) -> Iterator[Need]:
    """Require a cache that reuses prefixes if the policy orders requests by cached prefixes."""
    chosen = situation.candidate(POLICY)
    if chosen is not None and Feature.POLICY_PREFIX_AWARE in chosen.spec.offers:
        why = "it orders requests by what the prefix cache holds"
        yield from situation.needs(Feature.CACHE_REUSE, f"{POLICY} {chosen.spec.name!r}", why)


def drafter(situation: Situation) -> Iterator[Need | Reason]:
    """Require the features of attention, KV and grammar that verify draft tokens and roll back rejected ones. Refuse trees if
    layers keep states: the state of a token is that after the token before it."""
    chosen = situation.candidate(DRAFTER)
    if chosen is None:
        return
    needed_by = f"{DRAFTER} {chosen.spec.name!r}"
    yield from situation.needs(Feature.ATTN_VERIFY, needed_by)
    if Feature.DRAFT_TREE in chosen.spec.offers:
        yield from situation.needs(Feature.ATTN_TREE_MASK, needed_by)
    if situation.combo[MIN_PROBABILITY]:
        yield from situation.needs(Feature.DRAFT_PROBS, MIN_PROBABILITY)
    groups = {group.kind for group in situation.model.cache_groups}
    if groups - {CacheGroupKind.STATE}:
        yield from situation.needs(Feature.KV_ROLLBACK, needed_by)
    if CacheGroupKind.STATE in groups:
        yield from situation.needs(Feature.KV_STATE_ROLLBACK, needed_by, "the model keeps recurrent state")
        if Feature.DRAFT_TREE in chosen.spec.offers:
            yield Reason(
                "drafter.tree",
                f"model {situation.model.architecture!r} keeps recurrent state and needs drafts that are chains",
                f"{needed_by} drafts trees",
            )
    if situation.candidate(GRAMMAR) is not None:
        why = "rejected drafts are rolled back in the grammar"
        yield from situation.needs(Feature.GRAMMAR_ROLLBACK, needed_by, why)


def check_drafter(config: Config, slots: Mapping[str, Slot], combo: Combination) -> None:
    """Refuse trees of drafts with ``batch_invariant`` unless a page holds one token. Only then can the keys of a node's
    ancestors follow each other as in a decode step, without the keys of other nodes between them. Raises
    ``ConfigError``."""
    chosen = combo[DRAFTER]
    trees = isinstance(chosen, Candidate) and Feature.DRAFT_TREE in chosen.spec.offers
    if config.batch_invariant and trees and config.memory.page_size != 1:
        raise ConfigError(
            f"batch_invariant is true with speculative {show(chosen)!r}, whose drafts may be trees, and memory.page_size is "
            f"{config.memory.page_size}; allowed with trees: 1. Set memory.page_size: 1, batch_invariant: false, or a drafter of "
            "chains"
        )


def cache(situation: Situation) -> Iterator[Need]:
    """Require a cache of all kinds of groups if the model has a sliding or a state group."""
    kinds = {group.kind for group in situation.model.cache_groups}
    if others := kinds - {CacheGroupKind.FULL, CacheGroupKind.LATENT}:
        why = f"it has groups of kind {', '.join(sorted(others))}"
        yield from situation.needs(Feature.CACHE_GROUPS, f"model {situation.model.architecture!r}", why)


def screen_store(candidate: Candidate, request: ResolveRequest, named: bool) -> Iterator[Reason]:
    """Require a component whose ``describe``, if it has one, accepts the checkpoint."""
    assert request.model_info is not None
    if candidate.spec.describe is None:
        return
    describe = load_attribute(candidate.spec.describe, candidate.component.label)
    reason = describe(request.model_info.quantization, candidate.config, named)
    if reason is not None:
        yield Reason("store.checkpoint", "it must fit the checkpoint", reason, f"store: {candidate.spec.name}")


STORED = {
    CacheGroupKind.FULL: Feature.STORE_FULL,
    CacheGroupKind.SLIDING: Feature.STORE_SLIDING,
    CacheGroupKind.LATENT: Feature.STORE_LATENT,
    CacheGroupKind.STATE: Feature.STORE_STATE,
}
"""What a store must offer for each kind of groups."""


def store(situation: Situation) -> Iterator[Need]:
    """Require a store that keeps the groups of the model."""
    needed_by = f"model {situation.model.architecture!r}"
    kinds = {group.kind for group in situation.model.cache_groups}
    for kind in sorted(kinds):
        yield from situation.needs(STORED[kind], needed_by, f"it has groups of kind {kind}")
    if CacheGroupKind.STATE in kinds and len(kinds) > 1:
        yield from situation.needs(Feature.STORE_SLABS, needed_by, "states share the memory of keys and values")


def executor(situation: Situation) -> Iterator[Need]:
    """Require an executor of several ranks if the model is divided among ranks."""
    tp = situation.combo[TENSOR_PARALLEL]
    if tp != 1:
        yield from situation.needs(Feature.EXECUTOR_RANKS, f"{TENSOR_PARALLEL} {tp}")


def check_grammar(config: Config, slots: Mapping[str, Slot], combo: Combination) -> None:
    """Refuse jump-forward if no backend in use returns the forced text, and with a drafter, whose drafts would take the
    positions of that text. Raises ``ConfigError``."""
    if not config.grammar.jump_forward:
        return
    if combo[DRAFTER] is not None:
        raise ConfigError(
            f"grammar.jump_forward is true with speculative {show(combo[DRAFTER])!r}; allowed: one of the two. "
            "Set grammar.jump_forward: false or speculative: none"
        )
    slot, default = slots[GRAMMAR], combo[GRAMMAR]
    usable = [c for c in [default, *slot.others(default)] if isinstance(c, Candidate) and c.asked]
    if not any(Feature.GRAMMAR_JUMP_FORWARD in c.spec.offers for c in usable):
        able = [c for c in slot.candidates if c.usable and Feature.GRAMMAR_JUMP_FORWARD in c.spec.offers]
        names = ", ".join(f"grammar {c.spec.name!r}" for c in usable) or "none"
        changes = [*(f"grammar.backend: {c.spec.name}" for c in able), "grammar.jump_forward: false"]
        raise ConfigError(
            f"grammar.jump_forward is true and no grammar backend in use offers {Feature.GRAMMAR_JUMP_FORWARD} (in use: "
            f"{names}); set {' or '.join(changes)}"
        )
