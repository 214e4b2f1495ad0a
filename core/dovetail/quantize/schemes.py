"""Define the schemes in which ``dovetail quantize`` writes weights, as compressed-tensors stores them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.errors import ConfigError
from dovetail.ops.integers import Integers, dequantize, numbers_of, quantize

FP8_LARGEST = 448.0
Rounding = Callable[[torch.Tensor, int, int, bool], Integers]
"""A function that rounds a weight to integers of a number of bits and a group, with symmetric ranges or not."""


@dataclass(frozen=True, slots=True)
class WritingScheme:
    """Describe what is written: ``kind`` is ``fp8`` (W8A8), ``int8`` (W8A8), ``w8a16`` or ``int4`` (W4A16), the last two with a
    scale for each ``group`` of columns, or for each row (None)."""

    kind: str
    group: int | None = 128
    symmetric: bool = True

    @property
    def bits(self) -> int:
        """Return the bits of a number."""
        return 4 if self.kind == "int4" else 8

    @property
    def packed(self) -> bool:
        """Return whether several numbers are stored in an int32."""
        return self.kind in ("w8a16", "int4")

    @property
    def layout(self) -> str:
        """Return the name of the format in compressed-tensors."""
        return "float-quantized" if self.kind == "fp8" else "pack-quantized" if self.packed else "int-quantized"

    def config(self, ignore: list[str]) -> dict[str, Any]:
        """Return the ``quantization_config`` of a checkpoint that leaves out the modules ``ignore``."""
        kind = "float" if self.kind == "fp8" else "int"
        group = self.group if self.packed else None
        weights = {
            "num_bits": self.bits,
            "type": kind,
            "symmetric": self.symmetric,
            "strategy": "channel" if group is None else "group",
            "group_size": group,
            "dynamic": False,
        }
        inputs = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
        of_group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": None if self.packed else inputs,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": self.layout,
            "quantization_status": "compressed",
            "config_groups": {"group_0": of_group},
            "ignore": ignore,
            "kv_cache_scheme": None,
        }

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ``ConfigError`` if a weight of ``shape`` cannot be stored."""
        if self.packed and (shape[1] % (self.group or 1) or shape[1] % 32):
            raise ConfigError(
                f"{name} has {shape[1]} columns, which groups of {self.group or 32} do not divide; choose another --group-size, or leave the "
                "module out (--ignore)"
            )

    def stored(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return the tensors of module ``name``, whose weight has ``shape`` and ``dtype``."""
        rows, columns = shape
        groups = columns // self.group if self.packed and self.group else 1
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {f"{name}.weight_scale": (dtype, (rows, groups))}
        if not self.packed:
            return {f"{name}.weight": (torch.float8_e4m3fn if self.kind == "fp8" else torch.int8, shape), **found}
        each = 32 // self.bits
        found[f"{name}.weight_packed"] = (torch.int32, (rows, columns // each))
        found[f"{name}.weight_shape"] = (torch.int64, (2,))
        if not self.symmetric:
            found[f"{name}.weight_zero_point"] = (torch.int32, (-(-rows // each), groups))
        return found

    def quantized(
        self, name: str, weight: torch.Tensor, rounding: Rounding | None = None
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return the tensors of module ``name`` and the float32 weight that they stand for. Scales have the dtype of
        ``weight``. Raises ``ConfigError`` for a weight with numbers that are infinite or NaN."""
        if not weight.isfinite().all():
            raise ConfigError(f"{name}.weight has numbers that are infinite or NaN, and these cannot be quantized")
        if self.kind == "fp8":
            return _fp8(name, weight)
        group = self.group if self.packed and self.group else weight.shape[1]
        if rounding is None:
            made = quantize(weight, self.bits, group, symmetric=self.symmetric, dtype=weight.dtype)
        else:
            made = rounding(weight, self.bits, group, self.symmetric)
        exact, scales = dequantize(made, torch.float32), made.scales.mT.to(weight.dtype).contiguous()
        if not self.packed:
            return {f"{name}.weight": made.codes, f"{name}.weight_scale": scales}, exact
        found = {
            f"{name}.weight_packed": packed(numbers_of(made.codes), self.bits),
            f"{name}.weight_scale": scales,
            f"{name}.weight_shape": torch.tensor(weight.shape),
        }
        if made.zeros is not None:
            found[f"{name}.weight_zero_point"] = packed(made.zeros, self.bits).mT.contiguous()
        return found, exact


def packed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Return unsigned numbers (uint8 ``[rows, columns]``) as int32, of which each holds 32 / bits columns, the first in the lowest
    bits. Missing columns are zeros."""
    each = 32 // bits
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % each)).unflatten(1, (-1, each)).long()
    whole = (numbers << torch.arange(0, 32, bits, device=numbers.device)).sum(2)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).int()


def _fp8(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    wide = weight.float()
    largest = wide.abs().amax(1, keepdim=True)
    scales = torch.where(largest == 0, 1.0, largest / FP8_LARGEST).to(weight.dtype)
    scales = torch.where(
        scales == 0, torch.finfo(weight.dtype).tiny, scales
    )  # numbers that are too small for the dtype
    codes = (wide / scales.float()).clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)
    return {f"{name}.weight": codes, f"{name}.weight_scale": scales}, codes.float() * scales.float()
