"""Kernels under programmatic dependent launch wait before they touch memory: read from their PTX."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.dependent_launch import launch_options

pytest.importorskip("triton", reason="triton is not installed")

PTX = """
import re
import triton
from kernels import aot
from kernels.dependent_launch import AVAILABLE, CAPABILITIES

if not AVAILABLE: print("waited: not in Triton", triton.__version__); raise SystemExit
compiled, compile = [], triton.compile
triton.compile = lambda *args, **kwargs: compiled.append(compile(*args, **kwargs)) or compiled[-1]
MEMORY = re.compile(r"\\b(ld|st|atom|red)(\\.\\w+)*\\.global|cp\\.async|cp\\.reduce|\\btensormap")
names, seen = set(), set()
for capability in (80, *CAPABILITIES, 120):
    for configuration in aot.configurations(capability, quick=True):
        kernel = configuration.kernel
        if "PDL" not in kernel.arg_names or capability != 90 and (kernel.__name__, capability) in seen:
            continue
        seen.add((kernel.__name__, capability))
        aot.compile_kernel(configuration, capability)
        ptx = compiled[-1].asm["ptx"]
        where = f"{kernel.__name__} {configuration.label} sm_{capability}"
        if capability not in CAPABILITIES:
            assert "griddepcontrol" not in ptx, where
            continue
        names.add(kernel.__name__)
        assert ptx.count("griddepcontrol.wait") == 1, where
        wait, allow = ptx.index("griddepcontrol.wait"), ptx.index("griddepcontrol.launch_dependents")
        first = MEMORY.search(ptx)
        assert first, where
        assert wait < allow, where + ": the next kernel may start before this one has waited"
        assert wait < first.start(), where + ": reads or writes before it waits"
        before = ptx[:wait].split(".reqntid")[-1]
        assert "bra" not in re.sub(r"//.*", "", before), where + ": a program may return before it waits"
assert names >= {"rms_norm_kernel", "layer_norm_kernel", "gated_activation_kernel", "rope_and_cache_kernel",
                 "gemv_kernel", "probe_kernel", "paged_attention_kernel", "reduce_chunks_kernel"}, names
print("waited", sorted(names))
"""


def test_every_program_waits_before_its_first_access():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PTX],
        capture_output=True, text=True, timeout=600, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0 and "waited" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_other_devices_launch_one_kernel_after_the_other():
    assert launch_options(torch.device("cpu")) == {"PDL": False}
