"""Make layers of experts for tests, and compute them one expert at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from dovetail.gguf.block_types import TYPES
from dovetail.interfaces.expert_shapes import SILU, ExpertBlocks, ExpertFormat, ExpertWeights, Routing, SwiGLU
from dovetail.ops.packed_blocks import pack

TOLERANCES = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Map the dtype of activations to the difference from float64 that is allowed, relative to the root mean square."""

BLOCK = 128
"""The rows and columns of a block that has one scale."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers that 4-bit codes without a sign stand for."""


@dataclass(frozen=True, slots=True)
class ExpertsCase:
    """Describe a layer of experts, and the tokens of a step.

    This rank has the experts ``[first, first + held)`` of ``experts``. ``choice`` is how experts are chosen:
    ``random``, ``one`` (all tokens have the same experts), or ``last`` (those with the highest indices). Weights in a ``format``
    of FP8 blocks have blocks of 128 x 128.
    """

    tokens: int = 9
    experts: int = 8
    top_k: int = 3
    hidden: int = 64
    size: int = 48
    dtype: torch.dtype = torch.float32
    activation: SwiGLU = SILU
    bias: bool = False
    scaled_input: bool = False
    ungated: bool = False
    shared: bool = False
    first: int = 0
    held: int = 8
    choice: str = "random"
    format: ExpertFormat = "plain"
    seed: int = 0


