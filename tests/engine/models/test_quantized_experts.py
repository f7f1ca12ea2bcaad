"""Experts that stay quantised, against transformers with the matrices that the checkpoint means."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

from benchmarks.formats import writers
from benchmarks.formats.layouts import layouts
from benchmarks.formats.writers import mxfp4_experts, write_checkpoint
from engine.models.families import read_model_config
from engine.models.loading.load import load_model
from engine.models.loading.loader import load_weights
from kernels.quantized.weight import QuantizedWeight
from tests.engine.models.paged import PagedRunner, Sequence
from tests.engine.models.tiny_models import CASES, VOCAB, load_oracle, oracle_logits, save_model

CPU = torch.device("cpu")
PROMPT = [5, 17, 3, 88, 41, 9, 60, 2, 2, 31]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": VOCAB, "num_local_experts": 4, "pad_token_id": None}
LAYOUTS = layouts(group=32, block=48)
MODELS: dict[str, Callable[..., PreTrainedConfig]] = {
    "gptq 4 bits": MixtralConfig,
    "awq": MixtralConfig,
    "fp8 block": Qwen3MoeConfig,
}


def plain_checkpoint(kind: Callable[..., PreTrainedConfig], folder: Path, monkeypatch: Any, **more: Any) -> None:
    monkeypatch.setitem(CASES, "quantised", lambda: kind(**SIZES, **more))
    save_model("quantised", folder)


def check(folder: Path, plain: Path, meant: dict[str, Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in meant.items()}, plain / "model.safetensors")
    expected = oracle_logits(load_oracle(plain, torch.float32), PROMPT)
    config = read_model_config(folder)
    weights = load_weights(folder, config, torch.float32, CPU)
    assert all(isinstance(weights[f"layers.1.experts_{end}.weight"], QuantizedWeight) for end in ("in", "out"))
    model = load_model(folder, config, dtype=torch.float32, device=CPU, load_format="auto", seed=0)
    found = PagedRunner(model).step([(Sequence(PROMPT), len(PROMPT))])[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_one_tensor_for_each_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plain = tmp_path / "plain"
    sizes = {"moe_intermediate_size": 96} if name == "fp8 block" else {}
    plain_checkpoint(MODELS[name], plain, monkeypatch, num_experts_per_tok=2, **sizes)
    meant = write_checkpoint(plain, tmp_path, LAYOUTS[name], skipped=(".gate.",))
    check(tmp_path, plain, meant)


def test_experts_in_orders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPTQ's act-order: gate and up see the same inputs, so they share an order, and down has one of its own. The
    second expert is in order."""
    plain, experts = tmp_path / "plain", 0
    plain_checkpoint(MixtralConfig, plain, monkeypatch, num_experts_per_tok=2)
    layout = LAYOUTS["gptq 4 bits act-order"]

    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        nonlocal experts
        experts += weight.shape[0] == SIZES["intermediate_size"]  # w1 or w3: the file has w1, w2, w3 of each expert
        seed = (experts - 1) // 2 if weight.shape[0] == SIZES["intermediate_size"] else 100 + experts
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(seed))
        groups = torch.arange(weight.shape[1]) // 32
        monkeypatch.setattr(writers, "shuffled", lambda *_: groups if seed == 1 else groups[order])
        return layout.write(weight)

    meant = write_checkpoint(plain, tmp_path, replace(layout, write=write), skipped=(".gate.",))
    check(tmp_path, plain, meant)
    weights = load_weights(tmp_path, read_model_config(tmp_path), torch.float32, CPU)
    for end, size in (("in", 64), ("out", 96)):
        permutation = weights[f"layers.1.experts_{end}.weight"].permutation
        assert permutation.shape == (4, size) and len({tuple(order) for order in permutation.tolist()}) == 4


def test_mxfp4_of_gpt_oss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks are [experts, out, in], the plain tensors [experts, in, out]; gate and up take turns in both."""
    plain = tmp_path / "plain"
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    plain_checkpoint(GptOssConfig, plain, monkeypatch, head_dim=16, max_position_embeddings=128, **rope)
    meant = load_file(plain / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, tensor in meant.items():
        if tensor.dim() == 3:
            tensors, matrix = mxfp4_experts(tensor.mT.contiguous())
            stored |= {name + ending: part.contiguous() for ending, part in tensors.items()}
            meant[name] = matrix.mT.contiguous()
        else:
            stored[name] = tensor
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "mlp.router", "lm_head"]}
    config = json.loads((plain / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    check(tmp_path, plain, meant)


def test_routers_keep_fp32(tmp_path: Path) -> None:
    save_model("glm4_moe", tmp_path)
    weights = load_weights(tmp_path, read_model_config(tmp_path), torch.bfloat16, CPU)
    stored = load_file(tmp_path / "model.safetensors")
    for ours, theirs in (("correction.bias", "e_score_correction_bias"), ("router.weight", "weight")):
        assert torch.equal(weights[f"layers.1.{ours}"], stored[f"model.layers.1.mlp.gate.{theirs}"])
    assert weights["layers.1.experts_in.weight"].dtype == torch.bfloat16
