from dovetail.testing.policy import PolicySuite


class TestPolicy(PolicySuite):
    name = "example_shortest"
    patience_seconds = 1.0
