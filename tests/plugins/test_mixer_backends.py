"""Test the backends of layers with a state of this repository with their conformance suite.

.venv/bin/python -m pytest -q tests/plugins/test_mixer_backends.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail.errors import ConfigError
from dovetail.interfaces.mixer import MixerContext
from dovetail.testing.mixer import MixerSuite
from dovetail_mixers.config import TritonMixerConfig
from dovetail_mixers.triton import TritonMixers


class TestTorchNative(MixerSuite):
    name = "torch_native"


class TestTriton(MixerSuite):
    name = "triton"


def test_the_kernels_need_cuda() -> None:
    with pytest.raises(
        ConfigError, match="mixer: triton computes on cuda, and the device is cpu; set mixer: torch_native"
    ):
        TritonMixers(TritonMixerConfig(), MixerContext(torch.device("cpu"), torch.float32))
