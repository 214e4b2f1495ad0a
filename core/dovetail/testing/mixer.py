"""Test backends of layers with a state: the conformance suite of their interface.

class TestMine(MixerSuite):
    name = "mine"
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from dovetail.interfaces.features import Feature
from dovetail.interfaces.mixer import MixerBackend, MixerContext, MixerStep
from dovetail.interfaces.state_rows import StateRows
from dovetail.registry.specs import ComponentKind
from dovetail.testing.component import ComponentSuite
from dovetail.testing.mixer_cases import OPERATIONS, MixerOperation, ShortConv, Tensors

TOLERANCES = {torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Map the dtype of inputs to the error that is allowed, relative to the size of the vector or number."""
SLOTS = 9
CHUNK, DRAFT_CHUNK = 64, 16

each_operation = pytest.mark.parametrize("operation", OPERATIONS)


@dataclass(frozen=True)
class SlotRow:
    """Describe a row of tokens."""

    slot: int
    tokens: int
    fresh: bool = False


PROMPTS = (
    SlotRow(3, 37),
    SlotRow(5, 1, fresh=True),
    SlotRow(0, 4),
    SlotRow(7, 0),
    SlotRow(1, 130, fresh=True),
    SlotRow(6, 64),
    SlotRow(2, 2),
)
"""A row with fewer tokens than a chunk, a token, padding, no token, several chunks, a whole chunk, fewer than a convolution."""
DRAFTS = (SlotRow(0, 2), SlotRow(5, 4), SlotRow(2, 7), SlotRow(6, 1), SlotRow(1, 3))


class SlotMemory:
    """Hold the states of an operation in slots of a larger memory. What no row uses is NaN, and must stay NaN."""

    def __init__(self, operation: MixerOperation, used: Sequence[SlotRow]) -> None:
        whole = (SLOTS, 3, *operation.shape)
        self._memory = torch.full(whole, float("nan"), dtype=operation.state_dtype, device=operation.device)
        self.state = self._memory[:, 1]
        for row in used:
            if row.slot and not (row.fresh and row.tokens):
                self.state[row.slot] = operation.random(*operation.shape, dtype=operation.state_dtype)

    def exact(self) -> torch.Tensor:
        """Return a copy of the states in float64 on the host."""
        return self.state.double().cpu()

    def check(self, expected: torch.Tensor, written: Sequence[int], tolerance: float) -> None:
        """Check that the states in the slots ``written`` are the expected ones, and that nothing else has changed."""
        got = self.exact()
        _close(got[list(written)], expected[list(written)], tolerance, "a state is wrong")
        others = [slot for slot in range(SLOTS) if slot not in written]
        same = torch.equal(got[others].nan_to_num(7e30), expected[others].nan_to_num(7e30))
        assert same, "a slot was changed that belongs to padding, to no row, or to a row that writes nothing"
        assert self._memory[:, [0, 2]].isnan().all(), "memory between the slots was changed"


