"""Find the checkpoints of drafters, and read what their files contain."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

from dovetail.config.checkpoint import locate
from dovetail.errors import ConfigError, WeightsError

if TYPE_CHECKING:
    from dovetail.config.sections import Config
    from dovetail.interfaces.speculative import DraftRuntime
    from dovetail_speculative.config import CheckpointConfig, Eagle3TreeConfig, EagleConfig

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of tensors, by name."""


def find_checkpoint(runtime: DraftRuntime, section: CheckpointConfig) -> Path:
    """Return the directory of the checkpoint that ``speculative.path`` names. Raises ``ConfigError`` if there is
    none."""
    if section.path != "auto":
        return locate(section.path, "speculative.path")
    reason = _missing(runtime.directory, section.folder)
    if reason is not None:
        raise ConfigError(reason)
    return runtime.directory / section.folder


def opened(section: CheckpointConfig, config: Config) -> Path | None:
    """See ``ComponentSpec.opens``."""
    if section.path != "auto":
        return locate(section.path, "speculative.path")
    target = locate(config.model.path)
    return target / section.folder if _missing(target, section.folder) is None else None


def probe(section: CheckpointConfig, config: Config) -> str | None:
    """See ``ComponentSpec.probe``."""
    return _missing(locate(config.model.path), section.folder) if section.path == "auto" else None


def probe_tree(section: EagleConfig | Eagle3TreeConfig, config: Config) -> str | None:
    """Do the same as ``probe``, and check that the drafter states the probabilities that the config requires."""
    least = config.scheduler.min_draft_probability
    if section.topk == 1 and least > 0:
        return (
            f"speculative.topk is 1, which makes chains, and only trees have the probabilities that scheduler.min_draft_probability "
            f"{least:g} needs; set speculative.topk to 2 or more, or scheduler.min_draft_probability to 0"
        )
    return probe(section, config)


def _missing(target: Path, folder: str) -> str | None:
    if (target / folder).is_dir():
        return None
    return (
        f"speculative.path is 'auto', which is the folder {folder!r} of the target's checkpoint; {target} has no such folder. Set "
        "speculative.path to a directory in Hugging Face layout or a hub name like 'org/name'"
    )


def tensor_shapes(directory: Path) -> Shapes:
    """Return the shapes of all tensors in the safetensors files of a checkpoint. Empty if there are no files (the
    loader reports that)."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            shapes.update({name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()})  # noqa: SIM118
    return shapes


def tensor_names(directory: Path) -> frozenset[str]:
    """Return the names of all tensors in the safetensors files of a checkpoint."""
    return frozenset(tensor_shapes(directory))


def check_heads(heads: int, kv_heads: int) -> None:
    """Raise ``ConfigError`` unless every KV head serves the same number of query heads."""
    if heads % kv_heads:
        raise ConfigError(
            f"config.json of the drafter: num_attention_heads is {heads}, num_key_value_heads {kv_heads}; the first must be a "
            "multiple of the second"
        )


def read_tensor(directory: Path, name: str) -> torch.Tensor:
    """Return a tensor of a checkpoint as it is stored, in host memory. Raises ``WeightsError`` if no file has it."""
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118 - not a mapping
                return tensors.get_tensor(name)
    raise WeightsError(f"the checkpoint in {directory} lacks tensor {name}")


def target_ids(directory: Path, names: frozenset[str], count: int, vocab_size: int) -> torch.Tensor | None:
    """Return the target's token for each of the ``count`` tokens of the draft vocabulary, from the differences in
    ``d2t``.

    Returns None if both vocabularies are the same, and for random weights (no ``names``). Raises ``WeightsError`` if
    ``d2t`` has another shape or dtype, or if a token is outside the target's vocabulary.
    """
    if not names or ("d2t" not in names and count == vocab_size):
        return None
    offsets = read_tensor(directory, "d2t")
    if offsets.shape != (count,) or offsets.dtype.is_floating_point:
        raise WeightsError(
            f"tensor d2t of the drafter is {offsets.dtype} {list(offsets.shape)}; needed: integers [{count}], one for each token "
            "of draft_vocab_size"
        )
    ids = offsets.long() + torch.arange(count)
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise WeightsError(
            f"tensor d2t of the drafter maps to tokens {int(ids.min())} to {int(ids.max())}; the target has {vocab_size}"
        )
    return ids
