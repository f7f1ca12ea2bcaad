"""Cache tensors that differ by layer or belong to several layers, and the fields of Gemma 4 that are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.models.config import Heads, ModelConfig
from engine.models.families import model_config
from engine.models.parallel.shard import shard_model
from engine.worker.cache.host_cache import block_copier
from engine.worker.cache.kv_cache import allocate_kv_caches
from kernels.kv_format import INT8
from tests.engine.models.family_checks import check_logits, load
from tests.engine.models.tiny_models import CASES, save_model

CPU = torch.device("cpu")


def config(**changes: Any) -> ModelConfig:
    return model_config({**CASES["gemma4"]().to_dict(), "architectures": None, **changes})


@pytest.mark.parametrize("kv_format", [None, INT8])
def test_bytes_per_token_are_those_of_the_tensors(kv_format: Any) -> None:
    """Four layers: a window, full, and two that read the caches of the first two."""
    model = config()
    assert [model.heads(layer) for layer in range(4)] == [Heads(2, 16), Heads(1, 32)] * 2
    caches = allocate_kv_caches(model, 3, 8, torch.float32, CPU, kv_format)
    assert [caches[layer][0] is caches[layer - 2][0] for layer in (2, 3)] == [True, True]
    assert [k.shape[1] for k, _ in caches] == [2, 1, 2, 1]
    assert block_copier(caches).block_bytes == 8 * model.kv_bytes_per_token(4, kv_format)


def test_published_sizes() -> None:
    """The shape of E2B: 35 layers, of which the last 20 share; one in five is full."""
    kinds = (["sliding_attention"] * 4 + ["full_attention"]) * 7
    model = config(
        num_hidden_layers=35, layer_types=kinds, num_kv_shared_layers=20, num_attention_heads=8, num_key_value_heads=1,
        head_dim=256, global_head_dim=512, per_layer_config=None, attention_k_eq_v=False, enable_moe_block=False,
    )  # fmt: skip
    assert model.kv_bytes_per_token(2) == 2 * 2 * (12 * 256 + 3 * 512)
    assert (model.kv_source(15), model.kv_source(34)) == (13, 14)


def test_gelu_is_not_its_approximation() -> None:
    assert config(hidden_activation="gelu").activation == "gelu"  # Gemma 1 means the approximation by it


def test_keys_of_layers_that_share_are_skipped(tmp_path: Path) -> None:
    oracle = save_model("gemma4_shared", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    spare = {name.replace(".1.", ".3."): tensors[name].clone() for name in tensors if ".1.self_attn.k_" in name}
    assert len(spare) == 2
    save_file({**tensors, **spare}, path, metadata={"format": "pt"})
    check_logits(oracle, load(tmp_path))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all' is not supported"),
        ({"per_layer_config": {"1": {"head_dim": 32}}}, "per_layer_config must hold the same for each full_attention"),
        ({"per_layer_config": {"1": {"sliding_window": 3}, "3": {"sliding_window": 3}}}, "only heads are served"),
        (
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96},
            "vocab_size_per_layer_input must be an integer from 97 to 2147483647, not 96",
        ),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers 3 leaves no layer that keeps the keys"),
    ],
)
def test_fields_that_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        config(**fields)


def test_ranks_are_refused() -> None:
    with pytest.raises(ModelError, match="tensor_parallel_size: a model whose layers differ in heads"):
        shard_model(config(), 0, 2)
