"""What a GPU cannot serve is refused before weights load, in one line that names the way out."""

from dataclasses import replace

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.config import ModelConfig
from engine.worker.device import choice
from engine.worker.device.choice import check_attention, resolve_device, resolve_dtype
from kernels.card import A10, A100, CARDS, T4

CUDA = torch.device("cuda")
MODEL = ModelConfig(
    family="llama", vocab_size=8, hidden_size=512, num_layers=1, num_heads=4, num_kv_heads=1, head_dim=128,
    intermediate_size=8, max_position_embeddings=8, norm="rms", norm_eps=1e-6, position="rope", activation="silu",
    gated_mlp=True, dtype="bfloat16",
)  # fmt: skip


@pytest.fixture
def on_card(monkeypatch):
    def place(card):
        monkeypatch.setattr(choice, "read_card", lambda device: card)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    return place


def refusal(function, *arguments):
    with pytest.raises(ConfigError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_a_card_older_than_turing_is_refused(on_card, asked):
    on_card(replace(T4, capability=70))
    assert "compute capability 7.0, and kernels need 7.5" in refusal(resolve_device, asked)
    on_card(T4)
    assert resolve_device(asked).type == "cuda"


def test_bfloat16_on_turing_is_refused_and_auto_takes_float16(on_card, caplog):
    on_card(T4)
    message = refusal(resolve_dtype, EngineConfig(dtype="bfloat16"), MODEL, CUDA)
    assert "capability 7.5) has no bfloat16; use --dtype float16" in message
    assert resolve_dtype(EngineConfig(), MODEL, CUDA) is torch.float16 and "using float16" in caplog.text
    on_card(A10)
    assert resolve_dtype(EngineConfig(), MODEL, CUDA) is torch.bfloat16


@pytest.mark.parametrize("card", CARDS.values(), ids=lambda card: str(card.capability))
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8", "int4"])
def test_every_card_serves_usual_models_with_every_cache(on_card, card, kv_cache_dtype):
    on_card(card)
    for head_dim, dtype in ((64, torch.float16), (128, torch.float16), (256, torch.float16), (128, torch.float32)):
        model = replace(MODEL, head_dim=head_dim)
        check_attention(EngineConfig(kv_cache_dtype=kv_cache_dtype), model, dtype, CUDA)


def test_a_head_size_without_a_tile_is_refused(on_card):
    on_card(A100)
    wide = replace(MODEL, head_dim=512)
    message = refusal(check_attention, EngineConfig(), wide, torch.float16, CUDA)
    assert message == "model: the attention kernels take head sizes of up to 256, not 512; use --device cpu."
    check_attention(EngineConfig(), wide, torch.float32, torch.device("cpu"))
    on_card(T4)
    many = replace(MODEL, num_heads=96, head_dim=256)
    assert "fits the 64 KB of shared memory" in refusal(check_attention, EngineConfig(), many, torch.float16, CUDA)
