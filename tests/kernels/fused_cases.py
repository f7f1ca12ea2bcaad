"""The small Triton kernels of a layer against their torch references. Run like triton_cases.py: on a CUDA device as
they are, elsewhere by test_triton.py in the interpreter."""

from dataclasses import replace

import pytest
import torch

from kernels.cache.quantize import read_pages
from kernels.cache.reshape_and_cache import reshape_and_cache_reference
from kernels.cache.rope_and_cache import QKVHeads, rope_and_cache
from kernels.dispatch import INTERPRET
from kernels.elementwise.activation import ACTIVATIONS, gated_activation, gated_activation_reference
from kernels.elementwise.layer_norm import layer_norm, layer_norm_reference
from kernels.elementwise.quantized_rows import (
    gated_activation_quantized,
    quantize_rows,
    quantize_rows_reference,
    rms_norm_quantized,
    rms_norm_quantized_reference,
)
from kernels.elementwise.rms_norm import rms_norm, rms_norm_reference
from kernels.elementwise.rotary_embedding import rotary_embedding_reference
from kernels.elementwise.xielu import xielu, xielu_reference
from kernels.kv_format import KV_FORMATS
from tests.kernels.oracle import empty_pages

DEVICE = "cpu" if INTERPRET else "cuda"
DTYPES = [torch.float32, torch.float16] if INTERPRET else [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 64), (7, 100), (3, 2, 431), (2, 5120), (1, 16384), (0, 64)]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


def close(out, expected, ulps=2):
    """Sums in another order, and one rounding to 16 bits more or less."""
    eps = 1e-5 if out.dtype == torch.float32 else ulps * torch.finfo(out.dtype).eps
    torch.testing.assert_close(out.cpu(), expected, atol=eps, rtol=eps)


def on_device(*tensors):
    return [None if tensor is None else tensor.to(DEVICE) for tensor in tensors]


@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(dtype, shape, weight_offset, poisoned):
    x, residual, weight = (torch.randn(size).to(dtype) for size in (shape, shape, shape[-1:]))
    device_x, device_residual, device_weight = on_device(x.clone(), residual.clone(), weight)
    expected, total = rms_norm_reference(x, weight, 1e-5, residual, weight_offset)
    normed, in_place = rms_norm(device_x, device_weight, 1e-5, device_residual, weight_offset)
    close(normed, expected)
    assert torch.equal(in_place.cpu(), total) and in_place.data_ptr() == device_residual.data_ptr()
    assert torch.equal(device_x.cpu(), x)
    close(rms_norm(device_x, device_weight, 1e-5, None, weight_offset),
          rms_norm_reference(x, weight, 1e-5, None, weight_offset))  # fmt: skip


