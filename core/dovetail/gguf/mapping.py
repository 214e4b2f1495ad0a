"""Name the tensors of a GGUF file as a checkpoint of transformers does, and say what has to be done with each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dovetail.errors import ConfigError
from dovetail.gguf.block_types import PLAIN_TYPES, QUANT_METHOD
from dovetail.gguf.changes import Change, PairedRows
from dovetail.gguf.config import family_of, num_layers, predicting_layers
from dovetail.gguf.families import OFFSET, Family
from dovetail.gguf.reader import GgufFile, GgufTensor

UNUSED = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd\.weight")
"""Tensors that are read as settings, or that nothing reads."""

_LAYER = re.compile(r"blk\.([0-9]{1,6})\.(.+)")
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class MappedTensor:
    """Describe a tensor of the checkpoint: its name, its shape, and what ``change`` makes it of; without a change it is
    the only one of ``sources`` as it is. If ``optional``, a model reads other tensors with the same numbers instead."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[GgufTensor, ...]
    change: Change | None = None
    optional: bool = False

    @property
    def nbytes(self) -> int:
        """Return the number of bytes in the file."""
        return sum(source.nbytes for source in self.sources)

    @property
    def raw_shape(self) -> tuple[int, ...] | None:
        """Return the shape of the blocks as bytes, ``[..., bytes of a row]``; None if they cannot be used as they are,
        because the change cuts rows or the sources have several types."""
        one = self.sources[0].type
        if any(source.type != one for source in self.sources) or (
            self.change is not None and not self.change.keeps_rows
        ):
            return None
        return (*self.shape[:-1], one.row_bytes(self.shape[-1]))


def mapped_tensors(checkpoint: GgufFile) -> list[MappedTensor]:
    """Return the tensors of the checkpoint, in the order of the file. Raises ``ConfigError`` for a tensor that the
    family does not have."""
    family = family_of(checkpoint)
    layers = num_layers(checkpoint)
    found: dict[str, MappedTensor] = {}
    for tensor in checkpoint.tensors.values():
        if UNUSED.fullmatch(tensor.name):
            continue
        for one in _mapped(checkpoint, family, tensor, layers):
            if one.name in found and one.change is None:
                raise ConfigError(
                    f"{tensor.file}: {tensor.name} and {found[one.name].sources[0].name} are both {one.name}"
                )
            found[one.name] = one
    single = list(_single_experts(checkpoint, found))
    return [*found.values(), *single, *_tied_head(family, found)]


def _tied_head(family: Family, found: Mapping[str, MappedTensor]) -> Iterator[MappedTensor]:
    """Yield the head of a file that has blocks of the embedding only: its products can read these blocks."""
    head, embedding = f"{family.top.get('output')}.weight", found.get(f"{family.top.get('token_embd')}.weight")
    if head not in found and embedding is not None and embedding.sources[0].type.name not in PLAIN_TYPES:
        yield replace(embedding, name=head)


def expert_name(name: str, index: int | str, part: str) -> str:
    """Return the name of the matrix ``part`` (``gate_proj``, ``up_proj`` or ``down_proj``) of one of the experts of which the checkpoint has
    the tensor ``name`` of all. A model can read the blocks of such matrices."""
    parent = name.removesuffix(".weight").rpartition(".")[0]
    return f"{parent.removesuffix('.experts')}.experts.{index}.{part}.weight"


def _single_experts(checkpoint: GgufFile, found: dict[str, MappedTensor]) -> Iterator[MappedTensor]:
    """Yield the matrices of each expert of tensors of all experts. Both become optional. Raises ``ConfigError`` if a tensor has more or fewer
    experts than the file says: a model that reads single matrices would ignore the others."""
    count = checkpoint.metadata.get(f"{checkpoint.architecture}.expert_count")
    for name, mapped in list(found.items()):
        parts = ("gate_proj", "up_proj") if len(mapped.sources) == 2 else ("down_proj",)
        stacks = [re.fullmatch(r"blk\.\d+\.ffn_(gate|up|down)_exps\.weight", source.name) for source in mapped.sources]
        if all(stacks):
            found[name] = replace(mapped, optional=True)
            for part, source in zip(parts, mapped.sources, strict=True):
                if source.shape[:1] != (count,):
                    raise ConfigError(
                        f"{source.file}: tensor {source.name} has shape {list(source.shape)}, and {checkpoint.architecture}.expert_count is "
                        f"{count!s:.20}; convert the checkpoint again"
                    )
                for one in _experts(source, expert_name(name, "{}", part)):
                    yield replace(one, optional=True)


def block_types(tensors: list[MappedTensor]) -> dict[str, Any] | None:
    """Return the ``quantization_config`` of a checkpoint with these tensors: the type of each matrix in blocks by its name, with
    ``*`` in place of the number of an expert. None if none is in blocks."""
    types: dict[str, str] = {}
    for tensor in tensors:
        names = {source.type.name for source in tensor.sources}
        if len(tensor.shape) > 1:
            types[_EXPERT.sub(".experts.*.", tensor.name)] = "+".join(sorted(names))
    if all(name in PLAIN_TYPES for name in types.values()):
        return None
    return {"quant_method": QUANT_METHOD, "types": types}


