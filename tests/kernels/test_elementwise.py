"""Norms, rotary embedding, activations, cache writes and linear layers on a CPU, at odd shapes."""

import pytest
import torch
import torch.nn.functional as F
from transformers.activations import XIELUActivation
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kernels.cache.reshape_and_cache import reshape_and_cache, reshape_and_cache_reference
from kernels.cpu.elementwise.norms import supports_layer_norm
from kernels.elementwise.activation import ACTIVATIONS, activation, gated_activation, gated_activation_reference
from kernels.elementwise.layer_norm import layer_norm, layer_norm_reference
from kernels.elementwise.rms_norm import rms_norm, rms_norm_reference
from kernels.elementwise.rotary_embedding import rotary_embedding, rotary_embedding_reference
from kernels.elementwise.rows import add, gate_rows, limit, limit_reference, multiply
from kernels.elementwise.xielu import coefficients, xielu
from kernels.linear.packed import PackedLinear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(1, 64), (7, 96), (33, 768), (5, 100), (40, 3, 32)], ids=str)
def test_rms_norm(dtype, shape, weight_offset):
    x, residual, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    before = x.clone(), residual.clone()
    expected, total = rms_norm_reference(x, weight, 1e-5, residual, weight_offset)
    normed, new_residual = rms_norm(x, weight, 1e-5, residual, weight_offset)
    assert torch.equal(new_residual, total)
    torch.testing.assert_close(normed, expected)
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5, weight_offset=weight_offset),
        rms_norm_reference(x, weight, 1e-5, weight_offset=weight_offset),
    )
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


def test_rms_norm_reads_strided_heads(dtype):
    """QK-norm: the heads of q inside a fused qkv row."""
    qkv, weight = torch.randn(6, 9, 64).to(dtype), torch.randn(64).to(dtype)
    torch.testing.assert_close(
        rms_norm(qkv[:, 2:7], weight, 1e-6), rms_norm_reference(qkv[:, 2:7].clone(), weight, 1e-6)
    )


def test_rms_norm_is_what_llama_computes(dtype):
    """One unit in the last place in 16 bits: where transformers rounds a value up, another order of sums may not."""
    x, norm = torch.randn(9, 160).to(dtype), LlamaRMSNorm(160, eps=1e-6).to(dtype)
    torch.nn.init.normal_(norm.weight)
    with torch.no_grad():
        torch.testing.assert_close(rms_norm(x, norm.weight.detach(), 1e-6), norm(x))


@pytest.mark.parametrize("shape", [(1, 64), (7, 100), (33, 768), (40, 3, 32)], ids=str)
def test_layer_norm(dtype, shape):
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight, bias = torch.randn(shape[-1]).to(dtype), torch.randn(shape[-1]).to(dtype)
    for got, expected in zip(
        layer_norm(x, weight, bias, 1e-5, residual), layer_norm_reference(x, weight, bias, 1e-5, residual), strict=True
    ):
        torch.testing.assert_close(got, expected, atol=_one_ulp(dtype), rtol=_one_ulp(dtype))
    torch.testing.assert_close(
        layer_norm(x, None, None, 1e-5), F.layer_norm(x.float(), shape[-1:]).to(dtype),
        atol=_one_ulp(dtype), rtol=_one_ulp(dtype),
    )  # fmt: skip


def test_layer_norm_reads_strided_heads(dtype):
    """QK-norm by a LayerNorm: the heads of q inside a fused qkv row."""
    qkv, weight = torch.randn(6, 9, 64).to(dtype), torch.randn(64).to(dtype)
    expected = layer_norm_reference(qkv[:, 2:7].clone(), weight, None, 1e-6)
    torch.testing.assert_close(layer_norm(qkv[:, 2:7], weight, None, 1e-6), expected)


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_norms_take_rows_with_gaps(dtype, norm):
    """Results of a norm have gaps with AMX, and one that is the next norm's residual, too (a post-norm model)."""
    x, residual = torch.randn(2, 9, 96).to(dtype)[..., :64]
    options = (torch.randn(64).to(dtype), 1e-5) if norm is rms_norm else (torch.randn(64).to(dtype), None, 1e-5)
    for got, expected in zip(norm(x, *options, residual), norm(x.clone(), *options, residual.clone()), strict=True):
        assert torch.equal(got, expected)
    assert dtype == torch.float16 or supports_layer_norm(x, None, None, residual), "a kernel computes them, not torch"


