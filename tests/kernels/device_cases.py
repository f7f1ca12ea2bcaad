"""Every kernel, called as the models call it, in 16 bits against fp32: on a CUDA device, else on the CPU.

Not collected by default: `make gpu-check` runs it on the device, and tests/benchmarks/test_gpu_check.py a few cases of
it here. The expected values come from the references on fp32 copies of the same 16-bit inputs, so that all error is the
kernel's. Sizes are odd where that is allowed, and torch.empty is poisoned by conftest.py.
"""

import pytest
import torch

from kernels.attention.decode import paged_attention
from kernels.attention.prefill import prefill_attention, prefill_attention_reference
from kernels.cache.copy_blocks import BlockCopier
from kernels.cache.quantize import read_pages
from kernels.cache.reshape_and_cache import reshape_and_cache
from kernels.elementwise.activation import gated_activation, gated_activation_reference
from kernels.elementwise.layer_norm import layer_norm, layer_norm_reference
from kernels.elementwise.rms_norm import rms_norm, rms_norm_reference
from kernels.elementwise.rotary_embedding import rotary_embedding, rotary_embedding_reference
from kernels.kv_format import KV_FORMATS
from kernels.linear.packed import PackedLinear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16]
FORMATS = {"auto": None, **KV_FORMATS}
# |out - exact| / |exact| over a whole tensor: one or a few roundings of 2^-8 (bf16) or 2^-11 (fp16), root mean square
MAX_ERROR = {torch.bfloat16: 5e-3, torch.float16: 6e-4}
# (num_heads, num_kv_heads, head_dim, block_size)
HEADS = [(32, 8, 128, 16), (16, 8, 128, 64), (12, 4, 64, 32), (7, 1, 80, 16), (5, 5, 96, 128), (14, 2, 112, 16),
         (8, 4, 256, 16), (64, 8, 128, 32)]  # fmt: skip
OPTIONS = {"plain": {}, "window": {"sliding_window": 100}, "softcap": {"softcap": 2.0}, "alibi": {}}
# Every layout once, every option at three of them: a combination more is two kernels more to compile.
COMBINATIONS = [(heads, "plain") for heads in HEADS] + [
    (heads, case) for heads in (HEADS[0], HEADS[3], HEADS[6]) for case in OPTIONS if case != "plain"
]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


