from dovetail.testing.policy import PolicySuite


class TestPolicy(PolicySuite):
    name = "example_shortest"
    patience_seconds = 4.0  # 700 tokens at 200 a second, and a reserve