def test_layer_norm_far_from_zero():
    """The variance is that of centred numbers: a sum of squares would have no digits left."""
    x = torch.randn(3, 64) + 1e4
    expected = F.layer_norm(x.double(), (64,)).float()
    torch.testing.assert_close(layer_norm(x, None, None, 1e-5), expected, atol=2e-3, rtol=0)


def _one_ulp(dtype):
    """torch rounds the product before it adds the bias in 16 bits; the reference rounds once."""
    return 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("head_dim, rotary_dim, interleaved", [(64, 64, False), (80, 32, False), (32, 20, False),
                                                               (64, 32, True), (128, 128, True),
                                                               (32, 20, True)])  # fmt: skip
def test_rotary_embedding_rotates_pairs_and_leaves_the_rest(dtype, head_dim, rotary_dim, interleaved):
    qkv = torch.randn(11, 9, head_dim).to(dtype)
    original, reference = qkv.clone(), qkv.clone()
    positions = torch.randint(0, 50, (11,))
    angles = torch.rand(50, rotary_dim // 2) * 6
    cache = torch.cat([angles.cos(), angles.sin()], dim=-1)
    rotary_embedding(positions, qkv[:, :5], qkv[:, 5:7], cache, interleaved)
    rotary_embedding_reference(positions, reference[:, :5], reference[:, 5:7], cache, interleaved)
    torch.testing.assert_close(qkv, reference)

    pairs = original[:, :7, :rotary_dim].float()
    a, b = (pairs[..., 0::2], pairs[..., 1::2]) if interleaved else pairs.chunk(2, dim=-1)
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)[positions, None]
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    if interleaved:
        expected = torch.stack([turned.real, turned.imag], dim=-1).flatten(-2)
    torch.testing.assert_close(qkv[:, :7, :rotary_dim], expected.to(dtype), atol=2 * torch.finfo(dtype).eps,
                               rtol=2 * torch.finfo(dtype).eps)  # fmt: skip
    assert torch.equal(qkv[:, 7:], original[:, 7:]), "values were rotated"
    assert torch.equal(qkv[:, :, rotary_dim:], original[:, :, rotary_dim:]), "the part past rotary_dim was touched"


@pytest.mark.parametrize("shape", [(1, 64), (7, 100), (33, 862)], ids=str)
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_gated_activation(dtype, shape, name):
    """torch rounds the activation before the product in 16 bits; the reference rounds once."""
    x = torch.randn(shape).to(dtype) * 4
    tolerance = {} if dtype == torch.float32 else {"rtol": 3 * torch.finfo(dtype).eps, "atol": 1e-3}
    torch.testing.assert_close(gated_activation(x, name), gated_activation_reference(x, name), **tolerance)


@pytest.mark.parametrize("shape", [(1, 64), (7, 100), (33, 432)], ids=str)
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_plain_activation(dtype, shape, name):
    """The rows have gaps between them. The expected numbers are computed in fp32."""
    x = (torch.randn(shape[0], 2 * shape[1]) * 4).to(dtype)[:, : shape[1]]
    tolerance = {} if dtype == torch.float32 else {"rtol": 3 * torch.finfo(dtype).eps, "atol": 1e-3}
    expected = ACTIVATIONS[name](x.float()).to(dtype)
    torch.testing.assert_close(activation(x, name), expected, **tolerance)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations_far_out(name):
    x = torch.tensor([[-1e18, -100.0, -88.0, -1.0, 0.0, 1.0, 100.0, 1e18] * 2 + [1.0] * 16])
    torch.testing.assert_close(gated_activation(x, name), ACTIVATIONS[name](x[:, :16]))
    for dtype in (torch.float32, torch.bfloat16):
        far = x[:, :16].to(dtype)
        torch.testing.assert_close(activation(far, name), ACTIVATIONS[name](far.float()).to(dtype))
        assert activation(torch.full_like(far, float("nan")), name).isnan().all()


def test_gelu_far_below_zero_keeps_its_digits():
    x = torch.linspace(-5, -3, 64)[None]
    exact = (x.double() * torch.special.erfc(-x.double() * 0.5**0.5) / 2).float()
    torch.testing.assert_close(activation(x, "gelu"), exact, rtol=3e-3, atol=0)


