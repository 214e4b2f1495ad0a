"""Run the conformance suite on the APIs of this repository.

.venv/bin/python -m pytest -q tests/plugins/test_apis.py
"""

from dovetail.testing.api import ApiSuite


class TestOpenAI(ApiSuite):
    name = "openai"


class TestNative(ApiSuite):
    name = "native"


class TestResponses(ApiSuite):
    name = "responses"


class TestAnthropic(ApiSuite):
    name = "anthropic"


class TestOllama(ApiSuite):
    name = "ollama"


class TestEmbeddings(ApiSuite):
    name = "embeddings"


class TestScore(ApiSuite):
    name = "score"


class TestTokenize(ApiSuite):
    name = "tokenize"
