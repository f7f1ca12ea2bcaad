"""check_weights_fit: weights that cannot fit are refused before they are read, with settings that fit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.worker.loaded as loaded
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.families import read_model_config
from engine.worker.cache.kv_cache import DoesNotFitError
from engine.worker.encoder_runner import load_encoder
from engine.worker.loaded import check_weights_fit
from tests.engine.models.tiny_models import save_model

CPU = torch.device("cpu")


def test_weights_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model("llama", tmp_path)
    model, config = read_model_config(tmp_path), EngineConfig(model=str(tmp_path))
    needed = model.weight_bytes(4)
    monkeypatch.setattr(loaded, "available_host_bytes", lambda: needed)
    check_weights_fit(config, model, torch.float32, CPU)
    monkeypatch.setattr(loaded, "available_host_bytes", lambda: needed - 1)
    with pytest.raises(DoesNotFitError, match=r"no room for the weights: they take .* of host memory are free\. Use a"):
        check_weights_fit(config, model, torch.float32, CPU)


@pytest.mark.parametrize("given", [{"compressed_weights": True}, {"kv_cache_memory": "1GiB"}, {"num_blocks": 4}])
def test_an_encoder_refuses_what_only_a_decoder_has(tmp_path: Path, given: dict[str, Any]) -> None:
    save_model("llama", tmp_path)
    model, config = replace(read_model_config(tmp_path), causal=False), EngineConfig(model=str(tmp_path), **given)
    with pytest.raises(ConfigError, match=rf"^{next(iter(given))}: this model is an encoder.*leave the option out\."):
        load_encoder(config, tmp_path, model, lambda phase: None)


def test_a_second_copy_of_the_weights_needs_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model("llama", tmp_path)
    model, config = read_model_config(tmp_path), EngineConfig(model=str(tmp_path))
    monkeypatch.setattr(loaded, "available_host_bytes", lambda: model.weight_bytes(2) + 999)
    check_weights_fit(config, model, torch.bfloat16, CPU, compressed=999)
    with pytest.raises(DoesNotFitError, match="no room for the weights"):
        check_weights_fit(config, model, torch.bfloat16, CPU, compressed=1000)
