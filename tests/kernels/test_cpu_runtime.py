"""The runtime of the CPU kernels: imports, the cache of machine code, threads, the fallback."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from kernels import code_cache, warmup
from kernels.cpu import dots, parallel, simd
from kernels.cpu.features import HAS_BF16_DOT
from kernels.cpu.parallel import in_runs, next_item, parallel_kernel

IMPORTS = """
import sys, torch
import kernels.attention.decode, kernels.attention.prefill
import kernels.cache.reshape_and_cache, kernels.elementwise.rms_norm
assert not {"triton", "numba"} & set(sys.modules), "loaded before anything needs it"
kernels.elementwise.rms_norm.rms_norm(torch.ones(1, 32), torch.ones(32), 1e-5)
assert "triton" not in sys.modules and "numba" in sys.modules
"""

WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
import torch
from kernels.dispatch import cpu_kernels
from kernels.attention.decode import paged_attention, paged_attention_reference
from kernels.warmup import warmup
assert cpu_kernels() is None and warmup() == 0
q, k, v = torch.randn(1, 2, 32), torch.randn(3, 1, 8, 32), torch.randn(3, 1, 8, 32)
arguments = q, k, v, torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([11], dtype=torch.int32), 0.3
assert torch.equal(paged_attention(*arguments), paged_attention_reference(*arguments))
"""


@pytest.mark.parametrize("program", [IMPORTS, WITHOUT_NUMBA], ids=["imports", "without numba"])
def test_in_a_fresh_process(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def _count(args):
    """counts[item] += 1 for every item."""
    counts = simd.pointer_i64(args[2])
    item = next_item(args)
    while item < args[1]:
        simd.write(counts, item, simd.read(counts, item) + 1)
        item = next_item(args)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_item_runs_once_whatever_the_threads(num_threads):
    kernel = parallel_kernel("q")(_count)
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for num_items in (0, 1, 2, 1000):
            counts = np.zeros(1000, np.int64)
            kernel(num_items, counts.ctypes.data)
            assert counts[:num_items].tolist() == [1] * num_items and not counts[num_items:].any()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("num_items", [1, 2, 7, 64, 65])
def test_runs_hold_every_item_once_and_neighbours_stay_neighbours(num_items):
    for num_runs in (1, 2, 3, 8, 100):
        order = [in_runs.py_func(item, num_items, num_runs) for item in range(num_items)]
        assert sorted(order) == list(range(num_items))
        assert all(after == before + 1 for before, after in zip(order, order[num_runs:], strict=False))


def test_the_kernels_share_torchs_threads():
    """Linux wheels of torch come with an OpenMP runtime; without it the kernels would be correct, but on one core."""
    assert parallel._GOMP_PARALLEL is not None


def test_a_folder_that_cannot_be_written_means_compiling_in_memory(monkeypatch):
    def no_folder():
        raise OSError("read-only")

    monkeypatch.setattr(code_cache, "folder", no_folder)
    counts = np.zeros(3, np.int64)
    parallel_kernel("q")(_count)(3, counts.ctypes.data)
    assert counts.tolist() == [1, 1, 1]


def test_the_cache_folder_follows_the_sources_and_the_users_wish(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "mine"))
    folder = code_cache.folder()
    assert folder.is_relative_to(tmp_path / "mine") and code_cache.folder() == folder


def test_warmup_compiles_every_kernel():
    assert warmup.warmup() >= 9


@pytest.mark.parametrize("pointer, array, expected", [
    (simd.pointer_f32, torch.float32, 0.1), (simd.pointer_bf16, torch.bfloat16, float(torch.tensor(0.1).bfloat16())),
])  # fmt: skip
def test_stores_round_to_nearest_even(pointer, array, expected):
    def scale(args):
        x = pointer(args[2])
        item = next_item(args)
        while item < args[1]:
            simd.store(x, item * 16, simd.mul(simd.load(x, item * 16), simd.splat(np.float32(0.1))))
            item = next_item(args)

    values = torch.ones(32, dtype=array)
    parallel.ParallelKernel(scale, "q")(2, values.data_ptr())
    assert values.tolist() == [pytest.approx(expected, rel=1e-7)] * 32


@pytest.mark.parametrize("has_instruction", [HAS_BF16_DOT, False])
def test_bf16_rounding_equals_torchs_on_every_kind_of_value(has_instruction, monkeypatch, tmp_path):
    """The instruction makes zeros of numbers that are too small for bf16's full precision."""
    monkeypatch.setattr(simd, "HAS_BF16_DOT", has_instruction)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))

    def round_all(args):
        x, y = simd.pointer_f32(args[2]), simd.pointer_bf16(args[3])
        item = next_item(args)
        while item < args[1]:
            simd.store(y, item * 16, simd.load(x, item * 16))
            item = next_item(args)

    bits = torch.randint(-(2**31), 2**31 - 1, (4096,), dtype=torch.int64, generator=torch.Generator().manual_seed(0))
    values = bits.to(torch.int32).view(torch.float32)
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 3.3895e38, 1e-40, -1e-40] * 2)
    values = torch.cat([values, special])
    expected, out = values.bfloat16(), torch.empty(values.shape, dtype=torch.bfloat16)
    if has_instruction:
        expected[values.abs() < torch.finfo(torch.bfloat16).tiny] = 0
    parallel.ParallelKernel(round_all, "2q")(values.numel() // 16, values.data_ptr(), out.data_ptr())
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def mapped(function, values):
    """function(values), sixteen at a time; the length is a multiple of sixteen."""

    def map_all(args):
        x = simd.pointer_f32(args[2])
        item = next_item(args)
        while item < args[1]:
            simd.store(x, item * 16, function(simd.load(x, item * 16)))
            item = next_item(args)

    out = values.clone()
    parallel.ParallelKernel(map_all, "q")(out.numel() // 16, out.data_ptr())
    return out.double()


def test_exp_is_accurate_to_two_units_in_the_last_place():
    values = torch.cat([torch.linspace(-86.9, 88.0, 4080), torch.tensor([0.0, -88.0, -1e9, float("-inf")] * 4)])
    expected = values.double().exp().where(values > -87, torch.tensor(0.0, dtype=torch.float64))
    torch.testing.assert_close(mapped(simd.exp, values), expected, rtol=2.4e-7, atol=0)


def test_exp2_is_accurate_enough_for_bf16():
    special = torch.tensor([0.0, -1e30, float("-inf"), float("nan"), 1.0, -1.0, -126.0, 127.0] * 2)
    values = torch.cat([torch.linspace(-126, 127.9, 4080), special])
    expected = values.double().exp2()
    torch.testing.assert_close(mapped(dots.exp2, values), expected, rtol=9e-5, atol=0, equal_nan=True)
