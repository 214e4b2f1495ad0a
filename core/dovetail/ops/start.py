"""Begin with what kernels need, before the engine is built."""

from __future__ import annotations

import importlib.util

import torch

from dovetail.ops.compiled_files import remove_cut_kernels


def prepare_kernels(device: str, ranks: int) -> None:
    """Remove kernels that were cut, and start Triton for ``device`` in threads if this process will use it: several ``ranks`` may
    have processes of their own. On a CPU, do nothing."""
    if not device.startswith("cuda"):
        return
    remove_cut_kernels()
    if ranks == 1 and importlib.util.find_spec("triton"):
        from dovetail.ops.triton.driver import start_triton

        start_triton(torch.device(device))
