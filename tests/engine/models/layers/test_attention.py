"""The attention mechanisms of ModelConfig, one or two at a time, against a decoder written as the formulas say."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from engine.models.config import ModelConfig, QueryScaling, RopeScaling
from engine.models.decoder import Decoder
from engine.models.layers.position import alibi_slopes, query_scales, rotary_frequencies
from tests.engine.models.paged import PagedRunner, Sequence

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    family="llama",
    vocab_size=60,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=48,
    max_position_embeddings=128,
    norm="rms",
    norm_eps=1e-5,
    position="rope",
    activation="silu",
    gated_mlp=True,
)
LINEAR = RopeScaling("linear", 4.0, 128)
MECHANISMS: dict[str, dict[str, Any]] = {
    "alibi": {"position": "alibi"},
    "alibi_scaled": {"position": "alibi", "num_heads": 6, "alibi_scaled": True, "alibi_bias_max": 4.0},
    "alibi_clip": {"position": "alibi", "clip_qkv": 0.5, "head_dim": 20},
    "interleaved": {"rope_interleaved": True},
    "interleaved_part": {"rope_interleaved": True, "partial_rotary_factor": 0.5, "head_dim": 64},
    "norm_rows": {"qk_norm": "all", "clip_qkv": 0.7},
    "norm_per_head": {"qk_norm": "per_head", "qk_norm_kind": "layer", "rope_interleaved": True},
    "norm_per_head_rms": {"qk_norm": "per_head", "qk_norm_layers": (1,)},
    "layer_norm": {"qk_norm": "head", "qk_norm_kind": "layer"},
    "norm_after_rope": {"qk_norm": "head", "qk_norm_after_rope": True, "rope_scaling": RopeScaling("ntk", 50.0, 128)},
    "l2_norm": {"qk_norm": "head", "qk_norm_kind": "l2", "qk_norm_after_rope": True, "qk_norm_layers": (0,),
                "nope_layers": (1,), "query_scaling": QueryScaling(0.5, 7, 1, (1,))},
    "query_scaling": {"query_scaling": QueryScaling(0.3, 5)},
    "v_norm": {"v_norm": True, "qk_norm": "head"},
    "sinks": {"attention_sinks": True, "sliding_window": 6, "window_layers": (1,)},
    "chunk": {"attention_chunk": 7, "chunk_layers": (0,)},
    "llama4": {"attention_chunk": 16, "chunk_layers": (0,), "nope_layers": (1,), "rope_interleaved": True,
               "qk_norm": "head", "qk_norm_kind": "l2", "qk_norm_after_rope": True, "qk_norm_layers": (0,),
               "query_scaling": QueryScaling(0.1, 4, 1, (1,)), "num_heads": 5, "num_kv_heads": 1},
    "window_rope": {"sliding_window": 9, "window_layers": (1,), "window_rope_theta": 50.0,
                    "window_rope_scaling": LINEAR},
}  # fmt: skip


def random_weights(config: ModelConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = config.parameter_shapes()
    made = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    return {name: x + 1 if "norm" in name else x for name, x in made.items()}


def rms(x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + CONFIG.norm_eps).sqrt() * weight


def norm_heads(config: ModelConfig, x: Tensor, weight: Tensor | float) -> Tensor:
    rows = x.flatten(1) if config.qk_norm == "all" else x
    rows = rows - rows.mean(-1, keepdim=True) if config.qk_norm_kind == "layer" else rows
    return rms(rows, weight).view(x.shape)


def rotate(config: ModelConfig, x: Tensor) -> Tensor:
    """The complex product of each pair with its angle."""
    size = config.rotary_dim
    angles = torch.arange(len(x))[:, None, None] * rotary_frequencies(config, 128)
    part = x[..., :size]
    a, b = (part[..., 0::2], part[..., 1::2]) if config.rope_interleaved else part.chunk(2, -1)
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
    both = torch.stack([turned.real, turned.imag], -1).flatten(-2)
    both = both if config.rope_interleaved else torch.cat([turned.real, turned.imag], -1)
    return torch.cat([both, x[..., size:]], -1)


def attend(config: ModelConfig, weights: dict[str, Tensor], layer: int, x: Tensor) -> Tensor:
    """Attention of a whole sequence x [T, hidden]."""
    heads, kv_heads, num_tokens = config.num_heads, config.num_kv_heads, len(x)
    qkv = (x @ weights[f"layers.{layer}.qkv.weight"].T).unflatten(1, (-1, config.head_dim))
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    norms = [weights.get(f"layers.{layer}.{name}.weight", 1.0) for name in ("q_norm", "k_norm")]
    rope = (config.window_rope() if config.window(layer) else None) or config
    for is_norm in (True, False) if not config.qk_norm_after_rope else (False, True):
        if is_norm and config.has_qk_norm(layer):
            q, k = norm_heads(config, q, norms[0]), norm_heads(config, k, norms[1])
        if is_norm and config.clip_qkv:
            q, k, v = (part.clamp(-config.clip_qkv, config.clip_qkv) for part in (q, k, v))
        if not is_norm and config.position == "rope" and layer not in config.nope_layers:
            q, k = rotate(rope, q), rotate(rope, k)
    v = rms(v) if config.v_norm else v
    positions = torch.arange(num_tokens)
    if config.scales_queries(layer) and (scaling := config.query_scaling):
        steps = torch.div(positions + scaling.offset, scaling.period, rounding_mode="floor")
        q = q * (1 + scaling.factor * (1 + steps).log())[:, None, None]
    k, v = (part.repeat_interleave(heads // kv_heads, 1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k)
    distance = positions[:, None] - positions
    bias = torch.zeros(heads, num_tokens, num_tokens)
    if config.position == "alibi":
        bias = -_slopes(config)[:, None, None] * distance
    scale = config.softmax_scale
    scores = (scores + bias) * scale if config.alibi_scaled else scores * scale + bias
    hidden = distance < 0
    if window := config.window(layer):
        hidden |= distance >= window
    if chunk := config.chunk(layer):
        hidden |= positions[:, None] // chunk != positions // chunk
    weights_of = scores.masked_fill(hidden, -torch.inf).exp()
    total = weights_of.sum(-1, keepdim=True)
    if config.attention_sinks:
        total = total + weights[f"layers.{layer}.sinks.weight"].exp()[:, None, None]
    probs = weights_of / total
    return torch.einsum("hqk,khd->qhd", probs, v).flatten(1) @ weights[f"layers.{layer}.attn_out.weight"].T


def _slopes(config: ModelConfig) -> Tensor:
    if config.num_heads == 6:
        powers = [config.alibi_bias_max / 8 * i for i in (2, 4, 6, 8, 1, 3)]
        return 2.0 ** -torch.tensor(powers)
    return 2.0 ** -torch.tensor([2.0, 4.0, 6.0, 8.0])


def expected_logits(config: ModelConfig, weights: dict[str, Tensor], token_ids: list[int]) -> Tensor:
    x = weights["embedding.weight"][token_ids]
    for layer in range(config.num_layers):
        mine = {
            name: weights[f"layers.{layer}.{name}.weight"] for name in ("attn_norm", "mlp_norm", "mlp_in", "mlp_out")
        }
        x = x + attend(config, weights, layer, rms(x, mine["attn_norm"]))
        gate, up = (rms(x, mine["mlp_norm"]) @ mine["mlp_in"].T).chunk(2, -1)
        x = x + (torch.nn.functional.silu(gate) * up) @ mine["mlp_out"].T
    return rms(x, weights["final_norm.weight"]) @ weights["lm_head.weight"].T


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_mechanism_against_its_formula(name: str) -> None:
    """A prompt in chunks, then decodes beside another prompt; the last layer also with its last rows alone."""
    config = replace(CONFIG, **MECHANISMS[name])
    weights = random_weights(config)
    token_ids = torch.randint(0, 60, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = expected_logits(config, weights, token_ids)
    plain = expected_logits(CONFIG, random_weights(CONFIG), token_ids)
    assert (expected - plain).abs().max() > 0.1, "the mechanism changes nothing here"
    runner = PagedRunner(Decoder(config, weights, CPU))
    first, second = Sequence(token_ids), Sequence(token_ids[:20])
    found = [runner.step([(first, n)])[0] for n in (11, 20)]
    together = [runner.step([(first, 1), (second, 10)]), runner.step([(first, 1), (second, 1)])]
    found += [logits for logits, _ in together]
    found += [runner.step([(first, 7)], last_only=True)[0]]
    torch.testing.assert_close(torch.cat(found), torch.cat([expected[:33], expected[39:]]), atol=1e-3, rtol=1e-3)
    beside = torch.cat([logits for _, logits in together])
    torch.testing.assert_close(beside, expected[:11], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("num_heads", [1, 2, 3, 12, 16, 40, 71])
def test_alibi_slopes_are_those_of_bloom_and_of_mpt(num_heads: int) -> None:
    config = replace(CONFIG, position="alibi", num_heads=num_heads, num_kv_heads=1)
    slopes = alibi_slopes(config, CPU)
    torch.testing.assert_close(slopes, _get_alibi_slopes(num_heads, CPU))
    steep = alibi_slopes(replace(config, alibi_bias_max=16.0), CPU)
    torch.testing.assert_close(steep, -build_mpt_alibi_tensor(num_heads, 2, alibi_bias_max=16)[:, 0, 0])
    assert alibi_slopes(CONFIG, CPU) is None


def test_query_scales_step_at_each_period() -> None:
    scales = query_scales(replace(CONFIG, query_scaling=QueryScaling(0.1, 4, 1)), 12, CPU)
    assert scales is not None
    torch.testing.assert_close(scales, 1 + 0.1 * torch.tensor([0] * 3 + [1] * 4 + [2] * 4 + [3]).float().log1p())
