"""Computes logprobs of prompt tokens, from the logits of the token before each.

For this the decoder returns the hidden states of all rows of a step. Their logits are computed and reduced in pieces:
the logits of a whole prompt chunk would be [8192, 128256] in fp32, or 4 GB.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.executor.step import NewSequence, SequenceStep
from engine.outputs import PromptScores
from engine.sampling_params import MIN_LOGPROB
from engine.worker.batch.input_batch import InputBatch, StepInputs
from engine.worker.sampling.results import NOT_FINITE
from engine.worker.sampling.sampling_rows import Put
from kernels.sampling.logprobs import top_logprobs

logger = logging.getLogger(__name__)

# Logits of one piece, which bounds the workspace: at most 18 bytes per logit (bf16 and fp32 logits, logprobs, a mask,
# and the workspace of topk).
MAX_SCORED_LOGITS = 1 << 24
SCORE_BYTES = 18


@dataclass(frozen=True, slots=True)
class ScoredPart:
    """`num_tokens` tokens of one sequence from position `start` on, each with its k most likely alternatives."""

    seq_id: int
    start: int
    num_tokens: int
    k: int


@dataclass(frozen=True, slots=True)
class StepScores:
    """The scoring of one step: rows of its hidden states and the token that each row scores, int64 [num_tokens]."""

    parts: list[ScoredPart]
    rows: Tensor
    token_ids: Tensor


@dataclass(frozen=True, slots=True)
class Scores:
    """logprobs float32 [num_tokens, 1 + max k], ranks int32 [num_tokens], top_ids int32 [num_tokens, max k]."""

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor


@dataclass(frozen=True, slots=True)
class ScoredStep:
    """The scores of a step, perhaps still on their way to the host; None with the reason in `error`."""

    parts: list[ScoredPart]
    scores: Scores | None
    error: str = ""

    def results(self, failed: dict[int, str]) -> list[PromptScores]:
        """The scores by part, once the step's mark is reached. Adds sequences that cannot be scored to `failed`."""
        results, end = [], 0
        for part in self.parts:
            start, end = end, end + part.num_tokens
            if self.scores is None:
                failed.setdefault(part.seq_id, self.error)
                continue
            logprobs = self.scores.logprobs[start:end, : 1 + part.k].contiguous().numpy()
            if not (logprobs[:, 0] >= MIN_LOGPROB).all():  # true for NaN only
                failed.setdefault(part.seq_id, NOT_FINITE)
            elif part.seq_id not in failed:
                ranks, top_ids = self.scores.ranks[start:end], self.scores.top_ids[start:end, : part.k].contiguous()
                arrays = logprobs.tobytes(), ranks.numpy().tobytes(), top_ids.numpy().tobytes()
                results.append(PromptScores(part.seq_id, part.start, min(part.k, top_ids.shape[1]), *arrays))
        return results


class PromptScorer:
    """The sequences whose prompts have tokens left to score; costs nothing where there are none."""

    def __init__(self) -> None:
        self._unscored: dict[int, NewSequence] = {}

    def add(self, new: NewSequence) -> None:
        if new.params.prompt_logprobs is not None and new.num_scored_tokens < new.num_prompt_tokens:
            self._unscored[new.seq_id] = new

    def remove(self, seq_id: int) -> None:
        self._unscored.pop(seq_id, None)

    def wants(self, chunks: Sequence[SequenceStep]) -> bool:
        """True if a step with these chunks has rows to score. Decodes have none: they compute the last known token."""
        return bool(self._unscored) and any(step.seq_id in self._unscored for step in chunks)

    def build(self, inputs: StepInputs, batch: InputBatch, put: Put) -> StepScores | None:
        """The scoring of a step that `wants` scores and was just counted as computed; None if no row scores.

        The row of token i scores token i + 1, even if that is in the next chunk. The row of the prompt's last token is
        for sampling only.
        """
        parts, rows, token_ids = [], [], []
        for row, start, end in zip(inputs.rows.tolist(), inputs.starts.tolist(), inputs.ends.tolist(), strict=True):
            new = self._unscored.get(int(batch.seq_ids[row]))
            if new is None:
                continue
            stop = int(batch.num_computed[row])  # this step's tokens are start to stop - 1
            first, last = max(new.num_scored_tokens, start + 1), min(stop, new.num_prompt_tokens - 1)
            if first <= last:
                assert new.params.prompt_logprobs is not None
                parts.append(ScoredPart(new.seq_id, first, last - first + 1, new.params.prompt_logprobs))
                rows.append(np.arange(end - stop + first - 1, end - stop + last))
                token_ids.append(batch.token_ids[row, first : last + 1].astype(np.int64))
            if stop >= new.num_prompt_tokens - 1:
                del self._unscored[new.seq_id]
        if not parts:
            return None
        return StepScores(parts, put(np.concatenate(rows)), put(np.concatenate(token_ids)))


def score(hidden: Tensor, compute_logits: Callable[[Tensor], Tensor], step: StepScores, vocab_size: int) -> ScoredStep:
    """The scores of a step from its hidden states [num_tokens, hidden]. An error in the computation fails the scored
    sequences only."""
    try:
        scores = compute_scores(
            hidden, compute_logits, step.rows, step.token_ids, max(part.k for part in step.parts), vocab_size
        )
    except Exception as error:
        logger.exception("scoring %d prompts failed", len(step.parts))
        return ScoredStep(step.parts, None, f"{type(error).__name__}: {error}")
    return ScoredStep(step.parts, to_host(scores))


@torch.inference_mode()
def compute_scores(
    hidden: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
    rows: Tensor,
    token_ids: Tensor,
    max_k: int,
    vocab_size: int,
) -> Scores:
    """Logprobs of `token_ids` at `rows` of `hidden`, and the max_k highest of each row (at most vocab_size)."""
    size = max(1, MAX_SCORED_LOGITS // vocab_size)
    k = min(max_k, vocab_size)
    pieces = []
    for start in range(0, len(rows), size):
        logits = compute_logits(hidden.index_select(0, rows[start : start + size]))
        logprobs, ranks, top_ids = top_logprobs(logits, token_ids[start : start + size], k, with_ranks=True)
        del logits
        pieces.append((logprobs.clamp_(min=MIN_LOGPROB), ranks, top_ids.int()))
    return Scores(*(torch.cat(column) for column in zip(*pieces, strict=True)))


def to_host(scores: Scores) -> Scores:
    """The scores on the host; from a GPU the copies are queued."""
    if not scores.ranks.is_cuda:
        return scores
    tensors = (scores.logprobs, scores.ranks, scores.top_ids)
    return Scores(*(tensor.to("cpu", non_blocking=True) for tensor in tensors))
