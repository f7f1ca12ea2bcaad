"""The step profile: what a kernel call moves and computes, and how the time of steps is divided."""

import argparse
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3MoeConfig

from benchmarks.profiled_worker import REPLAY_STEP, Operator, Profile, ProfiledStep, StepProfiler, describe
from benchmarks.quantized import read_share
from benchmarks.step_profile import floor_seconds, group_steps, summarise
from engine.models.families import model_config
from kernels.attention.decode import mixed_attention, paged_attention
from kernels.attention.prefill import prefill_attention
from kernels.dispatch import cpu_kernels
from tests.kernels.oracle import paged

cpu = cpu_kernels()
needs_dots = pytest.mark.skipif(cpu is None or cpu.linear not in cpu.MODULES, reason="needs pairs of bf16")


def calls_of(work):
    """Descriptions of the kernel calls of `work`, each made once the kernel has run, as the profiler does."""
    recording, found = cpu.program.Recording(cpu.program.Workspace()), []
    with cpu.parallel.recording_to(recording):
        work()
    for kernel, packed in recording.calls:
        kernel.entry(packed)
        found.append(describe(kernel, packed))
    return found


@needs_dots
def test_a_linear_layer_reads_its_weight_once():
    weight, x = torch.randn(128, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    panels = cpu.linear.pack(weight)
    assert calls_of(lambda: cpu.linear.linear(x, panels, None, 128)) == [
        ("linear 64 -> 128", (panels.nbytes, 2 * 3 * 64 * 128))
    ]


@needs_dots
def test_a_compressed_layer_reads_three_quarters_of_it():
    torch.manual_seed(0)
    panels, x = cpu.linear.pack(torch.randn(128, 64).bfloat16()), torch.randn(3, 64).bfloat16()
    layer = cpu.compressed_linear.compress(panels)
    work = (panels.nbytes * 3 // 4, 2 * 3 * 64 * 128)
    assert calls_of(lambda: layer.linear(x, None, 128)) == [("compressed linear 64 -> 128", work)]
    assert calls_of(lambda: layer.gated_linear(x, None, 128, "silu")) == [
        ("compressed linear and gate 64 -> 128", work)
    ]


@needs_dots
def test_a_padded_step_reads_the_keys_of_its_own_sequences():
    """Two decodes and a chunk of five rows, in a program for forty tokens."""
    data, q = paged([20, 33, 50], 2, 32, 16, torch.bfloat16), torch.randn(40, 4, 32).bfloat16()
    caches, rest = (data.k_cache, data.v_cache), torch.zeros(37, dtype=torch.int32)
    tables = torch.cat([data.block_tables, torch.zeros((37, data.block_tables.shape[1]), dtype=torch.int32)])
    starts, seq_lens = torch.tensor([0, 1, 2, 7, *rest], dtype=torch.int32), torch.cat([data.seq_lens, rest])
    counts, chunk = torch.tensor([2, 3]), torch.tensor([0, 5], dtype=torch.int32)
    decodes = calls_of(lambda: paged_attention(q[:2], *caches, tables[:2], seq_lens[:2], 0.3))
    prefill = calls_of(lambda: prefill_attention(q[2:7], *caches, tables[2:3], chunk, seq_lens[2:3], 5, 0.3))
    step = calls_of(lambda: mixed_attention(q, *caches, tables, starts, seq_lens, 0.3, counts=counts))
    assert step == decodes + prefill


@needs_dots
def test_only_the_experts_with_rows_are_read():
    gate_up, down = torch.randn(8, 128, 64).bfloat16(), torch.randn(8, 64, 64).bfloat16()
    packed = cpu.experts.PackedExperts(gate_up, down, None, None, cpu.activations.Gate("silu"), False, False)
    x, chosen = torch.randn(3, 64).bfloat16(), torch.tensor([[0, 3], [3, 5], [5, 0]], dtype=torch.int32)
    weights = torch.rand(3, 2)
    calls = calls_of(lambda: packed(x, chosen, weights))
    assert [call for call in calls if "linear" in call[0]] == [
        ("grouped linear and gate 64 -> 128", (3 * 2 * 128 * 64, 2 * 6 * 128 * 64)),
        ("grouped linear 64 -> 64", (3 * 2 * 64 * 64, 2 * 6 * 64 * 64)),
    ]


def test_a_token_reads_the_experts_that_it_takes():
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    read = model_config(config.to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]})
    experts = 2 * 8 * 3 * 32 * 16
    assert read_share(read) == 1 - experts * 6 / 8 / read.num_parameters()


