"""Compiles CPU kernels before they are called: those that a model needs before it is served, the rest later.

    python -m kernels.warmup                 all, on two cores: for `make` and for images
    python -m kernels.warmup --names A,B     these, in that order: a second process beside one that starts a server
    python -m kernels.warmup --rest FOLDER   all, at the lowest priority: beside a server that runs; see `wait_for_turn`

A choice of kernels is only about time: a kernel that is not compiled yet is compiled when it is called.
"""

import argparse
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from kernels import code_cache
from kernels.kv_format import KV_FORMATS

if TYPE_CHECKING:  # a process that waits for its turn has imported neither torch nor numba
    from kernels.cpu import ParallelKernel

logger = logging.getLogger(__name__)

_DTYPES = {"bfloat16": "bf16", "float32": "f32"}


def all_kernels() -> dict[str, "ParallelKernel"]:
    """The kernels that this processor can run, by name; none without numba."""
    from kernels.dispatch import cpu_kernels

    cpu = cpu_kernels()
    modules = [] if cpu is None else cpu.MODULES
    values = [value for module in modules for value in vars(module).values()]
    return {value.fn.__name__: value for value in values if isinstance(value, cpu.ParallelKernel)}


def needed_kernels(
    dtype: str,
    kv_format: str | None,
    quantized: bool,
    adapters: bool,
    compressed: bool,
    unused: Collection[str] = (),
) -> list[str]:
    """The names of the kernels that a model may call.

    dtype: "bfloat16" or "float32"; kv_format: of a quantised KV cache; quantized: the weights are; adapters: LoRA
    adapters are served; compressed: bf16 weights are kept in 12 bits, too; unused: kernels that the model has no use
    for, without dtypes, such as "layer_norm". A kernel's name ends with its dtype and its KV format, if it has one for
    each of them.
    """
    from kernels.dispatch import cpu_kernels

    if (cpu := cpu_kernels()) is None:
        return []
    codes = {cpu.code_linear, cpu.integer_linear, cpu.code_floats, cpu.code_rows, cpu.scales, cpu.w8a8}
    left_out = set() if quantized else codes
    left_out |= set() if adapters else {cpu.lora}
    left_out |= set() if compressed else {cpu.compressed_linear}
    if dtype != "bfloat16":
        left_out |= {
            cpu.linear, cpu.compressed_linear, cpu.code_linear, cpu.integer_linear, cpu.lora, cpu.pairs, cpu.w8a8,
        }  # fmt: skip
    names = {module.__name__ for module in left_out}
    return [
        name
        for name, kernel in all_kernels().items()
        if kernel.fn.__module__ not in names
        and _fits(name, _DTYPES.get(dtype), kv_format)
        and name.strip("_").removesuffix("_bf16").removesuffix("_f32") not in unused
    ]


def _fits(name: str, dtype: str | None, kv_format: str | None) -> bool:
    words = set(name.split("_"))
    dtypes, formats = words & set(_DTYPES.values()), words & KV_FORMATS.keys()
    if name.strip("_").startswith(("attention", "prefill")) and not formats and kv_format is not None:
        return False
    return (not dtypes or dtype in dtypes) and (not formats or kv_format in formats)


def compile_kernels(kernels: Iterable["ParallelKernel"]) -> None:
    """Compile the kernels, or load them from disk. Those that other processes are compiling come last."""
    for kernel in [kernel for kernel in kernels if not kernel.compile(wait=False)]:
        kernel.compile()


def warmup() -> int:
    """Compile every kernel, or load them from disk; returns their number (0 without numba)."""
    kernels = all_kernels()
    compile_kernels(kernels.values())
    if kernels:
        try:
            code_cache.mark_complete(code_cache.folder())
        except OSError:  # no folder can be written: every process compiles for itself
            logger.debug("the kernels are not kept on disk", exc_info=True)
    return len(kernels)


class Helper:
    """A process that compiles kernels beside this one. It ends with this one."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "kernels.warmup", *arguments]
        self.process = subprocess.Popen([*command, "--with-parent"], stdin=subprocess.PIPE)
        self._ended = threading.Thread(target=self._clean_up, name="kernel-helper", daemon=True)
        self._ended.start()

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self._ended.join()

    def _clean_up(self) -> None:
        with self.process:  # waits, so that no zombie remains; then closes the pipe
            self.process.wait()


def help_with(names: Sequence[str]) -> Helper:
    """A process that compiles these kernels from the last to the first, while this one does from the first on."""
    return Helper("--names", ",".join(reversed(names)))


def compile_rest() -> int:
    """Compile every kernel that is not on disk, in a process of the lowest priority; returns their number."""
    missing = [kernel for kernel in all_kernels().values() if not kernel.is_on_disk()]
    try:
        folder = code_cache.folder()
        if not missing:
            code_cache.mark_complete(folder)
    except (ImportError, OSError):  # no numba, or nothing can be kept
        return 0
    if missing:
        Helper("--rest", str(folder))
    return len(missing)


def wait_for_turn(folder: Path, held: ExitStack) -> bool:
    """Wait until no other process of the machine compiles in the background; False if nothing is left to do then."""
    held.enter_context(code_cache.lock(folder / "background.lock"))
    return not code_cache.is_complete(folder)


def _end_with_parent() -> None:
    """End this process when the parent has ended: its end of stdin is closed then."""

    def wait() -> None:
        os.read(0, 1)  # sys.stdin would be locked when this process ends by itself
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def _lower_priority() -> None:
    os.nice(19)
    if hasattr(os, "SCHED_IDLE"):
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        except OSError:
            logger.debug("SCHED_IDLE is refused here", exc_info=True)


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kernels.warmup", description="Compile CPU kernels.")
    parser.add_argument("--names", default="", help="the kernels to compile, separated by commas")
    parser.add_argument("--rest", type=Path, help="the cache folder, to compile in the background")
    parser.add_argument("--with-parent", action="store_true", help="end when stdin is closed")
    arguments = parser.parse_args()
    if arguments.with_parent:
        _end_with_parent()
    started = time.perf_counter()
    with ExitStack() as held:
        if arguments.names:
            kernels = all_kernels()
            compile_kernels(kernels[name] for name in arguments.names.split(","))
        elif arguments.rest:
            _lower_priority()
            if wait_for_turn(arguments.rest, held):
                code_cache.lets_others_pass = True
                logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s kernels: %(message)s")
                logger.info("%d CPU kernels are ready, %.0f s after the start", warmup(), time.perf_counter() - started)
        else:
            print("compiling the CPU kernels, once: half a minute or more ...", flush=True)
            held.callback(help_with(list(all_kernels())).stop)
            print(f"{warmup()} CPU kernels ready in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    _main()
