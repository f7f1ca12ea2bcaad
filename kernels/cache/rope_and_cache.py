"""One launch between the qkv projection and attention: QK-norm, rotary embedding and the write into the KV cache.

A row gets the operations of kernels/elementwise/rms_norm.py (or layer_norm.py), kernels/elementwise/rotary_embedding.py
and kernels/cache/reshape_and_cache.py, in that order, and the rarer ones of QKVHeads between them. A CPU calls an
operator for each; a GPU has one kernel that reads each row of qkv once and writes rotated keys to the cache only.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
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
from kernels.elementwise.layer_norm import layer_norm
from kernels.elementwise.rms_norm import rms_norm, scale_normed
from kernels.elementwise.rotary_embedding import rotary_embedding
from kernels.kv_format import INT4, INT8, KV_FORMATS, KVFormat, kv_format_of

TILE = 1024  # elements of the heads that one program handles together
IN_PLACE = -1  # value of KV_FORMAT: write keys back to their rows of qkv, and nothing to the cache


@dataclass(frozen=True, slots=True)
class QKVHeads:
    """The content of a layer's rows of qkv [num_heads + 2 * num_kv_heads, head_dim] and the operations on them.

    num_kv_heads 0: the layer reads the keys and values of another layer, and nothing is stored.
    In order: the norm of q and k, the clip, the rotation (norm_after_rope: the norm follows it), the norm of v, the
    scaling of q.
    cos_sin_cache: see rotary_embedding; None: no rotation. q_norm and k_norm: weights of an RMSNorm over each head,
    [head_dim] for all heads or [heads, head_dim]; with norm_rows of one over all heads of a row, [heads * head_dim];
    both or none. norm_without_weights: such a norm of q and k without weights. norm_centred: a LayerNorm without bias
    in place of the RMSNorm. clip c > 0: q, k and v are limited to -c .. c. v_norm: an RMSNorm without weights over each
    head of v. query_scales fp32 [max_position]: factors of the queries by position.
    """

    num_heads: int
    num_kv_heads: int
    cos_sin_cache: Tensor | None = None
    interleaved: bool = False
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    norm_eps: float = 0.0
    norm_weight_offset: float = 0.0
    norm_without_weights: bool = False
    norm_rows: bool = False
    norm_centred: bool = False
    norm_after_rope: bool = False
    clip: float = 0.0
    v_norm: bool = False
    query_scales: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.q_norm is None) != (self.k_norm is None):
            raise ValueError("q_norm and k_norm: queries and keys are normalised both or not at all; give both weights")

    @property
    def has_norm(self) -> bool:
        """True if q and k are normalised."""
        return self.q_norm is not None or self.norm_without_weights

    @property
    def change_values(self) -> bool:
        """True if v is changed."""
        return self.clip > 0 or self.v_norm

    @property
    def change_rows(self) -> bool:
        """False if the rows go to the cache and to attention as they are."""
        rotated = self.cos_sin_cache is not None
        return rotated or self.has_norm or self.change_values or self.query_scales is not None


def rope_and_cache(
    qkv: Tensor, heads: QKVHeads, positions: Tensor, slot_mapping: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """Normalise and rotate the queries and keys of `qkv`, and store keys and values at slot_mapping of the caches.

    qkv [num_tokens, num_heads + 2 * num_kv_heads, head_dim], dense heads; its content is undefined afterwards.
    positions and slot_mapping int64 [num_tokens]; caches and slots as in reshape_and_cache: -1 stores nothing (but its
    position must be valid for the table). Returns the queries [num_tokens, num_heads, head_dim], a view of qkv or a new
    tensor.
    """
    if use_triton(qkv) and heads.change_rows:
        return _launch(qkv, heads, positions, slot_mapping, k_cache, v_cache)
    return rope_and_cache_reference(qkv, heads, positions, slot_mapping, k_cache, v_cache)


def rope_and_cache_reference(
    qkv: Tensor, heads: QKVHeads, positions: Tensor, slot_mapping: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """rope_and_cache by one operator for each step, each of which chooses its implementation. It is the CPU path."""
    if not heads.num_kv_heads:
        return _turn_queries(qkv, heads, positions)
    q, k, v = torch.split(qkv, [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=1)
    if heads.has_norm and not heads.norm_after_rope:
        q, k = norm_heads(q, heads.q_norm, heads), norm_heads(k, heads.k_norm, heads)
    if heads.clip > 0:
        for x in (q, k, v):
            x.clamp_(-heads.clip, heads.clip)
    if heads.cos_sin_cache is not None:
        rotary_embedding(positions, q, k, heads.cos_sin_cache, heads.interleaved)
    if heads.has_norm and heads.norm_after_rope:
        q, k = norm_heads(q, heads.q_norm, heads), norm_heads(k, heads.k_norm, heads)
    if heads.v_norm:
        v = rms_norm(v, _ones(v.shape[2], v.dtype, v.device), heads.norm_eps)  # type: ignore[assignment]
    if heads.query_scales is not None:
        q *= heads.query_scales[positions][:, None, None]
    reshape_and_cache(k, v, k_cache, v_cache, slot_mapping)
    return q


def _turn_queries(q: Tensor, heads: QKVHeads, positions: Tensor) -> Tensor:
    """rope_and_cache of a layer that reads the keys and values of another layer."""
    if heads.has_norm and not heads.norm_after_rope:
        q = norm_heads(q, heads.q_norm, heads)
    if heads.clip > 0:
        q.clamp_(-heads.clip, heads.clip)
    if heads.cos_sin_cache is not None:
        rotary_embedding(positions, q, q[:, :0], heads.cos_sin_cache, heads.interleaved)
    if heads.has_norm and heads.norm_after_rope:
        q = norm_heads(q, heads.q_norm, heads)
    if heads.query_scales is not None:
        q *= heads.query_scales[positions][:, None, None]
    return q


def norm_heads(x: Tensor, weight: Tensor | None, heads: QKVHeads) -> Tensor:
    """The norm of `heads` with the weight of q or k; x [num_tokens, heads, head_dim] may be a view of wider rows."""
    rows, eps, offset = x.view(len(x), -1) if heads.norm_rows else x, heads.norm_eps, heads.norm_weight_offset
    if weight is None:
        weight, offset = _ones(rows.shape[-1], rows.dtype, rows.device), 0.0
    if weight.ndim == 1:
        centred = heads.norm_centred
        normed = layer_norm(rows, weight, None, eps) if centred else rms_norm(rows, weight, eps, None, offset)
        return normed.view(x.shape)  # type: ignore[union-attr]
    if heads.norm_centred:  # no operator has a weight for each head
        return (layer_norm(x.float(), None, None, eps) * weight.float()).to(x.dtype)  # type: ignore[operator]
    return rms_norm(x, _ones(x.shape[2], x.dtype, x.device), eps) * (weight + offset)  # type: ignore[operator]


@cache
def _ones(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The weight of a norm without weights: made once, because a recorded program holds no operator of torch."""
    return torch.ones(size, dtype=dtype, device=device)


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
            heads.query_scales, as_bytes(k_cache), as_bytes(v_cache), qkv.stride(0), heads.norm_eps, **meta,
            num_warps=num_warps(meta), **launch_options(qkv.device),
        )  # fmt: skip
    q, k, v = torch.split(qkv, [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=1)
    if meta["KV_FORMAT"] == IN_PLACE and heads.num_kv_heads:
        reshape_and_cache(k, v, k_cache, v_cache, slot_mapping)
    return q


def constants(
    heads: QKVHeads, head_dim: int, block_size: int, kv_format: KVFormat | None
) -> dict[str, int | bool | float]:
    """The compile-time arguments of the kernel.

    int4 puts elements i and i + head_dim / 2 of a head into one byte. If these are not a rotated pair (interleaved or
    partial rotation), the keys are rotated in place and a second launch quantises them; likewise if values change
    before they are quantised. norm_rows: one program has all heads of a row, because programs write queries in place.
    """
    rotary_dim = 0 if heads.cos_sin_cache is None else heads.cos_sin_cache.shape[-1]
    pairs = (rotary_dim or head_dim) // 2
    tail = head_dim - 2 * pairs
    most_heads = power_of_2(max(heads.num_heads, heads.num_kv_heads))
    block_h = most_heads if heads.norm_rows else min(most_heads, max(1, TILE // power_of_2(head_dim)))
    unpaired = kv_format is INT4 and (heads.interleaved or tail > 0)
    in_place = unpaired or (kv_format is not None and heads.change_values)
    return {
        "PARTS": -(-heads.num_heads // block_h) + -(-heads.num_kv_heads // block_h),
        "NUM_HEADS": heads.num_heads,
        "NUM_KV_HEADS": heads.num_kv_heads,
        "HEAD_DIM": head_dim,
        "PAIRS": pairs,
        "ROTATE": rotary_dim > 0,
        "INTERLEAVED": heads.interleaved,
        "WEIGHT_OFFSET": heads.norm_weight_offset,
        "WEIGHT_PER_HEAD": heads.q_norm is not None and (heads.norm_rows or heads.q_norm.ndim == 2),
        "NORM": heads.has_norm,
        "NORM_ROWS": heads.norm_rows,
        "NORM_CENTRED": heads.norm_centred,
        "NORM_AFTER": heads.norm_after_rope,
        "NORM_VALUES": heads.v_norm,
        "CLIP": heads.clip,
        "BLOCK_SIZE": block_size,
        "ROW_BYTES": 0 if kv_format is None else kv_format.row_bytes(head_dim),
        "KV_FORMAT": IN_PLACE if in_place else 0 if kv_format is None else kv_format.code,
        "BLOCK_H": block_h,
        "BLOCK_D": power_of_2(head_dim),
        "BLOCK_P": power_of_2(pairs),
        "BLOCK_T": power_of_2(max(1, tail)),
    }


def num_warps(meta: dict[str, int | bool | float]) -> int:
    """Warps of a program: at most 32 elements a thread, where one program has all heads of a row."""
    return min(16, max(4, int(meta["BLOCK_H"] * meta["BLOCK_D"]) // TILE))


@triton.jit
def rope_and_cache_kernel(
    qkv_ptr, positions_ptr, slot_mapping_ptr, cos_sin_ptr, q_norm_ptr, k_norm_ptr, query_scales_ptr, k_cache_ptr,
    v_cache_ptr, qkv_stride_row, eps,
    PARTS: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr, ROTATE: tl.constexpr, INTERLEAVED: tl.constexpr, WEIGHT_OFFSET: tl.constexpr,
    WEIGHT_PER_HEAD: tl.constexpr, NORM: tl.constexpr, NORM_ROWS: tl.constexpr, NORM_CENTRED: tl.constexpr,
    NORM_AFTER: tl.constexpr, NORM_VALUES: tl.constexpr, CLIP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROW_BYTES: tl.constexpr, KV_FORMAT: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
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
            row_ptr, head, head < NUM_HEADS, q_norm_ptr, eps, cos, sin, NUM_HEADS,
            HEAD_DIM, PAIRS, ROTATE, INTERLEAVED, WEIGHT_OFFSET, WEIGHT_PER_HEAD, NORM, NORM_ROWS, NORM_CENTRED,
            NORM_AFTER, CLIP, BLOCK_P, BLOCK_T,
        )  # fmt: skip
        if query_scales_ptr is not None:
            factor = tl.load(query_scales_ptr + tl.load(positions_ptr + token))
            first, second, tail = first * factor, second * factor, tail * factor
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
            key_ptr, head, head < NUM_KV_HEADS, k_norm_ptr, eps, cos, sin, NUM_KV_HEADS,
            HEAD_DIM, PAIRS, ROTATE, INTERLEAVED, WEIGHT_OFFSET, WEIGHT_PER_HEAD, NORM, NORM_ROWS, NORM_CENTRED,
            NORM_AFTER, CLIP, BLOCK_P, BLOCK_T,
        )  # fmt: skip
        _write_keys(
            key_ptr, k_cache_ptr, slot, head, first, second, tail,
            NUM_KV_HEADS, HEAD_DIM, PAIRS, INTERLEAVED, BLOCK_SIZE, ROW_BYTES, KV_FORMAT, BLOCK_P, BLOCK_T,
        )  # fmt: skip
        value_ptr = key_ptr + NUM_KV_HEADS * HEAD_DIM
        _write_values(
            value_ptr, v_cache_ptr, slot, head, eps,
            NUM_KV_HEADS, HEAD_DIM, NORM_VALUES, CLIP, BLOCK_SIZE, ROW_BYTES, KV_FORMAT, BLOCK_D,
        )  # fmt: skip


@triton.jit
def _turned_heads(
    x_ptr,
    head,
    head_mask,
    norm_ptr,
    eps,
    cos,
    sin,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    ROTATE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    WEIGHT_PER_HEAD: tl.constexpr,
    NORM: tl.constexpr,
    NORM_ROWS: tl.constexpr,
    NORM_CENTRED: tl.constexpr,
    NORM_AFTER: tl.constexpr,
    CLIP: tl.constexpr,
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
    if NORM and not NORM_AFTER:
        first, second, tail = _normed(
            first, second, tail, head, head_mask, norm_ptr, eps, dtype, NUM_HEADS, HEAD_DIM, PAIRS, INTERLEAVED,
            WEIGHT_OFFSET, WEIGHT_PER_HEAD, NORM_ROWS, NORM_CENTRED, BLOCK_P, BLOCK_T,
        )  # fmt: skip
    if CLIP > 0:
        first, second, tail = tl.clamp(first, -CLIP, CLIP), tl.clamp(second, -CLIP, CLIP), tl.clamp(tail, -CLIP, CLIP)
    if ROTATE:
        turned = first * cos[None, :] - second * sin[None, :]
        second = (second * cos[None, :] + first * sin[None, :]).to(dtype).to(tl.float32)
        first = turned.to(dtype).to(tl.float32)
    if NORM and NORM_AFTER:
        first, second, tail = _normed(
            first, second, tail, head, head_mask, norm_ptr, eps, dtype, NUM_HEADS, HEAD_DIM, PAIRS, INTERLEAVED,
            WEIGHT_OFFSET, WEIGHT_PER_HEAD, NORM_ROWS, NORM_CENTRED, BLOCK_P, BLOCK_T,
        )  # fmt: skip
    return first, second, tail


@triton.jit
def _normed(
    first,
    second,
    tail,
    head,
    head_mask,
    norm_ptr,
    eps,
    dtype: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    WEIGHT_PER_HEAD: tl.constexpr,
    NORM_ROWS: tl.constexpr,
    NORM_CENTRED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """The elements of heads, zeros where there is none, after the norm of QKVHeads; fp32, rounded to dtype."""
    first_d, second_d, tail_d = _elements(PAIRS, INTERLEAVED, BLOCK_P, BLOCK_T)
    size: tl.constexpr = NUM_HEADS * HEAD_DIM if NORM_ROWS else HEAD_DIM
    if NORM_CENTRED:
        total = tl.sum(first + second, 1) + tl.sum(tail, 1)
        if NORM_ROWS:
            total = tl.sum(total, 0) + total * 0.0
        mean = total[:, None] / size
        pair_mask = head_mask[:, None] & (tl.arange(0, BLOCK_P) < PAIRS)[None, :]
        first, second = tl.where(pair_mask, first - mean, 0.0), tl.where(pair_mask, second - mean, 0.0)
        tail = tl.where(head_mask[:, None] & (tail_d < HEAD_DIM)[None, :], tail - mean, 0.0)
    squares = tl.sum(first * first + second * second, 1) + tl.sum(tail * tail, 1)
    if NORM_ROWS:
        squares = tl.sum(squares, 0) + squares * 0.0
    inverse = tl.rsqrt(squares / size + eps)[:, None]
    first, second, tail = first * inverse, second * inverse, tail * inverse
    if norm_ptr is not None:
        weight_row = head if WEIGHT_PER_HEAD else None
        first = _scaled(first, norm_ptr, weight_row, head_mask, first_d, HEAD_DIM, WEIGHT_OFFSET, NORM_CENTRED)
        second = _scaled(second, norm_ptr, weight_row, head_mask, second_d, HEAD_DIM, WEIGHT_OFFSET, NORM_CENTRED)
        tail = _scaled(tail, norm_ptr, weight_row, head_mask, tail_d, HEAD_DIM, WEIGHT_OFFSET, NORM_CENTRED)
    return first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32), tail.to(dtype).to(tl.float32)


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
def _scaled(
    normed, norm_ptr, weight_row, head_mask, offs, HEAD_DIM: tl.constexpr, WEIGHT_OFFSET: tl.constexpr,
    CENTRED: tl.constexpr,
):  # fmt: skip
    """normed times the weights of the elements `offs`; weight_row [BLOCK_H]: the row of weights of each head, if it has
    its own."""
    if weight_row is None:
        weight = tl.load(norm_ptr + offs, mask=offs < HEAD_DIM, other=0.0)[None, :]
    else:
        mask = head_mask[:, None] & (offs < HEAD_DIM)[None, :]
        weight = tl.load(norm_ptr + weight_row[:, None] * HEAD_DIM + offs[None, :], mask=mask, other=0.0)
    if CENTRED:
        return normed * weight.to(tl.float32)
    else:
        return scale_normed(normed, weight, WEIGHT_OFFSET)


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
    eps,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NORM_VALUES: tl.constexpr,
    CLIP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store the values of the same heads, plain or quantised. KV_FORMAT -1: another launch writes them; values that
    change go back to their rows of qkv."""
    if KV_FORMAT == 0 or (KV_FORMAT == -1 and (CLIP > 0 or NORM_VALUES)):
        offs_d = tl.arange(0, BLOCK_D)[None, :]
        mask = (head < NUM_KV_HEADS)[:, None] & (offs_d < HEAD_DIM)
        values = tl.load(value_ptr + head[:, None] * HEAD_DIM + offs_d, mask=mask)
        if CLIP > 0:
            values = tl.clamp(values.to(tl.float32), -CLIP, CLIP).to(values.dtype)
        if NORM_VALUES:
            wide = tl.where(mask, values.to(tl.float32), 0.0)
            values = (wide * tl.rsqrt(tl.sum(wide * wide, 1) / HEAD_DIM + eps)[:, None]).to(values.dtype)
        if KV_FORMAT == 0:
            row = cache_row(slot, head, NUM_KV_HEADS, BLOCK_SIZE) * HEAD_DIM
            tl.store(cache_ptr + row[:, None] + offs_d, values, mask=mask)
        else:
            tl.store(value_ptr + head[:, None] * HEAD_DIM + offs_d, values, mask=mask)
    elif KV_FORMAT > 0:
        BLOCK_B: tl.constexpr = BLOCK_D // 2 if KV_FORMAT == 3 else BLOCK_D
        quantize_heads(
            value_ptr, HEAD_DIM, head, cache_ptr, slot, NUM_KV_HEADS, ROW_BYTES, BLOCK_SIZE, BLOCK_B, KV_FORMAT
        )


def aot_configurations(capability: int) -> Iterator[AotConfiguration]:
    """Yields the shapes of Llama 3, Qwen 3, Gemma 3, GPT-NeoX, Phi-3-mini and Phi-4-mini, Pythia-2.8b and GPT-J, in
    every format; of OLMo 2 32B, Cohere's Command R+, Hunyuan, Llama 4 (its NoPE layers, too), MPT and Gemma 4's full
    layers (31B, and those of E2B without keys) in two."""
    table = torch.empty(1, 128)
    weight, wide, widest = torch.empty(128), torch.empty(256), torch.empty(512)
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
    whole, heads_of = torch.empty(64 * 128), torch.empty(64, 128)
    rare = {
        "qk-norm rows 40+8": (128, QKVHeads(40, 8, table, q_norm=whole, k_norm=whole, norm_rows=True)),
        "qk-norm rows 64+64": (128, QKVHeads(64, 64, table, q_norm=whole, k_norm=whole, norm_rows=True)),
        "qk-norm per head 64+8": (128, QKVHeads(
            64, 8, table, interleaved=True, q_norm=heads_of, k_norm=heads_of, norm_centred=True)),
        "qk-norm last 32+8": (128, QKVHeads(
            32, 8, table, interleaved=True, q_norm=weight, k_norm=weight, norm_after_rope=True, v_norm=True)),
        "qk-norm l2 40+8": (128, QKVHeads(
            40, 8, table, interleaved=True, norm_without_weights=True, norm_after_rope=True)),
        "clip 32+8 scaled": (128, QKVHeads(32, 8, clip=8.0, query_scales=table[0])),
        "v-norm 32+4": (512, QKVHeads(32, 4, widest[None], q_norm=widest, k_norm=widest, v_norm=True)),
        "no keys 8+0": (512, QKVHeads(8, 0, widest[None], q_norm=widest, k_norm=widest, v_norm=True)),
    }  # fmt: skip
    for kv_format in (None, *KV_FORMATS.values()):
        chosen = shapes | (rare if kv_format in (None, INT8) else {})
        for dtype, (label, (head_dim, heads)) in product(("bf16", "fp16", "fp32"), chosen.items()):
            if dtype != "bf16" and label != "llama 32+8":
                continue
            name = "plain" if kv_format is None else kv_format.name
            pages = {None: "*" + dtype, "int8": "*i8"}.get(kv_format and kv_format.name, "*u8")
            meta = constants(heads, head_dim, 16, kv_format)
            pointers = {"cos_sin_ptr": heads.cos_sin_cache, "q_norm_ptr": heads.q_norm, "k_norm_ptr": heads.k_norm,
                        "query_scales_ptr": heads.query_scales}  # fmt: skip
            absent = {name: None for name, tensor in pointers.items() if tensor is None}
            yield AotConfiguration(
                rope_and_cache_kernel, f"{label} d {head_dim} {name}", dtype,
                meta | pdl_constants(capability) | absent, num_warps=num_warps(meta),
                types={"eps": "fp32", "positions_ptr": "*i64", "slot_mapping_ptr": "*i64", "cos_sin_ptr": "*fp32",
                "query_scales_ptr": "*fp32", "k_cache_ptr": pages, "v_cache_ptr": pages},
                multiples_of_16=("qkv_stride_row",), quick=dtype == "bf16" and label.startswith(("llama ", "qk-norm ")),
            )  # fmt: skip
