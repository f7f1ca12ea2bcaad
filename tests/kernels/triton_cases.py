"""The Triton kernels against dense attention. On a CUDA device as they are; elsewhere test_triton.py runs this file in
the interpreter, in a process of its own (TRITON_INTERPRET=1 must be set before triton is imported)."""

import pytest
import torch

from kernels.attention.decode import paged_attention
from kernels.attention.prefill import prefill_attention
from kernels.cache.copy_blocks import (
    WORDS_PER_PROGRAM,
    BlockCopier,
    copy_blocks_reference,
    pack_blocks_reference,
    unpack_blocks_reference,
)
from kernels.cache.quantize import read_pages
from kernels.cache.reshape_and_cache import reshape_and_cache, reshape_and_cache_reference
from kernels.dispatch import INTERPRET
from kernels.kv_format import KV_FORMATS
from tests.kernels.oracle import attention, empty_pages, fused_q, options, paged

DEVICE = "cpu" if INTERPRET else "cuda"
# The interpreter computes bf16 from its bit pattern, silently wrong; on a device bf16 is the dtype that matters.
DTYPES = [torch.float32, torch.float16] if INTERPRET else [torch.float32, torch.float16, torch.bfloat16]
# (num_heads, num_kv_heads, head_dim, block_size, case)
SHAPES = [(3, 3, 32, 8, "plain"), (6, 2, 64, 16, "all"), (7, 1, 80, 24, "window"), (4, 1, 128, 128, "alibi"),
          (4, 4, 48, 16, "softcap")]  # fmt: skip


def each_shape_in_one_dtype():
    """Every shape in every dtype, for parametrize. Those that are not slow have each shape once, and each dtype."""
    return [
        pytest.param(dtype, shape, marks=[pytest.mark.slow] * ((i + j) % 2))
        for i, dtype in enumerate(DTYPES)
        for j, shape in enumerate(SHAPES)
    ]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def close(out, expected):
    """In 16 bits the probabilities are rounded before they meet the values: half of 1e-3 of values about 1. A device's
    exp2 is good to 2e-7 of it, and what it is raised to has the error of a sum of products."""
    fp32 = {} if INTERPRET else {"atol": 3e-5, "rtol": 1e-4}
    tolerance = {torch.float32: fp32, torch.float16: {"atol": 2e-3, "rtol": 2e-3},
                 torch.bfloat16: {"atol": 1.6e-2, "rtol": 1.6e-2}}[out.dtype]  # fmt: skip
    torch.testing.assert_close(out.cpu(), expected, **tolerance)


def on_device(kwargs):
    return {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()}


@pytest.mark.parametrize("dtype, shape", each_shape_in_one_dtype(), ids=str)
def test_decode(dtype, shape):
    num_heads, num_kv_heads, head_dim, block_size, case = shape
    seq_lens = [1, 17, 70]
    data = paged(seq_lens, num_kv_heads, head_dim, block_size, dtype)
    q, kwargs = fused_q(3, num_heads, num_kv_heads, head_dim, dtype), options(case, num_heads)
    data.seq_lens[1] = 0
    tensors = [x.to(DEVICE) for x in (q, data.k_cache, data.v_cache, data.block_tables, data.seq_lens)]
    out = paged_attention(*tensors, 0.3, **on_device(kwargs))
    assert not out[1].any(), "a padding row must give zeros"
    for i in (0, 2):
        close(out[i : i + 1], attention(q[i : i + 1], data.keys[i], data.values[i], 0.3, **kwargs))


@pytest.mark.parametrize("dtype, shape", each_shape_in_one_dtype(), ids=str)
def test_prefill_whole_chunked_single_and_empty(dtype, shape):
    num_heads, num_kv_heads, head_dim, block_size, case = shape
    seq_lens, q_lens = [33, 90, 17, 5], [33, 40, 1, 0]
    data = paged(seq_lens, num_kv_heads, head_dim, block_size, dtype)
    q, kwargs = fused_q(sum(q_lens), num_heads, num_kv_heads, head_dim, dtype), options(case, num_heads)
    cu_seqlens_q = torch.tensor([0, 33, 73, 74, 74], dtype=torch.int32)
    tensors = [x.to(DEVICE) for x in (q, data.k_cache, data.v_cache, data.block_tables, cu_seqlens_q, data.seq_lens)]
    out = prefill_attention(*tensors, max(q_lens), 0.3, **on_device(kwargs))
    for i, rows in enumerate(q.split(q_lens)):
        begin = int(cu_seqlens_q[i])
        close(out[begin : begin + q_lens[i]], attention(rows, data.keys[i], data.values[i], 0.3, **kwargs))


