"""Build the stores that ``KVStoreSuite`` tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest
import torch

from dovetail.errors import PageFormatError
from dovetail.interfaces.store import KVStoreFactory, StoreContext
from dovetail.memory.pool import pool_dtype
from dovetail.registry.specs import ComponentKind
from dovetail.testing.component import ComponentSuite

PAGE_SIZE = 4


class StoreChecks(ComponentSuite):
    """Provide what the cases of ``KVStoreSuite`` use: factories that fit the component."""

    kind: ClassVar[ComponentKind] = ComponentKind.STORE
    device: ClassVar[str] = "cpu"
    dtypes: ClassVar[Sequence[str]] = ("float32", "bfloat16", "fp8_e4m3")
    """The values of ``memory.kv_dtype`` to test, of which the spec must allow at least one."""

    def make(self, context: StoreContext) -> KVStoreFactory:
        """Return a new factory. Override it to test a class that no plugin registers."""
        return self.build(context)

    def allowed(self) -> list[str]:
        """Return those of ``dtypes`` that the component allows."""
        allowed = self.spec.constraints.kv_dtypes
        return [name for name in self.dtypes if not allowed or name in allowed]

    def factory(self, dtype: str | None = None, model_dtype: torch.dtype | None = None) -> KVStoreFactory:
        """Return a factory of stores of pages of ``PAGE_SIZE`` tokens, and of states in a model of ``model_dtype``."""
        named = self.allowed()[0] if dtype is None else dtype
        device = torch.device(self.device)
        return self.make(StoreContext(PAGE_SIZE, pool_dtype(named), device, model_dtype=model_dtype))


def check_refused(write: Callable[[], None], fault: str | None = None) -> None:
    """Check that ``write`` refuses an export, with this ``fault``."""
    with pytest.raises(PageFormatError) as error:
        write()
    assert fault is None or error.value.fault == fault
    assert str(error.value).startswith(error.value.fault)
