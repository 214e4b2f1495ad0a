"""Attend correctly, and fail where a request selects a failure by its namespace (``cache_salt`` in HTTP):

    memory prompt, memory decode    a step allocates far too much
    wild prompt, wild decode        a kernel of a step writes far out of bounds

``decode`` is the 30th step after the prompt. The environment's TROUBLE selects more failures: ``small`` leaves the process
almost no memory once the backend is built, ``capture`` lets the kernel run while graphs of four rows are captured,
``later`` causes nothing until the program sets ``TROUBLE`` of this module. If it is not set, a graph of two rows cannot be captured, because memory runs out in the middle.
"""

from __future__ import annotations

import os

import torch
from pydantic import BaseModel

from dovetail.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer
from dovetail.types import Batch

TROUBLE = os.environ.get("TROUBLE")
TOO_MUCH = 1 << 50


class TroubledAttention(AttentionBackend):
    """Wrap a working backend, and fail on demand."""

    def __init__(self, config: BaseModel, context: AttentionContext) -> None:
        self.device = context.device
        self.inner = working(context)
        if TROUBLE == "small":
            torch.cuda.set_per_process_memory_fraction(1e-6, torch.cuda.current_device())
            torch.cuda.empty_cache()

    def plan(self, batch: Batch) -> None:
        if batch.num_extend:
            self.cause(batch, "prompt")
        self.inner.plan(batch)

    def variant(self, batch: Batch) -> int:
        """Fail if a request selects it. The engine calls this in every decode step, also in those whose graph is
        replayed."""
        if any(n + 1 - req.prompt_len == 30 for req, n in zip(batch.reqs, batch.prefix_lens.tolist(), strict=False)):
            self.cause(batch, "decode")
        return 0

    def forward(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        if not TROUBLE and len(batch.slots) == 2 and q.is_cuda and torch.cuda.is_current_stream_capturing():
            self.allocate()
        return self.inner.forward(q, layer, batch)

    def plan_capture(self, batch: Batch) -> None:
        if TROUBLE == "capture" and len(batch.slots) == 4:
            self.go_wild()
        self.inner.plan_capture(batch)

    def plan_replay(self, batch: Batch) -> None:
        self.inner.plan_replay(batch)

    def cause(self, batch: Batch, where: str) -> None:
        """Cause the failures that the requests of ``batch`` select."""
        asked = {req.namespace for req in batch.reqs}
        if f"memory {where}" in asked:
            self.allocate()
        if f"wild {where}" in asked:
            self.go_wild()

    def allocate(self) -> None:
        """Run out of memory."""
        torch.empty(TOO_MUCH, dtype=torch.uint8, device=self.device)

    def go_wild(self) -> None:
        """Lose the device. On CUDA a kernel really fails, some time after this call; without CUDA raise the error that
        torch raises then."""
        if self.device.type == "cuda":
            from trouble_kernel import write_far

            write_far(self.device)
        else:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nand much advice")


def working(context: AttentionContext) -> AttentionBackend:
    """Return the backend that attends."""
    if context.device.type == "cuda":
        from dovetail_attention.config import TritonConfig
        from dovetail_attention.triton.backend import TritonAttention

        return TritonAttention(TritonConfig(), context)
    from dovetail_attention.config import TorchNativeConfig
    from dovetail_attention.torch_native import TorchNativeAttention

    return TorchNativeAttention(TorchNativeConfig(), context)