@pytest.mark.parametrize("q_len", [1, 6])
def test_prefill_of_a_few_tokens_takes_a_small_tile(q_len):
    data = paged([50, 20], 1, 32, 16, torch.float32)
    q = torch.randn(2 * q_len, 2, 32)
    cu_seqlens_q = torch.tensor([0, q_len, 2 * q_len], dtype=torch.int32)
    tensors = [x.to(DEVICE) for x in (q, data.k_cache, data.v_cache, data.block_tables, cu_seqlens_q, data.seq_lens)]
    out = prefill_attention(*tensors, q_len, 0.2)
    for i, rows in enumerate(q.split(q_len)):
        close(out[i * q_len : (i + 1) * q_len], attention(rows, data.keys[i], data.values[i], 0.2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim, num_kv_heads", [(64, 2), (20, 3)])
def test_reshape_and_cache(dtype, head_dim, num_kv_heads):
    qkv = torch.randn(9, 2 * num_kv_heads + 1, head_dim).to(dtype).to(DEVICE)
    key, value = qkv[:, 1 : num_kv_heads + 1], qkv[:, num_kv_heads + 1 :]
    slots = torch.randperm(40)[:9]
    slots[4] = -1
    caches = [torch.full((5, num_kv_heads, 8, head_dim), -3.0, dtype=dtype, device=DEVICE) for _ in range(4)]
    reshape_and_cache(key, value, *caches[:2], slots.to(DEVICE))
    reshape_and_cache_reference(key, value, *caches[2:], slots.to(DEVICE))
    assert torch.equal(caches[0], caches[2]) and torch.equal(caches[1], caches[3])


def test_copy_blocks():
    """Blocks of one program, of several, and smaller ones beside them (the scales of a quantised cache)."""
    shapes = [(9, 2, 4, 8), (9, 3, 1024), (9, WORDS_PER_PROGRAM + 4), (9, 2)]
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.int32]
    before = [torch.randint(0, 100, shape).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    tensors = [tensor.to(DEVICE, copy=True) for tensor in before]
    sources, targets = torch.tensor([1, 1, 7]), torch.tensor([0, 8, 3])
    BlockCopier(tensors).copy(sources.to(DEVICE), targets.to(DEVICE))
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor[[0, 8, 3]].cpu(), old[[1, 1, 7]])
        assert torch.equal(tensor[[1, 2, 4, 5, 6, 7]].cpu(), old[[1, 2, 4, 5, 6, 7]])
    copy_blocks_reference(before, sources, targets)
    assert all(torch.equal(tensor.cpu(), expected) for tensor, expected in zip(tensors, before, strict=True))


def test_pack_and_unpack_blocks():
    shapes = [(9, 2, 4, 8), (9, WORDS_PER_PROGRAM + 4), (9, 2)]
    before = [torch.randint(0, 100, shape).to(torch.float16) for shape in shapes]
    tensors = [tensor.to(DEVICE, copy=True) for tensor in before]
    copier = BlockCopier(tensors)
    packed = copier.pack(torch.tensor([7, 2, 8], device=DEVICE))
    assert torch.equal(packed.cpu(), pack_blocks_reference(before, torch.tensor([7, 2, 8])))
    assert packed.shape == (3, copier.block_bytes)
    staging = torch.zeros(5, copier.block_bytes, dtype=torch.uint8, device=DEVICE)
    copier.pack(torch.tensor([2, 7], device=DEVICE), staging[1:3])
    assert torch.equal(staging[1:3], packed[[1, 0]]) and not staging[[0, 3, 4]].any()
    copier.unpack(packed[1:], torch.tensor([0, 5], device=DEVICE))
    unpack_blocks_reference(before, packed[1:].cpu(), torch.tensor([0, 5]))
    for tensor, expected in zip(tensors, before, strict=True):
        assert torch.equal(tensor.cpu(), expected)
        assert torch.equal(expected[[0, 5]], expected[[2, 8]])


def test_copy_blocks_refuses_what_is_not_whole_words():
    with pytest.raises(ValueError, match="whole words"):
        BlockCopier([torch.zeros(4, 3, dtype=torch.float16, device=DEVICE)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim, num_kv_heads", [(16, 2), (20, 3), (80, 1), (128, 4)])
@pytest.mark.parametrize("kv_format", KV_FORMATS.values(), ids=KV_FORMATS)
def test_quantised_writes(kv_format, head_dim, num_kv_heads, dtype):
    """In the interpreter byte for byte; on a device a code may be off by one where a multiplication was fused."""
    qkv = torch.randn(9, 2 * num_kv_heads + 1, head_dim).to(dtype)
    qkv[3, 1] = 0.0
    qkv[5, 1, 2] = float("nan")
    key, value = qkv[:, 1 : num_kv_heads + 1], qkv[:, num_kv_heads + 1 :]
    slots = torch.randperm(40)[:9]
    slots[4] = -1
    caches = [empty_pages(5, num_kv_heads, head_dim, 8, kv_format) for _ in range(2)]
    found = [cache.to(DEVICE) for cache in caches]
    on_device_qkv = qkv.to(DEVICE)
    reshape_and_cache(on_device_qkv[:, 1 : num_kv_heads + 1], on_device_qkv[:, num_kv_heads + 1 :], *found,
                      slots.to(DEVICE))  # fmt: skip
    reshape_and_cache_reference(key, value, *caches, slots)
    for got, expected in zip(found, caches, strict=True):
        got, expected = read_pages(got.cpu()), read_pages(expected)
        assert torch.equal(got.isnan(), expected.isnan())
        step = {"int8": 0.05, "fp8": 0.5, "int4": 0.6}[kv_format.name]
        torch.testing.assert_close(got, expected, equal_nan=True, rtol=0, atol=0 if INTERPRET else step)
