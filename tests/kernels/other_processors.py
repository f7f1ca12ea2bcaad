"""The tests of the CPU kernels as on processors with fewer instructions than this one: make processors.

numba compiles for what NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say, and kernels/cpu/features.py reads the same. The
results are those of the other processor; the time is not.
"""

import os
import subprocess
import sys

from llvmlite import binding

# By name: the beginnings of the features that the processor lacks.
PROCESSORS = {
    "cooperlake": ("avx512fp16", "avx10", "avxvnni", "amx"),  # as Zen 4 and 5 have it: bf16 pairs without AMX
    "haswell": ("avx512", "avx10", "amx", "avxvnni", "gfni", "vaes", "vpclmulqdq"),
    # As on ARM, kernels have LLVM's portable operations alone, and linear layers are torch's.
    "nehalem": ("avx", "fma", "f16c", "bmi", "amx", "gfni", "vaes", "vpclmulqdq", "xop", "tbm", "xsave"),
    "icelake-server": ("avx512bf16", "avx512fp16", "avx10", "amx"),
}


def environment(name: str) -> dict[str, str]:
    """The environment of a process whose kernels are compiled for the processor `name`."""
    lacks = PROCESSORS[name]
    features = {key: has and not key.startswith(lacks) for key, has in binding.get_host_cpu_features().items()}
    chosen = ",".join(f"{'+' if has else '-'}{key}" for key, has in sorted(features.items()))
    return os.environ | {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": chosen}


def run_tests(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest with `arguments` for the processor `name`."""
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    return subprocess.run(command, env=environment(name), capture_output=True, text=True)


if __name__ == "__main__":
    worst = 0
    for processor in PROCESSORS:
        done = run_tests(processor, "-n", str(os.cpu_count()), "tests/kernels", "tests/engine/models", *sys.argv[1:])
        print(f"{processor}: {done.stdout.splitlines()[-1] if done.returncode == 0 else done.stdout[-5000:]}")
        worst = max(worst, done.returncode)
    sys.exit(worst)
