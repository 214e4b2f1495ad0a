"""triton attention, interpreted.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_attention_triton.py
"""

from __future__ import annotations

from dovetail.testing.attention import AttentionSuite


class TestTriton(AttentionSuite):
    name = "triton"
    device = "cpu"
