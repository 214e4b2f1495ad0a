from dovetail.testing.grammar import GrammarSuite


class TestGrammar(GrammarSuite):
    name = "example_choices"
    partial = True
