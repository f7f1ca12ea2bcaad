"""Renders the chart of deploy/helm into the plain manifests of deploy/k8s: `manifests.py HELM` (`make manifests`)."""

import subprocess
import sys
from pathlib import Path

DEPLOY = Path(__file__).parent
CHART = DEPLOY / "helm/pageserve"
GPU = ("--values", str(CHART / "values-gpu.yaml"))
ARGUMENTS = {
    "cpu.yaml": (),
    "gpu.yaml": GPU,
    "keda.yaml": ("--set", "autoscaling.kind=keda", "--show-only", "templates/keda.yaml"),
    "hpa.yaml": ("--set", "autoscaling.kind=hpa", "--show-only", "templates/hpa.yaml"),
    "monitoring.yaml": ("--set", "monitoring.enabled=true", "--show-only", "templates/monitoring.yaml"),
}
HEADER = "# Rendered from deploy/helm/pageserve by `make manifests`: change the chart, not this file.\n"


def render(helm: str, arguments: tuple[str, ...]) -> str:
    """The manifests of a release `pageserve` in the namespace `pageserve`."""
    command = [helm, "template", "pageserve", str(CHART), "--namespace", "pageserve", *arguments]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return HEADER + "".join(line.rstrip() + "\n" for line in text.splitlines() if not line.startswith("# Source:"))


if __name__ == "__main__":
    for name, arguments in ARGUMENTS.items():
        (DEPLOY / "k8s" / name).write_text(render(sys.argv[1], arguments), encoding="utf-8")
