"""One launch between the qkv projection and attention: QK-norm, rotary embedding and the write into the KV cache.

A row gets the operations of kernels/elementwise/rms_norm.py, kernels/elementwise/rotary_embedding.py and
kernels/cache/reshape_and_cache.py, in that order. A CPU calls these three; a GPU has one kernel that reads each row of
qkv once and writes rotated keys to the cache only.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from kernels.aot_configuration import AotConfiguration, power_of_2
from kernels.cache.quantize import as_bytes
from kernels.cache.reshape_and_cache import (
    cache_row,
    encode,
    pack_int4,
    page_start,
    quantize_heads,
    reshape_and_cache,
    row_scale,
    store_words,
)
from kernels.dependent_launch import launch_options, pdl_constants, wait_for_inputs
from kernels.dispatch import tl, triton, use_triton
from kernels.elementwise.rms_norm import rms_norm, scale_normed
from kernels.elementwise.rotary_embedding import rotary_embedding
from kernels.kv_format import INT4, KV_FORMATS, KVFormat, kv_format_of

TILE = 1024  # elements of the heads that one program handles together
IN_PLACE = -1  # value of KV_FORMAT: write keys back to their rows of qkv, and nothing to the cache


@dataclass(frozen=True, slots=True)
class QKVHeads:
    """The content of a layer's rows of qkv [num_heads + 2 * num_kv_heads, head_dim] and the operations on them.

    cos_sin_cache: see rotary_embedding; None: no rotation. q_norm and k_norm [head_dim]: weights of an RMSNorm over
    each head, before the rotation; both or none.
    """

    num_heads: int
    num_kv_heads: int
    cos_sin_cache: Tensor | None = None
    interleaved: bool = False
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    norm_eps: float = 0.0
    norm_weight_offset: float = 0.0

    def __post_init__(self) -> None:
        if (self.q_norm is None) != (self.k_norm is None):
            raise ValueError("q_norm and k_norm: queries and keys are normalised both or not at all; give both weights")


def rope_and_cache(
    qkv: Tensor, heads: QKVHeads, positions: Tensor, slot_mapping: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """Normalise and rotate the queries and keys of `qkv`, and store keys and values at slot_mapping of the caches.

    qkv [num_tokens, num_heads + 2 * num_kv_heads, head_dim], dense heads; its content is undefined afterwards.
    positions and slot_mapping int64 [num_tokens]; caches and slots as in reshape_and_cache: -1 stores nothing (but its
    position must be valid for the table). Returns the queries [num_tokens, num_heads, head_dim], a view of qkv or a new
    tensor.
    """
    if use_triton(qkv) and (heads.cos_sin_cache is not None or heads.q_norm is not None):
        return _launch(qkv, heads, positions, slot_mapping, k_cache, v_cache)
    return rope_and_cache_reference(qkv, heads, positions, slot_mapping, k_cache, v_cache)


def rope_and_cache_reference(
    qkv: Tensor, heads: QKVHeads, positions: Tensor, slot_mapping: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """rope_and_cache by its three operators, each of which chooses its implementation. It is also the CPU path."""
    q, k, v = torch.split(qkv, [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=1)
    if heads.q_norm is not None and heads.k_norm is not None:
        eps, offset = heads.norm_eps, heads.norm_weight_offset
        q, k = rms_norm(q, heads.q_norm, eps, None, offset), rms_norm(k, heads.k_norm, eps, None, offset)  # type: ignore[assignment]
    if heads.cos_sin_cache is not None:
        rotary_embedding(positions, q, k, heads.cos_sin_cache, heads.interleaved)
    reshape_and_cache(k, v, k_cache, v_cache, slot_mapping)
    return q


def _launch(qkv, heads, positions, slot_mapping, k_cache, v_cache):
    num_tokens, num_rows, head_dim = qkv.shape
    if num_rows != heads.num_heads + 2 * heads.num_kv_heads or qkv.stride()[1:] != (head_dim, 1):
        raise ValueError(f"qkv: rows of {heads.num_heads} + 2 x {heads.num_kv_heads} heads without gaps are expected, "
                         f"not {tuple(qkv.shape)} with strides {qkv.stride()}")  # fmt: skip
    kv_format = kv_format_of(k_cache)
    meta = constants(heads, head_dim, k_cache.shape[2], kv_format)
    if num_tokens:
        rope_and_cache_kernel[(num_tokens * meta["PARTS"],)](
            qkv, positions, slot_mapping, heads.cos_sin_cache, heads.q_norm, heads.k_norm,
            as_bytes(k_cache), as_bytes(v_cache), qkv.stride(0), heads.norm_eps, **meta, num_warps=4,
            **launch_options(qkv.device),
        )  # fmt: skip
    q, k, v = torch.split(qkv, [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=1)
    if meta["KV_FORMAT"] == IN_PLACE:
        reshape_and_cache(k, v, k_cache, v_cache, slot_mapping)
    return q


def constants(
    heads: QKVHeads, head_dim: int, block_size: int, kv_format: KVFormat | None
) -> dict[str, int | bool | float]:
    """The compile-time arguments of the kernel.

    int4 puts elements i and i + head_dim / 2 of a head into one byte. If these are not a rotated pair (interleaved or
    partial rotation), the keys are rotated in place and a second launch quantises them.
    """
    rotary_dim = 0 if heads.cos_sin_cache is None else heads.cos_sin_cache.shape[-1]
    pairs = (rotary_dim or head_dim) // 2
    tail = head_dim - 2 * pairs
    most_heads = power_of_2(max(heads.num_heads, heads.num_kv_heads))
    block_h = min(most_heads, max(1, TILE // power_of_2(head_dim)))
    unpaired = kv_format is INT4 and (heads.interleaved or tail > 0)
    return {
        "PARTS": -(-heads.num_heads // block_h) + -(-heads.num_kv_heads // block_h),
        "NUM_HEADS": heads.num_heads,
        "NUM_KV_HEADS": heads.num_kv_heads,
        "HEAD_DIM": head_dim,
        "PAIRS": pairs,
        "ROTATE": rotary_dim > 0,
        "INTERLEAVED": heads.interleaved,
        "WEIGHT_OFFSET": heads.norm_weight_offset,
        "BLOCK_SIZE": block_size,
        "ROW_BYTES": 0 if kv_format is None else kv_format.row_bytes(head_dim),
        "KV_FORMAT": IN_PLACE if unpaired else 0 if kv_format is None else kv_format.code,
        "BLOCK_H": block_h,
        "BLOCK_D": power_of_2(head_dim),
        "BLOCK_P": power_of_2(pairs),
        "BLOCK_T": power_of_2(max(1, tail)),
    }


@triton.jit
def rope_and_cache_kernel(
    qkv_ptr,
    positions_ptr,
    slot_mapping_ptr,
    cos_sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    k_cache_ptr,
    v_cache_ptr,
    qkv_stride_row,
    eps,
    PARTS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    ROTATE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (num_tokens * PARTS,): handles BLOCK_H heads of one token, queries first, then keys with their values.

    Reads qkv once; writes the queries back and keys and values to their pages. The angles come from L2.
    """
    wait_for_inputs(PDL)
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    Q_PARTS: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    row_ptr = qkv_ptr + token * qkv_stride_row
    pair = tl.arange(0, BLOCK_P)
    cos = tl.zeros([BLOCK_P], tl.float32)
    sin = tl.zeros([BLOCK_P], tl.float32)
    if ROTATE:
        angles_ptr = cos_sin_ptr + tl.load(positions_ptr + token) * (2 * PAIRS) + pair
        cos = tl.load(angles_ptr, mask=pair < PAIRS, other=0.0)
        sin = tl.load(angles_ptr + PAIRS, mask=pair < PAIRS, other=0.0)
    if part < Q_PARTS:
        head = part * BLOCK_H + tl.arange(0, BLOCK_H)
        first, second, tail = _turned_heads(
            row_ptr, head, head < NUM_HEADS, q_norm_ptr, eps, cos, sin,
            HEAD_DIM, PAIRS, ROTATE, INTERLEAVED, WEIGHT_OFFSET, BLOCK_P, BLOCK_T,
        )  # fmt: skip
        _store_heads(
            row_ptr, head * HEAD_DIM, head < NUM_HEADS, first, second, tail,
            HEAD_DIM, PAIRS, INTERLEAVED, BLOCK_P, BLOCK_T,
        )  # fmt: skip
    else:
        slot = tl.load(slot_mapping_ptr + token)
        head = (part - Q_PARTS) * BLOCK_H + tl.arange(0, BLOCK_H)
        head = tl.where(slot < 0, NUM_KV_HEADS, head)  # an invalid head: nothing is loaded or stored for it
        key_ptr = row_ptr + NUM_HEADS * HEAD_DIM
        first, second, tail = _turned_heads(
            key_ptr, head, head < NUM_KV_HEADS, k_norm_ptr, eps, cos, sin,
            HEAD_DIM, PAIRS, ROTATE, INTERLEAVED, WEIGHT_OFFSET, BLOCK_P, BLOCK_T,
        )  # fmt: skip
        _write_keys(
            key_ptr, k_cache_ptr, slot, head, first, second, tail,
            NUM_KV_HEADS, HEAD_DIM, PAIRS, INTERLEAVED, BLOCK_SIZE, ROW_BYTES, KV_FORMAT, BLOCK_P, BLOCK_T,
        )  # fmt: skip
        value_ptr = key_ptr + NUM_KV_HEADS * HEAD_DIM
        _write_values(
            value_ptr, v_cache_ptr, slot, head, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, ROW_BYTES, KV_FORMAT, BLOCK_D
        )


