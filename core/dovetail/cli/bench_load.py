"""Define ``dovetail bench serve`` and ``dovetail bench offline``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dovetail.cli.engine_flags import check_no_config
from dovetail.cli.outputs import check_writable
from dovetail.cli.sources import FileOptions, Json, Model, Sets, load, shortcuts
from dovetail.cli.spread import spread
from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from dovetail.bench.report import BenchReport
    from dovetail.bench.session import LoadPlan, Rates, ServerAccess
    from dovetail.bench.specs import ArrivalSpec
    from dovetail.config import Config

WorkloadOption = Annotated[
    str,
    typer.Option(
        "--workload",
        "-w",
        help="random, shared_prefix, chat, json, agent, questions; with settings as in '{kind: chat, turns: [2, 6]}'; or a "
        ".jsonl file. docs/bench.md describes them.",
    ),
]
ArrivalsOption = Annotated[
    str | None,
    typer.Option(
        help="all_at_once, '{kind: poisson, rate: 4}', '{kind: gamma, rate: 4, burstiness: 0.5}', '{kind: trace, file: F}', "
        "'{kind: concurrency, limit: 8}'.",
        show_default=False,
    ),
]
RateOption = Annotated[
    float | None,
    typer.Option(help="Short for Poisson arrivals at this rate, in calls per second.", show_default=False),
]
ConcurrencyOption = Annotated[
    int | None, typer.Option(min=1, help="Short for a closed loop with this number of users.", show_default=False)
]
GoodputOption = Annotated[
    list[str] | None,
    typer.Option("--goodput", metavar="BOUND...", help="The SLO, in milliseconds: ttft:200 tpot:20 e2e:5000."),
]
MoreBounds = Annotated[list[str] | None, typer.Argument(metavar="[BOUND]...", help="Further bounds of --goodput.")]
ShareOption = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="The share of the calls that must be within the bounds.")
]
SeedOption = Annotated[int, typer.Option(help="The seed of the calls and their arrivals.")]
WarmupOption = Annotated[
    int, typer.Option(min=0, help="Send this number of calls of another seed first, without recording them.")
]
SaveOption = Annotated[
    Path | None, typer.Option(help="Write all measurements to this file, as JSON.", show_default=False)
]
HtmlOption = Annotated[Path | None, typer.Option(help="Write a page with plots to this file.", show_default=False)]
UrlOption = Annotated[
    str | None,
    typer.Option(
        help="The URL of the server. Without it, a server is started with the config and stopped at the end.",
        show_default=False,
    ),
]
SweepOption = Annotated[
    str | None, typer.Option(help="Rates separated by commas; run the load at each.", show_default=False)
]
SecondsOption = Annotated[
    float, typer.Option(min=0.1, help="The seconds in which calls arrive in each run of --sweep and --find-rate.")
]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(help="The directory of tokenizer.json, for random tokens if the server reports no vocabulary."),
]
ApiOption = Annotated[
    str, typer.Option(help="native (Dovetail's /generate), or openai for any server with OpenAI's API.")
]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Describe the engine or server, the load, and where the report is written."""

    more: MoreBounds = None
    files: FileOptions = None
    sets: Sets = None
    model: Model = None
    workload: WorkloadOption = "random"
    arrivals: ArrivalsOption = None
    rate: RateOption = None
    concurrency: ConcurrencyOption = None
    goodput: GoodputOption = None
    share: ShareOption = 0.9
    seed: SeedOption = 0
    warmup: WarmupOption = 4
    save: SaveOption = None
    html: HtmlOption = None
    as_json: Json = False

    def plan(self) -> LoadPlan:
        """Return the load plan. Raises ``ConfigError``, also if the report could not be written."""
        from dovetail.bench.metrics import parse_slo
        from dovetail.bench.session import LoadPlan
        from dovetail.bench.specs import parse_workload

        check_writable({"--save": self.save, "--html": self.html})
        bounds = [*(self.goodput or ()), *(self.more or ())]
        slo = parse_slo(bounds) if bounds else None
        when = _arrivals(self.arrivals, self.rate, self.concurrency)
        return LoadPlan(parse_workload(self.workload), when, self.seed, self.warmup, slo, self.share)

    def config(self) -> Config:
        """Return the config of the engine, or of the server that is started."""
        return load(self.files, [*(self.sets or ()), *shortcuts({"model.path": self.model})])[0]

    def show(self, report: BenchReport) -> None:
        """Write the report to the given files and print it. The exit status is 1 if the run failed."""
        from dovetail.bench.records import write_json
        from dovetail.cli.bench_tables import print_report

        if self.save is not None:
            write_json(report, self.save)
        if self.html is not None:
            from dovetail.bench.page import write_page

            write_page(report, self.html)
        if self.as_json:
            typer.echo(json.dumps(report.without_measurements(), indent=2))
        else:
            print_report(report)
        if report.failed:
            raise typer.Exit(1)


