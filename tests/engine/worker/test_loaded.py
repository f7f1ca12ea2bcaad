"""check_weights_fit: weights that cannot fit are refused before they are read, with settings that fit."""

from pathlib import Path

import pytest
import torch

import engine.worker.loaded as loaded
from engine.config import EngineConfig
from engine.models.families import read_model_config
from engine.worker.cache.kv_cache import DoesNotFitError
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
