"""Families that transformers has no code for, and that another family computes: the logits of that family."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GraniteConfig, GraniteForCausalLM

from engine.errors import ModelError
from engine.models.families import model_config
from tests.engine.models.family_checks import check_logits, load
from tests.engine.models.tiny_models import VOCAB, randomize, save_model

MIMO = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
MINICPM = {"architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "scale_emb": 12, "scale_depth": 1.4}
MINICPM |= {"dim_model_base": 16}
FACTORS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
SIZES: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "vocab_size": VOCAB, "rms_norm_eps": 1e-5}


def rename(folder: Path, fields: dict[str, Any]) -> dict[str, Any]:
    path = folder / "config.json"
    raw = {name: value for name, value in json.loads(path.read_text()).items() if name not in FACTORS} | fields
    path.write_text(json.dumps(raw))
    return raw


def test_mimo_is_qwen2_whose_further_layers_are_not_loaded(tmp_path: Path) -> None:
    oracle = save_model("qwen2", tmp_path)
    rename(tmp_path, MIMO)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.mtp_layers.0.input_proj.weight"] = torch.ones(48, 96)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_logits(oracle, load(tmp_path))


@pytest.mark.parametrize("tied", [False, True])
def test_minicpm_is_granite_with_factors_of_its_sizes(tmp_path: Path, tied: bool) -> None:
    config = GraniteConfig(
        **SIZES,
        embedding_multiplier=12.0,
        residual_multiplier=1.4 / 3**0.5,
        attention_multiplier=8**-0.5,
        logits_scaling=3.0,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    oracle = GraniteForCausalLM(config).eval()
    randomize(oracle)
    oracle.save_pretrained(tmp_path)
    raw = rename(tmp_path, MINICPM)
    check_logits(oracle, load(tmp_path))
    for name, value in {"num_experts": 8, "sparse_config": {"topk": 64}, "mixer_types": ["lightning"]}.items():
        with pytest.raises(ModelError, match=f"{name} = .* is not supported"):
            model_config(raw | {name: value})
