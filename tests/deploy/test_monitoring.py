"""A real Prometheus scrapes a real `pageserve serve` under traffic, and answers every query of the dashboard, of the
autoscalers and of the alerts in deploy/."""

import contextlib
import json
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest
import yaml

from tests.checkpoints import save_fake_checkpoint
from tests.deploy.replica import LLAMA, START_SECONDS, Replica, free_ports

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
KEY = "sk-of-the-scraper"
LABELS = {"namespace": "pageserve", "pod": "pageserve-7c9d5f6b8-x2x4z", "job": "pageserve"}
NUM_SCRAPES = 6
RANGE = "1h"  # of rates: every scrape, however slow the machine is
VARIABLES = {"$__rate_interval": RANGE, "$__range": RANGE, "$namespace": ".*", "$pod": ".*"}

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="prometheus is not installed (Debian: apt install prometheus)",
)


@pytest.fixture(scope="module")
def pageserve(tmp_path_factory):
    """The address of a server with a file of keys, as the manifests run it."""
    folder = tmp_path_factory.mktemp("pageserve")
    model = save_fake_checkpoint(folder / "model")
    (model / "config.json").write_text(json.dumps(LLAMA))
    (folder / "api-keys").write_text(f"prometheus {KEY}\n")
    (folder / "api-keys").chmod(0o440)
    (port,) = free_ports(1)
    replica = Replica(model, port, folder / "log", "--api-key-file", str(folder / "api-keys"))
    try:
        replica.wait_ready()
        yield f"127.0.0.1:{port}"
    finally:
        status = replica.stop()
    assert status == 0


@pytest.fixture(scope="module")
def query(pageserve, tmp_path_factory):
    """A function from a PromQL expression to its result, after some scrapes of a server under load."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "250ms", "scrape_timeout": "250ms", "evaluation_interval": "1s"}
    config["rule_files"] = [str(DEPLOY / "alerts.yml")]
    (job,) = config["scrape_configs"]
    job["authorization"] = {"credentials": KEY}
    job["static_configs"] = [{"targets": [pageserve], "labels": LABELS}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (port,) = free_ports(1)
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)

    http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)

    def result(expression: str) -> list[dict]:
        response = http.get("/api/v1/query", params={"query": expression}).json()
        assert response["status"] == "success", f"{expression}: {response}"
        return response["data"]["result"]

    try:
        send_requests(pageserve, lambda: process.poll() is None and num_scrapes(result) < NUM_SCRAPES)
        assert process.poll() is None, log.read_text()
        yield result
    finally:
        http.close()
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def num_scrapes(result) -> int:
    with contextlib.suppress(httpx.TransportError, json.JSONDecodeError):  # Prometheus starts
        return sum(int(each["value"][1]) for each in result("sum_over_time(up[1h])"))
    return 0


def send_requests(address: str, wanted) -> None:
    """Requests with a common prefix, one after the other, while `wanted` says so."""
    body = {"model": "m", "prompt": "tell me " * 20, "max_tokens": 8, "ignore_eos": True}
    with httpx.Client(base_url=f"http://{address}", headers={"authorization": f"Bearer {KEY}"}, timeout=60) as client:
        deadline = time.monotonic() + START_SECONDS
        while wanted():
            assert client.post("/v1/completions", json=body).status_code == 200
            assert time.monotonic() < deadline


def with_values(expression: str) -> str:
    """The expression as Grafana sends it."""
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    assert "$" not in expression, expression
    return expression


@needs_prometheus
def test_every_query_of_the_dashboard_returns_data(query):
    for panel in PANELS:
        for target in panel["targets"]:
            found = query(with_values(target["expr"]))
            assert found, f"{panel['title']}: {target['expr']}"
            assert all(each["value"][1] != "NaN" for each in found), f"{panel['title']}: {target['expr']}"
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert all(label in each["metric"] for each in found), f"{panel['title']}: no label {label}"


@needs_prometheus
def test_variables_of_the_dashboard_have_values(query):
    (_, *variables) = DASHBOARD["templating"]["list"]
    for variable in variables:
        metric, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"]).groups()
        assert {each["metric"][label] for each in query(with_values(metric))} == {LABELS[label]}


@needs_prometheus
def test_the_autoscalers_read_what_the_server_exports(query):
    scaled = yaml.safe_load((DEPLOY / "k8s/keda.yaml").read_text())
    for trigger in scaled["spec"]["triggers"]:
        assert len(query(trigger["metadata"]["query"])) == 1
    (rule,) = yaml.safe_load((DEPLOY / "helm/pageserve/hpa-adapter-values.yaml").read_text())["rules"]["custom"]
    series = {each["metric"]["__name__"] for each in query(rule["seriesQuery"])}
    template = rule["name"]["as"].replace("${1}", r"\1").replace("${2}", r"\2")
    scaler = yaml.safe_load((DEPLOY / "k8s/hpa.yaml").read_text())
    wanted = {metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"]}
    assert {re.sub(rule["name"]["matches"], template, name) for name in series} == wanted and len(wanted) == 2
    for name in series:
        expression = rule["metricsQuery"].replace("<<.Series>>", name).replace("<<.GroupBy>>", "pod")
        (found,) = query(expression.replace("<<.LabelMatchers>>", 'namespace="pageserve"'))
        assert found["metric"] == {"pod": LABELS["pod"]}


@needs_prometheus
def test_alerts_load_and_none_fires_on_a_server_at_work(query):
    subprocess.run(["promtool", "check", "rules", str(DEPLOY / "alerts.yml")], check=True, capture_output=True)
    for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            assert query(rule["expr"]) == [], rule["alert"]
            watched = re.sub(r',? *code!?=~?"[^"]+"', "", re.sub(r"(==|>|<) *[0-9.]+", "", rule["expr"]))
            assert query(re.sub(r"\[\w+\]", f"[{RANGE}]", watched)), f"{rule['alert']} compares nothing"


def test_every_query_asks_for_series_of_pageserve_alone():
    """`up` is a series of every target of a Prometheus: with "All" chosen, node exporters counted as replicas."""
    for panel in PANELS:
        for target in panel["targets"]:
            for name, labels in re.findall(r"([a-z0-9_:]+){(.*?)}", target["expr"]):
                ours = name.startswith(("vllm:", "pageserve:")) or 'job="pageserve"' in labels
                assert ours, f"{panel['title']}: {target['expr']}"


def test_panels_are_whole_and_do_not_overlap():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    for panel in PANELS:
        assert panel["type"] in ("timeseries", "stat") and panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"] in ("short", "s", "reqps", "percentunit")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references)) > 0
    assert DASHBOARD["templating"]["list"][0]["type"] == "datasource" and DASHBOARD["uid"]
