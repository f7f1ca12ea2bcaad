"""For every test: nothing of the developer's own settings, and one thread per process, set before torch is imported."""

import os
import signal

for name in [name for name in os.environ if name.startswith("PAGESERVE_")]:
    del os.environ[name]
os.environ["OMP_NUM_THREADS"] = "1"
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored, and its children

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.quick_interpreter import search_once

    search_once()

# The files that take longest, each on one process (`--dist loadfile`): started last, one would run on while the other
# processes have nothing to do.
LONGEST_FIRST = (
    "tests/kernels/test_triton.py",
    "tests/sim/test_sim.py",
    "tests/benchmarks/test_gpu_check.py",
    "tests/engine/worker/test_on_a_fake_cuda.py",
)


def pytest_collection_modifyitems(items):
    """Put the longest files first and leave the order of the others."""
    rank = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(item.nodeid.split("::")[0], len(rank)))
