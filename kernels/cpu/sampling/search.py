"""The place where top_k and top_p cut a row of logits on a CPU: a search by the bits of the distances to the largest
logit, without a sort. On a GPU kernels/sampling/cuts.py looks for the same cut.
"""

import numpy as np

from kernels.cpu import simd
from kernels.cpu.parallel import jit
from kernels.cpu.simd import read, write

FIRST_BITS, NEXT_BITS = 11, 10  # 11 + 10 + 10 bits of 31
NUM_BINS = 1 << FIRST_BITS
MAGNITUDE = 0x7FFFFFFF


@jit
def cut_by(distances, weights, size, needed, masses):
    """The distance (float32, at most 0) of the last token that is kept if those nearest to 0 are kept until their
    weights reach `needed`; -inf if none weighs anything. weights: null for 1 each; masses: room for NUM_BINS.

    Non-negative floats have the order of their bits. Three histograms find the distance: over the first 11 bits, then
    over the next 10 and the last 10, each among tokens that agree in the bits before.
    """
    bits, counts = simd.pointer_i32(simd.address(distances)), simd.address(weights) == 0
    before, prefix, above, width = 0.0, 0, 31, FIRST_BITS
    while above > 0:
        shift, num_bins = above - width, 1 << width
        for i in range(num_bins):
            write(masses, i, 0.0)
        for i in range(size):
            key = read(bits, i) & MAGNITUDE
            if key >> above == prefix:
                at = (key >> shift) & (num_bins - 1)
                write(masses, at, read(masses, at) + (1.0 if counts else read(weights, i)))
        found, reached = -1, before
        for i in range(num_bins):
            mass = read(masses, i)
            if mass > 0.0:  # if rounding keeps the sum below `needed`, the last bin with a mass is taken
                found, before, reached = i, reached, reached + mass
                if reached >= needed:
                    break
        if found < 0:
            return np.float32(-np.inf)
        prefix, above, width = (prefix << width) + found, shift, NEXT_BITS
    return -simd.float_of(prefix)
