from dovetail.testing.drafter import DrafterSuite


class TestDrafter(DrafterSuite):
    name = "example_bigram"
