"""Define the config of what a server reports: traces of its requests, and the names and kinds of its metrics."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from dovetail.config.plugin import Section


class TracingSection(Section):
    """Configure OpenTelemetry traces of requests, which need the extra `otel`: docs/operations.md."""

    endpoint: str | None = Field(
        default=None,
        description="Receiver of the traces by OTLP over HTTP, as in `http://localhost:4318`; without a path, `/v1/traces` is added. By default requests are not traced.",
    )
    sample_ratio: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Share of the requests that are traced. A request with the header `traceparent` is traced if its caller traces it.",
    )
    service_name: str = Field(default="dovetail", pattern=r"\S", description="`service.name` of the traces.")

    @field_validator("endpoint")
    @classmethod
    def _is_url(cls, endpoint: str | None) -> str | None:
        parts = urlsplit(endpoint or "http://none")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{endpoint!r} is not a URL; give one with http or https, as in http://localhost:4318")
        return endpoint

    @property
    def url(self) -> str:
        """Return the URL to which traces are sent."""
        endpoint = self.endpoint or ""
        return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + "/v1/traces"


class MetricsSection(Section):
    """Configure the names in /metrics, and what is counted only if it is configured."""

    compat: Literal["vllm", "sglang"] | None = Field(
        default=None,
        description="Add the same measurements under the names, labels and histogram buckets of vLLM or SGLang: docs/operations.md lists them.",
    )
    expert_load: Literal["layers", "experts"] | None = Field(
        default=None,
        description="Count the tokens that each expert of a mixture of experts receives. `layers`: /metrics has the balance of each layer. `experts`: it also has the counter of each expert, a series for each expert of each layer. GET /expert_load returns the whole table. By default nothing is counted.",
    )