def near(out: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    """Finite everywhere, and within the error of the dtype as a whole."""
    assert out.dtype == dtype and out.shape == exact.shape
    assert out.isfinite().all(), "something was not written, or what nobody wrote was read"
    error = (out.double() - exact.double()).norm() / exact.double().norm()
    assert error < factor * MAX_ERROR[dtype]


def rand(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("shape", [(1, 64), (7, 100), (33, 431), (5, 4096), (300, 1024), (40, 3, 128)], ids=str)
@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
def test_rms_norm(dtype, shape, weight_offset):
    x, residual, weight = rand(*shape, dtype=dtype), rand(*shape, dtype=dtype), rand(shape[-1], dtype=dtype)
    normed, total = rms_norm(x, weight, 1e-5, residual.clone(), weight_offset)  # the sum overwrites it on a GPU
    near(total, x.float() + residual.float(), dtype)
    near(normed, rms_norm_reference(total.float(), weight.float(), 1e-5, weight_offset=weight_offset), dtype)
    alone = rms_norm(x, weight, 1e-5, weight_offset=weight_offset)
    near(alone, rms_norm_reference(x.float(), weight.float(), 1e-5, weight_offset=weight_offset), dtype)


@pytest.mark.parametrize("shape", [(1, 64), (7, 100), (33, 431), (5, 4096)], ids=str)
def test_layer_norm(dtype, shape):
    x, residual = rand(*shape, dtype=dtype), rand(*shape, dtype=dtype)
    weight, bias = rand(shape[-1], dtype=dtype), rand(shape[-1], dtype=dtype)
    normed, total = layer_norm(x, weight, bias, 1e-5, residual.clone())  # the sum overwrites it on a GPU
    near(total, x.float() + residual.float(), dtype)
    near(normed, layer_norm_reference(total.float(), weight.float(), bias.float(), 1e-5), dtype)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("shape", [(1, 64), (7, 100), (33, 862), (130, 28672)], ids=str)
def test_gated_activation(dtype, shape, name):
    x = rand(*shape, dtype=dtype)
    near(gated_activation(x, name), gated_activation_reference(x.float(), name), dtype)


@pytest.mark.parametrize("head_dim, rotary_dim, interleaved", [(128, 128, False), (80, 32, False), (96, 20, False),
                                                               (64, 32, True)])  # fmt: skip
@pytest.mark.parametrize("num_tokens", [1, 37])
def test_rotary_embedding(dtype, num_tokens, head_dim, rotary_dim, interleaved):
    qkv, positions = rand(num_tokens, 11, head_dim, dtype=dtype), torch.randint(0, 50, (num_tokens,), device=DEVICE)
    angles = torch.rand(50, rotary_dim // 2, device=DEVICE) * 6
    table, exact, before = torch.cat([angles.cos(), angles.sin()], dim=-1), qkv.float(), qkv.clone()
    rotary_embedding(positions, qkv[:, :7], qkv[:, 7:9], table, interleaved)
    rotary_embedding_reference(positions, exact[:, :7], exact[:, 7:9], table, interleaved)
    near(qkv, exact, dtype)
    assert torch.equal(qkv[:, 9:], before[:, 9:]) and torch.equal(qkv[..., rotary_dim:], before[..., rotary_dim:])


@pytest.mark.parametrize("rows", [1, 3, 17, 130])
def test_linear(dtype, rows):
    weight, bias, x = rand(515, 260, dtype=dtype), rand(515, dtype=dtype), rand(rows, 260, dtype=dtype)
    exact = x.double() @ weight.double().T + bias.double()
    near(PackedLinear(weight.clone(), bias)(x), exact, dtype)


class Cache:
    """Sequences of random keys and values, written by reshape_and_cache into shuffled blocks among poisoned ones."""

    def __init__(self, seq_lens, heads, dtype, kv_format=None):
        _, num_kv_heads, head_dim, block_size = heads
        counts = [-(-n // block_size) for n in seq_lens]
        cache_dtype = getattr(torch, kv_format.dtype_name) if kv_format else dtype
        shape = (sum(counts) + 3, num_kv_heads, block_size, kv_format.width(head_dim) if kv_format else head_dim)
        make = torch.zeros(shape, dtype=torch.uint8, device=DEVICE).view if kv_format else None
        self.k, self.v = (make(cache_dtype) if make else torch.zeros(shape, dtype=dtype, device=DEVICE)
                          for _ in range(2))  # fmt: skip
        if kv_format is not None:  # two tensors, not two views of one
            self.v = self.k.clone()
        order = torch.randperm(shape[0], device=DEVICE).int().split([*counts, 3])
        self.tables = torch.full((len(seq_lens), max(counts) + 1), 0, dtype=torch.int32, device=DEVICE)
        slots = []
        for i, (n, blocks) in enumerate(zip(seq_lens, order[:-1], strict=True)):
            self.tables[i, : counts[i]] = blocks
            t = torch.arange(n, device=DEVICE)
            slots.append(blocks.long()[t // block_size] * block_size + t % block_size)
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
        self.slots = torch.cat(slots)
        self.rows = [rand(sum(seq_lens), num_kv_heads, head_dim, dtype=dtype) for _ in range(2)]
        reshape_and_cache(*self.rows, self.k, self.v, self.slots)

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32 caches with what the pages give back."""
        return tuple(read_pages(cache).float() for cache in (self.k, self.v))


def attention_options(case, num_heads):
    slopes = torch.linspace(0.01, 0.4, num_heads, device=DEVICE)
    return {"alibi_slopes": slopes} if case == "alibi" else OPTIONS[case]


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_cache_writes(dtype, heads):
    cache = Cache([1, 40, 150], heads, dtype)
    for pages, rows in zip((cache.k, cache.v), cache.rows, strict=True):
        assert torch.equal(pages.transpose(1, 2).flatten(0, 1)[cache.slots], rows)
        assert pages.count_nonzero() == rows.count_nonzero(), "another slot was written"


@pytest.mark.parametrize("kv_format", KV_FORMATS.values(), ids=KV_FORMATS)
@pytest.mark.parametrize("heads", HEADS[:4], ids=str)
def test_quantised_cache_writes(dtype, heads, kv_format):
    cache = Cache([1, 40, 150], heads, dtype, kv_format)
    for pages, rows in zip(cache.exact(), cache.rows, strict=True):
        back = pages.transpose(1, 2).flatten(0, 1)[cache.slots]
        limit = {"int8": 0.01, "fp8": 0.04, "int4": 0.15}[kv_format.name]
        assert (back - rows.float()).norm() / rows.float().norm() < limit


@pytest.mark.parametrize("heads, case", COMBINATIONS, ids=str)
def test_decode(dtype, heads, case):
    """One short sequence, one that ends with a block, one over several splits."""
    cache = Cache([1, 128, 3001], heads, dtype)
    check_decode(cache, heads, dtype, case)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("heads", HEADS[:4], ids=str)
def test_decode_of_many(dtype, heads, name):
    cache = Cache([17 * i + 1 for i in range(70)], heads, dtype, FORMATS[name])
    # with codes, the probabilities are rounded after their product with the scales
    check_decode(cache, heads, dtype, "plain", factor=1.5 if FORMATS[name] is None else 2.0)


def check_decode(cache, heads, dtype, case, factor=1.5):
    num_heads, _, head_dim, _ = heads
    qkv, options = rand(len(cache.seq_lens), num_heads + 2, head_dim, dtype=dtype), attention_options(case, num_heads)
    q = qkv[:, :num_heads]
    out = paged_attention(q, cache.k, cache.v, cache.tables, cache.seq_lens, head_dim**-0.5, **options)
    bounds = torch.arange(len(q) + 1, dtype=torch.int32, device=DEVICE)
    exact = prefill_attention_reference(q.float(), *cache.exact(), cache.tables, bounds, cache.seq_lens, 1,
                                        head_dim**-0.5, **options)  # fmt: skip
    near(out, exact, dtype, factor)


@pytest.mark.parametrize("heads, case", COMBINATIONS, ids=str)
def test_prefill(dtype, heads, case):
    """Whole, one token, a chunk behind a long past, and one that is not a multiple of any tile."""
    check_prefill(Cache([200, 33, 1500, 301], heads, dtype), [200, 1, 130, 301], heads, dtype, case)


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("heads", HEADS[:4], ids=str)
def test_prefill_of_quantised_pages(dtype, heads, name):
    check_prefill(Cache([90, 500], heads, dtype, FORMATS[name]), [90, 65], heads, dtype, "plain")


def check_prefill(cache, q_lens, heads, dtype, case):
    num_heads, _, head_dim, _ = heads
    qkv, options = rand(sum(q_lens), num_heads + 2, head_dim, dtype=dtype), attention_options(case, num_heads)
    bounds = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    arguments = cache.tables, bounds, cache.seq_lens, max(q_lens), head_dim**-0.5
    out = prefill_attention(qkv[:, :num_heads], cache.k, cache.v, *arguments, **options)
    exact = prefill_attention_reference(qkv[:, :num_heads].float(), *cache.exact(), *arguments, **options)
    near(out, exact, dtype, factor=1.5)


def test_copies_of_blocks(dtype):
    tensors = [rand(9, 3, 16, 80, dtype=dtype) for _ in range(5)]
    before = [tensor.clone() for tensor in tensors]
    sources, targets = (torch.tensor(ids, device=DEVICE) for ids in ([1, 1, 7], [0, 8, 3]))
    BlockCopier(tensors).copy(sources, targets)
    for tensor, old in zip(tensors, before, strict=True):
        expected = old.clone()
        expected[targets] = old[sources]
        assert torch.equal(tensor, expected)
