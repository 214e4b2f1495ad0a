from dovetail.testing.attention import AttentionSuite


class TestAttention(AttentionSuite):
    name = "example_eager"