class ExpertsStep:
    """Hold the tensors of a case on a device: ``weights``, ``x``, ``routing`` and ``shared``, which are random."""

    def __init__(self, case: ExpertsCase, device: torch.device) -> None:
        self.case, self.device = case, device
        self._exact: tuple[torch.Tensor, torch.Tensor] | None = None  # of quantized weights
        self._generator = torch.Generator().manual_seed(case.seed)
        count, hidden, size = case.held, case.hidden, case.size
        biases = (self._random(count, 2 * size), self._random(count, hidden)) if case.bias else (None, None)
        gate_up = self._random(count, size if case.ungated else 2 * size, hidden) * hidden**-0.5
        down = self._random(count, hidden, size) * size**-0.5
        plain = ExpertWeights(
            gate_up, down, case.activation, *biases,
            first=case.first, whole=case.experts, scaled_input=case.scaled_input, ungated=case.ungated,
        )  # fmt: skip
        self.weights = plain if case.format == "plain" else self._quantized(plain)
        self.x = self._random(case.tokens, hidden)
        self.shared = self._random(case.tokens, hidden) if case.shared else None
        self.routing = self._routing()

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device, self.case.dtype)

    def _quantized(self, plain: ExpertWeights) -> ExpertWeights:
        """Return other weights of the same sizes in the format, and keep the values that they stand for."""
        if self.case.format in ("int4", "int8"):
            return self._of_integers(plain)
        if self.case.format == "gguf":
            return self._of_blocks(plain)
        make = self._mxfp4 if self.case.format == "mxfp4" else self._fp8
        found = [make(tensor) for tensor in (plain.gate_up, plain.down)]
        self._exact = found[0][2], found[1][2]
        codes, scales = [tuple(one[i].to(self.device) for one in found) for i in (0, 1)]
        return replace(
            plain,
            gate_up=codes[0],
            down=codes[1],
            gate_up_scale=scales[0],
            down_scale=scales[1],
            format=self.case.format,
        )

    def _fp8(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return codes, scales of different magnitudes, and the values that they stand for in float64."""
        count, out, columns = weight.shape
        codes = (torch.rand(weight.shape, generator=self._generator) * 100 - 50).to(torch.float8_e4m3fn)
        by_row = self.case.format == "fp8_rows"
        shape = (count, out) if by_row else (count, -(-out // BLOCK), -(-columns // BLOCK))
        scales = (torch.rand(shape, generator=self._generator) + 0.2) / 40 * columns**-0.5
        whole = scales.double()[..., None] if by_row else _spread(scales.double(), out, columns)
        return codes, scales, codes.double() * whole

    def _routing(self) -> Routing:
        case = self.case
        scores = torch.rand(case.tokens, case.experts, generator=self._generator)
        if case.choice == "one":
            scores[:] = scores[:1].clone()
        elif case.choice == "last":
            scores = torch.arange(case.experts).expand(case.tokens, -1)
        ids = scores.topk(case.top_k, 1).indices.int()
        weights = torch.rand(case.tokens, case.top_k, generator=self._generator) + 0.1
        return Routing(ids.to(self.device), weights.to(self.device))

    def _mxfp4(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return codes, scales of different magnitudes, and the values that they stand for in float64."""
        count, out, columns = weight.shape
        codes = torch.randint(0, 256, (count, out, columns // 2), generator=self._generator)
        middle = 127 - 2 - round(math.log2(columns) / 2)
        scales = torch.randint(middle - 2, middle + 2, (count, columns // 32, out), generator=self._generator)
        table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)
        of_blocks = codes.unflatten(2, (-1, 16))  # the columns 0 to 15 of a block are the low bits
        values = torch.cat((table[of_blocks & 15], table[of_blocks >> 4]), 3)
        exact = values * (2.0 ** (scales.mT - 127).double())[..., None]
        return codes.to(torch.uint8), scales.to(torch.uint8), exact.flatten(2)

    def _of_integers(self, plain: ExpertWeights) -> ExpertWeights:
        """Return weights with groups of 64 columns and with zero points, and keep the values that they stand for."""
        bits, found = (4 if self.case.format == "int4" else 8), list[tuple[torch.Tensor, ...]]()
        for weight in (plain.gate_up, plain.down):
            count, out, columns = weight.shape
            shape = (count, columns // 64, out)
            scales = (torch.rand(shape, generator=self._generator) + 0.2) / 2 ** (bits - 2) * columns**-0.5
            zeros = torch.randint(0, 1 << bits, shape, generator=self._generator)
            numbers = torch.randint(0, 1 << bits, (count, out, columns), generator=self._generator)
            of_groups = numbers.unflatten(2, (-1, 64)) - zeros.mT[..., None]
            exact = (of_groups * scales.double().mT[..., None]).flatten(2)
            if numbers.shape[2] % 128 == 0:  # the columns j, 32 + j, 64 + j and 96 + j of 128 are a word
                first, second, third, fourth = numbers.long().unflatten(2, (-1, 4, 32)).unbind(3)
                words = first + 16 * second + 256 * third + 4096 * fourth
                packed = torch.stack((words % 256, words // 256), -1).flatten(2).to(torch.uint8)
            else:  # the columns 0 to 15 of 32 are the low bits
                halves = numbers.unflatten(2, (-1, 2, 16))
                packed = (halves[..., 0, :] + 16 * halves[..., 1, :]).flatten(2).to(torch.uint8)
            codes = packed if bits == 4 else (numbers - 128).to(torch.int8)
            found.append((codes.to(self.device), scales.to(self.device), zeros.to(self.device, torch.uint8), exact))
        (gate_up, gate_up_scale, gate_up_zero, first), (down, down_scale, down_zero, second) = found
        self._exact = first, second
        return replace(
            plain, gate_up=gate_up, down=down, gate_up_scale=gate_up_scale, down_scale=down_scale,
            gate_up_zero=gate_up_zero, down_zero=down_zero, format=self.case.format,
        )  # fmt: skip

    def _of_blocks(self, plain: ExpertWeights) -> ExpertWeights:
        """Return weights in blocks of type Q8_0 and Q4_0, on CUDA packed, and keep the values that they stand for. A block is a scale in
        float16, then 32 integers: of 8 bits, or of 4 bits less 8, of which those of the low bits are the first."""
        found, packed = list[tuple[torch.Tensor, torch.Tensor]](), self.device.type == "cuda"
        for weight, kind in ((plain.gate_up, "Q8_0"), (plain.down, "Q4_0")):
            count, out, columns = weight.shape
            most = 128 if kind == "Q8_0" else 8
            scales = torch.rand(count, out, columns // 32, 1, generator=self._generator) + 0.2
            scales = (scales / most * columns**-0.5).half()
            numbers = torch.randint(-most, most, (count, out, columns // 32, 32), generator=self._generator)
            first, second = (numbers + 8).chunk(2, 3)
            codes = (
                numbers.to(torch.int8).view(torch.uint8) if kind == "Q8_0" else (first + 16 * second).to(torch.uint8)
            )
            blocks = torch.cat((scales.view(torch.uint8), codes), 3).flatten(2)
            exact = (numbers * scales.double()).flatten(2)
            if packed:
                blocks = pack(blocks.flatten(0, 1), TYPES[kind]).view(count, out, -1)
            found.append((blocks.to(self.device), exact))
        (gate_up, first), (down, second) = found
        self._exact = first, second
        blocks_of = ExpertBlocks("Q8_0", "Q4_0", packed)
        return replace(plain, gate_up=gate_up, down=down, format="gguf", blocks=blocks_of)

    @property
    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights of gate and up, and of down, in float64 on the host."""
        if self._exact is not None:
            return self._exact
        return self.weights.gate_up.cpu().double(), self.weights.down.cpu().double()

    def reference(self) -> torch.Tensor:
        """Return the result in float64 on the host, computed for one token and one of its experts at a time."""
        case = self.case
        exact = self.exact
        x, ids, factors = self.x.cpu().double(), self.routing.ids.cpu(), self.routing.weights.cpu().double()
        total = torch.zeros_like(x) if self.shared is None else self.shared.cpu().double()
        for token in range(case.tokens):
            for expert, factor in zip((ids[token] - case.first).tolist(), factors[token], strict=True):
                if 0 <= expert < case.held:
                    given = x[token] * factor if case.scaled_input else x[token]
                    result = self._expert(given, exact, expert)
                    total[token] += result if case.scaled_input else result * factor
        return total

    def _expert(self, x: torch.Tensor, exact: tuple[torch.Tensor, torch.Tensor], expert: int) -> torch.Tensor:
        """Return the result of one expert for ``x [hidden]``, in float64."""
        weights, activation = self.weights, self.weights.activation
        gate_up = exact[0][expert] @ x
        if weights.gate_up_bias is not None:
            gate_up += weights.gate_up_bias[expert].cpu().double()
        if weights.ungated:
            inner = gate_up.clamp(min=0) ** 2
        else:
            gate, up = gate_up.chunk(2)
            if activation.limit is not None:
                gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
            inner = gate / (1 + torch.exp(-activation.alpha * gate)) * (up + activation.offset)
        result = exact[1][expert] @ inner
        return result if weights.down_bias is None else result + weights.down_bias[expert].cpu().double()


def _spread(scales: torch.Tensor, out: int, columns: int) -> torch.Tensor:
    """Return the scale of each element of weights ``[..., out, columns]``."""
    return scales.repeat_interleave(BLOCK, 1)[:, :out].repeat_interleave(BLOCK, 2)[:, :, :columns]
