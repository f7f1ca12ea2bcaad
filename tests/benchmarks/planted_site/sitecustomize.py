"""Python runs this file at its start where its folder is on the path: it plants faults into parts of gpu_check.

GPU_CHECK_PLANTS is JSON: {key: kind}. A key is the name of a case, or "module:function" for each call of a function; a
kind is one of KINDS.
"""

import contextlib
import functools
import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import time

KINDS = ("hang", "illegal", "exception", "oom", "kill")
PLANTS = json.loads(os.environ.get("GPU_CHECK_PLANTS", "{}"))
RECORD = "benchmarks.gpu_check.record"
HANG_SECONDS = 0.2  # the time limit of a case that hangs, so that tests need not wait for the real one


def fault(kind):
    """Do what a faulty kernel does."""
    if kind == "hang":
        time.sleep(3600)
    elif kind == "kill":  # by the kernel's out-of-memory killer, say
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "oom":
        raise sys.modules["torch"].OutOfMemoryError("planted: CUDA out of memory")
    elif kind == "illegal":  # sticks: from now on each call of CUDA raises
        sys.modules[RECORD].device_is_broken = lambda: True
        raise RuntimeError("planted: CUDA error: an illegal memory access was encountered")
    raise ValueError(f"planted: {kind}")


def plant_cases(module):
    """Let planted cases fault in place of what they measure."""
    recorder = module.Recorder
    plain, plain_async = recorder.case, recorder.case_async

    async def fault_async(kind):
        fault(kind)

    def case(self, name, measure, seconds=module.CASE_SECONDS):
        kind = PLANTS.get(name)
        if kind is None:
            return plain(self, name, measure, seconds)
        return plain(self, name, functools.partial(fault, kind), HANG_SECONDS if kind == "hang" else seconds)

    async def case_async(self, name, measure, seconds=module.CASE_SECONDS):
        kind = PLANTS.get(name)
        if kind is None:
            return await plain_async(self, name, measure, seconds)
        limit = HANG_SECONDS if kind == "hang" else seconds
        return await plain_async(self, name, functools.partial(fault_async, kind), limit)

    recorder.case, recorder.case_async = case, case_async


def plant_call(module, name, kind):
    """Let each call of a function fault."""
    setattr(module, name, lambda *arguments, **named: fault(kind))


class Planter(importlib.abc.MetaPathFinder):
    """Changes modules right after they are loaded, before others import names from them."""

    def __init__(self):
        self.changes = {RECORD: [plant_cases]}
        for what, kind in PLANTS.items():
            module, _, name = what.partition(":")
            if name.isidentifier():
                change = functools.partial(plant_call, name=name, kind=kind)
                self.changes.setdefault(module, []).append(change)

    def find_spec(self, name, path, target=None):
        if name not in self.changes:
            return None
        changes = self.changes.pop(name)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            for change in changes:
                change(module)

        spec.loader.exec_module = exec_module
        return spec


if PLANTS:
    with contextlib.suppress(ImportError):
        sys.meta_path.insert(0, Planter())
