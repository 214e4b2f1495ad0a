"""Prepare the caches of kernels, before components are chosen and the engine is built."""

from __future__ import annotations

import importlib.util

from dovetail.ops.compiled_files import remove_cut_kernels


def prepare_kernels(device_type: str) -> None:
    """Remove truncated files from the caches of kernels, and have a thread read the digest that Triton needs for its first kernel. Does
    nothing unless ``device_type`` is ``cuda``. Does not use the device, which other processes may serve."""
    if device_type != "cuda":
        return
    remove_cut_kernels()
    if importlib.util.find_spec("triton"):
        from dovetail.ops.triton.driver import start_digest

        start_digest()
