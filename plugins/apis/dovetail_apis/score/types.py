"""Define the bodies of /v1/score and /v1/rerank."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from dovetail.api.body import ApiModel, CacheSalt, Ids, Int32, Rid, Texts, examples


class ScoreFields(ApiModel):
    """Describe the common fields of both bodies."""

    model: str | None = None
    pooling: Literal["last", "mean"] | None = Field(
        None, description="How texts are embedded if pairs are scored by embeddings. The default is set by the model."
    )
    priority: Int32 | None = None
    cache_salt: CacheSalt = None
    rid: Rid | None = None

    ignored: ClassVar[frozenset[str]] = frozenset({"user"})


class ScoreRequest(ScoreFields):
    """Describe the body of POST /v1/score: pairs of texts, or items with label tokens, but not both."""

    model_config = examples(
        {"model": "tiny", "text_1": "A question", "text_2": ["An answer", "Another one"]},
        {"query": "Is it so? ", "items": ["Yes", "No"], "label_token_ids": [5, 6], "apply_softmax": True},
    )

    text_1: str | list[str] | None = Field(None, description="One text, or as many texts as `text_2` has.")
    text_2: str | list[str] | None = None
    query: str | list[int] | None = Field(None, description="Text or token ids before each item.")
    items: str | Texts | list[Ids] | None = None
    label_token_ids: list[int] | None = Field(
        None,
        description="The answer contains the probability of each of these tokens as the next one after query and item.",
    )
    apply_softmax: bool = Field(
        False, description="Return probabilities relative to the labels only, which add up to 1."
    )
    item_first: bool = Field(False, description="Put items before the query.")


class ScoreDocument(ApiModel):
    """Describe a document that is an object."""

    text: str


class RerankRequest(ScoreFields):
    """Describe the body of POST /v1/rerank, which sorts documents by their relevance to a query."""

    model_config = examples({"model": "tiny", "query": "A question", "documents": ["An answer", "Another one"]})

    query: str
    documents: list[str | ScoreDocument]
    top_n: Int32 | None = Field(
        None, description="Number of the most relevant documents that are returned; by default all."
    )
    return_documents: bool = True
