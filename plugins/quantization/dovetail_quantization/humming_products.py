"""Multiply with integers of 4 bits by the kernels of humming-kernels, a package that is optional.

It holds the codes of a weight in the order in which threads of tensor cores read them, in as many bytes as ``ops.integers``
(``words_of``), and scales and zero points in the order of the threads (``scales_of``, ``zeros_of``). Kernels are compiled when a weight of a
new size is first seen, for each interval of ``BOUNDS`` with the schedule that the package chooses, and stay in its cache. They are launched
on the current stream and can be captured. Programs that share a sum add numbers of 16 bits to the result in the order in which they
come, so that the bits of a result differ from call to call.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import torch

from dovetail.errors import ConfigError
from dovetail.interfaces.quantization import LinearProduct
from dovetail.ops.activation import GATES, Activation
from dovetail.ops.integers import Integers, held, numbers_of
from dovetail_quantization.humming_requirements import broken, fits_groups, fits_sizes, installation_fault

BOUNDS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Up to each of these numbers of rows, and for more, a product has a kernel of its own."""
_MOST = 2048
"""The number of rows for which the last kernel is chosen."""
_ROWS = 4096
"""The number of rows whose codes are reordered at a time."""
_LOCKS = 2048
"""The int32 with which programs wait for each other; kernels leave them 0."""
_WORDS = (4, 0, 3, 6, 1, 7, 2, 5)
_NUMBERS = (1, 4, 6, 2, 0, 7, 3, 5)
_launched: set[tuple[Any, ...]] = set()


def fits(weight: Integers) -> bool:
    """Return True if the kernels multiply with ``weight``."""
    return fits_groups(weight.bits, weight.group) and fits_sizes(len(weight.codes), weight.columns)


