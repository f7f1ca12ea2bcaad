"""The parts "decode" and "prefill" of gpu_check on a CUDA device without memory: they launch what a card would.

Run by test_gpu_check.py, in a process of its own, since Triton must be imported before the kernels.
"""

import triton  # noqa: F401 -- before the kernels: it tells them to define their Triton halves

# isort: split
from types import SimpleNamespace

import pytest

from benchmarks.gpu_check import fabricated, kernels, quantized_rows, steps
from benchmarks.gpu_check.bench import Bench
from benchmarks.gpu_check.bounds import Limits
from benchmarks.gpu_check.operators import Rows, step_operators
from benchmarks.gpu_check.parts import Setting
from benchmarks.gpu_check.record import Recorder, read_record
from engine.executor.step import StepPlan
from tests.engine.worker.fake_cuda import FakeCudaQueue, fake_cuda


@pytest.fixture
def device(monkeypatch):
    with fake_cuda(monkeypatch) as fake:
        monkeypatch.setattr(fabricated, "CudaQueue", lambda device: FakeCudaQueue(fake))
        monkeypatch.setattr(fabricated, "fill", lambda caches: None)
        monkeypatch.setattr(steps, "pick_device", lambda tiny: FakeCudaQueue.device)
        monkeypatch.setattr(steps, "profile_steps", lambda run, device: [])
        yield fake


def test_steps_run_on_fabricated_keys_alone(device, tmp_path, monkeypatch):
    """Decode launches no prefill kernel, and is replayed from a graph."""
    path, setting = tmp_path / "part.jsonl", Setting(True, tmp_path)
    chosen = []
    monkeypatch.setattr("engine.models.layers.operators.choose_on_device", lambda *given: chosen.append(given))
    steps.run_decode(Recorder(path), setting)
    record = read_record(path)
    assert not [line for line in record if line["kind"] == "failed"]
    decodes = [line for line in record if line["kind"] == "figure" and ": decode " in line["name"]]
    assert len(decodes) == 8 and all(line["detail"]["graph"] for line in decodes)
    assert len(chosen) == 2
    assert "graph" in device.launched and not [name for name in device.launched if name.startswith("prefill")]
    steps.run_prefill(Recorder(path), setting)
    assert not [line for line in read_record(path) if line["kind"] == "failed"]
    assert [name for name in device.launched if name.startswith("prefill")]


def test_scaling_is_measured_fused_and_separate(device, tmp_path, monkeypatch):
    path = tmp_path / "part.jsonl"
    recorder = Recorder(path)
    monkeypatch.setattr(quantized_rows, "compare", lambda fused, separate: None)
    watch = SimpleNamespace(median=lambda call: call() and 1.0)
    quantized_rows.run(Bench(recorder, FakeCudaQueue.device, watch, Limits(3.0e12, 794e12)), kernels.SHAPE, 64)
    names = [line["name"] for line in read_record(path) if line["kind"] == "figure"]
    kernels_of_rows = ("rms_norm + residual", "gated_activation silu")
    assert names == [f"{kernel} to {to}{how} 64 rows" for to in ("e4m3", "int8") for kernel in kernels_of_rows
                     for how in ("", ", two kernels")]  # fmt: skip
    launched = [name for name in device.launched if name.endswith("_kernel") and name != "probe_kernel"]
    norm, activation = (
        [f"{kernel}_quantized_kernel", f"{kernel}_kernel", "quantize_rows_kernel"]
        for kernel in ("rms_norm", "gated_activation")
    )
    assert launched == (norm * 2 + activation * 2) * 2  # compared, then timed


@pytest.mark.parametrize("name", ["Llama-3-8B", "Qwen3-0.6B"])
def test_the_model_of_a_step_counts_the_launches_of_a_step(device, tmp_path, name, monkeypatch):
    monkeypatch.setattr("engine.models.layers.operators.choose_on_device", lambda *given: None)
    monkeypatch.setattr(FakeCudaQueue, "capture", lambda self, work: work)  # each replay launches its kernels
    measured = steps.Steps(name, Recorder(tmp_path / "part.jsonl"), Setting(True, tmp_path), steps.pick_device(True))

    def count():
        sequences = measured.sequences
        arriving = [sequences.arrive(32, 31, room=8)[1] for _ in range(2)]
        ids = [new.seq_id for new in arriving]
        runner = sequences.bare.runner
        runner.result(runner.launch(StepPlan(1, [], arriving, [], [], decodes=ids)))
        sequences.bare.record(2)
        device.launched.clear()
        runner.result(runner.launch(StepPlan(2, [], [], [], [], decodes=ids)))
        launched = [kernel for kernel in device.launched if kernel != "empty"]  # memory, no kernel
        merges = any(kernel.startswith("reduce") for kernel in launched)
        operators = step_operators(sequences.model, [Rows(2, 1, 33)], merges=merges)
        assert len(launched) == sum(operator.launches for operator in operators), launched

    measured.fresh(count)


def test_a_choice_of_kernels_that_fails_costs_no_step(device, tmp_path, monkeypatch):
    """The model is loaded again, and cuBLAS computes its linear layers."""

    def fail(*given):
        raise RuntimeError("a candidate faulted")

    path = tmp_path / "part.jsonl"
    monkeypatch.setattr("engine.models.layers.operators.choose_on_device", fail)
    steps.run_decode(Recorder(path), Setting(True, tmp_path))
    failed = [line["case"] for line in read_record(path) if line["kind"] == "failed"]
    assert failed == ["Llama-3-8B: load", "Qwen3-0.6B: load"]
