"""Test backends of experts: the conformance suite of their interface.

class TestMine(ExpertsSuite):
    name = "mine"
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, ClassVar

import pytest
import torch

from dovetail.interfaces.expert_shapes import ExpertFormat, ExpertWeights, Routing, SwiGLU
from dovetail.interfaces.experts import ExpertsBackend, ExpertsContext, ExpertsProduct
from dovetail.interfaces.features import Feature
from dovetail.registry.specs import ComponentKind
from dovetail.testing.component import ComponentSuite
from dovetail.testing.experts_cases import BLOCK, TOLERANCES, ExpertsCase, ExpertsStep

DTYPES = tuple(TOLERANCES)
BIAS, SWIGLU, SCALED = Feature.EXPERTS_BIAS, Feature.EXPERTS_SWIGLU, Feature.EXPERTS_SCALED_INPUT
CLAMPED = SwiGLU(1.702, 0.7, 1.0)
VARIANTS: dict[str, tuple[dict[str, Any], tuple[Feature, ...]]] = {
    "plain": ({}, ()),
    "biases": ({"bias": True}, (BIAS,)),
    "clamped": ({"activation": CLAMPED}, (SWIGLU,)),
    "scaled inputs": ({"scaled_input": True}, (SCALED,)),
    "without a gate": ({"ungated": True}, (Feature.EXPERTS_UNGATED,)),
    "biases and clamped": ({"bias": True, "activation": CLAMPED}, (BIAS, SWIGLU)),
}
"""The variants of a layer, by name: fields of ``ExpertsCase``, and the features that they need."""

FORMATS: dict[ExpertFormat, Feature] = {
    "fp8_rows": Feature.EXPERTS_FP8_ROWS,
    "fp8_blocks": Feature.EXPERTS_FP8_BLOCKS,
    "mxfp4": Feature.EXPERTS_MXFP4,
    "int4": Feature.EXPERTS_INT4,
    "int8": Feature.EXPERTS_INT8,
    "gguf": Feature.EXPERTS_GGUF,
}
LOSSES: dict[ExpertFormat, float] = {
    "fp8_rows": 0.08, "fp8_blocks": 0.08, "mxfp4": 0.03, "int4": 0.03, "int8": 0.03, "gguf": 0.03,
}  # fmt: skip
"""The relative error (root mean square) that is allowed. With FP8 weights activations may be quantized too."""

each_variant = pytest.mark.parametrize("variant", VARIANTS)


class ExpertsSuite(ComponentSuite):
    """Test a backend of experts. Only ``name`` is required."""

    kind: ClassVar[ComponentKind] = ComponentKind.EXPERTS
    device: ClassVar[str | None] = None
    """By default the first device that the spec allows and the machine has."""
    hidden: ClassVar[int] = 64
    size: ClassVar[int] = 48
    """The sizes of the layers. Backends that need multiples of larger numbers set larger ones."""

    def make(self, context: ExpertsContext) -> ExpertsBackend:
        """Return a new backend. Override it to test a class that no plugin registers."""
        return self.build(context)

    def find_device(self) -> torch.device:
        """Return the device to test on. Skips if the component runs on no device of this machine."""
        there = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        wanted = (self.device,) if self.device else (self.spec.constraints.devices or there)
        for name in wanted:
            if name in there:
                return torch.device(name)
        pytest.skip(f"{self.name} runs on {', '.join(wanted)}; this machine has {', '.join(there)}")

    def step(self, **changes: Any) -> ExpertsStep:
        """Return a step of a layer that the component can compute, with these fields of ``ExpertsCase``. Skips if it does
        not allow the dtype."""
        allowed = self.spec.constraints.dtypes or tuple(map(_name, DTYPES))
        case = ExpertsCase(**{"hidden": self.hidden, "size": self.size, **changes})
        if _name(case.dtype) not in allowed:
            if "dtype" in changes:
                pytest.skip(f"{self.name} does not allow {case.dtype}")
            case = replace(case, dtype=next(dtype for dtype in DTYPES if _name(dtype) in allowed))
        return ExpertsStep(case, self.find_device())

    def backend(self, step: ExpertsStep, *, batch_invariant: bool = False) -> ExpertsBackend:
        """Return a backend for the layer of ``step``."""
        return self.make(ExpertsContext(step.device, step.case.dtype, batch_invariant))

    @torch.inference_mode()
    def compare(self, step: ExpertsStep, product: ExpertsProduct | None = None) -> None:
        """Compare the result of ``step`` with float64, and check that nothing was changed."""
        product = product or self.backend(step).product(step.weights)
        before = [tensor.clone() for tensor in _tensors(step)]
        result = product.forward(step.x, step.routing, step.shared)
        for tensor, old in zip(_tensors(step), before, strict=True):
            assert tensor.equal(old), "an argument or a weight was changed"
        _check(result, step)

    @pytest.fixture(autouse=True)
    def one_thread(self) -> Iterator[None]:
        """Use one thread, because small products are computed faster by one thread than by several."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)

    @pytest.mark.parametrize("tokens", [0, 1, 2, 9, 70])
    @each_variant
    def test_results_are_those_of_each_expert(self, variant: str, tokens: int) -> None:
        """Results are the weighted sums of each token's experts, for any number of tokens."""
        changes, features = VARIANTS[variant]
        for feature in (Feature.EXPERTS_PLAIN, *features):
            self.require(feature)
        self.compare(self.step(tokens=tokens, **changes))

    @pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
    def test_activations_may_have_16_bits(self, dtype: torch.dtype) -> None:
        """With activations of 16 bits results have 16 bits, and are near those of float64."""
        self.require(Feature.EXPERTS_PLAIN)
        for tokens in (1, 33):
            self.compare(self.step(tokens=tokens, dtype=dtype))

    @pytest.mark.parametrize("choice", ["one", "last"])
    def test_choices_may_be_uneven(self, choice: str) -> None:
        """All tokens may have the same experts, and experts may have no token."""
        self.require(Feature.EXPERTS_PLAIN)
        for tokens, top_k in ((1, 1), (40, 1), (40, 3), (5, 8)):
            self.compare(self.step(tokens=tokens, top_k=top_k, choice=choice))

    def test_the_shared_expert_is_added(self) -> None:
        """What the shared expert has computed is part of the sum."""
        self.require(Feature.EXPERTS_PLAIN)
        for tokens in (1, 20):
            self.compare(self.step(tokens=tokens, shared=True))

    @pytest.mark.parametrize(("first", "held"), [(0, 2), (2, 4), (6, 2)])
    @each_variant
    def test_experts_of_other_ranks_add_nothing(self, variant: str, first: int, held: int) -> None:
        """A rank that has some of the experts adds their results only, also if no token has one of them."""
        changes, features = VARIANTS[variant]
        for feature in (Feature.EXPERTS_PLAIN, *features):
            self.require(feature)
        for tokens, choice in ((1, "last"), (1, "random"), (17, "random"), (17, "last")):
            self.compare(self.step(tokens=tokens, first=first, held=held, choice=choice, **changes))

    @torch.inference_mode()
    def test_parts_are_those_of_the_sum(self) -> None:
        """Parts, if there are any, add up to the result. Their dtype is float32."""
        self.require(Feature.EXPERTS_PLAIN)
        found = False
        for tokens in (1, 2, 16, 64, 300):
            step = self.step(tokens=tokens)
            parts = self.backend(step).product(step.weights).parts(step.x, step.routing)
            if parts is not None:
                found = True
                assert parts.dtype == torch.float32
                _check(parts.sum(0).to(step.x.dtype), step)
        if not found:
            pytest.skip(f"{self.name} computes nothing in parts")

    @torch.inference_mode()
    def test_layers_do_not_disturb_each_other(self) -> None:
        """The products of two layers are used in turns, and what they have returned does not change afterwards."""
        self.require(Feature.EXPERTS_PLAIN)
        steps = [self.step(tokens=tokens, seed=seed) for seed, tokens in enumerate((9, 9, 30))]
        backend = self.backend(steps[0])
        products = [backend.product(step.weights) for step in steps]
        results = [product.forward(step.x, step.routing, None) for product, step in zip(products, steps, strict=True)]
        again = products[0].forward(steps[0].x, steps[0].routing, None)
        for step, result in zip([*steps, steps[0]], [*results, again], strict=True):
            _check(result, step)

    @pytest.mark.parametrize("stored", FORMATS)
    @torch.inference_mode()
    def test_quantized_weights_are_multiplied(self, stored: ExpertFormat) -> None:
        """Results with codes and scales are near those with the weights that they stand for. Activations may be quantized
        too, in the way that the format describes."""
        self.require(FORMATS[stored])
        for tokens in (1, 2, 40):
            for changes in ({}, {"first": 2, "held": 4, "shared": True}):
                self._check_format(stored, self._format_step(stored, tokens=tokens, **changes))
        for feature, changes in (
            (BIAS, {"bias": True}),
            (SWIGLU, {"activation": CLAMPED}),
            (SCALED, {"scaled_input": True}),
        ):
            if self.offers(feature):
                self._check_format(stored, self._format_step(stored, tokens=9, **changes))

    def _format_step(self, stored: ExpertFormat, **changes: Any) -> ExpertsStep:
        return self.step(format=stored, hidden=2 * BLOCK, size=BLOCK, **changes)

    def _check_format(self, stored: ExpertFormat, step: ExpertsStep) -> None:
        got = self.backend(step).product(step.weights).forward(step.x, step.routing, step.shared)
        assert got.dtype == step.x.dtype
        expected = step.reference()
        error = (got.cpu().double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert error <= LOSSES[stored], f"{stored}: relative error of {float(error):.2e}; {LOSSES[stored]} is allowed"

    @torch.inference_mode()
    def test_other_weights_give_other_results(self) -> None:
        """A product that is made after weights were filled again uses the new ones."""
        self.require(Feature.EXPERTS_PLAIN)
        step = self.step()
        backend = self.backend(step)
        self.compare(step, backend.product(step.weights))
        step.weights.gate_up.mul_(-0.5)
        step.weights.down.mul_(2)
        self.compare(step, backend.product(step.weights))

    @each_variant
    @torch.inference_mode()
    def test_batch_invariance(self, variant: str) -> None:
        """A token's bits do not depend on the other tokens of the step."""
        changes, features = VARIANTS[variant]
        for feature in (Feature.EXPERTS_PLAIN, *features, Feature.EXPERTS_BATCH_INVARIANT):
            self.require(feature)
        for choice in ("random", "one"):
            for dtype in self._dtypes():
                self._check_invariance(self.step(tokens=200, choice=choice, shared=True, dtype=dtype, **changes))

    def _dtypes(self) -> list[torch.dtype]:
        allowed = self.spec.constraints.dtypes
        return [dtype for dtype in DTYPES if not allowed or _name(dtype) in allowed]

    def _check_invariance(self, step: ExpertsStep) -> None:
        product = self.backend(step, batch_invariant=True).product(step.weights)
        self.compare(step, product)
        whole = _bits(product, step.x, step.routing, step.shared)
        for start, stop in ((0, 1), (7, 9), (3, 20), (50, 114), (1, 200), (199, 200)):
            own = slice(start, stop)
            routing = Routing(step.routing.ids[own], step.routing.weights[own])
            shared = None if step.shared is None else step.shared[own]
            got = _bits(product, step.x[own], routing, shared)
            for one, expected in zip(got, whole, strict=True):
                assert (one is not None and expected is not None) or one is expected, "only some steps have parts"
                if one is not None and expected is not None:
                    assert one.equal(expected[..., own, :]), f"tokens {start} to {stop} have other bits alone"

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @torch.inference_mode()
    def test_graphs(self, dtype: torch.dtype) -> None:
        """A captured product follows every choice of experts, with steps that run without a graph between replays."""
        self.require(Feature.EXPERTS_GRAPH)
        if self.find_device().type != "cuda":
            pytest.skip("graphs need CUDA")
        for tokens in (1, 5, 64, 300):
            step = self.step(tokens=tokens, dtype=dtype)
            product = self.backend(step).product(step.weights)
            self.compare(step, product)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out, parts = _bits(product, step.x, step.routing, None)
            for seed, choice in enumerate(("one", "last", "random"), 1):
                other = self.step(tokens=tokens, dtype=dtype, seed=seed, choice=choice)
                step.x.copy_(other.x)
                step.routing.ids.copy_(other.routing.ids)
                step.routing.weights.copy_(other.routing.weights)
                graph.replay()
                _check(out, step)
                if parts is not None:
                    _check(parts.sum(0).to(dtype), step)
                self.compare(self.step(tokens=tokens + 1, dtype=dtype))

    @torch.inference_mode()
    def test_rehearsal(self) -> None:
        """While Triton launches nothing, forward can be called with experts that do not exist."""
        self.require(Feature.EXPERTS_REHEARSAL)
        if self.find_device().type != "cuda":
            pytest.skip("kernels are noted on CUDA")
        from dovetail.ops.triton.ahead import KernelsAhead

        major, minor = torch.cuda.get_device_capability()
        kernels = KernelsAhead(10 * major + minor, f"suite of {self.name}", 1)
        try:
            if not kernels.is_active:
                pytest.skip("kernels are noted for something else in this process")
            step = self.step()
            product = self.backend(step).product(step.weights)
            ids = torch.full_like(step.routing.ids, 1 << 30)
            with kernels.noting():
                result = product.forward(step.x, Routing(ids, step.routing.weights), None)
                product.parts(step.x, Routing(ids, step.routing.weights))
            torch.cuda.synchronize()
            assert result.shape == step.x.shape
            self.compare(step, product)
        finally:
            kernels.close()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bits(
    product: ExpertsProduct, x: torch.Tensor, routing: Routing, shared: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the result and the parts."""
    return product.forward(x, routing, shared), product.parts(x, routing)


def _tensors(step: ExpertsStep) -> list[torch.Tensor]:
    weights = [getattr(step.weights, field.name) for field in fields(ExpertWeights)]
    given = [step.x, step.routing.ids, step.routing.weights, step.shared, *weights]
    return [tensor for tensor in given if isinstance(tensor, torch.Tensor)]


def _check(result: torch.Tensor, step: ExpertsStep) -> None:
    """Check that ``result`` has the shape and dtype of the tokens of ``step``, and the numbers of the reference."""
    assert result.shape == step.x.shape
    assert result.dtype == step.x.dtype
    expected = step.reference()
    error = (result.cpu().double() - expected).abs()
    assert not error.isnan().any(), "the result is not a number"
    scale = 1 + (float(expected.square().mean().sqrt()) if expected.numel() else 0.0)
    worst = float(error.max()) / scale if error.numel() else 0.0
    allowed = TOLERANCES[step.case.dtype]
    assert worst <= allowed, f"difference of {worst:.2e}; {allowed:.0e} is allowed in {step.case.dtype}"
