"""``dovetail bench serve`` and ``dovetail bench offline``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dovetail.cli.outputs import check_writable
from dovetail.cli.sources import FileOptions, Json, Model, Sets, load, shortcuts
from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from dovetail.bench.report import BenchReport
    from dovetail.bench.session import Asked, Rates, Reached
    from dovetail.bench.specs import ArrivalSpec

WorkloadOption = Annotated[
    str,
    typer.Option(
        "--workload",
        "-w",
        help="random, shared_prefix, chat, json, agent, questions; with settings as in '{kind: chat, turns: [2, 6]}'; or a "
        ".jsonl file. docs/bench.md has all of them.",
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
    typer.Option(help="Short for poisson arrivals of so many calls a second.", show_default=False),
]
ConcurrencyOption = Annotated[
    int | None, typer.Option(min=1, help="Short for a closed loop of so many users.", show_default=False)
]
GoodputOption = Annotated[
    list[str] | None,
    typer.Option("--goodput", metavar="BOUND...", help="The SLO, in milliseconds: ttft:200 tpot:20 e2e:5000."),
]
MoreBounds = Annotated[list[str] | None, typer.Argument(metavar="[BOUND]...", help="Further bounds of --goodput.")]
ShareOption = Annotated[float, typer.Option(min=0.0, max=1.0, help="Of the calls, how many must be within the bounds.")]
SeedOption = Annotated[int, typer.Option(help="Of the calls and their arrivals.")]
WarmupOption = Annotated[int, typer.Option(min=0, help="Calls of another seed before, which are not recorded.")]
SaveOption = Annotated[
    Path | None, typer.Option(help="Write everything that was measured, as JSON.", show_default=False)
]
HtmlOption = Annotated[Path | None, typer.Option(help="Write a page with plots, one file.", show_default=False)]


def serve(
    more: MoreBounds = None,
    url: Annotated[
        str | None,
        typer.Option(help="Of the server. Without it one is started with the config, and stopped.", show_default=False),
    ] = None,
    files: FileOptions = None,
    sets: Sets = None,
    model: Model = None,
    workload: WorkloadOption = "random",
    arrivals: ArrivalsOption = None,
    rate: RateOption = None,
    concurrency: ConcurrencyOption = None,
    goodput: GoodputOption = None,
    share: ShareOption = 0.9,
    sweep: Annotated[str | None, typer.Option(help="Rates, by commas: a run at each.", show_default=False)] = None,
    find_rate: Annotated[
        bool, typer.Option("--find-rate", help="Look for the highest rate at which the SLO is met.")
    ] = False,
    tolerance: Annotated[float, typer.Option(min=0.01, help="How exactly.")] = 0.1,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="How long calls arrive in each run of --sweep and --find-rate.")
    ] = 20.0,
    seed: SeedOption = 0,
    warmup: WarmupOption = 4,
    flush: Annotated[bool, typer.Option(help="Empty the server's prefix cache before each run.")] = True,
    api: Annotated[
        str, typer.Option(help="native (Dovetail's /generate), or openai for any server with OpenAI's API.")
    ] = "native",
    served_model: Annotated[
        str | None, typer.Option(help="By default the first that the server lists.", show_default=False)
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Directory of tokenizer.json: random tokens for a server that tells no vocabulary."),
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds without a byte that fail a call.")] = 600.0,
    save: SaveOption = None,
    html: HtmlOption = None,
    as_json: Json = False,
) -> None:
    """A server under load: latencies, throughput, goodput. Calls are sent when they are due, however slow the answers are.
    Exit status 1 if no call succeeded, or no rate met the SLO."""
    from dovetail.bench.session import Rates, Reached

    check_writable({"--save": save, "--html": html})
    asked = _asked(workload, arrivals, rate, concurrency, [*(goodput or ()), *(more or ())], share, seed, warmup)
    if sweep is not None and (find_rate or rate is not None):
        raise ConfigError("--sweep says itself which rates are measured; leave out --rate and --find-rate, or --sweep")
    rates = Rates(_rates(sweep), find_rate, rate or 1.0, tolerance, seconds)
    if url is not None and (files or sets or model):
        raise ConfigError(
            "--url measures a server that runs already, with its own config; leave out --config, --set, --model"
        )
    key = api_key if api == "openai" else None

    def reached(address: str) -> Reached:
        return Reached(address, _api(api), served_model, tokenizer, key, timeout, flush)

    report = _serve(reached(url), asked, rates) if url is not None else None
    if report is None:
        from dovetail.bench.own_server import own_server

        config, _ = load(files, [*(sets or ()), *shortcuts({"model.path": model})])
        with own_server(config) as server:
            report = _serve(reached(server.url), asked, rates)
            started, peak = server.startup_seconds, server.peak_memory()
        report = report.of_own_server(started, peak)
    _show(report, save, html, as_json)


def offline(
    more: MoreBounds = None,
    files: FileOptions = None,
    sets: Sets = None,
    model: Model = None,
    workload: WorkloadOption = "random",
    arrivals: ArrivalsOption = None,
    rate: RateOption = None,
    concurrency: ConcurrencyOption = None,
    goodput: GoodputOption = None,
    share: ShareOption = 0.9,
    seed: SeedOption = 0,
    warmup: WarmupOption = 4,
    save: SaveOption = None,
    html: HtmlOption = None,
    as_json: Json = False,
) -> None:
    """The engine in this process, without a server: tokens per second. All calls are there at once, unless said otherwise."""
    check_writable({"--save": save, "--html": html})
    asked = _asked(workload, arrivals, rate, concurrency, [*(goodput or ()), *(more or ())], share, seed, warmup)
    config, _ = load(files, [*(sets or ()), *shortcuts({"model.path": model})])
    from dovetail.bench.session import bench_offline
    from dovetail.cli.bench_tables import watching

    with watching() as on_run:
        report = bench_offline(config, asked, on_run)
    _show(report, save, html, as_json)


def _serve(reached: Reached, asked: Asked, rates: Rates) -> BenchReport:
    from dovetail.bench.serve import run
    from dovetail.bench.session import bench_server
    from dovetail.cli.bench_tables import watching

    with watching() as on_run:
        return run(bench_server(reached, asked, rates, on_run))


def _asked(
    workload: str,
    arrivals: str | None,
    rate: float | None,
    concurrency: int | None,
    bounds: list[str],
    share: float,
    seed: int,
    warmup: int,
) -> Asked:
    from dovetail.bench.metrics import parse_slo
    from dovetail.bench.session import Asked
    from dovetail.bench.specs import parse_workload

    slo = parse_slo(bounds) if bounds else None
    return Asked(parse_workload(workload), _arrivals(arrivals, rate, concurrency), seed, warmup, slo, share)


def _arrivals(text: str | None, rate: float | None, concurrency: int | None) -> ArrivalSpec | None:
    from dovetail.bench.specs import FixedConcurrency, Poisson, parse_arrivals

    if sum(given is not None for given in (text, rate, concurrency)) > 1:
        raise ConfigError("--arrivals, --rate and --concurrency each say when calls arrive; give one of them")
    if concurrency is not None:
        return FixedConcurrency(limit=concurrency)
    if rate is not None:
        if not 0 < rate < float("inf"):
            raise ConfigError(
                f"--rate is {rate:g}; allowed: calls a second, above 0; all at once is --arrivals all_at_once"
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
        raise ConfigError(f"--sweep is {text!r}; allowed: rates in calls a second, by commas, as in 1,2,4,8")
    return rates


def _api(name: str) -> Literal["native", "openai"]:
    if name == "native" or name == "openai":
        return name
    raise ConfigError(f"--api is {name!r}; allowed: native, openai")


def _show(report: BenchReport, save: Path | None, html: Path | None, as_json: bool) -> None:
    from dovetail.bench.records import write_json
    from dovetail.cli.bench_tables import print_report

    if save is not None:
        write_json(report, save)
    if html is not None:
        from dovetail.bench.page import write_page

        write_page(report, html)
    if as_json:
        typer.echo(json.dumps(report.without_measurements(), indent=2))
    else:
        print_report(report)
    if report.failed:
        raise typer.Exit(1)
