"""Register the models of this package. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.registry.hookspecs import hookimpl
from dovetail.registry.specs import ComponentSpec
from dovetail_models.specs import FALLBACK, MODELS


@hookimpl
def register_components() -> Sequence[ComponentSpec]:
    """Return the specs of the models."""
    return (*MODELS, FALLBACK)
