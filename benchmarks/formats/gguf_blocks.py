"""quantize_k: fp32 rows -> blocks of GGUF's K types, which the `gguf` package reads but does not write.

The quantiser is plain: a group's scale comes from its range, in one pass, where llama.cpp searches for the least error.
"""

import numpy as np

BLOCK = 256
K_TYPES = ("Q4_K", "Q5_K", "Q6_K")


def quantize_k(rows: np.ndarray, kind: str) -> np.ndarray:
    """fp32 [..., in] -> uint8 [..., bytes] of a type of K_TYPES."""
    blocks = rows.reshape(-1, BLOCK).astype(np.float32)
    data = _q6_k(blocks) if kind == "Q6_K" else _q45_k(blocks, 5 if kind == "Q5_K" else 4)
    return data.reshape(*rows.shape[:-1], -1)


def _fp16(numbers: np.ndarray) -> np.ndarray:
    """[n, 1] -> its bytes, [n, 2]."""
    return numbers.astype(np.float16).view(np.uint8)


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(a.shape, b.shape), np.float32), where=b != 0)


def _pack(codes: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Codes uint8 [n, m] -> bytes: the first `run` codes in the lowest bits of `run` bytes, the next above them."""
    parts = codes.reshape(len(codes), -1, 8 // bits, run)
    shifted = parts << np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(shifted, axis=2).reshape(len(codes), -1)


def _q45_k(blocks: np.ndarray, bits: int) -> np.ndarray:
    groups = blocks.reshape(-1, 8, 32)
    least = -np.minimum(groups.min(-1), 0)
    scales = (groups.max(-1) + least) / ((1 << bits) - 1)
    factors = [np.float32(np.float16(numbers.max(-1, keepdims=True) / 63)) for numbers in (scales, least)]
    small = [
        np.clip(np.rint(_divide(numbers, factor)), 0, 63).astype(np.uint8)
        for numbers, factor in zip((scales, least), factors, strict=True)
    ]
    step, offset = (factor * number for factor, number in zip(factors, small, strict=True))
    codes = np.rint(_divide(groups + offset[..., None], step[..., None])).clip(0, (1 << bits) - 1)
    codes = codes.astype(np.uint8).reshape(-1, BLOCK)
    s, m = small
    packed = [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4]
    parts = [_fp16(factors[0]), _fp16(factors[1]), *packed]
    if bits == 5:
        parts.append(_pack(codes >> 4, 1, 32))
    return np.concatenate([*parts, _pack(codes & 15, 4, 32)], -1)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    groups = blocks.reshape(-1, 16, 16)
    scales = np.abs(groups).max(-1) / 31
    factor = np.float32(np.float16(scales.max(-1, keepdims=True) / 127))
    small = np.clip(np.rint(_divide(scales, factor)), 0, 127).astype(np.int8)
    codes = np.rint(_divide(groups, (factor * small)[..., None])).clip(-32, 31).astype(np.int8).reshape(-1, BLOCK)
    unsigned = (codes + 32).astype(np.uint8)
    low, high = _pack(unsigned & 15, 4, 64), _pack(unsigned >> 4, 2, 32)
    return np.concatenate([low, high, small.view(np.uint8), _fp16(factor)], -1)
