"""Test that the Grafana dashboard and the Prometheus alerts use metrics and labels that /metrics has, and that their queries parse.

.venv/bin/python -m pytest -q tests/e2e/test_dashboards.py
"""

import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from dovetail.config import Config
from dovetail.server.launch import running_server
from dovetail.server.tenants.keys import key_digest

promql = pytest.importorskip("promql_parser", reason="pip install promql-parser, which the extra test has")

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana/dovetail.json").read_text())
ALERTS: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [
    *((panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]),
    *(("annotation", annotation["expr"]) for annotation in DASHBOARD["annotations"]["list"]),
    *((rule["alert"], rule["expr"]) for rule in ALERTS),
]
OF_THE_SCRAPE = {"instance", "job"}
OF_PROMETHEUS = {"up"}
KEY = "sk-a-key-for-the-tests-of-dashboards"
GRAMMAR = {"prompt": "x", "max_tokens": 3, "regex": "[ab]{1,3}"}


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Return a client of a server with keys and a usage log, whose engine is scripted."""
    from fake_engine import run_fake_engine

    folder = tmp_path_factory.mktemp("keys")
    keys = {
        "tenants": {"a": {"keys": [key_digest(KEY.encode())]}},
        "admins": {"ops": {"keys": [key_digest(f"{KEY}-admin".encode())]}},
    }
    (folder / "keys.json").write_text(json.dumps(keys))
    (folder / "keys.json").chmod(0o600)
    server = {"port": 0, "log_level": "warning", "keys": str(folder / "keys.json"), "usage_log": str(folder / "usage")}
    tree = {"server": server, "metrics": {"compat": "vllm"}, "supervision": {"backoff_seconds": 2}}
    config = Config.model_validate(tree)
    headers = {"authorization": f"Bearer {KEY}-admin"}
    with (
        running_server(config, target=run_fake_engine) as url,
        httpx.Client(base_url=url, timeout=30, headers=headers) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def exposed(tiny: httpx.Client, tenants: httpx.Client) -> dict[str, tuple[str, set[str]]]:
    """Return the type and the labels of each sample of a server of the embedded model and of one with tenants."""
    assert tiny.post("/v1/completions", json=GRAMMAR).status_code == 200
    assert tiny.post("/v1/completions", json={"max_tokens": -1}).status_code == 400
    with suppress(httpx.HTTPError):  # the connection is shed, perhaps before the client has sent everything
        tenants.get("/health", headers={"x-large": "x" * 2_000_000})
    found: dict[str, tuple[str, set[str]]] = {}
    for text in (tiny.get("/metrics").text, tenants.get("/metrics").text):
        for family in text_string_to_metric_families(text):
            suffixes = ("_bucket", "_sum", "_count") if family.type == "histogram" else ("",)
            names = [family.name + ("_total" if family.type == "counter" else suffix) for suffix in suffixes]
            for name in names:
                found.setdefault(name, (family.type, set()))
            for sample in family.samples:
                found.setdefault(sample.name, (family.type, set()))[1].update(sample.labels)
    return found


def plain(query: str) -> str:
    """Return a query of Grafana as Prometheus gets it."""
    return query.replace("$__rate_interval", "1m").replace("$instance", ".*")


def walk(node: Any, inside: str = "") -> Iterator[tuple[Any, str]]:
    """Yield the parts of a query, each with the function whose argument it is."""
    yield node, inside
    name = node.func.name if type(node).__name__ == "Call" else inside
    for field in ("expr", "lhs", "rhs", "vector_selector"):
        child = getattr(node, field, None)
        if child is not None:
            yield from walk(child, name)
    for child in getattr(node, "args", None) or ():
        yield from walk(child, name)


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[f"{title}-{i}" for i, (title, _) in enumerate(QUERIES)])
def test_every_query_reads_what_there_is(exposed: dict[str, tuple[str, set[str]]], title: str, query: str) -> None:
    tree = promql.parse(plain(query))
    names = []
    allowed = set(OF_THE_SCRAPE)
    for node, function in walk(tree):
        if type(node).__name__ == "VectorSelector":
            names.append(node.name)
            if node.name in OF_PROMETHEUS:
                continue
            assert node.name in exposed, f"{title}: /metrics has no {node.name}"
            kind, labels = exposed[node.name]
            used = {matcher.name for matcher in node.matchers.matchers}
            assert used <= labels | OF_THE_SCRAPE, f"{title}: {node.name} has no {used - labels}"
            allowed |= labels
            counts = kind in ("counter", "histogram")
            assert counts == (function in ("rate", "increase", "changes")), (
                f"{title}: {function}({node.name}), a {kind}"
            )
    assert names
    for node, _ in walk(tree):
        modifier = getattr(node, "modifier", None)
        if type(node).__name__ == "AggregateExpr" and modifier is not None:
            assert set(modifier.labels) <= allowed, f"{title}: no metric has {set(modifier.labels) - allowed}"
            if "_bucket" in plain(query):
                assert "le" in modifier.labels


def test_the_test_finds_what_is_wrong(exposed: dict[str, tuple[str, set[str]]]) -> None:
    for query in (
        "dovetail_no_such_metric",
        'dovetail_kv_usage{tenant="a"}',
        "rate(dovetail_kv_usage[1m])",
        "dovetail_steps_total",
        "sum by (reason) (dovetail_kv_usage)",
    ):
        with pytest.raises(AssertionError):
            test_every_query_reads_what_there_is(exposed, "", query)
    with pytest.raises(ValueError, match="unclosed"):
        promql.parse("sum(rate(dovetail_steps_total[1m])")


def test_legends_name_labels_of_their_query() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                groups = "".join(re.findall(r"by \(([^)]*)\)", target["expr"]))
                assert label in groups or "by (" not in target["expr"], target
                assert label in groups or label in OF_THE_SCRAPE, target


def test_the_dashboard_can_be_imported() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert DASHBOARD["uid"] == "dovetail"
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        box = panel["gridPos"]
        taken = {(x, y) for x in range(box["x"], box["x"] + box["w"]) for y in range(box["y"], box["y"] + box["h"])}
        assert not taken & cells, panel["title"]
        assert box["x"] + box["w"] <= 24
        cells |= taken
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert [target["refId"] for target in panel["targets"]] == list("ABCDEF"[: len(panel["targets"])])
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(PANELS)))
    assert used <= variables | {"__rate_interval"}


def test_alerts_are_complete(exposed: dict[str, tuple[str, set[str]]]) -> None:
    names = [rule["alert"] for rule in ALERTS]
    assert len(set(names)) == len(names)
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert {"summary", "description"} <= rule["annotations"].keys()
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
        labels = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        assert labels <= OF_THE_SCRAPE | {"reason"}
    (slow,) = [rule["expr"] for rule in ALERTS if rule["alert"] == "DovetailFirstTokenSlow"]
    from dovetail.server.metrics import TTFT_SECONDS

    assert float(slow.rpartition(">")[2]) in TTFT_SECONDS  # a quantile is exact at the bound of a bucket


def test_the_engine_is_up_and_errors_are_counted(tiny: httpx.Client, tenants: httpx.Client) -> None:
    def count(client: httpx.Client, name: str) -> float:
        (value,) = re.findall(rf"^{re.escape(name)} (\S+)$", client.get("/metrics").text, re.M)
        return float(value)

    assert count(tiny, "dovetail_engine_up") == 1
    refused = 'dovetail_error_responses_total{status="503"}'
    before = count(tenants, refused)
    body = {"prompt": "x", "max_tokens": 2, "cache_salt": "status:503"}
    answer = tenants.post("/v1/completions", json=body, headers={"authorization": f"Bearer {KEY}"})
    assert answer.status_code == 503
    assert count(tenants, refused) == before + 1


def test_names_of_another_server_are_served(tenants: httpx.Client) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    assert tenants.post("/v1/completions", json={"prompt": "x y", "max_tokens": 3}, headers=headers).status_code == 200
    text = tenants.get("/metrics").text
    labels = '{engine="0",model_name="tiny"}'
    assert f"vllm:time_to_first_token_seconds_count{labels}" in text
    assert f"vllm:request_params_max_tokens_sum{labels} 3.0" in text
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 1.0' in text


def test_an_engine_that_has_died_is_down_until_it_is_started_again(tenants: httpx.Client) -> None:
    def values(*names: str) -> list[float]:
        text = tenants.get("/metrics").text
        return [float(re.findall(rf"^dovetail_{name} (\S+)$", text, re.M)[0]) for name in names]

    body = {"prompt": "x", "max_tokens": 2, "cache_salt": "exit"}
    answer = tenants.post("/v1/completions", json=body, headers={"authorization": f"Bearer {KEY}"})
    assert answer.status_code == 503
    assert values("engine_up", "requests_running") == [0, 0]
    deadline = time.monotonic() + 30
    while values("engine_up") == [0] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert values("engine_up", "engine_restarts_total") == [1, 1]
