"""Models and settings that a GPU cannot serve are refused before weights load, in one line that names the way out."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.config import ModelConfig
from engine.worker.device import choice
from engine.worker.device.choice import (
    check_attention,
    check_quantization,
    compressed_bytes,
    keeps_compressed,
    make_flashinfer,
    resolve_device,
    resolve_dtype,
)
from kernels.attention.flashinfer import PromptAttention
from kernels.card import A10, A100, CARDS, T4
from tests.engine.worker.lazy_queue import LazyQueue
from tests.kernels.fake_flashinfer import as_package

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
    wide = replace(MODEL, head_dim=1024)
    message = refusal(check_attention, EngineConfig(), wide, torch.float16, CUDA)
    assert message == "model: the attention kernels take head sizes of up to 512, not 1024; use --device cpu."
    check_attention(EngineConfig(), wide, torch.float32, torch.device("cpu"))
    on_card(T4)
    many = replace(MODEL, num_heads=96, head_dim=256)
    assert "fits the 64 KB of shared memory" in refusal(check_attention, EngineConfig(), many, torch.float16, CUDA)


def flashinfer(model=MODEL, dtype=torch.bfloat16, device=CUDA, backend="flashinfer", **settings):
    config = EngineConfig(attention_backend=backend, **settings)
    return make_flashinfer(config, model, 4, dtype, device, LazyQueue())


def test_flashinfer_is_taken_where_it_is_asked_for(on_card, monkeypatch):
    on_card(A100)
    package = as_package(monkeypatch, LazyQueue())
    assert flashinfer(backend="auto") is None and flashinfer(backend="triton") is None and not package.plans
    model = replace(MODEL, num_layers=3, sliding_window=7, window_layers=(1,), attn_softcap=2.0, attn_scale=0.5)
    made = flashinfer(model, block_size=32)
    assert made.attention == PromptAttention(4, 1, 128, 32, torch.bfloat16, 0.5, 2.0, (0, 7))
    assert [(p.window_left, p.sm_scale, p.soft_cap, p.causal) for p in package.plans] == [
        (-1, 0.5, 2.0, True), (6, 0.5, 2.0, True)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "given, words",
    [
        ({"device": torch.device("cpu")}, "needs a GPU"),
        ({"dtype": torch.float32}, "not in float32"),
        ({"model": replace(MODEL, head_dim=80)}, "head sizes of 64, 128, 256, not 80"),
        ({"model": replace(MODEL, position="alibi")}, "do not compute ALiBi, which this model has"),
        ({"kv_cache_dtype": "int4"}, "--kv-cache-dtype int4"),
        ({"batch_invariant": True}, "batch_invariant"),
    ],
)
def test_flashinfer_that_does_not_fit_is_refused(on_card, monkeypatch, given, words):
    on_card(A100)
    as_package(monkeypatch, LazyQueue())
    message = refusal(lambda: flashinfer(**given))
    assert (
        message.startswith("attention_backend: ") and words in message and "use --attention-backend triton" in message
    )


def test_flashinfer_that_is_not_installed_is_refused(on_card, monkeypatch):
    on_card(A100)
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # as if there were no such package
    assert refusal(flashinfer) == (
        "attention_backend: FlashInfer is not installed: pip install flashinfer-python, or use --attention-backend "
        "triton."
    )
    as_package(monkeypatch, LazyQueue(), version="0.6.11")
    assert "FlashInfer 0.6.11 is older than 0.7.2: pip install 'flashinfer-python>=0.7.2'" in refusal(flashinfer)


def test_flashinfer_whose_kernels_cannot_be_built_is_refused(on_card, monkeypatch, caplog):
    on_card(A100)

    def plan(*_, **__):
        raise RuntimeError("Ninja build failed:\nno nvcc")

    monkeypatch.setattr(as_package(monkeypatch, LazyQueue()).BatchPrefillWithPagedKVCacheWrapper, "plan", plan)
    assert "FlashInfer fails here (Ninja build failed:)" in refusal(flashinfer) and "no nvcc" in caplog.text


@pytest.fixture
def multiplies_pairs(monkeypatch):
    def set_to(value):
        linear = SimpleNamespace(supports_linear=lambda weight, bias: value)
        monkeypatch.setattr(choice, "cpu_kernels", lambda: SimpleNamespace(linear=linear))

    set_to(True)
    return set_to


def compresses(given, free=1 << 40, model=MODEL, dtype="bfloat16", device="cpu"):
    return keeps_compressed(EngineConfig(**given), [model], dtype, device, free)


def test_weights_are_compressed_where_free_memory_is_ten_times_the_copy(multiplies_pairs):
    copy, weights = compressed_bytes([MODEL]), MODEL.weight_bytes(2)
    plenty = 10 * copy + weights
    assert compresses({}, plenty) and not compresses({}, plenty - 1)
    assert not compresses({"kv_cache_memory": "1MiB"}, plenty)
    assert compresses({"kv_cache_memory": "1MiB"}, plenty + (1 << 20))
    assert compresses({"compressed_weights": True}, 0) and not compresses({"compressed_weights": False})
    both = [MODEL, replace(MODEL, num_layers=2)]
    assert compressed_bytes(both) > 2 * copy
    assert not keeps_compressed(EngineConfig(), both, "bfloat16", "cpu", plenty)


def test_an_embedding_that_is_no_head_is_not_compressed():
    tied = replace(MODEL, tie_embeddings=True)
    apart = replace(MODEL, tie_embeddings=False)
    assert apart.weight_bytes(2) > tied.weight_bytes(2)
    assert compressed_bytes([apart]) == compressed_bytes([tied])


@pytest.mark.parametrize("given, words", [
    ({"device": "cuda"}, "only a CPU reads such weights"),
    ({"dtype": "float32"}, "only bfloat16 weights can be compressed, not float32"),
    ({"model": replace(MODEL, quantization=SimpleNamespace(name="int8"))}, "int8 weights are smaller already"),
    ({"invariant": True}, "batch_invariant has linear layers of its own"),
    ({"pairs": False}, "needs numba and a CPU with AVX2"),
])  # fmt: skip
def test_weights_that_cannot_be_compressed_are_not_and_to_ask_for_it_is_refused(multiplies_pairs, given, words):
    multiplies_pairs(given.pop("pairs", True))
    invariant = given.pop("invariant", False)
    message = refusal(lambda: compresses({"compressed_weights": True, "batch_invariant": invariant}, **given))
    assert message.startswith("compressed_weights: ") and words in message and "leave the option out" in message
    assert not compresses({"batch_invariant": invariant}, **given)


@pytest.mark.parametrize("device, dtype, has_product, words", [
    ("cuda", torch.float16, False, "a GPU needs compute capability 8.0, and inputs in 16 bits; use int8"),
    ("cuda", torch.float32, True, "a GPU needs compute capability 8.0, and inputs in 16 bits; use int8"),
    ("cpu", torch.float32, True, "a CPU rounds inputs in bfloat16 alone; use --dtype bfloat16"),
    ("cpu", torch.bfloat16, False, "needs numba and a CPU with AVX512-VNNI; use int8"),
])  # fmt: skip
def test_w8a8_is_refused_where_inputs_are_not_rounded(monkeypatch, device, dtype, has_product, words):
    monkeypatch.setattr(choice, "multiplies_int8_inputs", lambda: has_product)
    monkeypatch.setattr(choice, "multiplies_in_8_bits", lambda codes, device: has_product and codes == torch.int8)
    message = refusal(check_quantization, EngineConfig(quantization="w8a8"), dtype, torch.device(device))
    assert message.startswith("quantization: w8a8 is not served here: ") and message.endswith(f"{words}.")
    check_quantization(EngineConfig(quantization="int8"), dtype, torch.device(device))
    if has_product:
        check_quantization(EngineConfig(quantization="w8a8"), torch.bfloat16, torch.device(device))
