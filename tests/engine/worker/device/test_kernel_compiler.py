"""KernelCompiler: the kernels that a model calls are among those that were compiled for it."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import engine.models.bundled
from engine.models.families import read_model_config
from engine.sampling_params import SamplingParams
from engine.worker.device import kernel_compiler
from engine.worker.device.kernel_compiler import KernelCompiler, unused_kernels
from engine.worker.load import load_runner
from kernels import warmup
from kernels.cpu.parallel import ParallelKernel
from kernels.dispatch import cpu_kernels
from tests.engine.models.recorded_models import RECORDED, save
from tests.engine.worker.mini_driver import CONFIG, GREEDY, MiniDriver

BUNDLED = Path(next(iter(engine.models.bundled.__path__)))
NEEDS_INT8_DOT = pytest.mark.skipif(not cpu_kernels().features.HAS_INT8_DOT, reason="needs AVX512-VNNI")
DRAWN = SamplingParams(temperature=1.0, top_p=0.9, min_p=0.05, frequency_penalty=0.5)


@pytest.fixture
def chosen(monkeypatch):
    """The names of the kernels that a KernelCompiler was made for. No second process is started."""
    names = []

    def choose(*arguments):
        names.extend(warmup.needed_kernels(*arguments))
        return names

    monkeypatch.setattr(kernel_compiler, "needed_kernels", choose)
    monkeypatch.setattr(kernel_compiler, "help_with", lambda names: None)
    return names


@pytest.fixture
def called(monkeypatch):
    """The names of the kernels that are called."""
    names, call = set(), ParallelKernel.__call__

    def spy(self, *arguments):
        names.add(self.fn.__name__)
        call(self, *arguments)

    monkeypatch.setattr(ParallelKernel, "__call__", spy)
    return names


def run(folder, changes):
    """A prompt of two sequences and a step behind it."""
    config = replace(CONFIG, block_size=16, num_blocks=64, **changes)
    runner, _ = load_runner(config, folder, [2], lambda phase: None)
    driver = MiniDriver(runner)
    for seq_id, params in ((1, GREEDY), (2, DRAWN)):
        driver.add(seq_id, list(range(5, 45)), params)
    driver.step({1: 40, 2: 40})
    driver.step({1: 1, 2: 1})


@pytest.mark.parametrize("changes", [
    {"dtype": "bfloat16"},
    {"dtype": "float32", "kv_cache_dtype": "fp8"},
    {"dtype": "bfloat16", "kv_cache_dtype": "int4", "quantization": "int8"},
    pytest.param({"dtype": "bfloat16", "quantization": "w8a8"}, marks=NEEDS_INT8_DOT),
], ids=str)  # fmt: skip
def test_the_bundled_model_calls_no_other_kernel(changes, chosen, called):
    run(BUNDLED, changes)
    attention = {name for name in called if name.strip("_").startswith("attention")}
    assert len(attention) == 1 and called <= set(chosen)


@pytest.mark.parametrize("name", ["experts", "parallel residual", "norm of rows", "gelu", "xielu", "squared relu"])
def test_other_families_call_no_other_kernel(name, tmp_path, chosen, called):
    run(save(RECORDED[name], tmp_path), {"dtype": "bfloat16"})
    assert called <= set(chosen)


def test_the_bundled_model_waits_for_no_kernel_of_other_families(chosen):
    unused = unused_kernels(read_model_config(BUNDLED), torch.bfloat16)
    KernelCompiler(torch.bfloat16, None, False, False, False, unused)
    rare = ["layer_norm", "activate", "xielu", "limit", "combine", "float_linear", *kernel_compiler.EXPERT_KERNELS]
    rare += ["attention"] if "attention_pairs_bf16" in warmup.all_kernels() else []  # two query heads share a KV head
    assert not [name for name in chosen if name.strip("_").removesuffix("_bf16") in rare]


@NEEDS_INT8_DOT
def test_only_a_model_whose_inputs_are_rounded_waits_for_their_kernels(chosen):
    for method, waits in (("int8", False), ("w8a8", True)):
        chosen.clear()
        unused = unused_kernels(read_model_config(BUNDLED, method), torch.bfloat16)
        KernelCompiler(torch.bfloat16, None, True, False, False, unused)
        assert ({"_w8a8_linear", "_w8a8_rows"} <= set(chosen)) == waits


def test_a_router_in_fp32_needs_its_linear_kernel(tmp_path):
    plain, routed = (read_model_config(save(RECORDED[name], tmp_path / name)) for name in ("gelu", "experts"))
    routed = replace(routed, moe=replace(routed.moe, router_float32=True))
    assert "float_linear" in unused_kernels(plain, torch.bfloat16)
    for config, dtype in ((routed, torch.bfloat16), (plain, torch.float32)):
        assert "float_linear" not in unused_kernels(config, dtype)


def test_the_log_says_what_was_compiled_and_no_process_helps_with_what_is_on_disk(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    helped = []
    monkeypatch.setattr(kernel_compiler, "help_with", lambda names: helped.append(names) or Helper())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for on_disk in (True, False):
        monkeypatch.setattr(ParallelKernel, "is_on_disk", lambda kernel, on_disk=on_disk: on_disk)
        KernelCompiler(torch.float32, None, quantized=False, adapters=False, compressed=False).finish()
    number = len(warmup.needed_kernels("float32", None, False, False, False))
    assert [len(names) for names in helped] == [number]
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith(f"CPU kernels: 0 compiled, {number} loaded from disk in ")
    assert second.startswith(f"CPU kernels: {number} compiled, 0 loaded from disk in ")


class Helper:
    def stop(self):
        pass


@pytest.mark.parametrize("number, logs", [(0, 0), (21, 1)])
def test_the_log_says_how_many_are_compiled_in_the_background(number, logs, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(kernel_compiler, "compile_rest", lambda: number)
    kernel_compiler.compile_in_background()
    assert len(caplog.records) == logs and all("21 for other dtypes" in text for text in caplog.messages)
