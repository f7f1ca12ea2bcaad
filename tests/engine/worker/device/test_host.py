"""Limits read from the machine, with control groups laid out in a folder."""

import os
import re
import subprocess
import sys

import pytest
import torch

from engine.config import EngineConfig
from engine.models.config import ModelConfig
from engine.worker.device import choice, host
from engine.worker.device.choice import resolve_dtype
from engine.worker.device.host import StepLimits, resolve_step_limits

GIB = 1 << 30
CPU = torch.device("cpu")


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    """cgroup({"memory.max": "..."}, ...) lays out control groups, outermost first, that hold this process."""
    real_folders, real_read = host.cgroup_folders, host._read

    def make(*levels, line="0::/{path}", base=""):
        path = "/".join(f"level{i}" for i in range(len(levels)))
        folder = tmp_path / base
        for i, files in enumerate(levels):
            folder = folder / f"level{i}"
            folder.mkdir(parents=True)
            for name, text in files.items():
                (folder / name).write_text(text)

        def read(file):
            return line.format(path=path) if str(file) == "/proc/self/cgroup" else real_read(file)

        monkeypatch.setattr(host, "_read", read)
        monkeypatch.setattr(host, "cgroup_folders", lambda controller: real_folders(controller, tmp_path))

    return make


def test_a_memory_limit_of_version_2_counts_at_every_level(cgroup):
    cgroup(
        {"memory.max": str(3 * GIB), "memory.current": str(GIB), "memory.stat": f"anon 5\ninactive_file {GIB // 2}\n"},
        {"memory.max": "max", "memory.current": str(GIB)},
    )
    assert host.available_host_bytes() == 2 * GIB + GIB // 2


def test_a_memory_limit_of_version_1(cgroup):
    files = {"memory.limit_in_bytes": str(2 * GIB), "memory.usage_in_bytes": str(GIB)}
    cgroup(files, line="7:memory:/{path}", base="memory")
    assert host.available_host_bytes() == GIB


def test_a_limit_that_is_used_up_leaves_nothing(cgroup):
    cgroup({"memory.max": str(GIB), "memory.current": str(2 * GIB)})
    assert host.available_host_bytes() == 0


def test_without_limits_the_machine_decides():
    with open("/proc/meminfo") as file:
        total = int(file.readline().split()[1]) * 1024
    assert 0 < host.available_host_bytes() <= total


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "20000 100000"}, 1),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "9999999 100000"}, 8),
    ],
)
def test_a_cpu_quota_limits_the_threads(cgroup, monkeypatch, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    cgroup(files)
    assert host.usable_cores() == cores


def test_a_cpu_quota_of_version_1(cgroup, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    files = {"cpu.cfs_quota_us": "300000", "cpu.cfs_period_us": "100000"}
    cgroup(files, line="3:cpu,cpuacct:/{path}", base="cpu,cpuacct")
    assert host.usable_cores() == 3


def test_threads_as_asked_then_as_inherited_then_the_cores(monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        monkeypatch.setenv(name, "3")
    assert host.set_threads(None) == 3
    assert host.set_threads(5) == 5
    assert os.environ["NUMBA_NUM_THREADS"] == "5"
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    assert host.set_threads(None) == host.usable_cores()


def test_waiting_threads_sleep_soon_unless_told_otherwise(monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "1")
    host.set_threads(1)
    assert os.environ["GOMP_SPINCOUNT"] == "1"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    host.set_threads(1)
    assert "GOMP_SPINCOUNT" not in os.environ  # the wait policy was chosen
    monkeypatch.delenv("OMP_WAIT_POLICY")
    host.set_threads(1)
    assert os.environ["GOMP_SPINCOUNT"] == host.SPIN_COUNT


def test_step_limits_depend_on_the_device():
    assert resolve_step_limits(EngineConfig(), "cpu", 0) == StepLimits(128, 2048)
    assert resolve_step_limits(EngineConfig(), "cuda", 24 * GIB) == StepLimits(256, 2048)
    assert resolve_step_limits(EngineConfig(), "cuda", 79 * GIB) == StepLimits(256, 8192)
    assert resolve_step_limits(EngineConfig(max_num_seqs=7), "cuda", 79 * GIB) == StepLimits(7, 8192)
    assert resolve_step_limits(EngineConfig(max_num_batched_tokens=16), "cpu", 0) == StepLimits(16, 16)


@pytest.mark.parametrize(
    ("asked", "checkpoint", "native", "expected"),
    [
        ("auto", "bfloat16", True, torch.bfloat16),
        ("auto", "bfloat16", False, torch.float32),
        ("auto", "float16", True, torch.float32),  # float16's range of numbers is not bfloat16's precision
        ("auto", "float32", True, torch.float32),
        ("bfloat16", "float32", True, torch.bfloat16),
        ("bfloat16", "float32", False, torch.bfloat16),  # as asked, with a warning
        ("float32", "bfloat16", True, torch.float32),
    ],
)
def test_dtype_on_a_cpu(monkeypatch, asked, checkpoint, native, expected):
    monkeypatch.setattr("engine.worker.device.choice._fast_dtypes", lambda device, causal: (native, False))
    model = ModelConfig(
        family="llama",
        vocab_size=8,
        hidden_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=8,
        max_position_embeddings=8,
        norm="rms",
        norm_eps=1e-6,
        position="rope",
        activation="silu",
        gated_mlp=True,
        dtype=checkpoint,
    )
    assert resolve_dtype(EngineConfig(dtype=asked), model, CPU) == expected


LINEAR_LAYERS = """
from engine.worker.device.host import limit_primitive_caches
limit_primitive_caches()
import torch
from kernels.linear.packed import PackedLinear
linear = PackedLinear(torch.randn(72, 65).bfloat16())  # kernels/cpu/linear/panels.py takes no odd number of inputs
for rows in [*range(1, 401), *range(400, 0, -1)]:
    linear(torch.ones(rows, 65, dtype=torch.bfloat16))
"""


def test_linear_layers_of_many_lengths_do_not_grow_the_worker():
    """Only the last of 400 numbers of rows are still compiled: counted, since the bytes differ with the machine."""
    done = subprocess.run(
        [sys.executable, "-c", LINEAR_LAYERS],
        env=os.environ | {"ONEDNN_VERBOSE": "profile_create"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    created = re.findall(r"create:cache_(hit|miss),cpu,inner_product", done.stdout)
    if not created:
        pytest.skip("oneDNN compiles no layer on this CPU: nothing is kept")
    assert len(created) >= 800 and 0 < created.count("hit") <= int(host.PRIMITIVES_KEPT)


@pytest.mark.parametrize(
    ("native", "pairs", "causal", "expected"),
    [
        (True, False, True, True),
        (False, True, True, True),  # our kernels widen the weights
        (False, True, False, False),  # an encoder's attention is torch's
        (False, False, True, False),
    ],
)
def test_bfloat16_is_fast_where_the_processor_or_our_kernels_multiply_it(monkeypatch, native, pairs, causal, expected):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: native)
    monkeypatch.setattr(choice, "multiplies_pairs", lambda device_type: pairs)
    assert choice._fast_dtypes(CPU, causal) == (expected, False)