@triton.jit
def _turned_heads(
    x_ptr,
    head,
    head_mask,
    norm_ptr,
    eps,
    cos,
    sin,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    ROTATE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Heads of one token, normed and rotated: the first and the second of each pair [BLOCK_H, BLOCK_P], and the
    unrotated rest [BLOCK_H, BLOCK_T]. fp32, rounded to the dtype of x after each operator."""
    first_d, second_d, tail_d = _elements(PAIRS, INTERLEAVED, BLOCK_P, BLOCK_T)
    row = head[:, None] * HEAD_DIM
    mask = head_mask[:, None] & (tl.arange(0, BLOCK_P) < PAIRS)[None, :]
    tail_mask = head_mask[:, None] & (tail_d < HEAD_DIM)[None, :]
    dtype = x_ptr.dtype.element_ty
    first = tl.load(x_ptr + row + first_d[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + row + second_d[None, :], mask=mask, other=0.0).to(tl.float32)
    tail = tl.load(x_ptr + row + tail_d[None, :], mask=tail_mask, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        squares = tl.sum(first * first + second * second, 1) + tl.sum(tail * tail, 1)
        inverse = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        first = _scaled(first * inverse, norm_ptr, first_d, HEAD_DIM, WEIGHT_OFFSET).to(dtype).to(tl.float32)
        second = _scaled(second * inverse, norm_ptr, second_d, HEAD_DIM, WEIGHT_OFFSET).to(dtype).to(tl.float32)
        tail = _scaled(tail * inverse, norm_ptr, tail_d, HEAD_DIM, WEIGHT_OFFSET).to(dtype).to(tl.float32)
    if ROTATE:
        turned = first * cos[None, :] - second * sin[None, :]
        second = (second * cos[None, :] + first * sin[None, :]).to(dtype).to(tl.float32)
        first = turned.to(dtype).to(tl.float32)
    return first, second, tail


@triton.jit
def _elements(PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr):
    """Offsets in a head of the firsts of pairs, of the seconds, and of the unrotated rest."""
    pair = tl.arange(0, BLOCK_P)
    tail = 2 * PAIRS + tl.arange(0, BLOCK_T)
    if INTERLEAVED:
        return 2 * pair, 2 * pair + 1, tail
    else:
        return pair, pair + PAIRS, tail


@triton.jit
def _scaled(normed, norm_ptr, offs, HEAD_DIM: tl.constexpr, WEIGHT_OFFSET: tl.constexpr):
    weight = tl.load(norm_ptr + offs, mask=offs < HEAD_DIM, other=0.0)
    return scale_normed(normed, weight[None, :], WEIGHT_OFFSET)


@triton.jit
def _store_heads(
    out_ptr,
    row,
    head_mask,
    first,
    second,
    tail,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """row [BLOCK_H]: offset of each head's first element, or code."""
    first_d, second_d, tail_d = _elements(PAIRS, INTERLEAVED, BLOCK_P, BLOCK_T)
    mask = head_mask[:, None] & (tl.arange(0, BLOCK_P) < PAIRS)[None, :]
    tail_mask = head_mask[:, None] & (tail_d < HEAD_DIM)[None, :]
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + row[:, None] + first_d[None, :], first.to(dtype), mask=mask)
    tl.store(out_ptr + row[:, None] + second_d[None, :], second.to(dtype), mask=mask)
    tl.store(out_ptr + row[:, None] + tail_d[None, :], tail.to(dtype), mask=tail_mask)