@pytest.mark.parametrize("parameters", ["weight and bias", "weight", "none"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm(dtype, shape, parameters, poisoned):
    x, residual = torch.randn(shape).to(dtype) + 3, torch.randn(shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype) if "weight" in parameters else None
    bias = torch.randn(shape[-1]).to(dtype) if "bias" in parameters else None
    device_x, device_residual, device_weight, device_bias = on_device(x, residual.clone(), weight, bias)
    expected, total = layer_norm_reference(x, weight, bias, 1e-5, residual)
    normed, in_place = layer_norm(device_x, device_weight, device_bias, 1e-5, device_residual)
    close(normed, expected)
    assert torch.equal(in_place.cpu(), total) and in_place.data_ptr() == device_residual.data_ptr()
    close(layer_norm(device_x, device_weight, device_bias, 1e-5), layer_norm_reference(x, weight, bias, 1e-5))


@pytest.mark.parametrize(
    "norm", [lambda x, w, r: rms_norm(x, w, 1e-6, r), lambda x, w, r: layer_norm(x, w, w, 1e-6, r)]
)
def test_norms_of_a_row_do_not_depend_on_the_batch(norm, dtype):
    x, residual, weight = on_device(*(torch.randn(size).to(dtype) for size in ((9, 200), (9, 200), (200,))))
    together, _ = norm(x, weight, residual.clone())
    for row in range(9):
        alone, _ = norm(x[row : row + 1], weight, residual[row : row + 1].clone())
        assert torch.equal(alone[0], together[row])


def test_norms_read_strided_rows_and_leave_what_is_between(dtype):
    wide, weight = torch.randn(6, 300).to(dtype), torch.randn(96).to(dtype)
    device_wide, device_weight = on_device(wide.clone(), weight)
    heads = device_wide[:, 7:295].unflatten(1, (3, 96))
    close(rms_norm(heads, device_weight, 1e-6), rms_norm_reference(wide[:, 7:295].unflatten(1, (3, 96)), weight, 1e-6))
    columns = torch.randn(96, 5).to(dtype)
    close(layer_norm(columns.to(DEVICE).t(), device_weight, None, 1e-6),
          layer_norm_reference(columns.t(), weight, None, 1e-6))  # fmt: skip
    assert torch.equal(device_wide.cpu(), wide)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, where the sigmoid becomes 0
@pytest.mark.parametrize("shape", [(1, 64), (7, 100), (3, 2 * 1027), (0, 64)], ids=str)
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_gated_activation(dtype, shape, name, poisoned):
    wide = torch.randn(shape[0], shape[1] + 5).to(dtype) * 4
    close(gated_activation(wide.to(DEVICE)[:, 2:-3], name), gated_activation_reference(wide[:, 2:-3], name))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_silu_far_out():
    x = torch.tensor([[-1e4, -100.0, -88.0, -1.0, 0.0, 1.0, 100.0, 1e4] + [1.0] * 8])
    close(gated_activation(x.to(DEVICE), "silu"), torch.nn.functional.silu(x[:, :8]))


def test_an_unknown_activation_names_the_known_ones():
    with pytest.raises(ValueError, match="unknown activation 'swishy'; known are gelu"):
        gated_activation(torch.zeros(1, 2, device=DEVICE), "swishy")


def same_rows(found, expected):
    """The same codes and scales, bit for bit; of fp32 rows up to the last bit, since the compiler may fuse a product
    and a sum in one of two kernels."""
    assert found.dtype == expected.dtype and len(found) == len(expected)
    if found.dtype == torch.float32:
        torch.testing.assert_close(found.scales.cpu(), expected.scales.cpu(), rtol=3e-7, atol=0)
        codes, others = (rows.codes.cpu().view(torch.uint8).int() for rows in (found, expected))
        assert ((codes - others).abs() <= 1).all()
        return
    assert torch.equal(found.scales.cpu(), expected.scales.cpu())
    assert torch.equal(found.codes.cpu().view(torch.uint8), expected.codes.cpu().view(torch.uint8))


TYPES = pytest.mark.parametrize("to", [torch.float8_e4m3fn, torch.int8], ids=str)
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


@TYPES
@pytest.mark.parametrize("n", [16, 100])
def test_rows_are_rounded(dtype, to, n):
    """A row of zeros, of small and of large numbers, and gaps between rows."""
    x = (torch.randn(5, n + 3) * torch.tensor([1.0, 1e-3, 0.0, 1e4, 7.0])[:, None]).to(dtype).to(DEVICE)[:, 3:]
    found, largest = quantize_rows(x, to), LARGEST[to]
    same_rows(found, quantize_rows_reference(x, to))
    assert found.codes.float().abs().amax(1).tolist() == [largest, largest, 0.0, largest, largest]


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, of the division and the cast of NaN
@TYPES
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_a_row_with_nan_or_infinity_stays_one(dtype, to, broken):
    """Its products are no numbers, so its request fails. Other rows keep their numbers."""
    x = torch.randn(3, 32).to(dtype)
    x[1, 7] = broken
    found = quantize_rows(x.to(DEVICE), to)
    wide = found.codes.float() * found.scales
    assert not wide[1].isfinite().all() and wide[0].isfinite().all() and wide[2].isfinite().all()
    assert not (wide[1] * torch.rand(32, device=DEVICE)).sum().isfinite()


@TYPES
@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(7, 100), (2, 5120), (0, 64)], ids=str)
def test_rms_norm_in_8_bits(dtype, to, shape, weight_offset, poisoned):
    """The codes and scales of the norm's own kernel and quantize_rows, and within a code of the reference."""
    x, residual, weight = on_device(*(torch.randn(size).to(dtype) for size in (shape, shape, shape[-1:])))
    kept = residual.clone()
    rows, total = rms_norm_quantized(x, weight, 1e-5, to, residual, weight_offset)
    normed, expected_total = rms_norm(x, weight, 1e-5, kept.clone(), weight_offset)
    same_rows(rows, quantize_rows(normed, to))
    assert torch.equal(total, expected_total) and total.data_ptr() == residual.data_ptr()
    host = (x.cpu(), weight.cpu())
    expected, _ = rms_norm_quantized_reference(*host, 1e-5, to, kept.cpu(), weight_offset)
    wide, wanted = (some.codes.cpu().float() * some.scales.cpu() for some in (rows, expected))
    step = wanted.abs() / 8 + expected.scales / 256 if to != torch.int8 else 1.01 * expected.scales + wanted.abs() / 256
    assert ((wide - wanted).abs() <= step).all()
    alone, same = rms_norm_quantized(x, weight, 1e-5, to, None, weight_offset)
    same_rows(alone, quantize_rows(rms_norm(x, weight, 1e-5, None, weight_offset), to))
    assert torch.equal(same, x)


