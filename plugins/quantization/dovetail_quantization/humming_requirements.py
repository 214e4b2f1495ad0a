"""State what the products of humming-kernels need: of the machine, of config, of the installation and of a weight. Does not
import torch."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet
from packaging.version import Version

if TYPE_CHECKING:
    from dovetail.config import Config
    from dovetail_quantization.config import IntegerConfig

HUMMING = "humming-kernels"
HUMMING_VERSIONS = SpecifierSet("==0.1.20")
"""The distribution that ``IntegerConfig.products`` may name, and the versions whose order of codes is known."""
GROUPS = (32, 64, 128)
"""The numbers of columns with one scale for which its products are used."""
MULTIPLE = 128
"""The rows and the columns of a weight are multiples of this number."""
_CAPABILITY = (8, 0)
_DTYPES = ("bfloat16", "float16")
_MODULES = ("humming.kernel.humming", "humming.schema", "humming.transform", "humming.tune")
_GIVEN = "quantization.products is humming"
_OTHERWISE = "Set quantization.products to triton"


def refusal(
    section: IntegerConfig, config: Config, capability: tuple[int, int] | None, device: str, dtype: str
) -> str | None:
    """Return why the products that ``section`` names cannot be used on ``device`` with ``config`` and activations of ``dtype``, or
    None. ``capability`` is the compute capability, None on other devices than CUDA."""
    if section.products != "humming":
        return None
    if capability is None or capability < _CAPABILITY:
        got = f"{device} has {capability[0]}.{capability[1]}" if capability else f"device is {device}"
        return f"{_GIVEN}, and {got}; allowed: CUDA of compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]} or more. {_OTHERWISE}"
    if dtype not in _DTYPES:
        return f"{_GIVEN}, and model.dtype is {dtype}; allowed: {', '.join(_DTYPES)}. {_OTHERWISE}"
    if config.batch_invariant:
        return f"{_GIVEN}, whose results are not batch invariant, and batch_invariant is true. {_OTHERWISE}, or batch_invariant to false"
    return None


def probe(section: IntegerConfig) -> str | None:
    """Return why the package of the products that ``section`` names cannot be used, or None."""
    return installation_fault() if section.products == "humming" else None


def installation_fault() -> str | None:
    """Return why humming-kernels cannot be used here, with what to install, or None if it can be imported."""
    try:
        found = importlib.metadata.version(HUMMING)
    except importlib.metadata.PackageNotFoundError:
        return f"{_GIVEN}, and {HUMMING} is not installed; pip install 'dovetail[humming]', or set it to triton"
    if Version(found) not in HUMMING_VERSIONS:
        return f"{_GIVEN}, and {HUMMING} {found} is installed; implemented for {HUMMING_VERSIONS}: pip install '{HUMMING}{HUMMING_VERSIONS}'"
    try:
        for module in _MODULES:
            importlib.import_module(module)
    except Exception as error:
        return broken(error)
    return None


def broken(error: Exception) -> str:
    """Return the text for an installation of humming-kernels of which ``error`` was raised."""
    return (
        f"{_GIVEN}, and the installed {HUMMING} is broken: {type(error).__name__}: {error}. Install it again with what it depends on: "
        f"pip install --force-reinstall '{HUMMING}{HUMMING_VERSIONS}', or set quantization.products to triton"
    )


def fits_groups(bits: int, group: int | None) -> bool:
    """Return True if there are products for integers of ``bits`` with a scale for each ``group`` columns (None: for each row)."""
    return bits == 4 and group in GROUPS


def fits_sizes(rows: int, columns: int) -> bool:
    """Return True if there are products for a weight ``[rows, columns]``."""
    return rows > 0 and columns > 0 and not rows % MULTIPLE and not columns % MULTIPLE


def listed_groups() -> str:
    """Return the numbers of columns with one scale for errors."""
    return ", ".join(map(str, GROUPS[:-1])) + f" or {GROUPS[-1]}"
