"""The clients that people use, against a live server with the bundled model: a table of what passed.

    python -m tests.clients --environment DIR --node DIR --agents DIR [--only NAME] [--examples N]

`make clients` makes the environments: other versions of openai, langchain-openai, litellm and schemathesis in one, the
npm client in the next, coding agents in the last; --only agent runs all of these. openai-python's newest is the one of
this Python. Exit status 1 where anything failed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.processes import ServerProcess
from tests.clients.agents import AGENTS

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
KEY, LIMITED_KEY, MODEL = "sk-of-the-clients", "sk-with-limits", "pageserve"
START_SECONDS = 180.0
SUITE_SECONDS = 900.0
PYTEST = ("-m", "pytest", "-q", "-o", "filterwarnings=default", "-p", "no:cacheprovider")
# positive_data_acceptance is left out: whether a prompt fits or a name is known is not for a schema to say.
CHECKS = (
    "not_a_server_error status_code_conformance content_type_conformance response_headers_conformance "
    "response_schema_conformance negative_data_rejection unsupported_method allow_header_conformance ignored_auth"
)


@dataclass(frozen=True)
class Suite:
    """`command` writes a JUnit file where {report} stands; `of` is asked for its version."""

    name: str
    command: tuple[str, ...]
    version: tuple[str, ...]


def suites(environment: Path, node: Path, agents: Path, url: str, examples: int) -> list[Suite]:
    python = str(environment / "bin" / "python")
    schemathesis = (
        str(environment / "bin" / "schemathesis"),
        *("run", f"{url}/openapi.json", "--header", f"Authorization: Bearer {KEY}"),
        *("--phases", "examples,coverage,fuzzing", "--max-examples", str(examples), "--seed", "1"),
        *("--checks", ",".join(CHECKS.split()), "--continue-on-failure", "--request-timeout", "60"),
        *("--report", "junit", "--report-junit-path", "{report}"),
    )
    js = ("node", "--test", "--test-reporter=junit", "--test-reporter-destination={report}")
    js += ("--test-reporter=spec", "--test-reporter-destination=stdout", str(HERE / "check_node.mjs"))
    node_version = ("node", "-p", f"require('{node.resolve()}/node_modules/openai/package.json').version")

    def pytest(executable: str, name: str, package: str) -> Suite:
        command = (executable, *PYTEST, str(HERE / f"check_{name}.py"), "--junitxml={report}")
        code = f"from importlib.metadata import version; print(version('{package}'))"
        return Suite(package, command, (executable, "-c", code))

    return [
        pytest(sys.executable, "openai", "openai"),
        pytest(python, "openai", "openai"),
        pytest(python, "langchain", "langchain-openai"),
        pytest(python, "litellm", "litellm"),
        Suite("openai (npm)", js, node_version),
        Suite("schemathesis", schemathesis, (python, "-c", "import schemathesis; print(schemathesis.__version__)")),
        *[agent_suite(name, agents) for name in AGENTS],
    ]


def agent_suite(name: str, folder: Path) -> Suite:
    """A scripted task, against a server of its own: a prompt is longer than the context of the one that runs."""
    check = (sys.executable, *PYTEST, "--capture=no", str(HERE / "check_agents.py"), "-k", name, "--junitxml={report}")
    return Suite(f"agent {name}", check, (str(folder.resolve() / AGENTS[name].executable), "--version"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__.split("\n")[0])
    parser.add_argument("--environment", type=Path, required=True, metavar="DIR", help="a virtual environment")
    parser.add_argument("--node", type=Path, required=True, metavar="DIR", help="where npm's openai is")
    parser.add_argument("--agents", type=Path, required=True, metavar="DIR", help="where the coding agents are")
    parser.add_argument("--only", default="", metavar="NAME", help="the suites whose name holds this")
    parser.add_argument("--examples", type=int, default=50, help="that schemathesis makes for each operation")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pageserve-clients-") as name:
        folder = Path(name)
        server = serve(folder)
        try:
            rows = run_all(options, server.base_url, folder)
        finally:
            server.stop()
    return report(rows)


def serve(folder: Path) -> ServerProcess:
    keys = folder / "keys"
    keys.write_text(f"clients {KEY}\nlimited {LIMITED_KEY} requests-per-minute=60\n")
    keys.chmod(0o600)
    command = f"{sys.executable} -m server.cli serve --port {{port}} --api-key-file {keys} --debug-kv"
    server = ServerProcess(command, folder / "server.log", {"OMP_NUM_THREADS": "1"})
    ready = server.base_url.removesuffix("/v1") + "/ready"
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        server.check_alive()
        try:
            if httpx.get(ready).status_code == 200:
                return server
        except httpx.TransportError:  # it does not listen yet
            pass
        time.sleep(0.2)
    server.stop()
    raise RuntimeError("the server did not become ready")


def run_all(options: argparse.Namespace, url: str, folder: Path) -> list[tuple[str, dict[str, int], float]]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CLIENTS_URL": url,
        "CLIENTS_KEY": KEY,
        "CLIENTS_LIMITED_KEY": LIMITED_KEY,
        "CLIENTS_MODEL": MODEL,
        "CLIENTS_NODE_FOLDER": str(options.node.resolve()),
        "CLIENTS_AGENTS_FOLDER": str(options.agents.resolve()),
        "SCHEMATHESIS_HOOKS": "tests.clients.schemathesis_hooks",
    }
    rows = []
    root = url.removesuffix("/v1")
    found_suites = suites(options.environment, options.node, options.agents, root, options.examples)
    for i, suite in enumerate(found_suites):
        if options.only not in suite.name:
            continue
        if not shutil.which(suite.version[0]):
            rows.append((f"{suite.name} (not installed)", {"passed": 0, "failed": 0, "skipped": 1}, 0.0))
            continue
        asked = {**environment, "HOME": str(folder)}  # agents write there whatever they are asked
        version = subprocess.run(suite.version, capture_output=True, text=True, check=True, env=asked).stdout.strip()
        print(f"== {suite.name} {version}", flush=True)
        found, start = folder / f"{i}.xml", time.monotonic()
        command = [part.replace("{report}", str(found)) for part in suite.command]
        status = subprocess.run(command, cwd=ROOT, env=environment, timeout=SUITE_SECONDS).returncode
        counts = count(found)
        if status and not counts["failed"]:
            counts["failed"] = 1  # it ended without saying of what
        rows.append((f"{suite.name} {version}", counts, time.monotonic() - start))
    return rows


def count(found: Path) -> dict[str, int]:
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for case in ElementTree.parse(found).iter("testcase") if found.exists() else ():
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts[kind] += 1
    return counts


def report(rows: list[tuple[str, dict[str, int], float]]) -> int:
    print(f"\n{'client':40} {'passed':>7} {'failed':>7} {'skipped':>8} {'seconds':>8}")
    for name, counts, seconds in rows:
        print(f"{name:40} {counts['passed']:7} {counts['failed']:7} {counts['skipped']:8} {seconds:8.1f}")
    failed = sum(counts["failed"] for _, counts, _ in rows)
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
