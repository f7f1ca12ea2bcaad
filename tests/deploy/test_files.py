"""The files of deploy/ and the Dockerfile: what can be held without a registry or a container engine."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from engine.config import EngineConfig
from engine.errors import ConfigError, UnavailableError
from engine.settings import load_settings, settings_of
from engine.telemetry.stats import EngineStats
from server.config import ServerConfig
from server.routes.metrics import make_registry
from server.serve import check_exposed

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
NGINX = (ROOT / "deploy/nginx.conf").read_text()


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def test_containers_are_hardened():
    for name, service in COMPOSE["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "healthcheck" in service, name


@pytest.mark.parametrize("replica", ["replica-1", "replica-2"])
def test_a_replica_gets_the_time_it_needs_to_drain(replica):
    service = COMPOSE["services"][replica]
    (_, server) = load_settings((EngineConfig, ServerConfig), {"config": str(ROOT / "configs/replica.yaml")}, {})
    assert seconds(service["stop_grace_period"]) > server.drain_timeout + 10
    assert "../configs/replica.yaml:/etc/pageserve/replica.yaml:ro" in service["volumes"]
    assert service["command"] == ["serve", "--config", "/etc/pageserve/replica.yaml"]


def test_every_variable_is_a_setting():
    known = {setting.env for cls in (EngineConfig, ServerConfig) for setting in settings_of(cls).values()}
    text = DOCKERFILE + (ROOT / "deploy/compose.yaml").read_text()
    assert set(re.findall(r"\bPAGESERVE_[A-Z_]+", text)) <= known


def test_the_image_runs_as_nobody_in_particular_and_dies_properly():
    assert re.search(r"^USER 10001:10001$", DOCKERFILE, re.MULTILINE)
    assert 'ENTRYPOINT ["tini", "--", "pageserve"]' in DOCKERFILE
    assert "HEALTHCHECK" in DOCKERFILE and "/health" in DOCKERFILE
    order = [DOCKERFILE.index(step) for step in ("COPY pyproject.toml", "torch.txt", "rest.txt", "COPY engine")]
    assert order == sorted(order), "dependencies have their layers before the source"


def test_requirements_are_those_of_pyproject():
    def printed(*arguments: str) -> list[str]:
        command = [sys.executable, "deploy/requirements.py", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()

    declared = (ROOT / "pyproject.toml").read_text().split("dependencies = [")[1].split("]\n")[0]
    assert printed() == re.findall(r'"(.+)"', declared)
    assert printed("torch") == [line for line in printed() if line.startswith("torch")]
    assert len(printed("torch")) == 1


def test_a_replica_starts_without_a_key_only_because_nobody_else_can_reach_it():
    replica = COMPOSE["services"]["replica-1"]
    environment = {name: re.sub(r"\$\{\w+:-(.*)\}", r"\1", value) for name, value in replica["environment"].items()}
    environment.pop("HF_TOKEN")
    (_, server) = load_settings(
        (EngineConfig, ServerConfig), {"config": str(ROOT / "configs/replica.yaml")}, environment
    )
    assert server.host == "0.0.0.0" and not server.api_key and server.public_metrics
    check_exposed(server)
    assert "ports" not in replica
    for service in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    assert "/metrics" not in re.sub(r"#.*", "", NGINX)


def test_the_image_alone_wants_a_key():
    (_, server) = load_settings(
        (EngineConfig, ServerConfig), {}, dict(re.findall(r"^ +(PAGESERVE_\w+)=(\S+)", DOCKERFILE, re.MULTILINE))
    )
    with pytest.raises(ConfigError, match="PAGESERVE_API_KEY"):
        check_exposed(server)


def test_nginx_limits_match_the_server():
    assert re.search(r"client_max_body_size 32m;", NGINX) and ServerConfig().max_body_bytes == 32 << 20
    from server.serve import KEEP_ALIVE_SECONDS

    assert int(re.search(r"keepalive_timeout (\d+)s;", NGINX)[1]) < KEEP_ALIVE_SECONDS
    assert set(re.findall(r"replica-\d", NGINX)) == {name for name in COMPOSE["services"] if name.startswith("replica")}


def test_prometheus_scrapes_every_replica():
    prometheus = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())
    (job,) = prometheus["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [
        f"{name}:8000" for name in COMPOSE["services"] if name.startswith("replica")
    ]


async def test_alerts_watch_metrics_that_exist():
    class Driver:
        config = EngineConfig(model="m")
        stats = EngineStats()
        sleep_level = 0

        def stats_snapshot(self):
            pass

        @property
        def replicas(self):
            return (self,)

        @property
        def model(self):
            raise UnavailableError("no model is loaded")

    registry = make_registry({"m": Driver()}, Counter({("/v1/completions", 200): 1}), Counter())
    names = {sample.name for family in registry.collect() for sample in family.samples}
    names |= {f"{family.name}_total" for family in registry.collect() if family.type == "counter"}
    rules = yaml.safe_load((ROOT / "deploy/alerts.yml").read_text())["groups"][0]["rules"]
    watched = {name for rule in rules for name in re.findall(r"\b(?:vllm|pageserve):\w+", rule["expr"])}
    assert len(watched) > 5
    assert watched <= names
