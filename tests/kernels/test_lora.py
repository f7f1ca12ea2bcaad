"""LoRA on a CPU: compiled kernels in bf16, torch in fp32, and both inside a recorded program."""

import pytest
import torch

from kernels.dispatch import cpu_kernels
from kernels.lora.rows import RowGroups
from kernels.lora.weights import PackedWeights, make_lora_weights
from tests.kernels.lora_cases import test_against_a_product_for_each_row as test_each_row  # noqa: F401

CPU = torch.device("cpu")


def test_a_recorded_program_serves_what_the_slots_hold_later():
    cpu = cpu_kernels()
    weights = make_lora_weights(64, (64,), 2, 16, torch.bfloat16, CPU)
    if cpu is None or not cpu.program.SUPPORTED or not isinstance(weights, PackedWeights):
        pytest.skip("this CPU has no compiled kernels for LoRA")
    torch.manual_seed(0)
    groups, x, out = RowGroups(2, CPU), torch.randn(3, 64).bfloat16(), torch.zeros(3, 64, dtype=torch.bfloat16)
    groups.set(torch.tensor([-1, -1, -1]), active=True)
    program = cpu.program.record(lambda: weights.add(out, x, groups), cpu.program.Workspace())
    program()
    assert not out.any()
    a, b = torch.randn(16, 64).bfloat16() / 8, torch.randn(64, 16).bfloat16() / 4
    weights.set(1, weights.pack([(a, b)]))
    groups.set(torch.tensor([1, -1, 1]), active=True)
    program()
    torch.testing.assert_close(out[[0, 2]], (x @ a.T @ b.T)[[0, 2]], atol=2e-2, rtol=2e-2)
    assert not out[1].any()