def block_type(quantization_config: Mapping[str, Any], name: str) -> str | None:
    """Return the type of the blocks of tensor ``name`` of the checkpoint, by what ``block_types`` has written; None if
    the checkpoint has no such matrix."""
    return quantization_config["types"].get(_EXPERT.sub(".experts.*.", name))


def _mapped(checkpoint: GgufFile, family: Family, tensor: GgufTensor, layers: int) -> Iterator[MappedTensor]:
    place = _LAYER.fullmatch(tensor.name)
    if place is None:
        stem, _, suffix = tensor.name.rpartition(".")
        if stem not in family.top:
            raise _unknown(checkpoint, tensor)
        yield _with_offset(family, MappedTensor(f"{family.top[stem]}.{suffix}", tensor.shape, (tensor,)))
        return
    index, leaf = int(place[1]), place[2]
    if index >= layers + predicting_layers(checkpoint):
        raise ConfigError(
            f"{tensor.file} has tensor {tensor.name}, and {checkpoint.architecture}.block_count is {layers}; convert the checkpoint again"
        )
    if index >= layers:
        return  # predicts further tokens
    prefix = f"{family.layers}.{index}"
    for joined in family.joined:
        if leaf in joined.parts:
            yield _joined(checkpoint, tensor, f"{prefix}.{joined.name}", f"blk.{index}.", joined.parts, joined.change)
            return
    stem, _, suffix = leaf.rpartition(".")
    theirs = family.names.get(leaf) or (f"{family.names[stem]}.{suffix}" if stem in family.names else None)
    if theirs is None:
        raise _unknown(checkpoint, tensor)
    if "{}" in theirs:
        yield from _experts(tensor, f"{prefix}.{theirs}")
        return
    change = _bound(checkpoint, family.changes.get(leaf) or family.changes.get(stem), tensor)
    shape = tensor.shape if change is None else _changed_shape(change, tensor)
    yield _with_offset(family, MappedTensor(f"{prefix}.{theirs}", shape, (tensor,), change))


def _with_offset(family: Family, mapped: MappedTensor) -> MappedTensor:
    return replace(mapped, change=OFFSET) if family.norm_offset and mapped.name.endswith("norm.weight") else mapped


def _bound(checkpoint: GgufFile, change: Change | None, tensor: GgufTensor) -> Change | None:
    """Return ``change`` with the numbers of this checkpoint."""
    if not isinstance(change, PairedRows) or not isinstance(change.heads, str):
        return change
    heads: Any = checkpoint.metadata.get(f"{checkpoint.architecture}.{change.heads}")
    heads = heads if heads is not None else checkpoint.metadata.get(f"{checkpoint.architecture}.attention.head_count")
    heads = heads[0].item() if isinstance(heads, np.ndarray) and len(heads) else heads  # one number for each layer
    if type(heads) is not int or heads < 1 or tensor.shape[0] % (2 * heads):
        raise ConfigError(
            f"{tensor.file}: tensor {tensor.name} has {tensor.shape[0]} rows, and {change.heads} is {heads!s:.20}"
        )
    return PairedRows(heads)


def _joined(
    checkpoint: GgufFile, tensor: GgufTensor, name: str, prefix: str, parts: tuple[str, ...], change: Change
) -> MappedTensor:
    missing = [part for part in parts if prefix + part not in checkpoint.tensors]
    if missing:
        raise ConfigError(f"{tensor.file} has {tensor.name} and no {prefix}{missing[0]}; convert the checkpoint again")
    sources = tuple(checkpoint.tensors[prefix + part] for part in parts)
    return MappedTensor(name, _changed_shape(change, *sources), sources, change)


def _changed_shape(change: Change, *sources: GgufTensor) -> tuple[int, ...]:
    """Return the shape of what ``change`` makes of ``sources``. Raises ``ConfigError`` if it cannot be applied to them."""
    shapes = [source.shape for source in sources]
    if not change.fits(*shapes):
        described = " and ".join(f"{source.name} {list(source.shape)}" for source in sources)
        raise ConfigError(
            f"{sources[0].file}: the shapes of {described} do not fit; expected {change.expects}; convert the checkpoint again"
        )
    return change.shape(*shapes)


def _experts(tensor: GgufTensor, name: str) -> Iterator[MappedTensor]:
    if len(tensor.shape) != 3:
        raise ConfigError(
            f"{tensor.file}: tensor {tensor.name} has shape {list(tensor.shape)}; expected [experts, rows, columns]"
        )
    for index, data in enumerate(tensor.data):
        own = replace(tensor, name=f"{tensor.name}[{index}]", shape=tensor.shape[1:], data=data)
        yield MappedTensor(name.format(index), own.shape, (replace(own, offset=tensor.offset + index * data.nbytes),))


def _unknown(checkpoint: GgufFile, tensor: GgufTensor) -> ConfigError:
    return ConfigError(
        f"{tensor.file} has tensor {tensor.name}, which {family_of(checkpoint).architecture} does not have here; the file may be of a "
        f"newer kind of {checkpoint.architecture!r} than is implemented"
    )
