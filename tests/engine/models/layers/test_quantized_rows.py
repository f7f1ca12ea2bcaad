"""Norms and activations that round to 8 bits themselves, in a model whose linear layers multiply e4m3 or int8.

The reference of that product works on a CPU, so the test lets the CPU pass for a card that has it. The kernels
themselves are tested by tests/kernels/fused_cases.py and scaled_matmul_cases.py."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.models.families import read_model_config
from engine.models.layers import mlp, norm, operators
from engine.models.loading.load import load_model
from kernels.quantized import linear, scaled_matmul
from tests.engine.models.paged import PagedRunner, Sequence

CPU = torch.device("cpu")
LAYERS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=128,
            max_position_embeddings=64,
            initializer_range=0.3,
        )
    ).save_pretrained(path)
    return path


@pytest.fixture
def rounded(monkeypatch):
    """Numbers of rows that quantize_rows was given."""
    calls = []
    inner = scaled_matmul.quantize_rows
    monkeypatch.setattr(linear, "multiplies_in_8_bits", lambda dtype, device: True)
    monkeypatch.setattr(operators, "supports_quantized_gate", lambda *given: False)  # a kernel of the CPU alone
    monkeypatch.setattr(scaled_matmul, "quantize_rows", lambda x, to: calls.append(len(x)) or inner(x, to))
    return calls


def logits(folder, num_tokens, method):
    config = read_model_config(folder, method)
    model = load_model(folder, config, dtype=torch.bfloat16, device=CPU, load_format="auto", seed=0)
    tokens = [7 * i % 128 for i in range(num_tokens)]
    return PagedRunner(model, dtype=torch.bfloat16).step([(Sequence(tokens), num_tokens)])[0].float()


@pytest.mark.parametrize("method", ["fp8", "w8a8"])
def test_only_the_output_of_attention_is_rounded_by_a_kernel_of_its_own(folder, rounded, monkeypatch, method):
    fused = logits(folder, 20, method)
    assert rounded == [20] * (LAYERS + 1)  # attn_out, once a layer, and the head
    rounded.clear()
    for module in (norm, mlp):
        monkeypatch.setattr(module, "rounded_inputs", lambda linear: None)
    separate = logits(folder, 20, method)
    assert rounded == [20] * (4 * LAYERS + 1)  # qkv, attn_out, mlp_in and mlp_out
    assert (fused - separate).norm() < 0.03 * separate.norm()  # torch's norm may round another way than ours


def test_a_few_rows_stay_in_16_bits(folder, rounded, monkeypatch):
    few = logits(folder, linear.FEW_ROWS, "fp8")
    assert not rounded
    monkeypatch.setattr(linear, "multiplies_in_8_bits", lambda dtype, device: False)
    assert torch.equal(few, logits(folder, linear.FEW_ROWS, "fp8"))
