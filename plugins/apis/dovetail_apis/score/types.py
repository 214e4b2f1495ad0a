"""Define the bodies of /v1/score and /v1/rerank."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from dovetail.api.body import ApiModel, Ids, Int32, Rid, Texts, examples
from dovetail.api.placement import PlacementFields
from dovetail.api.truncation import TruncationFields
from dovetail.errors import RequestError
from dovetail_apis.fields import RERANK, SCORE


class ScoreFields(TruncationFields, PlacementFields):
    """Describe the common fields of both bodies. ``id_prefix`` begins the ids of requests that have none."""

    id_prefix: ClassVar[str] = "score-"

    model: str | None = None
    pooling: Literal["last", "mean"] | None = Field(
        None, description="How texts are embedded if pairs are scored by embeddings. The default is set by the model."
    )
    rid: Rid | None = None
    request_id: Rid | None = None


class ScoreRequest(ScoreFields):
    """Describe the body of POST /v1/score: pairs of texts, or items with label tokens, but not both."""

    model_config = examples(
        {"model": "tiny", "text_1": "A question", "text_2": ["An answer", "Another one"]},
        {"query": "Is it so? ", "items": ["Yes", "No"], "label_token_ids": [5, 6], "apply_softmax": True},
    )

    text_1: str | list[str] | None = Field(None, description="One text, or as many texts as `text_2` has.")
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = Field(None, description="Another name of `text_1`, as `data_1`.")
    documents: str | list[str] | None = Field(None, description="Another name of `text_2`, as `data_2`.")
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    query: str | list[int] | None = Field(None, description="Text or token ids before each item.")
    items: str | Texts | list[Ids] | None = None
    label_token_ids: Ids | list[Ids] | None = Field(
        None,
        description="The answer contains the probability of each of these tokens as the next one after query and item. A list "
        "of lists has one for each item.",
    )
    temperature: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Divides the log-probabilities before `apply_softmax`."
    )
    return_token_logprobs: bool | None = Field(None, description="Return the log-probabilities of the labels, too.")
    apply_softmax: bool = Field(
        False, description="Return probabilities relative to the labels only, which add up to 1."
    )
    item_first: bool = Field(False, description="Put items before the query.")

    ignored = SCORE.ignored
    refused = SCORE.refused
    reasons = SCORE.reasons

    def side(self, *names: str) -> tuple[str, str | list[str] | None]:
        """Return the name and the value of the one of the fields ``names`` that is given. Raises ``RequestError`` if
        several are."""
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise RequestError(f"{given[0]} and {given[1]} are names of the same field; give one", param=given[1])
        name = given[0] if given else names[0]
        return name, getattr(self, name)


class ScoreDocument(ApiModel):
    """Describe a document that is an object."""

    text: str


class RerankRequest(ScoreFields):
    """Describe the body of POST /v1/rerank, which sorts documents by their relevance to a query."""

    model_config = examples({"model": "tiny", "query": "A question", "documents": ["An answer", "Another one"]})
    id_prefix = "rerank-"

    query: str
    documents: str | ScoreDocument | list[str | ScoreDocument]
    top_n: Int32 | None = Field(
        None, description="Number of the most relevant documents that are returned; by default, and with 0, all."
    )
    return_documents: bool = True

    ignored = RERANK.ignored
    refused = RERANK.refused
    reasons = RERANK.reasons
