"""Mistral AI's own layout, params.json and consolidated.safetensors: the logits of transformers' layout."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.checkpoint.locate import read_eos_token_ids, resolve_model
from engine.config import EngineConfig
from engine.errors import ModelError
from engine.models.families import mistral_params, read_model_config
from engine.models.loading.load import load_model
from tests.engine.models.paged import PagedRunner, Sequence
from tests.engine.models.tiny_models import oracle_logits, save_model

PROMPT = [5, 17, 3, 88, 41, 9, 60, 2, 2, 31]
NAMES = {theirs: ours for theirs, ours in mistral_params.WEIGHTS.items()}
TRANSFORMERS = {
    "embedding": "model.embed_tokens",
    "attn_norm": "input_layernorm",
    "qkv.q": "self_attn.q_proj",
    "qkv.k": "self_attn.k_proj",
    "qkv.v": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp_in.gate": "mlp.gate_proj",
    "mlp_in.up": "mlp.up_proj",
    "mlp_out": "mlp.down_proj",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
}


def neighbours(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of q or k for pairs of halves -> rows for pairs of neighbours, the inverse of transformers' conversion."""
    return weight.view(num_heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def to_own_layout(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    theirs = load_file(folder / "model.safetensors")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / name).unlink(missing_ok=True)
    heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    own = {}
    for name, ours in NAMES.items():
        for layer in range(raw["num_hidden_layers"] if "{}" in name else 1):
            part = TRANSFORMERS[ours.removeprefix("layers.{}.")]
            tensor = theirs.pop(f"model.layers.{layer}.{part}.weight" if "{}" in name else f"{part}.weight")
            if ours.endswith((".q", ".k")):
                tensor = neighbours(tensor, heads if ours.endswith(".q") else kv_heads)
            own[f"{name.format(layer)}.weight"] = tensor.contiguous()
    assert not theirs
    save_file(own, folder / "consolidated.safetensors")
    params = {
        "dim": raw["hidden_size"],
        "n_layers": raw["num_hidden_layers"],
        "head_dim": raw["head_dim"] or raw["hidden_size"] // heads,
        "hidden_dim": raw["intermediate_size"],
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "norm_eps": raw["rms_norm_eps"],
        "vocab_size": raw["vocab_size"],
        "rope_theta": raw["rope_parameters"]["rope_theta"],
        "sliding_window": raw["sliding_window"],
    }
    (folder / "params.json").write_text(json.dumps(params))


def test_logits(tmp_path: Path) -> None:
    oracle = save_model("mistral", tmp_path)
    to_own_layout(tmp_path)
    assert resolve_model(EngineConfig(model=str(tmp_path))) == tmp_path
    assert read_eos_token_ids(tmp_path) == [2]
    config = read_model_config(tmp_path)
    cpu = torch.device("cpu")
    model = load_model(tmp_path, config, dtype=torch.float32, device=cpu, load_format="auto", seed=0)
    logits = PagedRunner(model).step([(Sequence(PROMPT), len(PROMPT))])[0]
    torch.testing.assert_close(logits, oracle_logits(oracle, PROMPT), atol=2e-5, rtol=2e-5)


def test_fields_that_are_not_served(tmp_path: Path) -> None:
    save_model("mistral", tmp_path)
    to_own_layout(tmp_path)
    params = json.loads((tmp_path / "params.json").read_text())
    (tmp_path / "params.json").write_text(json.dumps(params | {"moe": {"num_experts": 8}}))
    with pytest.raises(ModelError, match=r"moe = .* is not supported"):
        read_model_config(tmp_path)
