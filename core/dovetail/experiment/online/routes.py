"""Serve the routes and the page of an experiment that runs inside one server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from prometheus_client import CollectorRegistry
from pydantic import Field
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from dovetail.api.body import ApiModel, parse
from dovetail.api.responses import json_response
from dovetail.config import Config
from dovetail.experiment.online.arms import ArmsClient, OnlineArm
from dovetail.experiment.online.comparison import CompareArms, ComparisonRow, Side
from dovetail.experiment.online.log import Latency
from dovetail.experiment.online.routing import RememberRequest
from dovetail.server.app import ServerRoute
from dovetail.server.parts import ServerParts
from dovetail.server.service import Service

REFRESH_SECONDS = 5
_RECENT = 20


class ArmRequest(ApiModel):
    """Describe the body of POST /experiment/stop and /experiment/promote."""

    arm: str = Field(description="Name of the arm.")


class OnlineExperiment:
    """Answer the routes of the experiment of one server."""

    def __init__(self, config: Config, engine: ArmsClient, compare: CompareArms) -> None:
        """``compare`` computes the comparison of the arms."""
        self.engine = engine
        self._section = config.experiment
        self._compare = compare
        self._started = time.time()
        self._compared: tuple[float, list[ComparisonRow]] = (-REFRESH_SECONDS, [])
        self._comparing = asyncio.Lock()

    def parts(self) -> ServerParts:
        """Return the parts from which the server is built."""
        source = self._section.key
        return ServerParts(self.engine, self._routes(), lambda app: RememberRequest(app, source), self._register)

    def _register(self, registry: CollectorRegistry) -> None:
        self.engine.log.register(registry, self.engine.gauges)
        if self.engine.shadow is not None:
            registry.register(self.engine.shadow.results)

    def _routes(self) -> tuple[ServerRoute, ...]:
        return (
            ServerRoute(["GET"], "/health", self.health, open=True, answers=("text/plain",)),
            ServerRoute(["GET"], "/experiment", self.page, answers=("text/html",)),
            ServerRoute(["GET"], "/experiment.json", self.json),
            ServerRoute(["POST"], "/experiment/stop", self.stop, ArmRequest),
            ServerRoute(["POST"], "/experiment/promote", self.promote, ArmRequest),
        )

    async def health(self, service: Service, request: Request) -> Response:
        """Answer 200 while requests are accepted, else 503. The answer names arms whose process has ended by itself."""
        service.check_ready()
        failure, problem = self.engine.failure, service.problem()
        text = f"ok, but an arm has ended ({failure}); the other arms serve its requests" if failure else "ok"
        return PlainTextResponse(text + (f"{';' if failure else ', but'} {problem}" if problem else ""))

    async def stop(self, service: Service, request: Request) -> Response:
        """Stop an arm: the other arms get its share, its running requests finish, then its process ends."""
        body = await parse(request, ArmRequest, service.max_body)
        self.engine.stop_arm(body.arm)
        return json_response({"stopping": body.arm, "shares": self.engine.shares()})

    async def promote(self, service: Service, request: Request) -> Response:
        """Route all requests to one arm. The other arms keep running and get no requests."""
        body = await parse(request, ArmRequest, service.max_body)
        self.engine.promote(body.arm)
        return json_response({"promoted": body.arm, "shares": self.engine.shares()})

    async def json(self, service: Service, request: Request) -> Response:
        """Return the current state of the experiment."""
        return json_response(await self._state())

    async def page(self, service: Service, request: Request) -> Response:
        """Return the current state of the experiment as a page that refreshes itself."""
        state = await self._state()
        return HTMLResponse(
            _template().render(e=state, model=service.model_name, refresh=REFRESH_SECONDS, recent=_RECENT)
        )

    async def _state(self) -> dict[str, Any]:
        shadow = self.engine.shadow
        return {
            "mode": "shadow" if shadow else "split",
            "key": self._section.key,
            "started": self._started,
            "arms": self._arms(),
            "comparison": [asdict(row) for row in await self._rows()],
            "shadow": shadow.to_json() if shadow else None,
        }

    def _arms(self) -> list[dict[str, Any]]:
        log, shares = self.engine.log, self.engine.shares()
        counts = {
            "requests": log.totals(log.requests),
            "tokens": log.totals(log.tokens),
            "outputs": log.totals(log.finished),
            "errors": log.totals(log.errors),
        }
        return [
            {
                **_facts(arm, shares[name]),
                "settings": self._section.arms.get(name, {}),
                **{what: _of_arm(name, values) for what, values in counts.items()},
                "abandoned": log.totals(log.abandoned).get((name,), 0),
                "latency_ms": _latency(log.latencies[name]),
            }
            for name, arm in self.engine.arms.items()
        ]

    async def _rows(self) -> list[ComparisonRow]:
        async with self._comparing:
            if time.monotonic() - self._compared[0] >= REFRESH_SECONDS:
                control, *others = self._sides()
                rows = await asyncio.to_thread(self._compare, control, others)
                self._compared = (
                    time.monotonic(),
                    [_without_verdict(row) for row in rows] if self.engine.shadow else rows,
                )
            return self._compared[1]

    def _sides(self) -> list[Side]:
        """Return the outputs to compare: in a split all outputs of each arm, with a shadow those that both arms have finished."""
        shadow = self.engine.shadow
        if shadow is not None:
            return [(shadow.primary, list(shadow.pairs[0])), (shadow.arm, list(shadow.pairs[1]))]
        return [(name, list(latencies)) for name, latencies in self.engine.log.latencies.items()]


def _without_verdict(row: ComparisonRow) -> ComparisonRow:
    """Return the row without a verdict: a shadow runs under another load than its primary, so neither can be called faster."""
    return replace(row, verdict="not judged", note="the shadow arm runs under another load than the primary arm")


def _facts(arm: OnlineArm, share: float) -> dict[str, Any]:
    client = arm.client
    return {
        "name": arm.name,
        "state": arm.state,
        "failure": client.failure,
        "pid": client.pid if client.alive else None,
        "share": share,
        "open": client.num_open,
    }


def _of_arm(name: str, totals: dict[tuple[str, ...], int]) -> dict[str, int]:
    """Return the counts of one arm by the label that follows ``arm``."""
    return {label: value for (arm, label), value in totals.items() if arm == name}


def _latency(latencies: Sequence[Latency]) -> dict[str, float | int | None]:
    ttft = sorted(one.ttft for one in latencies)
    tpot = [one.tpot for one in latencies if one.tpot is not None]
    return {
        "outputs": len(ttft),
        "ttft_median": median(ttft) if ttft else None,
        "ttft_p99": ttft[ceil(0.99 * len(ttft)) - 1] if ttft else None,
        "tpot_mean": fmean(tpot) if tpot else None,
    }


def _template() -> Any:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = lambda share: f"{100 * share:.4g} %"
    environment.filters["number"] = lambda value: (
        "–" if value is None else f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"
    )
    environment.filters["change"] = lambda ratio: "?" if ratio is None else f"{100 * (ratio - 1):+.1f} %"
    return environment.get_template("experiment.html")
