import json

from dovetail.testing.parsers import ReasoningParserSuite, ToolParserSuite


class TestCallLines(ToolParserSuite):
    name = "example_lines"
    in_fragments = False

    def write(self, content, calls) -> str:
        return "\n".join([content, *(f"CALL {call.name} {json.dumps(call.arguments)}" for call in calls)])


class TestComments(ReasoningParserSuite):
    name = "example_comments"

    def write(self, reasoning, answer, prompt) -> str:
        return "# " + reasoning.replace("\n", "\n# ") + "\n" + answer
