"""check_weights_fit: weights that cannot fit are refused before they are read, with settings that fit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.worker.encoder_runner as encoder_runner
import engine.worker.load as load
import engine.worker.loaded as loaded
import engine.worker.memory_plan as memory_plan
from benchmarks.formats.gguf_writer import write_gguf
from engine.checkpoint.locate import BUNDLED_MODEL
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.families import read_model_config
from engine.models.loading.load import weight_bytes
from engine.worker.cache.kv_cache import DoesNotFitError
from engine.worker.encoder_runner import load_encoder
from engine.worker.loaded import check_weights_fit
from engine.worker.memory_plan import Machine, make_plan
from tests.engine.models.tiny_encoders import save_encoder
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


def test_codes_need_the_room_that_they_take_where_they_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(BUNDLED_MODEL, tmp_path / "model.gguf", "Q5_0")
    model, config = read_model_config(path), EngineConfig(model=str(path))
    plain, packed = weight_bytes(model, 2), weight_bytes(model, 2, packed=True)
    assert packed < plain
    plans = []
    for packs, needed in ((True, packed), (False, plain)):
        for module in (loaded, memory_plan):
            monkeypatch.setattr(module, "multiplies_pairs", lambda device_type, packs=packs: packs)
        plans.append(make_plan(config, model, Machine("cpu", 1 << 34)))
        monkeypatch.setattr(loaded, "available_host_bytes", lambda needed=needed: needed)
        check_weights_fit(config, model, torch.bfloat16, CPU)
        monkeypatch.setattr(loaded, "available_host_bytes", lambda needed=needed: needed - 1)
        with pytest.raises(DoesNotFitError, match="no room for the weights"):
            check_weights_fit(config, model, torch.bfloat16, CPU)
    assert plans[1].weights - plans[0].weights == plain - packed


@pytest.mark.parametrize("given", [{"compressed_weights": True}, {"kv_cache_memory": "1GiB"}, {"num_blocks": 4}])
def test_an_encoder_refuses_what_only_a_decoder_has(tmp_path: Path, given: dict[str, Any]) -> None:
    save_model("llama", tmp_path)
    model, config = replace(read_model_config(tmp_path), causal=False), EngineConfig(model=str(tmp_path), **given)
    with pytest.raises(ConfigError, match=rf"^{next(iter(given))}: this model is an encoder.*leave the option out\."):
        load_encoder(config, tmp_path, model, lambda phase: None)


@pytest.mark.parametrize(
    "dtype, free, advice", [("float32", 1.0, r"--dtype bfloat16 fits\."), ("bfloat16", 0.5, r"Use a smaller model\.")]
)
def test_an_encoder_without_room_is_refused_before_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, free: float, advice: str
) -> None:
    save_encoder("bert", tmp_path)
    model, config = read_model_config(tmp_path), EngineConfig(model=str(tmp_path), dtype=dtype, device="cpu")
    monkeypatch.setattr(encoder_runner, "available_host_bytes", lambda: int(free * model.weight_bytes(4)) - 1)
    phases: list[str] = []
    with pytest.raises(DoesNotFitError, match=rf"no room for the weights: they take .* are free\. {advice}"):
        load_encoder(config, tmp_path, model, phases.append)
    assert phases == []


def test_a_second_copy_of_the_weights_needs_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model("llama", tmp_path)
    model, config = read_model_config(tmp_path), EngineConfig(model=str(tmp_path))
    monkeypatch.setattr(loaded, "available_host_bytes", lambda: model.weight_bytes(2) + 999)
    check_weights_fit(config, model, torch.bfloat16, CPU, compressed=999)
    with pytest.raises(DoesNotFitError, match="no room for the weights"):
        check_weights_fit(config, model, torch.bfloat16, CPU, compressed=1000)


def test_a_gpu_without_memory_for_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model("llama", tmp_path)

    def profile(loaded: Any) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 11.76 GiB of which 1.20 GiB "
            "is free. Including non-PyTorch memory, this process has 10.50 GiB memory in use."
        )

    monkeypatch.setattr(load, "size_cache", profile)
    config = EngineConfig(model=str(tmp_path), device="cpu")
    with pytest.raises(ConfigError, match=r"which 1\.20 GiB is free\. Use a lower --max-num-batched-tokens, "):
        load.load_resident(config, tmp_path, [], lambda phase: None)
