"""Describe the device that components are chosen for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dovetail.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Machine:
    """Describe a device. ``compute_capability`` is (major, minor) on CUDA, None elsewhere; ``device`` is torch's
    name for it. An ``assumed`` machine need not exist here, and nothing is probed on it. ``num_devices`` is the number
    of CUDA devices that torch sees; None on a CPU and on assumed machines."""

    device_type: str
    compute_capability: tuple[int, int] | None
    device_name: str
    device: str
    assumed: bool = False
    num_devices: int | None = None

    @classmethod
    def detect(cls, setting: str = "auto") -> Machine:
        """Return the device of this machine that the setting ``device`` selects. Imports torch. Raises ``ConfigError``
        if it does not exist."""
        import torch

        if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
            return cls("cpu", None, "cpu", "cpu")
        index = int(setting.partition(":")[2] or 0)
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if index >= count:
            devices = ", ".join(["cpu", *(f"cuda:{i}" for i in range(count))])
            raise ConfigError(f"device is {setting!r}, but torch {torch.__version__} sees only {devices}")
        capability = torch.cuda.get_device_capability(index)
        return cls("cuda", capability, torch.cuda.get_device_name(index), f"cuda:{index}", num_devices=count)

    @classmethod
    def assume(cls, text: str) -> Machine:
        """Return a machine by name: ``cpu``, or ``sm90`` for CUDA with compute capability 9.0. Imports nothing.
        Raises ``ConfigError``."""
        if text == "cpu":
            return cls("cpu", None, "cpu", "cpu", assumed=True)
        match = re.fullmatch(r"sm_?(\d+)(\d)", text.lower())
        if match is None:
            raise ConfigError(
                f"--assume is {text!r}; allowed: cpu, or sm and a compute capability, as in sm80, sm90, sm100"
            )
        return cls("cuda", (int(match[1]), int(match[2])), text.lower(), "cuda:0", assumed=True)
