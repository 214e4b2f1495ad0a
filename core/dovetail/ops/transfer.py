"""Copy between host and device without waiting for either."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def to_device(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """Return ``array`` as a tensor on ``device``. For CUDA the array is copied to pinned memory first, so that the host
    does not wait for the kernels in flight, as it would with a plain ``.to``."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` in host memory. The copy is complete once the stream has executed it: wait for an event before
    reading it."""
    return tensor.to("cpu", non_blocking=True)
