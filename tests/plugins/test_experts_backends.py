"""Test the backends of experts of this repository with their conformance suite, and how they are chosen.

.venv/bin/python -m pytest -q tests/plugins/test_experts_backends.py
"""

from __future__ import annotations

from dovetail.testing.experts import ExpertsSuite


class TestTorchNative(ExpertsSuite):
    name = "torch_native"


class TestTriton(ExpertsSuite):
    name = "triton"
