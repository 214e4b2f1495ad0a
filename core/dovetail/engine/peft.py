"""Read adapters (LoRA) that PEFT has saved: a directory with adapter_config.json and adapter_model.safetensors.

Nothing in the files is trusted. What changes the result and is not implemented is refused by name. Only the header of
the tensors is read here; pickled adapters are not read at all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from dovetail.config.checkpoint import read_json
from dovetail.engine.read_thread import Note, note_nothing
from dovetail.engine.shards import StoredTensor, stored_tensors
from dovetail.errors import ConfigError, WeightsError
from dovetail.stop_regex import StopRegexError, StopRegexes

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MOST_RANK = 256
"""The largest rank of an adapter."""
MOST_CONFIG_BYTES = 16 << 20
"""The largest size of adapter_config.json."""
MOST_PATTERNS = 1024
"""The largest number of modules or patterns that one field of adapter_config.json may list."""
MOST_EXPRESSIONS = 32
"""The largest number of these patterns that may be more than the end of a name."""
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

_REFUSED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "lora_bias": "biases of adapters (lora_bias)",
    "modules_to_save": "modules_to_save, whole modules beside the low-rank matrices",
    "layer_replication": "layer_replication",
    "trainable_token_indices": "trainable_token_indices",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
    "arrow_config": "Arrow routing (arrow_config)",
    "megatron_config": "layers of Megatron (megatron_config)",
}
"""The fields of adapter_config.json that change what an adapter computes, and that are not implemented."""
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga", "mclr")
"""Values of ``init_lora_weights`` with which PEFT changes the base weights too, unless the adapter was converted."""
_PREFIXES = ("base_model.model.", "base_model.")
_NAME = re.compile(
    r"(?P<module>.+)\.(lora_(?P<side>[AB])(\.default)?\.weight|lora_embedding_(?P<table>[AB])(\.default)?)"
)
_COPY = re.compile(r"(?P<module>.+)\.base_layer\.weight")
_NESTED = ".base_layer"
_EXPERTS = "experts"
"""The name of the modules of transformers that hold the weights of all experts as parameters."""
_PLAIN = re.compile(r"[\w.-]+")

T = TypeVar("T")


class LowRank(NamedTuple):
    """Hold the matrices of one module: ``a [rank, in]`` and ``b [out, rank]``. The product is multiplied by
    ``scale``."""

    a: StoredTensor
    b: StoredTensor
    scale: float

    @property
    def rank(self) -> int:
        """Return the number of rows of ``a``."""
        return self.a.shape[0]


class StackedLowRank(NamedTuple):
    """Hold the matrices that PEFT writes for a parameter of all experts (``target_parameters``): of each expert ``rank`` rows of ``a
    [experts * rank, x]``, one expert after the other, and ``rank`` columns of ``b [y, rank * experts]``, in which those of all experts
    alternate. Which parameter it is, and whether ``a`` belongs to its inputs or to its outputs, shapes tell."""

    a: StoredTensor
    b: StoredTensor


class ModulePatterns(Generic[T]):
    """Hold the values of a field such as ``rank_pattern``, by keys that name modules as PEFT reads them: a key is a regular
    expression for the end of a name, or, if it begins with ``^``, for the whole name. Matching takes linear time."""

    def __init__(self, given: Mapping[str, T], what: str) -> None:
        """Raises ``WeightsError``. ``what`` names the file and the field."""
        self._entries: list[tuple[str | StopRegexes, T]] = []
        for key, value in given.items():
            self._entries.append((key if _PLAIN.fullmatch(key) else _expression(key, what), value))
        if sum(not isinstance(key, str) for key, _ in self._entries) > MOST_EXPRESSIONS:
            raise WeightsError(f"{what} has more than {MOST_EXPRESSIONS} regular expressions; name the modules instead")

    def value(self, module: str, default: T) -> T:
        """Return the value of the first key that names ``module``, or ``default``."""
        return next((value for key, value in self._entries if _matches(key, module)), default)


def _expression(key: str, what: str) -> StopRegexes:
    whole = f"(?:{key[1:]})$" if key.startswith("^") else rf"(?:.*\.)?(?:{key})$"
    try:
        return StopRegexes([f"^{whole}"])
    except StopRegexError as error:
        raise WeightsError(f"{what} has the key {key!r:.80}, which is not implemented: {error}") from None


def _matches(key: str | StopRegexes, module: str) -> bool:
    if isinstance(key, str):
        return _ends_with(module, key)
    state = key.start
    for char in module:
        state = key.step(state, char)
    return key.accepts(state)


def _ends_with(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Hold what adapter_config.json says of the matrices. ``targets`` are the names of modules, or None if a regular
    expression or ``all-linear`` selects them: the tensors then tell which modules have matrices. ``parameters`` are the names in
    ``target_parameters``, and ``version`` is that of PEFT, which is empty before 0.18. With ``ties`` (``ensure_weight_tying``), the module
    that is tied to one of them has matrices too."""

    rank: int
    alpha: float
    rslora: bool
    targets: tuple[str, ...] | None
    ranks: ModulePatterns[int]
    alphas: ModulePatterns[float]
    base_model: str
    parameters: tuple[str, ...] = ()
    version: tuple[int, ...] = ()
    ties: bool = False

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's matrices."""
        return self.ranks.value(module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of a module's product: alpha / rank, or alpha / sqrt(rank) with rslora."""
        alpha, rank = self.alphas.value(module, self.alpha), self.rank_of(module)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def selects(self, module: str) -> bool:
        """Return False if the config lists modules and ``module`` is none of them."""
        return self.targets is None or any(_ends_with(module, name) for name in self.targets)

    def parameters_of(self, module: str) -> list[str]:
        """Return the full names of the parameters of ``module`` that ``target_parameters`` names."""
        found: list[str] = []
        for name in self.parameters:
            owner, _, field = name.rpartition(".")
            if _ends_with(module, owner) if owner else field != "weight" and module.rpartition(".")[2] == _EXPERTS:
                found.append(f"{module}.{field}")
        return found


class PeftAdapter(NamedTuple):
    """Hold the config of an adapter and the matrices of its modules, by the names of the modules in the base model. ``stacked`` are those
    of parameters of all experts, and ``copies`` the base weights that PEFT saves beside the matrices of embeddings and heads."""

    config: PeftConfig
    modules: Mapping[str, LowRank]
    stacked: Mapping[str, Sequence[StackedLowRank]] = MappingProxyType({})
    copies: Mapping[str, StoredTensor] = MappingProxyType({})

    @property
    def rank(self) -> int:
        """Return the largest rank."""
        own = [self.config.rank_of(name) for module in self.stacked for name in self.config.parameters_of(module)]
        return max([pair.rank for pair in self.modules.values()] + own)

    @property
    def file(self) -> Path:
        """Return the file of the tensors."""
        first = next(iter(self.modules.values()), None) or next(iter(self.stacked.values()))[0]
        return first.a.file


def read_adapter(directory: Path, note: Note = note_nothing) -> PeftAdapter:
    """Read the config of an adapter and the header of its tensors. Raises ``WeightsError`` that names the file and the
    field or tensor that is wrong or not implemented."""
    note(directory / CONFIG)
    config = read_config(directory)
    file = directory / TENSORS
    note(file)
    if not file.is_file():
        pickled = (directory / "adapter_model.bin").is_file()
        raise WeightsError(
            f"{directory} has no {TENSORS}"
            + (
                ", only adapter_model.bin, which could run code: save the adapter with safe_serialization"
                if pickled
                else ""
            )
        )
    sides, copies = _sides(file)
    modules: dict[str, LowRank] = {}
    stacked: dict[str, list[StackedLowRank]] = {}
    for module, found in sides.items():
        own, pair = module.replace(_NESTED, ""), _matrices(module, found)
        key, *_ = *config.parameters_of(own), module
        if key == module or (key.endswith(".weight") and pair.a.shape[0] == config.rank_of(key)):
            modules[module] = _pair(module, pair, config, key)
        else:
            stacked.setdefault(own, []).append(pair)
    _check_targets(file, config, modules)
    return PeftAdapter(config, modules, stacked, copies)


def _sides(file: Path) -> tuple[dict[str, dict[str, StoredTensor]], dict[str, StoredTensor]]:
    """Return the matrices of each module by their sides, "A" and "B", and the copies of base weights. Raises ``WeightsError``."""
    sides: dict[str, dict[str, StoredTensor]] = {}
    copies: dict[str, StoredTensor] = {}
    for tensor in stored_tensors(file):
        if (copy := _COPY.fullmatch(_own_name(tensor.name))) is not None:
            copies[copy["module"]] = tensor
            continue
        module, side = _place(tensor)
        if side in sides.setdefault(module, {}):
            raise WeightsError(f"{file} has the matrix {side} of {module} twice, the second time as {tensor.name}")
        sides[module][side] = tensor
    if not sides:
        raise WeightsError(f"{file} has no tensors of adapters")
    alone = next((module for module in copies if module not in sides), None)
    if alone is not None:
        raise WeightsError(
            f"{file} has the weight of {alone:.200} and no matrices of it; whole modules (modules_to_save) are not implemented"
        )
    return sides, copies


def read_config(directory: Path) -> PeftConfig:
    """Read adapter_config.json. Raises ``WeightsError``."""
    try:
        size = (directory / CONFIG).stat().st_size
    except (OSError, ValueError):
        size = 0  # the error below says why it cannot be read
    if size > MOST_CONFIG_BYTES:
        raise WeightsError(f"{directory / CONFIG} has {size} bytes; allowed: at most {MOST_CONFIG_BYTES}")
    try:
        tree = read_json(directory, CONFIG)
    except ConfigError as error:
        raise WeightsError(
            str(error).replace("a model directory in Hugging Face layout", "an adapter saved by PEFT")
        ) from None
    where = directory / CONFIG
    if tree.get("peft_type") != "LORA":
        raise WeightsError(f"{where} has peft_type {tree.get('peft_type')!r:.40}; implemented: 'LORA'")
    for field, what in _REFUSED.items():
        if tree.get(field):
            raise WeightsError(f"{where} sets {field} to {tree[field]!r:.80}; {what} is not implemented")
    if tree.get("bias", "none") != "none":
        raise WeightsError(
            f"{where} has bias {tree['bias']!r:.40}; implemented: 'none' (the adapter leaves biases alone)"
        )
    start = tree.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASES):
        raise WeightsError(
            f"{where} has init_lora_weights {start!r:.40}, with which training also changed the base weights; convert the adapter "
            "with path_initial_model_for_weight_conversion of PEFT's save_pretrained"
        )
    base = tree.get("base_model_name_or_path")
    return PeftConfig(
        rank=_rank(tree.get("r", 8), f"{where}: r"),
        alpha=_number(tree.get("lora_alpha", 8), f"{where}: lora_alpha"),
        rslora=_flag(tree.get("use_rslora", False), f"{where}: use_rslora"),
        targets=_targets(tree.get("target_modules"), f"{where}: target_modules"),
        ranks=_patterns(tree, "rank_pattern", where, _rank),
        alphas=_patterns(tree, "alpha_pattern", where, _number),
        base_model=base[:512] if isinstance(base, str) else "",
        parameters=_targets(tree.get("target_parameters") or [], f"{where}: target_parameters") or (),
        ties=_flag(tree.get("ensure_weight_tying") or False, f"{where}: ensure_weight_tying"),
        version=tuple(int(number) for number in re.findall(r"\d{1,9}", str(tree.get("peft_version") or "")[:64])[:2]),
    )