@needs_dots
def test_attention_reads_the_keys_and_values_of_every_sequence():
    caches = torch.randn(2, 8, 2, 16, 32).bfloat16()  # keys and values: blocks, KV heads, tokens, head_dim
    tables, lengths = torch.arange(6, dtype=torch.int32).view(3, 2), torch.tensor([5, 17, 30], dtype=torch.int32)
    q = torch.randn(3, 4, 32).bfloat16()
    options = (1.0, None, 0, 0.0, None, 0)
    numbers = int(lengths.sum()) * 2 * 32  # of the keys
    assert calls_of(lambda: cpu.attention.paged_attention(q, *caches, tables, lengths, *options)) == [
        ("attention_pairs_bf16" if cpu.features.HAS_BF16_DOT else "attention_bf16", (4 * numbers, 8 * numbers))
    ]


@needs_dots
@pytest.mark.parametrize("dtype, name, size", [(torch.bfloat16, "bf16", 2), (torch.float32, "f32", 4)])
def test_prefill_attention_multiplies_each_row_with_the_tokens_that_it_sees(dtype, name, size):
    caches = torch.randn(2, 8, 2, 16, 32).to(dtype)  # keys and values: blocks, KV heads, tokens, head_dim
    tables, lengths = torch.arange(4, dtype=torch.int32).view(2, 2), torch.tensor([3, 20], dtype=torch.int32)
    starts = torch.tensor([0, 3, 5], dtype=torch.int32)  # all three tokens, and the last two of twenty
    q = torch.randn(5, 4, 32).to(dtype)
    for window, pairs in ((0, 1 + 2 + 3 + 19 + 20), (2, 1 + 2 + 2 + 2 + 2)):
        options = (starts, lengths, 1.0, None, window, 0.0, None, 0)
        assert calls_of(lambda given=options: cpu.attention.tiles.prefill_attention(q, *caches, tables, *given)) == [
            (f"prefill_{name}", (2 * size * 23 * 2 * 32, 4 * pairs * 4 * 32))
        ]


@needs_dots
def test_a_program_is_replayed_after_a_step_whose_inputs_are_still_in_place(monkeypatch):
    kernel, program = cpu.parallel.ParallelKernel, cpu.program.Program
    for kind, name in ((kernel, "__call__"), (program, "__init__"), (program, "__call__")):
        monkeypatch.setattr(kind, name, getattr(kind, name))  # the profiler replaces them
    profiler = StepProfiler(Profile())
    x, panels = torch.randn(3, 64).bfloat16(), cpu.linear.pack(torch.randn(128, 64).bfloat16())
    program = cpu.program.record(lambda: cpu.linear.linear(x, panels, None, 128), cpu.program.Workspace())
    runner = SimpleNamespace(launch=lambda plan: program(), result=lambda launched: None)
    profiler.attach(runner)
    for number in range(1, REPLAY_STEP + 3):
        runner.result(runner.launch(SimpleNamespace(decodes=[1, 2, 3], num_tokens=3)))
        assert list(profiler.profile.programs.get(0, {})) == (["linear 64 -> 128"] if number >= REPLAY_STEP else [])
    assert profiler.profile.programs[0]["linear 64 -> 128"].calls == 1


def test_the_floor_of_a_step_is_the_slower_of_bytes_and_products_of_each_operator():
    operators = {"bytes": Operator(1, 9.0, 40, 1), "products": Operator(1, 9.0, 1, 60), "other": Operator(5, 1.0)}
    ceilings = {"read_bytes_per_s": 10.0, "dot_flops_per_s": 20.0}
    assert floor_seconds({"operators": operators}, ceilings) == 4.0 + 3.0


def step(launched, ended, decodes, kernels, tokens=None):
    operators = {"linear": Operator(1, kernels, 100, 100)}
    return ProfiledStep(launched, decodes, tokens or decodes, ended, operators=operators)


def test_the_time_of_a_step_is_divided():
    steps = [step(10.0 * i, 10.0 * i + 6.0, 4, 5.0) for i in range(5)]
    driver = [(10.0 * i + 7.0, 1.5) for i in range(5)]
    groups = group_steps(Profile([*steps, step(60.0, 69.0, 0, 8.0, 512)]), argparse.Namespace(streams=[4], prompt=512))
    row = summarise(groups["4 streams"], Profile(), driver)
    parts = [row[name] for name in ("kernels", "worker", "driver", "wake_ups", "step")]
    assert parts == [5.0, 1.0, 1.5, 2.5, 10.0]
    assert row["overhead"] == 0.5
    assert summarise(groups["prefill of 512"], Profile(), driver)["step"] == 9.0