@spread
def serve(
    load_options: LoadOptions,
    url: UrlOption = None,
    sweep: SweepOption = None,
    find_rate: Annotated[
        bool, typer.Option("--find-rate", help="Search for the highest rate at which the SLO is met.")
    ] = False,
    tolerance: Annotated[float, typer.Option(min=0.01, help="The relative accuracy of --find-rate.")] = 0.1,
    seconds: SecondsOption = 20.0,
    flush: Annotated[bool, typer.Option(help="Empty the server's prefix cache before each run.")] = True,
    api: ApiOption = "native",
    served_model: Annotated[
        str | None,
        typer.Option(help="The name of the model. By default the first that the server lists.", show_default=False),
    ] = None,
    tokenizer: TokenizerOption = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="The API key, which is sent as a bearer token.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="A call fails after this number of seconds without a byte.")
    ] = 600.0,
) -> None:
    """Measure a server under load: latencies, throughput, goodput. Calls are sent when they are due, however slow the
    answers are. The exit status is 1 if no call succeeded, or no rate met the SLO."""
    from dovetail.bench.session import Rates, ServerAccess

    plan, rate = load_options.plan(), load_options.rate
    if sweep is not None and (find_rate or rate is not None):
        raise ConfigError(
            "--sweep already lists the rates to measure; leave out --rate and --find-rate, or leave out --sweep"
        )
    rates = Rates(_rates(sweep), find_rate, rate or 1.0, tolerance, seconds)
    if url is not None:
        check_no_config("--url", load_options.sets, load_options.files, load_options.model)
    key = api_key if api == "openai" else None

    def access(address: str) -> ServerAccess:
        return ServerAccess(address, _api(api), served_model, tokenizer, key, timeout, flush)

    report = _serve(access(url), plan, rates) if url is not None else None
    if report is None:
        from dovetail.bench.own_server import own_server

        with own_server(load_options.config()) as server:
            report = _serve(access(server.url), plan, rates)
            started, peak = server.startup_seconds, server.peak_memory()
        report = report.of_own_server(started, peak)
    load_options.show(report)


@spread
def offline(load_options: LoadOptions) -> None:
    """Measure the engine in this process without a server: tokens per second. All calls are due at once unless
    --arrivals, --rate, --concurrency or the workload's file gives other times."""
    plan, config = load_options.plan(), load_options.config()
    from dovetail.bench.session import bench_offline
    from dovetail.cli.bench_tables import watching

    with watching() as on_run:
        report = bench_offline(config, plan, on_run)
    load_options.show(report)


def _serve(access: ServerAccess, plan: LoadPlan, rates: Rates) -> BenchReport:
    from dovetail.bench.serve import run
    from dovetail.bench.session import bench_server
    from dovetail.cli.bench_tables import watching

    with watching() as on_run:
        return run(bench_server(access, plan, rates, on_run))


def _arrivals(text: str | None, rate: float | None, concurrency: int | None) -> ArrivalSpec | None:
    from dovetail.bench.specs import FixedConcurrency, Poisson, parse_arrivals

    if sum(given is not None for given in (text, rate, concurrency)) > 1:
        raise ConfigError("--arrivals, --rate and --concurrency each define when calls arrive; give only one of them")
    if concurrency is not None:
        return FixedConcurrency(limit=concurrency)
    if rate is not None:
        if not 0 < rate < float("inf"):
            raise ConfigError(
                f"--rate is {rate:g}; allowed: calls per second, above 0; for all calls at once give --arrivals all_at_once"
            )
        return Poisson(rate=rate)
    return None if text is None else parse_arrivals(text)


def _rates(text: str | None) -> tuple[float, ...]:
    if text is None:
        return ()
    try:
        rates = tuple(float(word) for word in text.split(",") if word.strip())
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise ConfigError(
            f"--sweep is {text!r}; allowed: rates in calls per second, separated by commas, as in 1,2,4,8"
        )
    return rates


def _api(name: str) -> Literal["native", "openai"]:
    if name == "native" or name == "openai":
        return name
    raise ConfigError(f"--api is {name!r}; allowed: native, openai")
