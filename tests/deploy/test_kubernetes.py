"""deploy/k8s and the chart that it is rendered from: schemas, and each promise that must agree with the server."""

import functools
import itertools
import json
import re
import subprocess
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from deploy import manifests
from engine.config import EngineConfig
from engine.settings import settings_of
from server import cli, serve
from server.app import ROUTES
from server.config import ServerConfig
from server.http.middleware import PUBLIC_PATHS

ROOT = Path(__file__).parents[2]
KUBERNETES = "1.30"  # the oldest that the chart takes
HELM = next((str(path) for path in [ROOT / ".cache/kubernetes/helm"] if path.exists()), None)
SCHEMAS = ROOT / "tests/deploy/schemas"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
VARIANTS = ("cpu", "gpu")
needs_helm = pytest.mark.skipif(HELM is None, reason="helm could not be fetched (make test says why)")


@functools.cache
def objects(name: str) -> tuple[dict, ...]:
    return tuple(yaml.safe_load_all((ROOT / f"deploy/k8s/{name}.yaml").read_text()))


def the(name: str, kind: str) -> dict:
    (found,) = (each for each in objects(name) if each["kind"] == kind)
    return found


def pod_of(name: str) -> dict:
    return the(name, "Deployment")["spec"]["template"]["spec"]


def container_of(name: str) -> dict:
    (container,) = pod_of(name)["containers"]
    return container


def gibibytes(text: str) -> float:
    number, unit = re.fullmatch(r"([0-9.]+)(Mi|Gi)", text).groups()
    return float(number) / (1024 if unit == "Mi" else 1)


def check(resource: dict) -> None:
    """Raises ValidationError unless the schema of its kind takes the resource, unknown fields refused."""
    if (schema := SCHEMAS / f"{resource['kind']}.json").exists():
        jsonschema.validate(resource, json.loads(schema.read_text()))
    else:
        kubernetes_validate.validate(resource, KUBERNETES, strict=True)


@pytest.fixture
def served(request, tmp_path, monkeypatch) -> tuple[ServerConfig, EngineConfig]:
    """The settings that `pageserve` reads in a container: its arguments, variables and files."""
    name, taken = request.param, []

    async def run(*configs):
        taken.append(configs)
        return 0

    monkeypatch.setattr(serve, "run", run)
    container = container_of(name)
    environment = dict(re.findall(r"^ +(PAGESERVE_\w+)=(\S+?)(?: \\)?$", DOCKERFILE, re.MULTILINE))
    cores = container["resources"]["requests"]["cpu"]
    environment |= {each["name"]: each.get("value", cores) for each in container["env"]}
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    (tmp_path / "replica.yaml").write_text(the(name, "ConfigMap")["data"]["replica.yaml"])
    arguments = [each.replace("/etc/pageserve", str(tmp_path)) for each in container["args"]]
    assert cli.main(arguments) == 0
    return taken[0]


@pytest.mark.parametrize("name", [name.removesuffix(".yaml") for name in manifests.ARGUMENTS])
def test_every_manifest_follows_the_schema_of_its_kind(name):
    for resource in objects(name):
        check(resource)
        resource["spec" if "spec" in resource else "metadata"]["unheardOf"] = 1
        with pytest.raises(jsonschema.ValidationError):
            check(resource)
        del resource["spec" if "spec" in resource else "metadata"]["unheardOf"]


@needs_helm
@pytest.mark.parametrize("name", manifests.ARGUMENTS)
def test_the_chart_renders_to_the_manifests(name):
    rendered = manifests.render(HELM, manifests.ARGUMENTS[name])
    assert rendered == (ROOT / "deploy/k8s" / name).read_text(), "run `make manifests`"


@needs_helm
def test_the_chart_leaves_the_number_of_replicas_to_the_autoscaler():
    for kind, count in (("none", 2), ("keda", None), ("hpa", None)):
        text = manifests.render(HELM, ("--set", f"autoscaling.kind={kind}", "--show-only", "templates/deployment.yaml"))
        assert yaml.safe_load(text)["spec"].get("replicas") == count


@needs_helm
@pytest.mark.parametrize("fault", ["gpu=1", "config.port=9000", "autoscaling.kind=vpa", "drain.stopSeconds=1"])
def test_the_chart_refuses_a_wrong_value(fault):
    with pytest.raises(subprocess.CalledProcessError):
        manifests.render(HELM, ("--set", fault))


