"""The bodies of /v1/score and /v1/rerank."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from dovetail.api.body import ApiModel, CacheSalt, Ids, Int32, Rid, Texts, examples


class ScoreFields(ApiModel):
    """What both have in common."""

    model: str | None = None
    pooling: Literal["last", "mean"] | None = Field(
        None, description="How texts are embedded, where pairs are scored by embeddings; by default as the model says."
    )
    priority: Int32 | None = None
    cache_salt: CacheSalt = None
    rid: Rid | None = None

    ignored: ClassVar[frozenset[str]] = frozenset({"user"})


class ScoreRequest(ScoreFields):
    """POST /v1/score: pairs of texts, or items with label tokens. Not both."""

    model_config = examples(
        {"model": "tiny", "text_1": "A question", "text_2": ["An answer", "Another one"]},
        {"query": "Is it so? ", "items": ["Yes", "No"], "label_token_ids": [5, 6], "apply_softmax": True},
    )

    text_1: str | list[str] | None = Field(None, description="One text, or as many as `text_2`.")
    text_2: str | list[str] | None = None
    query: str | list[int] | None = Field(None, description="What comes before each item.")
    items: str | Texts | list[Ids] | None = None
    label_token_ids: list[int] | None = Field(
        None, description="The probability of each as the token after query and item is the answer."
    )
    apply_softmax: bool = Field(False, description="Probabilities among the labels alone, which add up to 1.")
    item_first: bool = Field(False, description="Items come before the query.")


class Document(ApiModel):
    """A document that is an object."""

    text: str


class RerankRequest(ScoreFields):
    """POST /v1/rerank: documents in the order of their relevance to a query."""

    model_config = examples({"model": "tiny", "query": "A question", "documents": ["An answer", "Another one"]})

    query: str
    documents: list[str | Document]
    top_n: Int32 | None = Field(None, description="Answer with so many of the most relevant; by default all.")
    return_documents: bool = True