def _targets(given: Any, what: str) -> tuple[str, ...] | None:
    if given is None or isinstance(given, str):
        return None
    if not isinstance(given, list) or len(given) > MOST_PATTERNS or not all(isinstance(name, str) for name in given):
        raise WeightsError(f"{what} is {given!r:.80}; allowed: a list of at most {MOST_PATTERNS} names, or a text")
    return tuple(given)


def _patterns(tree: Mapping[str, Any], field: str, where: Path, read: Callable[[Any, str], T]) -> ModulePatterns[T]:
    given, what = tree.get(field) or {}, f"{where}: {field}"
    if not isinstance(given, dict) or len(given) > MOST_PATTERNS:
        raise WeightsError(f"{what} is {given!r:.80}; allowed: an object of at most {MOST_PATTERNS} members")
    return ModulePatterns({key: read(value, what) for key, value in given.items()}, what)


def _rank(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_RANK:
        raise WeightsError(f"{what} is {value!r:.40}; allowed: an integer from 1 to {MOST_RANK}")
    return value


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e6:
        raise WeightsError(f"{what} is {value!r:.40}; allowed: a number of less than 1e6")
    return float(value)


def _flag(value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise WeightsError(f"{what} is {value!r:.40}; allowed: true, false")
    return value


def _place(tensor: StoredTensor) -> tuple[str, str]:
    """Return the module and the side ("A" or "B") of a tensor. Raises ``WeightsError``."""
    name = tensor.name
    found = _NAME.fullmatch(_own_name(name))
    if found is None:
        what = "is not implemented"
        if "lora_magnitude_vector" in name:
            what = "belongs to DoRA, which is not implemented"
        elif ".lora_" not in name:
            what = "is a whole module (modules_to_save), which is not implemented"
        raise WeightsError(
            f"{tensor.file} has tensor {name:.200}, which {what}; implemented: lora_A.weight, lora_B.weight, lora_embedding_A and lora_embedding_B"
        )
    if tensor.dtype not in FLOATS:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        raise WeightsError(f"{tensor.file}: tensor {name:.200} is {tensor.dtype}; allowed: {allowed}")
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise WeightsError(f"{tensor.file}: tensor {name:.200} has shape {list(tensor.shape)}; allowed: two dimensions")
    return found["module"], found["side"] or found["table"]


def _own_name(name: str) -> str:
    """Return the name of a tensor without the prefix of PEFT's models."""
    return next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)


def _matrices(module: str, found: Mapping[str, StoredTensor]) -> StackedLowRank:
    if len(found) < 2:
        (present,) = found.values()
        raise WeightsError(f"{present.file} has {present.name:.200}, and lacks the other matrix of {module:.200}")
    return StackedLowRank(found["A"], found["B"])


def _pair(module: str, pair: StackedLowRank, config: PeftConfig, key: str) -> LowRank:
    """Return the matrices of one module, whose rank and scale the config has for ``key``. Raises ``WeightsError``."""
    (a, b), rank = pair, config.rank_of(key)
    if a.shape[0] != rank or b.shape[1] != rank:
        raise WeightsError(
            f"{a.file}: {module:.200} has matrices of {list(a.shape)} and {list(b.shape)}; the rank in {CONFIG} is {rank}"
        )
    return LowRank(a, b, config.scale_of(key))


def _check_targets(file: Path, config: PeftConfig, modules: Mapping[str, Any]) -> None:
    """Check that the tensors are those of the modules that the config lists. Raises ``WeightsError``."""
    unexpected = next((name for name in modules if not config.selects(name) and not config.parameters_of(name)), None)
    if unexpected is not None and not config.ties:
        raise WeightsError(f"{file} has matrices of {unexpected:.200}, which target_modules in {CONFIG} does not name")