@TYPES
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("shape", [(7, 100), (3, 2 * 1027), (0, 64)], ids=str)
@pytest.mark.parametrize("name", ["gelu", "gelu_new", "silu"])
def test_gated_activation_in_8_bits(dtype, to, shape, name, poisoned):
    wide = (torch.randn(shape[0], shape[1] + 5) * 4).to(dtype).to(DEVICE)[:, 2:-3]
    same_rows(gated_activation_quantized(wide, name, to), quantize_rows(gated_activation(wide, name), to))


@pytest.mark.parametrize("shape", [(1, 64), (3, 1027), (0, 64)], ids=str)
def test_xielu(dtype, shape, poisoned):
    wide = torch.randn(shape[0], shape[1] + 5).to(dtype) * 4
    close(xielu(wide.to(DEVICE)[:, 2:-3], 0.7, 1.3), xielu_reference(wide[:, 2:-3], 0.7, 1.3))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_xielu_near_zero_and_far_out():
    """Relative to x, which the result is close to a half of near 0."""
    x = torch.tensor([[0.0, -1e-30, -1e-6, -1e-3, -0.2499, -0.2501, -1.0, -80.0, -1e4, 1e-30, 1e-6, 100.0, 1e4, 1e18]])
    wide = x.double()
    exact = torch.where(wide > 0, 0.7 * wide * wide, 1.3 * (torch.expm1(wide) - wide)) + 0.5 * wide
    torch.testing.assert_close(xielu(x.to(DEVICE), 0.7, 1.3).cpu().double(), exact, rtol=5e-6, atol=0.0)


# (num_heads, num_kv_heads, head_dim, rotary_dim (0: none), interleaved, qk_norm, weight_offset)
HEADS = {
    "llama": (6, 2, 64, 64, False, False, 0.0),
    "qwen3": (4, 4, 32, 32, False, True, 0.0),
    "gemma3": (3, 1, 80, 80, False, True, 1.0),
    "neox": (5, 5, 20, 8, False, False, 0.0),
    "phi-4-mini": (3, 1, 64, 48, False, False, 0.0),
    "one pair": (4, 2, 8, 2, False, False, 0.0),
    "gpt-j": (2, 2, 48, 16, True, True, 0.0),
    "no rotation": (3, 1, 16, 0, False, True, 0.0),
    "many heads": (40, 20, 128, 128, False, True, 0.0),
    "no tail, interleaved": (3, 2, 36, 36, True, False, 0.0),
    "olmo2": (6, 2, 24, 24, False, "rows", 0.0),
    "olmoe": (3, 3, 48, 16, True, "rows", 0.0),
    "cohere": (4, 2, 32, 32, True, "per head", 0.0),
    "per head": (4, 2, 32, 8, False, "per head", 1.0),
    "hunyuan": (3, 1, 64, 64, False, True, 0.0),
    "llama4": (5, 1, 64, 64, True, False, 0.0),
    "clip": (4, 2, 20, 0, False, False, 0.0),
    "no keys": (3, 0, 64, 64, False, True, 0.0),
}
# Further fields of QKVHeads; query_scales are made by make_heads.
FIELDS = {
    "olmoe": {"norm_rows": True, "clip": 0.5},
    "olmo2": {"norm_rows": True, "norm_centred": True},
    "cohere": {"norm_centred": True, "query_scales": True},
    "hunyuan": {"norm_after_rope": True, "v_norm": True},
    "llama4": {"norm_without_weights": True, "norm_after_rope": True},
    "clip": {"clip": 0.3, "query_scales": True},
}


