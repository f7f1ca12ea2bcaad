"""The threshold of nucleus sampling on a CPU: a search by the bits of the logits, without a sort.

Non-negative floats have the order of their bits. Three histograms of probability find the distance at which top_p is
reached: over the first 11 bits, then over the next 10 and the last 10, each among tokens that agree in the bits before.
On a GPU kernels/sampling/draw.py makes the same search.
"""

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import simd
from kernels.cpu.parallel import jit, next_item, parallel_kernel
from kernels.cpu.simd import advance, read, write

FIRST_BITS, NEXT_BITS = 11, 10  # 11 + 10 + 10 bits of 31
NUM_BINS = 1 << FIRST_BITS
INFINITY, SIGN = 0x7F800000, 1 << 31


@jit
def search(bits, weights, size, masses, top_p):
    """The bits of the last kept token's distance; -1 if no token has a probability."""
    needed, before, prefix, shift, num_bins = 0.0, 0.0, 0, 31 - FIRST_BITS, NUM_BINS
    for level in range(3):
        for i in range(num_bins):
            write(masses, i, 0.0)
        for i in range(size):
            key = (read(bits, i) & 0x7FFFFFFF) >> shift
            if level == 0 or key // num_bins == prefix:
                at = key % num_bins
                write(masses, at, read(masses, at) + read(weights, i))
        if level == 0:
            for i in range(num_bins):
                needed += read(masses, i)
            needed *= top_p
        found, reached = -1, before
        for i in range(num_bins):
            mass = read(masses, i)
            if mass > 0.0:  # if rounding keeps the sum below `needed`, the last bin with a mass is taken
                found, before, reached = i, reached, reached + mass
                if reached >= needed:
                    break
        if found < 0:
            return -1
        prefix, shift, num_bins = prefix * num_bins + found, shift - NEXT_BITS, 1 << NEXT_BITS
    return prefix


@parallel_kernel("6q")
def _thresholds(args):
    bits, weights, thresholds = simd.pointer_i32(args[2]), simd.pointer_f32(args[3]), simd.pointer_i32(args[5])
    top_p, masses, size = simd.pointer_f64(args[4]), simd.pointer_f64(args[6]), args[7]
    item = next_item(args)
    while item < args[1]:
        at = item * size
        found = search(
            advance(bits, at), advance(weights, at), size, advance(masses, item * NUM_BINS), read(top_p, item)
        )
        # Logits are negative distances: the same bits and a sign. Without a cut the threshold is -inf.
        write(thresholds, item, np.int32((found if found >= 0 else INFINITY) - SIGN))
        item = next_item(args)


def supports_nucleus_thresholds(x: Tensor, weights: Tensor) -> bool:
    """True for dense fp32 rows."""
    return x.dtype == weights.dtype == torch.float32 and x.is_contiguous() and weights.is_contiguous()


def nucleus_thresholds(x: Tensor, weights: Tensor, top_p: Tensor) -> Tensor:
    """The logit of the last token that top_p keeps of each row (most likely first), float32 [n]; -inf keeps all.

    x float32 [n, vocab_size] <= 0; weights: exp(x), or 0 for a token filtered out; top_p float64 [n].
    """
    rows, size = x.shape
    thresholds = torch.empty(rows, dtype=torch.float32)
    masses = torch.empty((rows, NUM_BINS), dtype=torch.float64)
    _thresholds(
        rows, x.data_ptr(), weights.data_ptr(), top_p.data_ptr(), thresholds.data_ptr(), masses.data_ptr(), size
    )
    return thresholds
