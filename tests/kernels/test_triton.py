"""The Triton kernels where there is no GPU: in the interpreter, and compiled ahead of time. Each in its own process,
because both must be decided before triton is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
CASES = Path(__file__).with_name("triton_cases.py")

COMPILE = """
import json
from kernels import aot
rows = []
for capability in (80, 90):
    for configuration in aot.configurations(capability, quick=True):
        report = aot.compile_kernel(configuration, capability)
        rows.append([configuration.kernel.__name__, capability, report.registers, report.spilled, report.shared_memory,
                     report.mma, report.wgmma, report.async_copies])
print(json.dumps(rows))
"""


def run(*arguments, **environment):
    environment = {**os.environ, **environment}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the cases run on the device itself")
def test_in_the_interpreter():
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES), TRITON_INTERPRET="1")
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_device():
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES))
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


def test_compiled_for_ampere_and_hopper():
    """No spill, shared memory within the device's, matrix instructions where they must be, loads that overlap."""
    done = run("-W", "ignore", "-c", COMPILE)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(done.stdout)
    assert len(rows) == 12
    for name, capability, registers, spilled, shared_memory, mma, wgmma, async_copies in rows:
        print(
            name, f"sm_{capability}", f"{registers} registers, {shared_memory} bytes shared, {mma} mma, {wgmma} wgmma"
        )
        assert spilled == 0, f"{name} spills {spilled} bytes on sm_{capability}"
        assert shared_memory <= {80: 163 * 1024, 90: 227 * 1024}[capability]
        if name == "paged_attention_kernel" or (name == "prefill_attention_kernel" and capability == 80):
            assert mma > 0 and async_copies > 0
        if name == "prefill_attention_kernel" and capability == 90:
            assert wgmma > 0
