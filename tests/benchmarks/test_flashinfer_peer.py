"""gpu_check's FlashInfer figures: with the stand-in of tests/kernels/fake_flashinfer.py, and where it is missing."""

import sys

import pytest
import torch

from benchmarks.gpu_check import torch_peers
from benchmarks.gpu_check.bench import Bench
from benchmarks.gpu_check.bounds import Limits
from benchmarks.gpu_check.record import Recorder, read_record
from benchmarks.gpu_check.timing import Stopwatch
from benchmarks.kernel_speed import Shape
from tests.engine.worker.lazy_queue import LazyQueue
from tests.kernels.fake_flashinfer import as_package

SHAPE = Shape(num_heads=4, num_kv_heads=2, head_dim=16, block_size=8, dtype=torch.float32)
CPU = torch.device("cpu")


@pytest.fixture
def bench(tmp_path):
    return Bench(Recorder(tmp_path / "part.jsonl"), CPU, Stopwatch(CPU, 0.01), Limits(bandwidth=1e9, rate=1e9))


@pytest.mark.parametrize("size", [(1, 24, 24), (3, 5, 32)])
def test_a_layer_and_a_plan_are_timed_and_the_result_is_compared(bench, monkeypatch, tmp_path, size):
    queue = LazyQueue()
    wrapper = as_package(monkeypatch, queue).BatchPrefillWithPagedKVCacheWrapper
    torch_peers.flashinfer(bench, SHAPE, queue, *size)
    figures = {line["name"]: line for line in read_record(tmp_path / "part.jsonl") if line["kind"] == "figure"}
    name = "{} x {} of {}".format(*size)
    assert set(figures) == {f"FlashInfer plan {name}", f"FlashInfer prefill {name}"}
    assert all(line["value"] > 0 and line["detail"]["by"] == "FlashInfer" for line in figures.values())
    monkeypatch.setattr(wrapper, "run", lambda self, q, caches, out: out.fill_(1.0))
    with pytest.raises(AssertionError, match="differs from theirs"):
        torch_peers.flashinfer(bench, SHAPE, queue, *size)


def test_why_it_is_left_out(bench, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    torch_peers.run_flashinfer(bench.recorder, bench, SHAPE)
    as_package(monkeypatch, LazyQueue())
    torch_peers.run_flashinfer(bench.recorder, bench, SHAPE)
    reasons = [line["reason"] for line in read_record(tmp_path / "part.jsonl") if line["kind"] == "skipped"]
    assert reasons == ["FlashInfer is not installed: pip install flashinfer-python", "no CUDA device"]
