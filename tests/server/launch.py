"""`pageserve serve` as a process of its own, over a Worker whose device is fake.

python -m tests.server.launch FOLDER PORT DRAIN_TIMEOUT ENGINE [options of tests.fake_worker]

ENGINE is a JSON object with fields of EngineConfig.
"""

import json
import sys

import uvloop

from engine.config import EngineConfig
from engine.driver import Driver
from engine.errors import PageserveError
from server.config import ServerConfig
from server.serve import run


def main() -> int:
    folder, port, drain_timeout, engine, *worker_options = sys.argv[1:]
    config = EngineConfig(model=folder, load_format="dummy", **json.loads(engine))
    driver = Driver(config, worker_command=(sys.executable, "-m", "tests.fake_worker", *worker_options))
    settings = ServerConfig(port=int(port), served_model_name=("fake",), drain_timeout=float(drain_timeout))
    try:
        return uvloop.run(run(settings, config, driver))
    except PageserveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