def make_heads(name, dtype):
    """(QKVHeads on the CPU, head_dim) for one of HEADS."""
    num_heads, num_kv_heads, head_dim, rotary_dim, interleaved, qk_norm, offset = HEADS[name]
    table = None
    if rotary_dim:
        angles = torch.rand(50, rotary_dim // 2) * 6
        table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    q_norm, k_norm = (torch.randn(_norm_shape(qk_norm, n, head_dim)).to(dtype) for n in (num_heads, num_kv_heads))
    fields = dict(FIELDS.get(name, {}))
    fields |= {"query_scales": torch.rand(50) + 0.5} if "query_scales" in fields else {}
    return QKVHeads(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        cos_sin_cache=table,
        interleaved=interleaved,
        q_norm=q_norm if qk_norm else None,
        k_norm=k_norm if qk_norm else None,
        norm_eps=1e-5,
        norm_weight_offset=offset,
        **fields,
    ), head_dim


def _norm_shape(kind, num_heads, head_dim):
    return {"rows": (num_heads * head_dim,), "per head": (num_heads, head_dim)}.get(kind, (head_dim,))


def moved(heads):
    tensors = {name: getattr(heads, name) for name in heads.__slots__}
    return replace(heads, **{name: x.to(DEVICE) for name, x in tensors.items() if isinstance(x, torch.Tensor)})


def expected_norm(x, weight, heads):
    """The norm of QKVHeads by its formula, one head or one row after the other."""
    if not x.shape[1]:
        return x
    rows = [x.flatten(1).float()] if heads.norm_rows else [x[:, h].float() for h in range(x.shape[1])]
    weight = torch.ones(x.shape[2]) if weight is None else weight
    weights = list(weight) if weight.ndim == 2 else [weight] * len(rows)
    out = []
    for row, w in zip(rows, weights, strict=True):
        row = row - row.mean(-1, keepdim=True) if heads.norm_centred else row
        normed = row / (row.square().mean(-1, keepdim=True) + heads.norm_eps).sqrt()
        if not heads.norm_centred and not heads.norm_weight_offset:
            normed = normed.to(x.dtype).float()  # as LLaMA
        out.append(normed * (w.float() + heads.norm_weight_offset))
    return torch.stack(out, 1).view(x.shape).to(x.dtype)


def expected_of(qkv, heads, positions, slots, caches):
    """Plain torch from beginning to end; rope_and_cache_reference would call kernels in the interpreter."""
    q, k, v = torch.split(qkv.clone(), [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=1)
    if heads.has_norm and not heads.norm_after_rope:
        q, k = expected_norm(q, heads.q_norm, heads), expected_norm(k, heads.k_norm, heads)
    if heads.clip:
        q, k, v = (x.clamp(-heads.clip, heads.clip) for x in (q, k, v))
    if heads.cos_sin_cache is not None:
        rotary_embedding_reference(positions, q, k, heads.cos_sin_cache, heads.interleaved)
    if heads.has_norm and heads.norm_after_rope:
        q, k = expected_norm(q, heads.q_norm, heads), expected_norm(k, heads.k_norm, heads)
    if heads.v_norm:
        v = rms_norm_reference(v, torch.ones(v.shape[2], dtype=v.dtype), heads.norm_eps)
    if heads.query_scales is not None:
        q = (q * heads.query_scales[positions][:, None, None]).to(q.dtype)
    reshape_and_cache_reference(k, v, *caches, slots)
    return q


# Every format with the usual heads; the rare ones plain and in one format, whose rows are written by a second launch.
LAYOUTS = [
    (name, kv_format)
    for name in HEADS
    for kv_format in (None, *KV_FORMATS.values())
    if (name not in FIELDS and name != "no keys") or kv_format in (None, KV_FORMATS["int8"])
]


def each_layout_in_one_dtype():
    """Every layout in every dtype, for parametrize. Those that are not slow have each layout once, and each head and
    each format in both dtypes of the interpreter."""
    names, formats = list(HEADS), [None, *KV_FORMATS.values()]
    return [
        pytest.param(
            dtype, name, kv_format,
            marks=[pytest.mark.slow] * ((number + names.index(name) + formats.index(kv_format)) % 2),
        )
        for number, dtype in enumerate(DTYPES)
        for name, kv_format in LAYOUTS
    ]  # fmt: skip


@pytest.mark.parametrize("dtype, name, kv_format", each_layout_in_one_dtype(), ids=lambda x: getattr(x, "name", str(x)))
def test_rope_and_cache(dtype, name, kv_format):
    """Rows are views of a wider tensor; one slot is -1; what is not written keeps its poison."""
    num_tokens, block_size, num_blocks = 5, 8, 3
    heads, head_dim = make_heads(name, dtype)
    num_rows = heads.num_heads + 2 * heads.num_kv_heads
    wide = torch.randn(num_tokens, (num_rows + 1) * head_dim).to(dtype)
    positions, slots = torch.tensor([0, 49, 7, 7, 3]), torch.randperm(num_blocks * block_size)[:num_tokens]
    slots[3] = -1
    if kv_format is None:
        caches = [torch.full((num_blocks, heads.num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
                  for _ in range(4)]  # fmt: skip
    else:
        caches = [empty_pages(num_blocks, heads.num_kv_heads, head_dim, block_size, kv_format) for _ in range(4)]
    found = on_device(*(cache.clone() for cache in caches[:2]))
    device_wide = wide.clone().to(DEVICE)
    device_qkv = device_wide[:, : num_rows * head_dim].unflatten(1, (num_rows, head_dim))
    q = rope_and_cache(device_qkv, moved(heads), *on_device(positions, slots), *found)
    qkv = wide[:, : num_rows * head_dim].unflatten(1, (num_rows, head_dim))
    close(q, expected_of(qkv, heads, positions, slots, caches[2:]), ulps=4)
    assert torch.equal(device_wide[:, num_rows * head_dim :].cpu(), wide[:, num_rows * head_dim :])
    for got, expected in zip(found, caches[2:], strict=True):
        if kv_format is None:
            eps = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(got.cpu(), expected, atol=eps, rtol=eps, equal_nan=True)
        else:  # a code may be off by one, where a value differs in its last bit
            step = {"int8": 0.05, "fp8": 0.5, "int4": 0.7}[kv_format.name]
            torch.testing.assert_close(read_pages(got.cpu()), read_pages(expected), equal_nan=True, rtol=0, atol=step)


def test_rope_and_cache_takes_no_tokens_and_refuses_gaps():
    heads, head_dim = make_heads("llama", torch.float32)
    cache, none = torch.zeros(1, 2, 8, head_dim, device=DEVICE), torch.empty(0, dtype=torch.int64, device=DEVICE)
    empty = torch.empty(0, 10, head_dim, device=DEVICE)
    assert rope_and_cache(empty, moved(heads), none, none, cache, cache.clone()).shape == (0, 6, head_dim)
    gaps = torch.zeros(1, 10, head_dim + 1, device=DEVICE)[..., 1:]
    with pytest.raises(ValueError, match="without gaps"):
        rope_and_cache(gaps, moved(heads), none, none, cache, cache)
    with pytest.raises(ValueError, match="both"):
        QKVHeads(6, 2, q_norm=torch.ones(head_dim))