@triton.jit
def _write_keys(
    key_ptr,
    cache_ptr,
    slot,
    head,
    first,
    second,
    tail,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Store the rotated keys of one token in their pages, in any format, or (KV_FORMAT -1) back in their rows of
    qkv."""
    mask = head < NUM_KV_HEADS
    if KV_FORMAT == -1:
        row = head.to(tl.int64) * HEAD_DIM
        _store_heads(key_ptr, row, mask, first, second, tail, HEAD_DIM, PAIRS, INTERLEAVED, BLOCK_P, BLOCK_T)
    elif KV_FORMAT == 0:
        row = cache_row(slot, head, NUM_KV_HEADS, BLOCK_SIZE) * HEAD_DIM
        _store_heads(cache_ptr, row, mask, first, second, tail, HEAD_DIM, PAIRS, INTERLEAVED, BLOCK_P, BLOCK_T)
    else:
        page = page_start(slot, head, NUM_KV_HEADS, ROW_BYTES, BLOCK_SIZE)
        row = page + slot % BLOCK_SIZE * ROW_BYTES
        bad = tl.sum(first * 0.0 + second * 0.0, 1) + tl.sum(tail * 0.0, 1)
        if KV_FORMAT == 3:
            pairs = tl.arange(0, BLOCK_P)
            code_mask = mask[:, None] & (pairs < PAIRS)[None, :]
            codes, words = pack_int4(first, second, bad, code_mask)
            codes_at = cache_ptr + row[:, None] + pairs[None, :]
            tl.store(codes_at, codes.to(cache_ptr.dtype.element_ty), mask=code_mask)
        else:
            largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1)
            largest = tl.maximum(largest, tl.max(tl.abs(tail), 1))
            inverse, words = row_scale(largest, bad, KV_FORMAT)
            _store_heads(
                cache_ptr, row, mask,
                encode(first, inverse, KV_FORMAT), encode(second, inverse, KV_FORMAT), encode(tail, inverse, KV_FORMAT),
                HEAD_DIM, PAIRS, INTERLEAVED, BLOCK_P, BLOCK_T,
            )  # fmt: skip
        store_words(cache_ptr, page, slot % BLOCK_SIZE, words, mask, ROW_BYTES, BLOCK_SIZE)


@triton.jit
def _write_values(
    value_ptr,
    cache_ptr,
    slot,
    head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store the values of the same heads, plain or quantised (KV_FORMAT -1: another launch writes them)."""
    if KV_FORMAT == 0:
        offs_d = tl.arange(0, BLOCK_D)[None, :]
        mask = (head < NUM_KV_HEADS)[:, None] & (offs_d < HEAD_DIM)
        row = cache_row(slot, head, NUM_KV_HEADS, BLOCK_SIZE) * HEAD_DIM
        values = tl.load(value_ptr + head[:, None] * HEAD_DIM + offs_d, mask=mask)
        tl.store(cache_ptr + row[:, None] + offs_d, values, mask=mask)
    elif KV_FORMAT > 0:
        BLOCK_B: tl.constexpr = BLOCK_D // 2 if KV_FORMAT == 3 else BLOCK_D
        quantize_heads(
            value_ptr, HEAD_DIM, head, cache_ptr, slot, NUM_KV_HEADS, ROW_BYTES, BLOCK_SIZE, BLOCK_B, KV_FORMAT
        )


def aot_configurations(capability: int) -> Iterator[AotConfiguration]:
    """Yields the shapes of Llama 3, Qwen 3, Gemma 3, GPT-NeoX, Phi-3-mini and Phi-4-mini, Pythia-2.8b and GPT-J, in
    every format."""
    table = torch.empty(1, 128)
    weight, wide = torch.empty(128), torch.empty(256)
    shapes = {
        "llama 32+8": (128, QKVHeads(32, 8, table)),
        "qk-norm 16+8": (128, QKVHeads(16, 8, table, q_norm=weight, k_norm=weight)),
        "qk-norm offset 8+4": (256, QKVHeads(8, 4, wide[None], q_norm=wide, k_norm=wide, norm_weight_offset=1.0)),
        "partial 40+40": (128, QKVHeads(40, 40, table[:, :32])),
        "multi-head 32+32": (96, QKVHeads(32, 32, table[:, :96])),
        "partial 24+8": (128, QKVHeads(24, 8, table[:, :96])),
        "partial 32+32": (80, QKVHeads(32, 32, table[:, :20])),
        "interleaved 16+16": (128, QKVHeads(16, 16, table[:, :64], interleaved=True)),
    }
    for kv_format in (None, *KV_FORMATS.values()):
        for dtype, (label, (head_dim, heads)) in product(("bf16", "fp16", "fp32"), shapes.items()):
            if dtype != "bf16" and label != "llama 32+8":
                continue
            head_dim = 128 if heads.q_norm is None else len(heads.q_norm)
            name = "plain" if kv_format is None else kv_format.name
            pages = {None: "*" + dtype, "int8": "*i8"}.get(kv_format and kv_format.name, "*u8")
            yield AotConfiguration(
                rope_and_cache_kernel, f"{label} d {head_dim} {name}", dtype,
                constants(heads, head_dim, 16, kv_format) | pdl_constants(capability)
                | ({} if heads.q_norm is not None else {"q_norm_ptr": None, "k_norm_ptr": None}),
                num_warps=4, types={"eps": "fp32", "positions_ptr": "*i64", "slot_mapping_ptr": "*i64",
                "cos_sin_ptr": "*fp32", "k_cache_ptr": pages, "v_cache_ptr": pages},
                multiples_of_16=("qkv_stride_row",), quick=dtype == "bf16" and label[:5] in ("llama", "qk-no"),
            )  # fmt: skip
