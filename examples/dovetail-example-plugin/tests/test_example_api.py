from dovetail.testing.api import ApiSuite


class TestLines(ApiSuite):
    name = "example_line"
