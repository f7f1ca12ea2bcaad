"""Compiles the CPU kernels that a model needs before it is served, and all others while it is served."""

import logging
import time

import torch

from kernels.kv_format import KVFormat
from kernels.warmup import all_kernels, compile_kernels, compile_rest, help_with, needed_kernels

logger = logging.getLogger(__name__)


class KernelCompiler:
    """Compiles what one model needs. A second process begins at once, while this one loads the weights."""

    def __init__(
        self, dtype: torch.dtype, kv_format: KVFormat | None, quantized: bool, adapters: bool, compressed: bool
    ) -> None:
        kernels = all_kernels()
        format_name = None if kv_format is None else kv_format.name
        names = needed_kernels(str(dtype).removeprefix("torch."), format_name, quantized, adapters, compressed)
        self._kernels = [kernels[name] for name in names]
        self._num_missing = sum(not kernel.is_on_disk() for kernel in self._kernels)
        self._helper = help_with(names) if self._num_missing > 1 and torch.get_num_threads() > 1 else None

    def finish(self) -> None:
        """Compile what is left; returns when all of them can be called."""
        started = time.perf_counter()
        compile_kernels(self._kernels)
        if self._helper is not None:
            self._helper.stop()
        logger.info(
            "CPU kernels: %d compiled, %d loaded from disk in %.1f s",
            self._num_missing,
            len(self._kernels) - self._num_missing,
            time.perf_counter() - started,
        )


def compile_in_background() -> None:
    """Compile the kernels that are not on disk in another process, which ends with this one."""
    if number := compile_rest():
        logger.info("CPU kernels: %d for other dtypes and formats are compiled in the background", number)
