"""A server that runs an experiment: its arms, the routes beside the usual ones, and the running comparison."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import Field
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from dovetail.api.body import ApiModel, parse
from dovetail.api.responses import json_response
from dovetail.config import Config
from dovetail.interfaces.api import Api
from dovetail.registry.installed import Registry
from dovetail.server.app import Route, build_app
from dovetail.server.arm_configs import arm_configs, check_arms
from dovetail.server.arm_log import Latency
from dovetail.server.arms import Arm, ArmsClient
from dovetail.server.engine_process import Endpoints
from dovetail.server.routing import RememberRequest
from dovetail.server.service import Service
from dovetail.server.tenants.tenancy import Tenancy
from dovetail.tokenizer import Tokenizer

REFRESH_SECONDS = 5
_RECENT = 20


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the comparison: a metric of ``arm`` (``b``) against that of ``control`` (``a``). Bounds are of the ratio b / a;
    None where there is not enough data."""

    control: str
    arm: str
    metric: str
    unit: str
    a: float | None
    b: float | None
    ratio: float | None
    low: float | None
    high: float | None
    verdict: str
    blocks: int
    note: str


Side = tuple[str, Sequence[Latency]]
Judge = Callable[[Side, Sequence[Side]], list[Row]]
"""Compares the control with each of the others; runs on a thread."""


class ArmRequest(ApiModel):
    """POST /experiment/stop and /experiment/promote."""

    arm: str = Field(description="Name of the arm.")


class Online:
    """The experiment of one server."""

    def __init__(self, config: Config, engine: ArmsClient, judge: Judge | None) -> None:
        """Without a ``judge`` the page has no comparison."""
        self.engine = engine
        self._section = config.experiment
        self._judge = judge
        self._started = time.time()
        self._judged: tuple[float, list[Row]] = (-REFRESH_SECONDS, [])
        self._judging = asyncio.Lock()

    @classmethod
    async def prepare(
        cls,
        config: Config,
        registry: Registry,
        target: Callable[[Config, Endpoints], None],
        tokenizer: Tokenizer,
        judge: Judge | None,
    ) -> Online:
        """Resolve every arm; nothing has started yet. Raises ``ConfigError`` or ``PluginError`` that names the arm."""
        arms = arm_configs(config, registry)
        await asyncio.to_thread(check_arms, arms)
        return cls(config, ArmsClient(config, arms, target, lambda ids: tokenizer.decode(list(ids))), judge)

    def app(self, service: Service, apis: Sequence[Api], tenancy: Tenancy | None = None) -> ASGIApp:
        """The application (``app.build_app``); the engines have been started."""
        registry = service.metrics.registry
        self.engine.log.register(registry, self.engine.standings)
        if self.engine.shadow is not None:
            registry.register(self.engine.shadow.results)
        return RememberRequest(build_app(service, apis, self._routes(), tenancy), self._section.key)

    def _routes(self) -> tuple[Route, ...]:
        return (
            Route(["GET"], "/health", self.health, open=True, answers=("text/plain",)),
            Route(["GET"], "/experiment", self.page, answers=("text/html",)),
            Route(["GET"], "/experiment.json", self.json),
            Route(["POST"], "/experiment/stop", self.stop, ArmRequest),
            Route(["POST"], "/experiment/promote", self.promote, ArmRequest),
        )

    async def health(self, service: Service, request: Request) -> Response:
        """200 while requests are taken, else 503. Arms that have died are named."""
        service.check_ready()
        failure = self.engine.failure
        return PlainTextResponse(f"ok, without {failure}; others take its requests" if failure else "ok")

    async def stop(self, service: Service, request: Request) -> Response:
        """End an arm: its share goes to the others, its running requests finish, its process ends."""
        body = await parse(request, ArmRequest, service.max_body)
        self.engine.stop_arm(body.arm)
        return json_response({"stopping": body.arm, "shares": self.engine.shares()})

    async def promote(self, service: Service, request: Request) -> Response:
        """Give an arm all requests. The others run on, without any."""
        body = await parse(request, ArmRequest, service.max_body)
        self.engine.promote(body.arm)
        return json_response({"promoted": body.arm, "shares": self.engine.shares()})

    async def json(self, service: Service, request: Request) -> Response:
        """The experiment as it stands."""
        return json_response(await self._state())

    async def page(self, service: Service, request: Request) -> Response:
        """The experiment as it stands, as a page that refreshes itself."""
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

    async def _rows(self) -> list[Row]:
        if self._judge is None:
            return []
        async with self._judging:
            if time.monotonic() - self._judged[0] >= REFRESH_SECONDS:
                control, *others = self._sides()
                rows = await asyncio.to_thread(self._judge, control, others)
                self._judged = (time.monotonic(), [_unlike(row) for row in rows] if self.engine.shadow else rows)
            return self._judged[1]

    def _sides(self) -> list[Side]:
        """In a split all that was answered; with a shadow what both have answered."""
        shadow = self.engine.shadow
        if shadow is not None:
            return [(shadow.primary, list(shadow.pairs[0])), (shadow.arm, list(shadow.pairs[1]))]
        return [(name, list(latencies)) for name, latencies in self.engine.log.latencies.items()]


def _unlike(row: Row) -> Row:
    """A shadow has other requests beside it than its primary has, so that nobody may call one of them faster."""
    return replace(row, verdict="not judged", note="the load of a shadow is not that of its primary")


def _facts(arm: Arm, share: float) -> dict[str, Any]:
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
    """The counts of one arm, by the label beside ``arm``."""
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
