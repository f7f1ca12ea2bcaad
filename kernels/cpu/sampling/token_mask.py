"""Applies token masks on a CPU: sixteen logits at a time, by sixteen bits of the mask."""

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from kernels.cpu import simd
from kernels.cpu.codes import WIDTH, F32Pointer
from kernels.cpu.parallel import jit, next_item, parallel_kernel
from kernels.cpu.simd import advance, read, write

_F32S = ir.VectorType(ir.FloatType(), WIDTH)


@intrinsic
def _rule_out(typingctx, x, index, bits):
    """Set x[index : index + 16] to -inf where the bit of the int64 `bits` is 0. NaN and +inf stay."""

    def codegen(context, builder, sig, args):
        pointer, index, bits = args
        place = builder.bitcast(builder.gep(pointer, [index]), _F32S.as_pointer())
        values = builder.load(place, align=4)
        allowed = builder.bitcast(builder.trunc(bits, ir.IntType(WIDTH)), ir.VectorType(ir.IntType(1), WIDTH))
        stays = builder.or_(allowed, builder.fcmp_unordered(">=", values, ir.Constant(_F32S, [np.inf] * WIDTH)))
        builder.store(builder.select(stays, values, ir.Constant(_F32S, [-np.inf] * WIDTH)), place, align=4)
        return context.get_dummy_value()

    return types.void(F32Pointer, types.int64, types.int64), codegen


@parallel_kernel("6q")
def _mask_rows(args):
    logits, rows, words = simd.pointer_f32(args[2]), simd.pointer_i64(args[3]), simd.pointer_i32(args[4])
    stride, num_words, vocab_size = args[5], args[6], args[7]
    item = next_item(args)
    while item < args[1]:
        _mask_row(advance(logits, read(rows, item) * stride), advance(words, item * num_words), num_words, vocab_size)
        item = next_item(args)


@jit
def _mask_row(x, words, num_words, vocab_size):
    whole = vocab_size // WIDTH * WIDTH
    for i in range(0, whole, WIDTH):
        _rule_out(x, i, np.int64(read(words, i // 32)) >> (i % 32) if i < 32 * num_words else 0)
    for i in range(whole, vocab_size):
        allowed = i < 32 * num_words and (np.int64(read(words, i // 32)) >> (i % 32)) & 1
        if not allowed and read(x, i) < np.float32(np.inf):
            write(x, i, np.float32(-np.inf))


def supports_mask_tokens(logits: Tensor, rows: Tensor, words: Tensor) -> bool:
    """True for dense fp32 rows, the layout of the CPU's sampler."""
    return logits.dtype == torch.float32 and logits.stride(1) == 1 and rows.is_contiguous() and words.is_contiguous()


def mask_tokens(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """See kernels.sampling.token_mask."""
    _mask_rows(
        len(rows), logits.data_ptr(), rows.data_ptr(), words.data_ptr(), logits.stride(0), words.shape[1],
        logits.shape[1],
    )  # fmt: skip
