"""`make ray`: pageserve on a local Ray cluster of two nodes. Prints a line per part and the figures as JSON.

The exit status is 1 if a part fails. Runs in an environment that has ray (see the Makefile), never under pytest.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3",  # default 30: the end of the tests would wait for it
    "RAY_SERVE_HAPROXY_NBTHREAD": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
}
OBJECT_STORE_BYTES = 100 << 20
ARGUMENTS = {"device": "cpu", "cpu_threads": 1, "num_blocks": 1024, "max_num_seqs": 8, "drain_timeout": 60.0}


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m tests.ray")
    options.add_argument("--model", required=True)
    options.add_argument("--only", default="", help="names of parts, separated by spaces")
    options.add_argument("--no-haproxy", action="store_true", help="Ray Serve's own HTTP proxy in front of the ingress")
    given = options.parse_args()
    os.environ.update(
        ENVIRONMENT | {"RAY_SERVE_ENABLE_HA_PROXY": str(int(not given.no_haproxy))}
    )  # before ray is imported, which reads it
    from tests.ray.parts import PARTS

    chosen = {name: part for name, part in PARTS.items() if not given.only or name in given.only.split()}
    figures: dict[str, object] = {}
    failed = []
    with stand(given.model) as it:
        for name, part in chosen.items():
            begun = time.monotonic()
            try:
                figures[name] = asyncio.run(part(it))
                verdict = "ok"
            except AssertionError as error:
                failed.append(name)
                verdict = f"FAILED: {error}"
            print(f"{name:12} {time.monotonic() - begun:5.1f} s  {verdict}  {figures.get(name, '')}", flush=True)
    print(json.dumps(figures, indent=1))
    return 1 if failed else 0


@contextlib.contextmanager
def stand(model: str):
    """Two raylets with one CPU for a replica each; everything ends with the context."""
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    from tests.ray.stand import Stand

    node = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **node})
    try:
        cluster.add_node(num_cpus=2, object_store_memory=OBJECT_STORE_BYTES)
        ray.init(address=cluster.address, log_to_driver=bool(os.environ.get("RAY_LOGS")), logging_level="error")
        it = Stand(model, ARGUMENTS)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": it.port})
        yield it
    finally:
        with contextlib.suppress(Exception):
            serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
