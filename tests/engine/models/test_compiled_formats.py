"""Layouts of quantised checkpoints in bf16, on the compiled kernels of a CPU that read packed codes.

The oracle is the same model with the weights that the codes mean, in bf16: both round at the same places.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from benchmarks.formats.layouts import layouts
from benchmarks.formats.writers import Layout, write_checkpoint
from engine.models.families import read_model_config
from engine.models.loading.load import load_model
from kernels.dispatch import cpu_kernels
from kernels.quantized import linear
from tests.engine.models.paged import PagedRunner, Sequence
from tests.engine.models.tiny_models import VOCAB

COMPILED = cpu_kernels() is not None and cpu_kernels().features.MULTIPLIES_PAIRS
pytestmark = pytest.mark.skipif(not COMPILED, reason="needs pairs of bf16")
CPU = torch.device("cpu")
STEPS = (60, 10, 1)  # rows: panels are decoded first, are read packed, and a single row
MOST_ERROR = 0.025  # relative norm of the difference of all logits; bf16's rounding makes 0.018 of it
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2}
G32, G64, G128 = layouts(32, 48), layouts(64, 64), layouts(128, 128)
CASES = {
    "int4 g32": G32["compressed-tensors int4 group"],
    "int4 g128": G128["compressed-tensors int4 group"],
    "int4 g32 with offsets": G64["gptq 4 bits asymmetric"],
    "int4 g128 with offsets": G128["awq"],
    "int4 rows with offsets": G128["gptq_v2 4 bits rows"],
    "int4 act-order": G32["gptq 4 bits act-order"],
    "int4 with offsets of torchao": G64["torchao int4"],
    "nf4": G64["bitsandbytes nf4"],
    "mxfp4": G64["compressed-tensors mxfp4"],
    "nvfp4": G64["modelopt nvfp4"],
    "int8 rows": G64["compressed-tensors int8"],
    "int8 with offsets": G64["compressed-tensors int8 asymmetric"],
    "fp8 rows": G64["compressed-tensors fp8 channel"],
    "fp8 blocks": G64["fp8 block"],
    "fp8 ragged blocks": G32["fp8 block"],
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a tiny random model."""
    folder = tmp_path_factory.mktemp("plain")
    save(LlamaForCausalLM, LlamaConfig(**SIZES, vocab_size=VOCAB, max_position_embeddings=128, head_dim=32), folder)
    return folder


@pytest.fixture(scope="module")
def plain_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture whose tokens see every expert, because a near tie of the router may fall either way in bf16."""
    folder = tmp_path_factory.mktemp("experts")
    sizes = SIZES | {"num_local_experts": 3, "num_experts_per_tok": 3, "vocab_size": VOCAB}
    save(MixtralForCausalLM, MixtralConfig(**sizes, max_position_embeddings=128, head_dim=32), folder)
    plain = load_file(folder / "model.safetensors")
    assert any("experts.2.w2" in name for name in plain)
    return folder


def save(kind: Any, config: Any, folder: Path) -> None:
    torch.manual_seed(0)
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)


def logits(folder: Path) -> Tensor:
    """fp32 [sum of STEPS, vocab]"""
    model = load_model(folder, read_model_config(folder), dtype=torch.bfloat16, device=CPU, load_format="auto", seed=0)
    runner = PagedRunner(model, dtype=torch.bfloat16)
    sequence = Sequence([(7 * position + 5) % VOCAB for position in range(sum(STEPS))])
    return torch.cat([runner.step([(sequence, count)])[0] for count in STEPS]).float()


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_dequantised_weights(
    name: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(CASES[name], plain, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", ["int4 g32", "int4 g32 with offsets", "int4 act-order", "int8 rows", "fp8 rows"])
def test_experts_are_read_packed(
    name: str, plain_experts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(CASES[name], plain_experts, tmp_path, monkeypatch, skipped=(".gate.",))


def compare(
    layout: Layout, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skipped: tuple[str, ...] = ()
) -> None:
    """Logits of a checkpoint in the layout and of the weights that it means."""
    meant = write_checkpoint(plain, tmp_path / "quantised", layout, skipped)
    (tmp_path / "meant").mkdir()
    save_file(meant, tmp_path / "meant" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "meant" / "config.json").write_bytes((plain / "config.json").read_bytes())
    expected = logits(tmp_path / "meant")

    def refused(*arguments: Any) -> Tensor:
        raise AssertionError("the weights were dequantised instead of read packed")

    monkeypatch.setattr(linear, "linear_reference", refused)
    found = logits(tmp_path / "quantised")
    error = float((found - expected).norm() / expected.norm())
    assert error < MOST_ERROR
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.95  # near ties may fall either way