def words_of(codes: torch.Tensor) -> torch.Tensor:
    """Return codes of 4 bits, uint8 ``[out, in / 2]`` (``ops.integers``), in the order of the kernels: int32 ``[in / 16, 2 * out]``.

    A line has 16 columns, and of each 64 rows four words for each of 32 threads. Word ``j`` of thread ``t`` has eight numbers, of rows
    ``16 * j + t // 4`` and 8 more, and of columns ``2 * (t % 4)``, the next one, and 8 more than both. Rows and columns are multiples of 64.
    """
    rows, columns = len(codes), codes.shape[1] * 2
    words = torch.empty(columns // 16, 2 * rows, dtype=torch.int32, device=codes.device)
    for start in range(0, rows, _ROWS):
        numbers = numbers_of(codes[start : start + _ROWS])
        placed = numbers.view(-1, 4, 2, 8, columns // 16, 2, 4, 2).permute(_WORDS).reshape(columns // 16, -1, 2)
        packed = placed[..., 0] | placed[..., 1] << 4
        words[:, 2 * start : 2 * (start + len(numbers))] = packed.view(torch.int32)
    return words


def codes_of(words: torch.Tensor) -> torch.Tensor:
    """Return the codes of ``words_of``, as ``ops.integers`` holds them."""
    lines, rows = len(words), words.shape[1] // 2
    codes = torch.empty(rows, 8 * lines, dtype=torch.uint8, device=words.device)
    for start in range(0, rows, _ROWS):
        packed = words[:, 2 * start : 2 * (start + _ROWS)].contiguous().view(torch.uint8)
        placed = torch.stack((packed & 15, packed >> 4), -1).view(lines, -1, 8, 4, 4, 2, 2, 2)
        numbers = placed.permute(_NUMBERS).reshape(-1, 16 * lines)
        codes[start : start + len(numbers)] = held(numbers, 4)
    return codes


def scales_of(scales: torch.Tensor) -> torch.Tensor:
    """Return ``scales [groups, out]`` in the order of the kernels: of each 64 rows those that are 8 apart side by side."""
    return scales.unflatten(1, (-1, 8, 8)).mT.flatten(1).contiguous()


def zeros_of(zeros: torch.Tensor) -> torch.Tensor:
    """Return zero points, uint8 ``[groups, out]``, in the order of scales, two in a byte: int32 ``[groups, out / 8]``."""
    placed = scales_of(zeros).unflatten(1, (-1, 2))
    return (placed[..., 0] | placed[..., 1] << 4).view(torch.int32)


@functools.cache
def kernels_of(
    rows: int, columns: int, group: int, zeros: bool, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Compile the kernels of all weights of this kind, and return what names them to ``launch_kernel``: int64 on the CPU, for each interval
    of rows its bounds, a kernel and its number of programs (0: all processors). Raises ``ConfigError``."""
    if (fault := installation_fault()) is not None:
        raise ConfigError(fault)
    from humming import dtypes  # pyright: ignore[reportMissingImports]
    from humming.kernel.humming import HummingKernel  # pyright: ignore[reportMissingImports]
    from humming.schema import HummingWeightSchema  # pyright: ignore[reportMissingImports]
    from humming.transform import prepare_layer_config  # pyright: ignore[reportMissingImports]
    from humming.tune import get_heuristics_config  # pyright: ignore[reportMissingImports]

    schema = HummingWeightSchema(
        b_dtype=dtypes.uint4,
        bs_dtype=dtypes.DataType.from_torch_dtype(dtype),
        weight_scale_group_size=group,
        has_zero_point=zeros,
    )
    layer = prepare_layer_config(rows, columns, schema, torch_dtype=dtype, device=device)
    chosen: list[tuple[int, int, dict[str, Any]]] = []
    for below, bound in pairwise((0, *BOUNDS, 1 << 30)):
        schedule = dict(get_heuristics_config(layer, shape_m=min(bound, _MOST), device=device))
        schedule["use_pdl"] = bool(schedule.get("use_warp_spec"))
        chosen.append((below, bound, schedule))
    try:
        return HummingKernel.prepare_kernels(layer.to_str(), None, chosen, device)
    except OSError as error:  # a library of the package cannot be loaded
        raise ConfigError(broken(error)) from error
    except RuntimeError as error:
        raise ConfigError(
            f"humming-kernels cannot compile products of [{rows}, {columns}]: {error}. It needs NVRTC or nvcc with the headers of CUDA (CUDA_HOME, "
            "or pip install 'humming-kernels[cu13]'); otherwise set quantization.products to triton"
        ) from error


class HummingProduct(LinearProduct):
    """Multiply with ``words`` (``words_of``) that stand for codes of a weight with ``scales [groups, out]`` and ``zeros`` (uint8, the same shape)
    or None. Its columns belong to the inputs in ``order``, if it is given. Scales are rounded to ``dtype``, that of activations. Gates are
    computed apart, and there are no parts."""

    def __init__(
        self,
        words: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        order: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self._out, columns = words.shape[1] // 2, len(words) * 16
        self._group = columns // len(scales)
        self._words, self._order = words, order
        self._scales = scales_of(scales.to(dtype))
        self._zeros = None if zeros is None else zeros_of(zeros)
        self._locks = torch.zeros(_LOCKS, dtype=torch.int32, device=words.device)
        kind = (self._out, columns, self._group, zeros is not None, dtype, words.device)
        self._kernels = kernels_of(*kind)
        self._launch = torch.ops.humming.launch_kernel.default
        if kind not in _launched:  # loads the kernels, which no capture may do
            for rows in (*BOUNDS, BOUNDS[-1] + 1):
                self.forward(torch.zeros(rows, columns, dtype=dtype, device=words.device), None)
            _launched.add(kind)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See ``LinearProduct``."""
        if not len(x):
            return x.new_empty(0, self._out)
        x = x if self._order is None else x.index_select(1, self._order)
        none = None
        y = self._launch(
            self._kernels, x, self._words, self._scales, none, none, none, self._zeros, none, none,
            none, none, none, none, self._locks, 1, 0,
        )  # fmt: skip
        return y if bias is None else y.add_(bias)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> torch.Tensor:
        """See ``LinearProduct``."""
        return GATES[activation](self.forward(x, bias))

    @property
    def describe(self) -> str:
        """See ``LinearProduct``."""
        return f"integers of 4 bits, groups of {self._group}, humming-kernels"
