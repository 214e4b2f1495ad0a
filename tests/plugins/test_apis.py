"""Run the conformance suite on the APIs of this repository.

.venv/bin/python -m pytest -q tests/plugins/test_apis.py
"""

from collections.abc import Sequence

from dovetail.interfaces.api import Api, Route
from dovetail.testing.api import ApiSuite
from dovetail_apis.embeddings import Embeddings


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


class EmbeddingsWithoutClassify(Embeddings):
    """Leave out /classify, which refuses every request."""

    def routes(self) -> Sequence[Route]:
        return [route for route in super().routes() if not route.path.endswith("/classify")]


class TestEmbeddings(ApiSuite):
    name = "embeddings"

    def make(self) -> Api:
        return EmbeddingsWithoutClassify(self.config())


class TestScore(ApiSuite):
    name = "score"


class TestTokenize(ApiSuite):
    name = "tokenize"
