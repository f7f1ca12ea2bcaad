"""For every test: nothing of the developer's own settings, and one thread per process, set before torch is imported."""

import os

for name in [name for name in os.environ if name.startswith("PAGESERVE_")]:
    del os.environ[name]
os.environ["OMP_NUM_THREADS"] = "1"