def test_xielu_near_zero_keeps_its_digits():
    x = torch.logspace(-9, 0, 64)[None] * -1
    exact = (1.4 * (torch.expm1(x.double()) - x.double()) + 0.5 * x.double()).float()
    torch.testing.assert_close(xielu(x, 0.9, 1.4), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(1, 64), (7, 100)], ids=str)
def test_sums_and_gates_of_rows(dtype, shape):
    a, b = torch.randn(2, *shape).to(dtype)
    assert torch.equal(add(a, b), a + b) and torch.equal(multiply(a, b), a * b)
    gates = torch.randn(shape[0], 1).to(dtype)
    expected = (gates.float().sigmoid() * a.float()).to(dtype)
    torch.testing.assert_close(gate_rows(a, gates), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("scale, cap", [(1.0, 30.0), (0.0625, 0.0), (3.0, 2.0), (1.0, 0.0)])
def test_limits_of_logits(dtype, scale, cap):
    x = torch.cat([torch.randn(3, 997) * 8, torch.logspace(-6, 3, 997)[None], torch.full((1, 997), -1e4)]).to(dtype)
    found, expected = x.clone(), x.clone()
    limit(found, scale, cap)
    limit_reference(expected, scale, cap)
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=0)
    broken = torch.full((1, 32), float("nan")).to(dtype)
    limit(broken, scale, cap)
    assert broken.isnan().all()


def test_xielu_is_that_of_transformers(dtype):
    module = XIELUActivation(alpha_p_init=0.9, alpha_n_init=1.4, dtype=dtype)
    positive, negative = coefficients(torch.cat([module.alpha_p, module.alpha_n]).detach())
    x = torch.randn(9, 100).to(dtype) * 4
    tolerance = {"rtol": 3 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    with torch.no_grad():
        torch.testing.assert_close(xielu(x, positive, negative), module(x), **tolerance)


def test_an_unknown_activation_names_the_known_ones():
    with pytest.raises(ValueError, match="unknown activation 'swishy'; known are gelu"):
        activation(torch.zeros(1), "swishy")


@pytest.mark.parametrize("head_dim, block_size", [(64, 16), (20, 3)])
def test_reshape_and_cache_writes_its_slots_and_nothing_else(dtype, head_dim, block_size):
    qkv = torch.randn(9, 7, head_dim).to(dtype)
    key, value = qkv[:, 3:5], qkv[:, 5:]
    slots = torch.randperm(7 * block_size)[:9].contiguous()
    slots[4] = -1
    caches = [torch.full((7, 2, block_size, head_dim), -3.0, dtype=dtype) for _ in range(4)]
    reshape_and_cache(key, value, *caches[:2], slots)
    reshape_and_cache_reference(key, value, *caches[2:], slots)
    expected = [torch.full((7, 2, block_size, head_dim), -3.0, dtype=dtype) for _ in range(2)]
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[0][slot // block_size, :, slot % block_size] = key[t]
            expected[1][slot // block_size, :, slot % block_size] = value[t]
    for i, cache in enumerate(caches):
        assert torch.equal(cache, expected[i % 2])


@pytest.mark.parametrize("rows", [1, 3, 16, 65])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_linear(dtype, rows, with_bias):
    weight, bias = torch.randn(72, 40).to(dtype), torch.randn(72).to(dtype) if with_bias else None
    layer, x = PackedLinear(weight, bias), torch.randn(rows, 40).to(dtype)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    out = layer(x)
    assert out.dtype == dtype and out.shape == (rows, 72)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def test_a_packed_layer_lets_go_of_the_plain_weight():
    layer = PackedLinear(torch.randn(64, 64).bfloat16())
    assert (layer.weight is None) == (layer.packed_weight is not None or layer.panels is not None)


@pytest.mark.parametrize("rows", [1, 7, 300])
def test_two_threads_give_the_same_bits_as_one(rows):
    x, weight = torch.randn(rows, 768).bfloat16(), torch.randn(768).bfloat16()
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append((rms_norm(x, weight, 1e-5), gated_activation(x, "silu")))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_no_rows_at_all():
    weight, cache = torch.randn(64), torch.zeros(2, 1, 8, 64)
    assert rms_norm(torch.empty(0, 64), weight, 1e-5).shape == (0, 64)
    assert gated_activation(torch.empty(0, 64), "silu").shape == (0, 32)
    reshape_and_cache(torch.empty(0, 1, 64), torch.empty(0, 1, 64), cache, cache.clone(), torch.empty(0).long())