def test_the_values_follow_their_schema():
    chart = ROOT / "deploy/helm/pageserve"
    schema = json.loads((chart / "values.schema.json").read_text())
    values = yaml.safe_load((chart / "values.yaml").read_text())
    jsonschema.validate(values, schema)
    gpu = yaml.safe_load((chart / "values-gpu.yaml").read_text())
    gpu["config"] = values["config"] | gpu["config"]
    jsonschema.validate(gpu, schema)
    assert values.keys() == schema["properties"].keys() - {"global"}
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    assert about["appVersion"] == version and values["image"]["tag"].startswith(version)


@pytest.mark.parametrize("served", VARIANTS, indirect=True)
def test_the_server_takes_the_arguments_and_is_closed_to_strangers(served):
    server, _ = served
    serve.check_exposed(server)
    assert server.api_key_file and not server.public_metrics and not server.allow_unauthenticated


@pytest.mark.parametrize(("name", "served"), [(name, name) for name in VARIANTS], indirect=["served"])
def test_ports_lead_to_the_server(name, served):
    server, engine = served
    (port,) = container_of(name)["ports"]
    assert port["containerPort"] == server.port and server.host == "0.0.0.0"
    (service,) = the(name, "Service")["spec"]["ports"]
    assert service["targetPort"] == port["name"]
    assert {p["port"] for rule in the(name, "NetworkPolicy")["spec"]["ingress"] for p in rule["ports"]} == {
        port["name"]
    }
    (endpoint,) = the("monitoring", "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == port["name"]
    assert endpoint["path"] in {route.path for route in ROUTES} - PUBLIC_PATHS and "authorization" in endpoint
    assert engine.device == ("cuda" if name == "gpu" else "auto") and engine.cpu_threads == (
        None if name == "gpu" else 4
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_probes_ask_the_right_routes_often_enough(name):
    container = container_of(name)
    probes = {kind: container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}
    paths = {kind: probe["httpGet"]["path"] for kind, probe in probes.items()}
    assert paths == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
    assert set(paths.values()) <= PUBLIC_PATHS & {route.path for route in ROUTES}, "the kubelet has no key"
    for probe in probes.values():
        assert probe["httpGet"]["port"] == container["ports"][0]["name"]
        assert probe["timeoutSeconds"] < probe["periodSeconds"]
    patience = {kind: probe["periodSeconds"] * probe["failureThreshold"] for kind, probe in probes.items()}
    assert patience["readiness"] <= 10 and 30 <= patience["liveness"] <= 120
    assert patience["startup"] < the(name, "Deployment")["spec"]["progressDeadlineSeconds"]


@pytest.mark.parametrize(("name", "served"), [(name, name) for name in VARIANTS], indirect=["served"])
def test_a_pod_gets_the_time_to_drain(name, served):
    server, _ = served
    pod, container = pod_of(name), container_of(name)
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "sleep"
    readiness = container["readinessProbe"]
    assert int(command[1]) >= readiness["periodSeconds"] * readiness["failureThreshold"]
    grace = pod["terminationGracePeriodSeconds"]
    assert grace >= int(command[1]) + server.drain_timeout + serve.STOP_SECONDS + 2
    for scaler in (the("hpa", "HorizontalPodAutoscaler")["spec"], the("keda", "ScaledObject")["spec"]):
        behavior = scaler.get("behavior") or scaler["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert behavior["scaleDown"]["stabilizationWindowSeconds"] > grace, "or a drain starts the next scale-down"
        assert behavior["scaleDown"]["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": grace}]
    rollout = the(name, "Deployment")["spec"]["strategy"]["rollingUpdate"]
    assert rollout == ({"maxSurge": 0, "maxUnavailable": 1} if name == "gpu" else {"maxSurge": 1, "maxUnavailable": 0})
    assert the(name, "Deployment")["spec"]["replicas"] > rollout["maxUnavailable"]


@pytest.mark.parametrize("name", VARIANTS)
def test_pods_meet_the_restricted_security_standard(name):
    pod, container = pod_of(name), container_of(name)
    user = int(re.search(r"^USER (\d+):\1$", DOCKERFILE, re.MULTILINE)[1])
    security = pod["securityContext"]
    assert security["runAsNonRoot"] and security["runAsUser"] == security["runAsGroup"] == security["fsGroup"] == user
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False
    allowed = {"configMap", "secret", "emptyDir", "persistentVolumeClaim"}
    assert {kind for volume in pod["volumes"] for kind in volume.keys() - {"name"}} <= allowed
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()


@pytest.mark.parametrize("name", VARIANTS)
def test_what_the_image_writes_lies_on_volumes(name):
    pod, container = pod_of(name), container_of(name)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert {mount["name"] for mount in mounts.values()} == volumes.keys()
    writable = {path for path, mount in mounts.items() if not mount.get("readOnly")}
    assert writable == {"/cache", "/tmp", "/dev/shm"}
    caches = re.findall(r"(?:HOME|CACHE_DIR)=(\S+)", DOCKERFILE)
    assert len(caches) == 3 and all(path.split("/")[1] == "cache" for path in caches)
    for path in writable:
        assert "sizeLimit" in volumes[mounts[path]["name"]]["emptyDir"], "an unbounded volume fills the node"
    shm = volumes[mounts["/dev/shm"]["name"]]["emptyDir"]
    resources = container["resources"]
    assert shm["medium"] == "Memory" and gibibytes(shm["sizeLimit"]) < gibibytes(resources["limits"]["memory"]) / 4
    assert resources["requests"]["memory"] == resources["limits"]["memory"] and "cpu" not in resources["limits"]
    assert resources["limits"].get("nvidia.com/gpu") == (1 if name == "gpu" else None)
    files = [argument for argument in container["args"] if argument.startswith("/")]
    assert len(files) == 2 and all(str(Path(file).parent) in mounts.keys() - writable for file in files)
    (item,) = volumes["keys"]["secret"]["items"]
    assert f"/run/secrets/pageserve/{item['path']}" in files
    assert volumes["keys"]["secret"]["defaultMode"] == 0o440, "the server warns of keys that everybody may read"


@pytest.mark.parametrize("name", VARIANTS)
def test_no_variable_of_the_cluster_becomes_a_setting(name):
    service = the(name, "Service")["metadata"]["name"]
    assert service.upper() == "PAGESERVE" and pod_of(name)["enableServiceLinks"] is False
    known = {setting.env for cls in (EngineConfig, ServerConfig) for setting in settings_of(cls).values()}
    used = {each["name"] for each in container_of(name)["env"]}
    assert {each for each in used if each.startswith("PAGESERVE_")} <= known
    assert used - known <= {"HF_HUB_OFFLINE", "HF_TOKEN"}


@pytest.mark.parametrize("name", VARIANTS)
def test_selectors_find_the_pods(name):
    deployment = the(name, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels
    assert the(name, "Service")["spec"]["selector"].items() <= labels
    assert the(name, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"].items() <= labels
    assert the(name, "PodDisruptionBudget")["spec"]["maxUnavailable"] < deployment["spec"]["replicas"]
    assert the(name, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"].items() <= labels
    assert the("monitoring", "PodMonitor")["spec"]["selector"]["matchLabels"].items() <= labels
    (spread,) = pod_of(name)["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"].items() <= labels
    assert pod_of(name)["serviceAccountName"] == the(name, "ServiceAccount")["metadata"]["name"]
    for scaler in (the("hpa", "HorizontalPodAutoscaler"), the("keda", "ScaledObject")):
        assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    namespaces = {
        each["metadata"]["namespace"] for each in itertools.chain(*map(objects, ("cpu", "gpu", "keda", "hpa")))
    }
    assert namespaces == {"pageserve"}


@pytest.mark.parametrize(("name", "served"), [(name, name) for name in VARIANTS], indirect=["served"])
def test_only_a_replica_that_fetches_its_model_reaches_out(name, served):
    _, engine = served
    egress = the(name, "NetworkPolicy")["spec"]["egress"]
    offline = {"name": "HF_HUB_OFFLINE", "value": "1"} in container_of(name)["env"]
    assert the(name, "NetworkPolicy")["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert bool(egress) == bool(engine.model) == (not offline)
    for rule in egress:
        assert {port["port"] for port in rule["ports"]} in ({53}, {443})


def test_rules_and_dashboard_of_the_operator_are_those_of_deploy():
    alerts = yaml.safe_load((ROOT / "deploy/alerts.yml").read_text())
    assert the("monitoring", "PrometheusRule")["spec"] == alerts
    dashboard = json.loads((ROOT / "deploy/dashboard.json").read_text())
    assert json.loads(the("monitoring", "ConfigMap")["data"]["pageserve.json"]) == dashboard
    job = re.search(r'up\{job="(.+?)"\}', json.dumps(alerts).replace("\\", ""))[1]
    label = the("monitoring", "PodMonitor")["spec"]["jobLabel"]
    assert the("cpu", "Deployment")["spec"]["template"]["metadata"]["labels"][label] == job
