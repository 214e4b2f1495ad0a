"""Define the config section of the HTTP server, and of the limits that it sets to clients."""

from __future__ import annotations

import ipaddress
import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from dovetail.config.plugin import Section


class LimitsSection(Section):
    """Configure what clients may hold of the server. docs/reliability.md explains each limit."""

    connections: int | None = Field(
        default=None,
        ge=1,
        description="Open connections. Beyond it the connection that has waited longest for the rest of its request is closed, or an idle one; if there is none, requests get 503. By default what the limit of file descriptors allows (16384 at most).",
    )
    connections_per_address: int | None = Field(
        default=None,
        ge=1,
        description="Open connections of one address (IPv6: one /64 network). By default three quarters of `connections`. Behind a proxy all clients have its address.",
    )
    header_kib: int = Field(
        default=64,
        ge=1,
        le=1024,
        description="Larger headers (KiB) are answered with 431, and the connection is closed.",
    )
    header_seconds: float = Field(
        default=10.0, gt=0, description="Seconds in which the headers of a request must arrive; 408 otherwise."
    )
    body_seconds: float = Field(
        default=60.0, gt=0, description="Seconds in which the body of a request must arrive; 408 otherwise."
    )
    idle_seconds: float = Field(
        default=65.0, gt=0, description="Seconds for which a connection may be idle between two requests."
    )
    write_seconds: float = Field(
        default=120.0,
        gt=0,
        description="A client that takes none of its answer for this number of seconds is disconnected.",
    )
    template_seconds: float = Field(
        default=5.0,
        gt=0,
        description="Processor time (seconds) in which the chat template must render a conversation, and in which it must be compiled at the start; more is refused with 400.",
    )
    bodies_mib: float = Field(
        default=512.0,
        gt=0,
        description="Request bodies (MiB) that are held at the same time, while they arrive and until they are parsed; more get 503. A tenant may hold half of it. One body of each tenant is always accepted.",
    )
    answer_mib: float = Field(
        default=64.0,
        gt=0,
        description="The largest answer (MiB), as estimated from the request before it starts; more is refused with 400. The large answers (over 1 MiB) of a tenant that are open at the same time may have twice this size; more get 429.",
    )


class ServerSection(Section):
    """Configure the HTTP server."""

    host: str = Field(default="127.0.0.1", description="Address to listen on; 0.0.0.0 for every interface.")
    port: int = Field(default=30000, ge=0, le=65535, description="0 picks a free port.")
    max_body_mib: float = Field(default=8.0, gt=0, description="Larger request bodies (MiB) are answered with 413.")
    drain_seconds: float = Field(
        default=30.0, ge=0, description="Seconds that running requests have to finish after SIGTERM."
    )
    health_seconds: float = Field(
        default=30.0, gt=0, description="/health_generate fails if a token takes more than this number of seconds."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="The lowest level that is logged."
    )
    keys: str | None = Field(
        default=None,
        description="The key file, or `env:NAME` for an environment variable that holds its text. With it every request needs a key, and belongs to a tenant: docs/tenants.md.",
    )
    allow_public_without_keys: bool = Field(
        default=False,
        description="Allow the server to listen on an address that other machines can reach although there are no keys.",
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="Names by which a server without keys may be called, in addition to `localhost`, IP addresses and `host`; `*` for any. With `allow_public_without_keys` an empty list allows any name.",
    )
    trusted_proxies: tuple[str, ...] = Field(
        default=(),
        description="Addresses and networks (`10.0.0.0/8`) of proxies whose X-Forwarded-For states the client's address. Clients without a key are counted by their address, behind other proxies by that of the proxy. A client whose own address is in the list can forge the header.",
    )
    max_seconds: float | None = Field(
        default=None,
        gt=0,
        le=10**6,
        description="A request that runs for more than this number of seconds is ended with an error (504).",
    )
    max_logprobs: int = Field(
        default=20,
        ge=0,
        le=100,
        description="Log-probabilities that a request may ask for at each position, of the output and of the prompt.",
    )
    cors_origins: tuple[str, ...] = Field(
        default=(),
        description="Web pages of other origins that may call the server, as in `https://chat.example.org`; `*` for all.",
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        lt=2**63,
        description="Requests that set no seed get seeds that follow from this one, in the order of their arrival. By default they get random seeds.",
    )
    log_requests: bool = Field(
        default=True,
        description="Log a line for each finished request, at level info: id, tenant, route, tokens, times and finish reason. Never prompts or outputs.",
    )
    profile_dir: str | None = Field(
        default=None,
        description="Directory to which POST /start_profile writes traces of the engine, in files whose names the server chooses. Without it profiles are refused.",
    )
    profile_seconds: float = Field(
        default=10.0, gt=0, le=600, description="A profile ends at the latest after this number of seconds."
    )
    usage_log: str | None = Field(
        default=None, description="File to which a line of JSON is added for each request: tenant, tokens, seconds."
    )
    usage_log_texts: bool = Field(default=False, description="Write prompts and outputs into the usage log too.")
    limits: LimitsSection = LimitsSection()

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+", origin):
                raise ValueError(f"{origin!r} is not an origin; allowed: *, or scheme://host[:port] without a path")
        return origins

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if host != "*" and not re.fullmatch(r"[A-Za-z0-9_.-]+", host):
                raise ValueError(f"{host!r} is not a host; allowed: *, or a name without scheme and port")
        return tuple(host.lower() for host in hosts)

    @field_validator("trusted_proxies")
    @classmethod
    def _proxies(cls, proxies: tuple[str, ...]) -> tuple[str, ...]:
        for proxy in proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError as error:
                raise ValueError(
                    f"{proxy!r} is no address or network ({error}); allowed: 127.0.0.1, 10.0.0.0/8"
                ) from None
        return proxies

    @model_validator(mode="after")
    def _log_has_tenants(self) -> ServerSection:
        if self.usage_log and not self.keys:
            raise ValueError("usage_log needs keys, which identify the tenants; give server.keys")
        return self
