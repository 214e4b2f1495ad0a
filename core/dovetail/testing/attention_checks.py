"""Compare one step of an attention backend with the reference, and skip cases that a component does not allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from dovetail.interfaces.attention import AttentionBackend, AttentionContext
from dovetail.interfaces.features import Feature
from dovetail.registry.specs import ComponentKind, Constraints
from dovetail.testing.attention_reference import (
    TOLERANCES,
    AttentionCase,
    AttentionStep,
    output_shape,
    poisoned_equal,
    reference,
)
from dovetail.testing.component import ComponentSuite

ROUNDING = 2.0**-22
"""The relative change of softmax weights when logits are rounded to float32, for keys of scale 1. The change grows with
the logits."""


class AttentionChecks(ComponentSuite):
    """Provide what the cases of ``AttentionSuite`` use: a step that fits the component, compared or skipped."""

    kind: ClassVar[ComponentKind] = ComponentKind.ATTENTION
    device: ClassVar[str | None] = None
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)
    longest: ClassVar[int] = 1900
    """The number of keys of the longest rows, which a backend may split or group. Suites lower it where such rows take
    too long."""
    undeclared: ClassVar[set[tuple[str, Feature]]] = set()
    """The (component, feature) of every case that passed although the feature is not declared."""

    @property
    def constraints(self) -> Constraints:
        """Return where the component can run, according to its spec."""
        return self.spec.constraints

    def make(self, context: AttentionContext) -> AttentionBackend:
        """Return a new backend. Override it to test a class that no plugin registers."""
        return self.build(context)

    def find_device(self) -> torch.device:
        """Return the device to test on. Skips if the component runs on no device of this machine."""
        there = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        wanted = (self.device,) if self.device else (self.constraints.devices or there)
        for name in wanted:
            if name in there:
                return torch.device(name)
        pytest.skip(f"{self.name} runs on {', '.join(wanted)}; this machine has {', '.join(there)}")

    def fit(self, case: AttentionCase) -> AttentionCase:
        """Return ``case`` in a dtype, head_dim and page size that the component allows, changed as little as
        possible."""
        allowed = self.constraints
        if allowed.latent_dims and (case.head_dim, case.value_dim) not in allowed.latent_dims:
            pytest.skip(f"{self.name} serves certain latents only")
        dtypes = self.allowed_dtypes()
        return replace(
            case,
            dtype=case.dtype if case.dtype in dtypes else dtypes[0],
            head_dim=_nearest(case.head_dim, allowed.head_dims if case.value_dim is None else ()),
            page_size=_nearest(case.page_size, allowed.page_sizes),
        )

    def allowed_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes that the component and this suite allow."""
        names = self.constraints.dtypes or tuple(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        return [dtype for dtype in self.dtypes if str(dtype).removeprefix("torch.") in names]

    def check(self, case: AttentionCase, *features: Feature) -> None:
        """Compare one step with the reference if all ``features`` are declared; otherwise try it and skip."""
        missing = [feature for feature in features if not self.offers(feature)]
        if not missing:
            self.proves(*features)
            self.compare(case)
            return
        names = ", ".join(missing)
        try:
            self.compare(case)
        except Exception:
            pytest.skip(f"{self.name} does not declare {names}")
        self.undeclared.update((self.name, feature) for feature in missing)
        pytest.skip(f"{self.name} does not declare {names}, yet this case passes")

    @torch.inference_mode()
    def compare(self, case: AttentionCase, backend: AttentionBackend | None = None) -> None:
        """Run one step and compare it. ``backend`` must have been built for a pool of the same content."""
        step = AttentionStep(self.fit(case), self.find_device())
        backend = backend or self.make(step.context())
        pool, q = (step.pool.k.clone(), step.pool.v.clone()), step.q.clone()
        backend.plan(step.batch)
        out = backend.forward(step.q, step.layer, step.batch)
        self.compare_output(step, out)
        # In layers after the first, kernels read ahead what the first layer has written. This is tested on CUDA only: on other devices no
        # kernel starts early.
        if step.device.type == "cuda":
            backend.plan(step.batch)
            backend.forward(step.q, step.other_layer, step.batch)
            self.compare_output(step, backend.forward(step.q, step.layer, step.batch))
        assert torch.equal(step.q, q), "forward changed its queries"
        assert poisoned_equal(step.pool.k, pool[0]), "forward changed the pool"
        assert poisoned_equal(step.pool.v, pool[1]), "forward changed the pool"

    def compare_output(self, step: AttentionStep, out: torch.Tensor) -> None:
        """Check that ``out`` has the shape and dtype of the queries (with the size of the values) and the numbers of
        the reference."""
        assert out.shape == output_shape(step)
        assert out.dtype == step.q.dtype
        expected = reference(step)
        real = ~expected.isnan()
        error = (out.cpu().double() - expected).abs()[real]
        assert not error.isnan().any(), "NaN from pool places that belong to no row reached the output"
        allowed = TOLERANCES[step.case.dtype] + step.case.key_scale * ROUNDING
        worst = float((error / (step.case.value_scale + expected[real].abs())).max())
        assert worst <= allowed, (
            f"difference of {worst:.2e} (1 + |value|); {allowed:.1e} is allowed in {step.case.dtype}"
        )

    def alone(self, backend: AttentionBackend, whole: AttentionStep, row: int) -> tuple[torch.Tensor, slice]:
        """Return the output of one row of ``whole`` in a batch of only this row, and its tokens in ``whole``."""
        case, first = whole.case, whole.batch.num_extend
        extends = row < first
        trees = None if extends or case.trees is None else [case.trees[row - first]]
        prefix, extend = [case.prefix[row]], [case.extend[row]]
        single = AttentionStep(
            replace(case, prefix=prefix, extend=extend, num_extend=int(extends), trees=trees), whole.device
        )
        single.batch.page_table = whole.batch.page_table[row : row + 1]
        start = sum(case.extend[:row])
        tokens = slice(start, start + case.extend[row])
        backend.plan(single.batch)
        return backend.forward(whole.q[tokens], whole.layer, single.batch), tokens

    def skip_dtype(self, dtype: torch.dtype) -> None:
        """Skip the test if the component or this suite does not allow ``dtype``."""
        if dtype not in self.allowed_dtypes():
            pytest.skip(f"{self.name} does not allow {dtype}")

    def skip_kv_dtype(self, kv_dtype: str) -> None:
        """Skip the test if the component or this machine does not allow ``kv_dtype``."""
        if self.constraints.kv_dtypes and kv_dtype not in self.constraints.kv_dtypes:
            pytest.skip(f"{self.name} does not allow a pool of {kv_dtype}")
        device = self.find_device()
        if kv_dtype == "fp8_e4m3" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            pytest.skip("fp8_e4m3 needs compute capability 8.9")

    def skip_page_size(self, page_size: int) -> None:
        """Skip the test if the component does not allow ``page_size``."""
        if self.constraints.page_sizes and page_size not in self.constraints.page_sizes:
            pytest.skip(f"{self.name} does not allow page size {page_size}")


def _nearest(wanted: int, allowed: Sequence[int]) -> int:
    return min(allowed, key=lambda value: abs(value - wanted), default=wanted)