class MixerSuite(ComponentSuite):
    """Test a backend of layers with a state. Only ``name`` is required."""

    kind: ClassVar[ComponentKind] = ComponentKind.MIXER
    device: ClassVar[str | None] = None
    """By default the first device that the spec allows and the machine has."""

    def make(self, context: MixerContext) -> MixerBackend:
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

    def operation(self, name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> MixerOperation:
        """Return the operation. Skips if the component does not offer it or does not allow the dtype."""
        self.require(OPERATIONS[name].feature)
        allowed = self.spec.constraints.dtypes
        if allowed and str(dtype).removeprefix("torch.") not in allowed:
            pytest.skip(f"{self.name} does not allow {dtype}")
        return OPERATIONS[name](self.find_device(), dtype, **changes)

    def backend(self, operation: MixerOperation) -> MixerBackend:
        """Return a backend for ``operation``."""
        return self.make(MixerContext(operation.device, operation.dtype))

    @pytest.fixture(autouse=True)
    def one_thread(self) -> Iterator[None]:
        """Use one thread, because small products are computed faster by one thread than by several."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)

    @each_operation
    def test_prompts_are_the_recurrence(self, operation: str) -> None:
        """Outputs and states of rows of prompts are those of a loop over tokens in float64. Padding rows and fresh rows begin with
        zeros, whatever their slots hold, and nothing is written to slot 0."""
        self._check_prompts(self.operation(operation), PROMPTS)

    @torch.inference_mode()
    def _check_prompts(self, op: MixerOperation, prompts: Sequence[SlotRow]) -> None:
        backend, memory = self.backend(op), SlotMemory(op, prompts)
        inputs, rows = op.inputs(sum(row.tokens for row in prompts)), _rows(prompts, op.device)
        expected, last = reference(op, inputs, memory.exact(), prompts)
        kept = [each.clone() for each in inputs]
        backend.plan(MixerStep(rows, _ints([], op.device)))
        out = op.prompt(backend, inputs, memory.state, rows)
        for each, before in zip(inputs, kept, strict=True):
            assert each.equal(before), "an input was changed"
        assert out.dtype is op.dtype, f"outputs are {out.dtype}"
        _close(out, expected, TOLERANCES[op.dtype], "an output is wrong")
        memory.check(last, [row.slot for row in prompts if row.slot and row.tokens], _of_state(op))

    @each_operation
    @torch.inference_mode()
    def test_decode_steps_are_the_recurrence(self, operation: str) -> None:
        """One token of each row continues the state in its slot. Rows of slot 0, of which there may be several, begin with zeros
        and write nothing."""
        op = self.operation(operation)
        rows = [SlotRow(slot, 1) for slot in (4, 0, 8, 1, 0)]
        backend, memory, slots = self.backend(op), SlotMemory(op, rows), _ints([4, 0, 8, 1, 0], op.device)
        for _ in range(3):
            inputs = op.inputs(5)
            expected, last = reference(op, inputs, memory.exact(), rows)
            backend.plan(MixerStep(None, slots))
            out = op.step(backend, inputs, memory.state, slots)
            assert out.dtype is op.dtype, f"outputs are {out.dtype}"
            _close(out, expected, TOLERANCES[op.dtype], "an output is wrong")
            memory.check(last, [4, 8, 1], TOLERANCES[op.dtype])

    @each_operation
    @torch.inference_mode()
    def test_rows_may_be_divided(self, operation: str) -> None:
        """A row that is computed in prompts of odd sizes and in decode steps, beside other rows, has the outputs and the last state
        of the whole row."""
        op, length = self.operation(operation), 150
        whole, parts = SlotMemory(op, []), SlotMemory(op, [SlotRow(2, 5)])
        backend, inputs = self.backend(op), op.inputs(length)
        expected = op.prompt(backend, inputs, whole.state, _rows([SlotRow(4, length, fresh=True)], op.device))
        found, done = [], 0
        for end in (1, 2, 65, 129, 131):
            beside, rows = op.inputs(5), [SlotRow(2, 5), SlotRow(4, end - done, fresh=done == 0)]
            joined = tuple(torch.cat((left, right[done:end])) for left, right in zip(beside, inputs, strict=True))
            found.append(op.prompt(backend, joined, parts.state, _rows(rows, op.device))[5:])
            done = end
        for at in range(done, length):
            one = tuple(each[at : at + 1] for each in inputs)
            found.append(op.step(backend, one, parts.state, _ints([4], op.device)))
        _close(torch.cat(found), expected, TOLERANCES[op.dtype], "an output depends on how the row is divided")
        _close(parts.state[4], whole.state[4], TOLERANCES[op.dtype], "the state depends on how the row is divided")

    @each_operation
    @torch.inference_mode()
    def test_states_within_prompts_are_saved(self, operation: str) -> None:
        """The states after chunks of rows are written to the slots that ``StateRows.saves`` names, and outputs and last states
        are as without them."""
        self.require(Feature.MIXER_SNAPSHOTS)
        op = self.operation(operation)
        prompts = [SlotRow(3, 2 * CHUNK + 1), SlotRow(1, 5), SlotRow(6, CHUNK + 9, fresh=True)]
        saves = [(0, CHUNK, 2), (0, 2 * CHUNK, 7), (2, CHUNK, 4)]
        backend, memory = self.backend(op), SlotMemory(op, prompts)
        inputs, rows = op.inputs(sum(row.tokens for row in prompts)), _rows(prompts, op.device, saves=saves)
        before = memory.exact()
        expected, last = reference(op, inputs, before, prompts)
        begins = np.cumsum([0] + [row.tokens for row in prompts]).tolist()
        for row, length, slot in saves:
            own = tuple(each[begins[row] : begins[row] + length] for each in inputs)
            _, states = reference(op, own, before, [SlotRow(prompts[row].slot, length, prompts[row].fresh)])
            last[slot] = states[prompts[row].slot]
        backend.plan(MixerStep(rows, _ints([], op.device)))
        _close(op.prompt(backend, inputs, memory.state, rows), expected, TOLERANCES[op.dtype], "an output is wrong")
        memory.check(last, [*(row.slot for row in prompts), *(slot for _, _, slot in saves)], _of_state(op))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    @each_operation
    def test_inputs_may_have_16_bits(self, operation: str, dtype: torch.dtype) -> None:
        """With inputs of 16 bits outputs have 16 bits, and are near those of float64."""
        self._check_prompts(
            self.operation(operation, dtype), (SlotRow(3, 37), SlotRow(5, 70, fresh=True), SlotRow(0, 3))
        )

    @each_operation
    @torch.inference_mode()
    def test_states_may_be_bfloat16(self, operation: str) -> None:
        """With states in bfloat16 outputs are as near to those of float64 as with float32, and states are those of float64,
        rounded once for each call."""
        self.require(Feature.MIXER_BFLOAT16_STATES)
        op = self.operation(operation)
        op.narrow = True
        self._check_prompts(op, (SlotRow(3, 37), SlotRow(5, 130, fresh=True), SlotRow(0, 3)))
        rows, memory = [SlotRow(4, 1), SlotRow(0, 1)], SlotMemory(op, [SlotRow(4, 1)])
        backend, slots, inputs = self.backend(op), _ints([4, 0], op.device), op.inputs(2)
        expected, last = reference(op, inputs, memory.exact(), rows)
        backend.plan(MixerStep(None, slots))
        _close(op.step(backend, inputs, memory.state, slots), expected, TOLERANCES[op.dtype], "an output is wrong")
        memory.check(last, [4], _of_state(op))
        if Feature.MIXER_DRAFTS in self.spec.offers:
            before = memory.exact()
            op.advance(backend, inputs, memory.state, slots[:1], _ints([0], op.device), _ints([2], op.device))
            memory.check(accepted(op, inputs, before, [SlotRow(4, 2)], [2]), [4], _of_state(op))

    def test_convolutions_have_any_width_and_may_have_no_activation(self) -> None:
        """Convolutions have from 2 columns on, a bias or none, and SiLU or nothing as their activation."""
        for width in (2, 3, 4):
            self._check_prompts(self.operation("short_conv", width=width, activation="none"), PROMPTS[:5])

    @pytest.mark.parametrize("counts", [(0, 0, 0, 0, 0), (1, 1, 2, 1, 0), (2, 3, 5, 0, 2), (2, 4, 7, 1, 3)], ids=str)
    @each_operation
    @torch.inference_mode()
    def test_rejected_drafts_leave_no_trace(self, operation: str, counts: tuple[int, ...]) -> None:
        """Rows of drafts have outputs and write nothing. The advance then writes the state after the accepted tokens of each row,
        which may be none, and nothing for padding."""
        self.require(Feature.MIXER_DRAFTS)
        op = self.operation(operation)
        backend, memory = self.backend(op), SlotMemory(op, DRAFTS)
        inputs, rows = op.inputs(sum(row.tokens for row in DRAFTS)), _rows(DRAFTS, op.device, writes=False)
        before = memory.exact()
        expected, _ = reference(op, inputs, before, DRAFTS)
        backend.plan(MixerStep(None, _ints([], op.device), rows))
        _close(op.prompt(backend, inputs, memory.state, rows), expected, TOLERANCES[op.dtype], "an output is wrong")
        memory.check(before, [], 0)
        op.advance(backend, inputs, memory.state, rows.slots, rows.indptr[:-1], _ints(counts, op.device))
        last = accepted(op, inputs, before, DRAFTS, counts)
        memory.check(last, [row.slot for row, n in zip(DRAFTS, counts, strict=True) if row.slot and n], _of_state(op))

    @each_operation
    @torch.inference_mode()
    def test_plans_are_followed(self, operation: str) -> None:
        """A backend may be given a plan for each of many steps, with prompts, with decode rows and with both, and layers of other
        states are computed in turns."""
        op = self.operation(operation)
        prompts, decodes = [SlotRow(3, 5), SlotRow(6, 70, fresh=True)], [SlotRow(1, 1), SlotRow(8, 1)]
        backend, memories = self.backend(op), [SlotMemory(op, [*prompts, *decodes]) for _ in range(2)]
        for swap in (False, True, False):
            rows, ones = (prompts[::-1], decodes[::-1]) if swap else (prompts, decodes)
            plan, slots = _rows(rows, op.device), _ints([row.slot for row in ones], op.device)
            backend.plan(MixerStep(plan, slots))
            for memory in memories:
                before, inputs, last_inputs = memory.exact(), op.inputs(75), op.inputs(2)
                out = op.prompt(backend, inputs, memory.state, plan)
                last = op.step(backend, last_inputs, memory.state, slots)
                expected, middle = reference(op, inputs, before, rows)
                of_steps, after = reference(op, last_inputs, middle, ones)
                _close(out, expected, TOLERANCES[op.dtype], "an output of a prompt is wrong")
                _close(last, of_steps, TOLERANCES[op.dtype], "an output of a decode row is wrong")
                memory.check(after, [3, 6, 1, 8], TOLERANCES[op.dtype])

    @each_operation
    @torch.inference_mode()
    def test_graphs_of_decode_steps(self, operation: str) -> None:
        """What was captured follows the slots and inputs of each replay, with steps that run without a graph between replays. Without
        CUDA the calls are repeated in place of a replay."""
        self.require(Feature.MIXER_GRAPH)
        op = self.operation(operation)
        everything = [SlotRow(slot, 1) for slot in range(1, SLOTS)]
        backend, memory, slots = self.backend(op), SlotMemory(op, everything), _ints([0, 0, 0], op.device)
        inputs, step = op.inputs(3), MixerStep(None, slots)
        backend.plan_capture(step)
        replay = _capture(op.device, lambda: op.step(backend, inputs, memory.state, slots))
        for now in ([1, 2, 3], [8, 0, 4], [3, 1, 0]):
            slots.copy_(_ints(now, op.device))
            _refill(inputs, op.inputs(3))
            expected, last = reference(op, inputs, memory.exact(), [SlotRow(slot, 1) for slot in now])
            backend.plan_replay(step)
            _close(replay(), expected, TOLERANCES[op.dtype], "an output of a replay is wrong")
            memory.check(last, [slot for slot in now if slot], TOLERANCES[op.dtype])
            other = _ints([5, 6], op.device)
            backend.plan(MixerStep(None, other))
            op.step(backend, op.inputs(2), memory.state, other)

    @each_operation
    @torch.inference_mode()
    def test_graphs_of_drafts(self, operation: str) -> None:
        """Rows of drafts can be captured with their advance. In a replay the rows have other slots, and divide the tokens of the
        step in another way."""
        self.require(Feature.MIXER_GRAPH)
        self.require(Feature.MIXER_DRAFTS)
        op = self.operation(operation)
        backend, memory = self.backend(op), SlotMemory(op, [SlotRow(slot, 1) for slot in range(1, SLOTS)])
        rows = _rows([SlotRow(0, 4)] * 3, op.device, writes=False)
        inputs, counts = op.inputs(12), _ints([1, 1, 1], op.device)
        step = MixerStep(None, _ints([], op.device), rows)
        backend.plan_capture(step)

        def compute() -> torch.Tensor:
            out = op.prompt(backend, inputs, memory.state, rows)
            op.advance(backend, inputs, memory.state, rows.slots, rows.indptr[:-1], counts)
            return out

        replay = _capture(op.device, compute)
        for slots, lens, taken in (([1, 2, 3], [4, 4, 4], [1, 4, 2]), ([8, 0, 4], [2, 4, 1], [2, 3, 0])):
            now = [SlotRow(slot, length) for slot, length in zip(slots, lens, strict=True)]
            _copy_rows(rows, _rows(now, op.device, writes=False))
            counts.copy_(_ints(taken, op.device))
            _refill(inputs, op.inputs(12))
            before = memory.exact()
            expected, _ = reference(op, inputs, before, now)
            backend.plan_replay(step)
            _close(replay()[: sum(lens)], expected, TOLERANCES[op.dtype], "an output of a replay is wrong")
            written = [row.slot for row, count in zip(now, taken, strict=True) if row.slot and count]
            memory.check(accepted(op, inputs, before, now, taken), written, _of_state(op))


def reference(
    op: MixerOperation, inputs: Tensors, states: torch.Tensor, rows: Sequence[SlotRow]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of rows and the states after them, computed token by token in float64."""
    exact = [each.double().cpu() for each in inputs]
    states, outs, at = states.clone(), [], 0
    for row in rows:
        own = torch.zeros_like(states[0]) if row.fresh or not row.slot else states[row.slot]
        for _ in range(row.tokens):
            out, own = op.token(tuple(each[at] for each in exact), own)
            outs.append(out)
            at += 1
        if row.slot and row.tokens:
            states[row.slot] = own
    return torch.stack(outs), states


def accepted(
    op: MixerOperation, inputs: Tensors, states: torch.Tensor, rows: Sequence[SlotRow], counts: Sequence[int]
) -> torch.Tensor:
    """Return the states after the first ``counts[r]`` tokens of row r."""
    begin = 0
    for row, count in zip(rows, counts, strict=True):
        if row.slot and count:
            own = tuple(each[begin : begin + count] for each in inputs)
            _, states = reference(op, own, states, [SlotRow(row.slot, count)])
        begin += row.tokens
    return states


def _rows(
    rows: Sequence[SlotRow],
    device: torch.device,
    *,
    writes: bool = True,
    saves: Sequence[tuple[int, int, int]] = (),
) -> StateRows:
    slots, lens = (np.array(each, np.int32) for each in zip(*((row.slot, row.tokens) for row in rows), strict=True))
    fresh = np.array([row.fresh for row in rows])
    return StateRows.of(slots, lens, fresh, device, CHUNK if writes else DRAFT_CHUNK, writes, saves)


def _copy_rows(target: StateRows, source: StateRows) -> None:
    for name in ("slots", "indptr", "fresh", "chunk_rows", "chunk_starts", "first_chunks"):
        getattr(target, name).copy_(getattr(source, name))


def _ints(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _refill(inputs: Tensors, values: Tensors) -> None:
    for target, source in zip(inputs, values, strict=True):
        target.copy_(source)


def _capture(device: torch.device, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Return a function that replays ``compute``, or repeats it on a CPU."""
    if device.type != "cuda":
        return compute
    compute()  # kernels are compiled
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


def _of_state(op: MixerOperation) -> float:
    """Return the tolerance of states, 0 for those that are copies of inputs."""
    return 0.0 if isinstance(op, ShortConv) else TOLERANCES[op.state_dtype if op.narrow else op.dtype]


def _close(got: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> None:
    """Check that errors are at most ``tolerance`` times the largest of 1, the expected number, and the root mean square of the
    expected vector: a number that is small because large ones cancel is as wrong as they are."""
    got, expected = got.double().cpu(), expected.double().cpu()
    assert got.shape == expected.shape, f"{what}: it has the shape {list(got.shape)}, not {list(expected.shape)}"
    if not got.numel():
        return
    size = expected.square().mean(-1, keepdim=True).sqrt().clamp(min=1.0)
    errors = (got - expected).abs() / torch.maximum(size, expected.abs())
    assert not errors.isnan().any(), f"{what}: it is not a number"
    worst = float(errors.max())
    assert worst <= tolerance, f"{what}: difference of {worst:.2e}; {tolerance:.0e} is allowed"
