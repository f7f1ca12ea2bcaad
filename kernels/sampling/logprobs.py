"""The logprobs that a request asks for: of one token of each row, and the highest of the row."""

import torch
from torch import Tensor

from kernels.dispatch import cpu_kernels


def top_logprobs(
    logits: Tensor, token_ids: Tensor, k: int, *, with_ranks: bool = False
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(logprobs, ranks, top_ids) of logits [n, vocab_size], which stay as they are; 0 <= k <= vocab_size.

    logprobs float32 [n, 1 + k]: of the row's token in token_ids (int64 [n]), then the k highest. ranks int32 [n]: of
    that token, 1 for the highest. top_ids int64 [n, k]. Rows with NaN or +inf have logprobs that mean nothing.
    """
    if logits.device.type == "cpu" and logits.dtype != torch.float16 and (cpu := cpu_kernels()) is not None:
        return cpu.logprobs.top_logprobs(logits, token_ids, k, with_ranks)  # type: ignore[no-any-return]
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, token_ids[:, None])
    ranks = 1 + (logprobs > own).sum(-1, dtype=torch.int32) if with_ranks else None
    top, top_ids = logprobs.topk(k)
    return torch.cat([own, top], 1), ranks, top_ids
