"""`python -m kernels.warmup`: compile every CPU kernel now, so that no server start and no request waits."""

import time

from kernels.dispatch import cpu_kernels


def warmup() -> int:
    """Compile the CPU kernels, or load them from the cache on disk; returns their number (0 without numba)."""
    if (cpu := cpu_kernels()) is None:
        return 0
    kernels = [
        value for module in cpu.MODULES for value in vars(module).values() if isinstance(value, cpu.ParallelKernel)
    ]
    for kernel in kernels:
        kernel.compile()
    return len(kernels)


if __name__ == "__main__":
    print("compiling the CPU kernels, once: a minute or two ...", flush=True)
    started = time.perf_counter()
    print(f"{warmup()} CPU kernels ready in {time.perf_counter() - started:.1f} s")
