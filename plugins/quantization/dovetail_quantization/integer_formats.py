"""Read the ``quantization_config`` of checkpoints with integer weights. Does not import torch.

The formats are those of AutoAWQ (arXiv 2306.00978, layout ``gemm``), of AutoGPTQ and GPTQModel (arXiv 2210.17323), and of
compressed-tensors (``pack-quantized`` and ``int-quantized``).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dovetail.errors import ConfigError
from dovetail_quantization.checkpoint import (
    allow_only,
    any_of,
    check_kv_scheme,
    listed,
    modules_left_out,
    names_of,
    refuse_ignore,
)
from dovetail_quantization.config import IntegerConfig
from dovetail_quantization.humming_requirements import fits_groups, listed_groups

LARGEST_GROUP = 1 << 20
"""The largest number of columns of a group that a config may name."""


class IntegerLayout(enum.StrEnum):
    """Enumerate how tensors store integers. ``PLAIN`` has one in an int8. With ``ONLINE``, weights are quantized while
    they are loaded."""

    AWQ = "awq"
    GPTQ = "gptq"
    PACKED = "pack-quantized"
    PLAIN = "int-quantized"
    ONLINE = "online"


class IntegerActivations(enum.StrEnum):
    """Enumerate how activations are quantized: not at all (16 bits), or to int8 with a scale for each token, computed in each
    step, or with the one that the checkpoint has."""

    WHOLE = "16 bits"
    TOKEN = "token"
    STATIC = "static"


@dataclass(frozen=True, slots=True)
class Scheme:
    """Describe how a module is stored: integers of ``bits``, a scale for each ``group`` of columns of a row (None: for each row,
    or with ``by_tensor`` for the tensor), zero points beside scales (``zeros``), and columns whose groups are listed
    (``indexed``), which with ``ordered`` may be in any order (act-order)."""

    layout: IntegerLayout
    bits: int
    group: int | None
    zeros: bool = False
    by_tensor: bool = False
    indexed: bool = False
    ordered: bool = False
    activations: IntegerActivations = IntegerActivations.WHOLE
    missing: int = 0  # what stored zero points lack

    def __str__(self) -> str:
        """Describe the scheme for errors."""
        scales = "tensor" if self.by_tensor else f"{self.group} columns of a row" if self.group else "row"
        further = [" and zero points"] * self.zeros + [", columns in any order"] * self.ordered
        inputs = "" if self.activations is IntegerActivations.WHOLE else f", int8 activations ({self.activations})"
        return f"{self.layout} of {self.bits} bits with scales for each {scales}{''.join(further)}{inputs}"


Rule = tuple[re.Pattern[str], Scheme | None]
"""A pattern of whole names of modules, and how these are stored; None: they are not quantized."""


@dataclass(frozen=True, slots=True)
class IntegerFormat:
    """Describe how a checkpoint is stored: of ``rules`` the first one whose pattern matches a module. With ``precise_too``,
    layers that are ``LinearShape.precise`` are quantized as the rules say, otherwise those that ``precise`` matches."""

    rules: tuple[Rule, ...]
    precise_too: bool = False
    precise: re.Pattern[str] = re.compile(r"(?!)")

    def scheme_of(self, names: Sequence[str], *, precise: bool = False) -> Scheme | None:
        """Return how a layer that holds the modules ``names`` is stored, or None if it is not quantized. Raises
        ``ConfigError`` if not all of them are stored alike."""
        found = [self._one(name, precise) for name in names]
        for name, scheme in zip(names, found, strict=True):
            if scheme != found[0]:
                others = [n for n, own in zip(names, found, strict=True) if own != found[0]]
                if scheme is None or found[0] is None:
                    out, kept = (others, names[0]) if scheme is None else ([names[0]], name)
                    raise ConfigError(
                        f"the quantization leaves out {listed(out)}, but not {kept} of the same layer; all of them or none can be quantized"
                    )
                raise ConfigError(
                    f"{names[0]} and {name} share a layer, and the checkpoint stores the first as {found[0]}, and the second as {scheme}; "
                    "implemented: all modules of a layer stored alike"
                )
        return found[0] if found else None

    def _one(self, name: str, precise: bool) -> Scheme | None:
        if precise and not self.precise_too and not self.precise.fullmatch(name):
            return None
        return next((scheme for pattern, scheme in self.rules if pattern.fullmatch(name)), None)

    @property
    def schemes(self) -> list[Scheme]:
        """Return all schemes, the most general last."""
        return [scheme for _, scheme in self.rules if scheme is not None]


def describe(checkpoint: Mapping[str, Any] | None, config: IntegerConfig) -> str | None:
    """Return why these weights cannot be loaded, or None (see ``interfaces.quantization.Quantization``)."""
    try:
        form = read_format(checkpoint, config)
    except ConfigError as error:
        return str(error)
    if config.products == "humming" and not any(fits_groups(scheme.bits, scheme.group) for scheme in form.schemes):
        stored = "; ".join(dict.fromkeys(map(str, form.schemes)))
        return (
            f"quantization.products is humming, and linear layers are stored as {stored}; it multiplies 4 bits with scales for each "
            f"{listed_groups()} columns. Set quantization.products to triton"
        )
    return None


def expert_format(checkpoint: Mapping[str, Any] | None, config: IntegerConfig) -> str:
    """Return the ``ExpertFormat`` of experts that are quantized."""
    return f"int{read_format(checkpoint, config).schemes[-1].bits}"


def read_format(checkpoint: Mapping[str, Any] | None, config: IntegerConfig) -> IntegerFormat:
    """Return the format of a checkpoint. Raises ``ConfigError`` for one that has no integers or is not implemented."""
    if checkpoint is None:
        activations = IntegerActivations.TOKEN if config.activations == "int8" else IntegerActivations.WHOLE
        if activations is IntegerActivations.TOKEN and (config.bits != 8 or config.group_size is not None):
            raise ConfigError(
                "quantization.activations is int8; implemented with it: bits: 8 and group_size: null (a scale for each row)"
            )
        scheme = Scheme(IntegerLayout.ONLINE, config.bits, config.group_size, activations=activations)
        return IntegerFormat(((any_of(config.ignore), None), (_EVERY, scheme)))
    refuse_ignore(config.ignore)
    for key in ("bits", "group_size", "activations"):
        if key in config.model_fields_set:
            raise ConfigError(
                f"quantization.{key} is set, and the checkpoint is quantized already; leave it out, or take the unquantized checkpoint"
            )
    method = checkpoint.get("quant_method")
    if not isinstance(method, str) or method not in _READERS:
        raise ConfigError(
            f"quantization_config: quant_method is {method!r}; implemented: {', '.join(map(repr, _READERS))}"
        )
    return _READERS[method](checkpoint)


_EVERY = re.compile(r".*", re.DOTALL)


def _group(value: Any, key: str = "group_size") -> int | None:
    """Return the number of columns of a group; None if a row has one."""
    if value == -1 or value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and 32 <= value <= LARGEST_GROUP and value % 32 == 0:
        return value
    raise ConfigError(
        f"quantization_config: {key} is {value!r:.80}; implemented: multiples of 32, and -1 (a scale for each row)"
    )


def _read_awq(given: Mapping[str, Any]) -> IntegerFormat:
    bits = "w_bit" if "w_bit" in given else "bits"
    size = "q_group_size" if "q_group_size" in given else "group_size"
    allow_only(given, bits, (4,))
    allow_only(given, "zero_point", (True,))
    version = given.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise ConfigError(f"quantization_config: version is {version!r:.80}; implemented: 'gemm'")
    scheme = Scheme(IntegerLayout.AWQ, 4, _group(given.get(size), size), zeros=True)
    left_out = modules_left_out(given, "modules_to_not_convert")
    within = any_of(
        [rf"(?:.*\.)?{re.escape(name)}\..*" for name in names_of(given.get("modules_to_not_convert") or [])]
    )
    return IntegerFormat(((left_out, None), (within, None), (_EVERY, scheme)))


def _read_gptq(given: Mapping[str, Any]) -> IntegerFormat:
    allow_only(given, "pack_dtype", ("int32", None))
    allow_only(given, "is_marlin_format", (False, None))
    allow_only(given, "checkpoint_format", ("gptq", "gptq_v2", None))
    allow_only(given, "lm_head", (True, False, None))
    missing = 0 if given.get("checkpoint_format") == "gptq_v2" else 1
    base = _gptq_scheme(given, Scheme(IntegerLayout.GPTQ, 4, 128, zeros=True, indexed=True, missing=missing))
    rules: list[Rule] = []
    overrides = given.get("dynamic") or {}
    if not isinstance(overrides, Mapping):
        raise ConfigError(f"quantization_config: dynamic is {overrides!r:.80}; allowed: an object")
    for pattern, own in overrides.items():
        if not isinstance(own, Mapping):
            raise ConfigError(f"quantization_config: dynamic of {pattern!r:.80} is {own!r:.80}; allowed: an object")
        expression = any_of([rf"(?:{re.sub(r'^[+-]:', '', pattern)}).*"])
        rules.append((expression, None if pattern.startswith("-:") else _gptq_scheme({**given, **own}, base)))
    rules.append((modules_left_out(given, "modules_to_not_convert"), None))
    if (blocks := given.get("modules_in_block_to_quantize")) is not None:
        inside = blocks if isinstance(blocks, list) else [blocks]
        names = [name for block in inside for name in names_of(block if isinstance(block, list) else [block])]
        rules.append((any_of([rf".*\.{re.escape(name)}" for name in names] + [r"(?:.*\.)?lm_head"]), base))
        rules.append((_EVERY, None))
    rules.append((_EVERY, base))
    head = r"(?:.*\.)?lm_head" if given.get("lm_head") else r"(?!)"
    return IntegerFormat(tuple(rules), precise=re.compile(head))


def _gptq_scheme(given: Mapping[str, Any], base: Scheme) -> Scheme:
    allow_only(given, "bits", (4, 8))
    allow_only(given, "desc_act", (True, False, None))
    allow_only(given, "sym", (True, False, None))
    ordered = given.get("desc_act") or given.get("static_groups")
    return replace(base, bits=given["bits"], group=_group(given.get("group_size", 128)), ordered=bool(ordered))


def _read_compressed(given: Mapping[str, Any]) -> IntegerFormat:
    check_kv_scheme(given)
    for key in ("sparsity_config", "transform_config"):
        allow_only(given, key, (None, {}))
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError(
            f"quantization_config: config_groups is {groups!r:.200}; allowed: an object with at least one group"
        )
    # compressed-tensors compares expressions with the beginning of a name
    ignored = [_expression(name) for name in names_of(given.get("ignore") or [])]
    named, classes = list[Rule](), list[Rule]()
    for group in groups.values():
        if not isinstance(group, Mapping):
            raise ConfigError(f"quantization_config: a group of config_groups is {group!r:.80}; allowed: an object")
        scheme = _compressed_scheme(given, group)
        for target in names_of(group.get("targets")):
            (classes if target == "Linear" else named).append(
                (_EVERY if target == "Linear" else any_of([_expression(target)]), scheme)
            )
    if not named and not classes:
        raise ConfigError(
            "quantization_config: no group of config_groups has targets; allowed: 'Linear', or names of modules"
        )
    return IntegerFormat(((any_of(ignored), None), *named, *classes), precise_too=True)


def _expression(name: str) -> str:
    return f"(?:{name[3:]}).*" if name.startswith("re:") else re.escape(name)


def _compressed_scheme(given: Mapping[str, Any], group: Mapping[str, Any]) -> Scheme:
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping):
        raise ConfigError(f"quantization_config: weights is {weights!r:.80}; implemented: integer weights")
    own = {"format": group.get("format") or given.get("format")}
    allow_only(own, "format", ("pack-quantized", "int-quantized"))
    layout = IntegerLayout(own["format"])
    allow_only(group, "output_activations", (None,))
    allow_only(weights, "type", ("int", None))
    allow_only(weights, "num_bits", (4, 8))
    allow_only(weights, "symmetric", (True, False, None))
    allow_only(weights, "dynamic", (False, None))
    allow_only(weights, "strategy", ("group", "channel", "tensor", None))
    allow_only(weights, "actorder", (None, False, "static", "weight", "group", "dynamic", True))
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if strategy == "group" and weights.get("group_size") in (None, -1):
        raise ConfigError(
            "quantization_config: strategy is 'group', and group_size is missing; allowed: a multiple of 32"
        )
    ordered = weights.get("actorder") in ("group", "dynamic", True)
    if ordered and layout is IntegerLayout.PLAIN:
        raise ConfigError(
            "quantization_config: actorder is 'group' with format 'int-quantized'; implemented: 'pack-quantized'"
        )
    scheme = Scheme(
        layout,
        weights["num_bits"],
        _group(weights.get("group_size")) if strategy == "group" else None,
        zeros=weights.get("symmetric") is False,
        by_tensor=strategy == "tensor",
        indexed=ordered,
        ordered=ordered,
        activations=_compressed_inputs(inputs),
    )
    if scheme.activations is not IntegerActivations.WHOLE and (scheme.bits != 8 or scheme.group or scheme.zeros):
        raise ConfigError(
            f"quantization_config: int8 activations with weights of {scheme.bits} bits, strategy {strategy!r} and symmetric "
            f"{not scheme.zeros}; implemented with int8 activations: symmetric weights of 8 bits, strategy 'channel' or 'tensor'"
        )
    return scheme


def _compressed_inputs(inputs: Any) -> IntegerActivations:
    if inputs is None:
        return IntegerActivations.WHOLE
    if not isinstance(inputs, Mapping):
        raise ConfigError(f"quantization_config: input_activations is {inputs!r:.80}; allowed: an object, null")
    allow_only(inputs, "num_bits", (8,))
    allow_only(inputs, "type", ("int", None))
    allow_only(inputs, "symmetric", (True, None))
    allow_only(inputs, "dynamic", (True, False, None))
    if inputs.get("dynamic"):
        allow_only(inputs, "strategy", ("token", None))
        return IntegerActivations.TOKEN
    allow_only(inputs, "strategy", ("tensor", None))
    return IntegerActivations.STATIC


_READERS: Mapping[str, Callable[[Mapping[str, Any]], IntegerFormat]] = {
    "awq": _read_awq,
    "gptq": _read_gptq,
    "compressed-tensors": _read_compressed,
}
