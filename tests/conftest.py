"""For every test: nothing of the developer's own settings, and one thread per process, set before torch is imported."""

import os
import signal

for name in [name for name in os.environ if name.startswith("PAGESERVE_")]:
    del os.environ[name]
os.environ["OMP_NUM_THREADS"] = "1"
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored, and its children
