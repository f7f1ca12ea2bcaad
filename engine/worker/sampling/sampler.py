"""Sampler: logits [rows, vocab_size] -> one token per row, with the logprobs that were asked for.

Order: logprobs of the unchanged logits; then the mask of a grammar, logit_bias, penalties, bans (min_tokens, bad_words,
allowed_token_ids), temperature, min_p, top_k, top_p (each filter works on the tokens that the filter before it left, as
in vLLM), then the draw. A forced token replaces the drawn token. A filter cuts by value: tokens tied with the last kept
token stay in, so the result never depends on how a sort breaks ties.

A draw maps one uniform number per row through the inverse of the cumulative distribution in token-id order. The result
of a row does not depend on the other rows. A row with NaN, with +inf or without a logit above -inf is reported as
failed.

On a GPU the kernels of kernels/sampling/logits.py and kernels/sampling/draw.py do the same, in the same order and with
the same numbers, and so do those of kernels/cpu/sampling on a CPU; the code here is their reference, and the sampler of
a CPU without numba. It never waits for the device.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.sampling_params import MIN_LOGPROB
from engine.worker.sampling.sampling_rows import Draw, Penalties, PlainDraws, SamplingInputs
from engine.worker.sampling.token_bans import RecentTokens, allow_only, ban_words
from kernels.dispatch import cpu_kernels, use_triton
from kernels.sampling import FAILED
from kernels.sampling.draw import draw_tokens
from kernels.sampling.greedy import most_likely
from kernels.sampling.logits import TokenPenalties, change_logits, largest_logits
from kernels.sampling.logprobs import top_logprobs
from kernels.sampling.token_mask import TokenMask, mask_tokens

BUCKET = 64  # tokens per bucket of the two-level cumulative sum
FIRST_BIN, NUM_BINS = (127 - 10) * 32, 18 * 32  # histogram that finds a nucleus: bins from 2**-10 up to 2**8


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """Per row: token_ids int64 and failed bool [rows]. Logprobs if asked for, rows in the order of logprob_rows.

    logprobs float32 [n, 1 + max_logprobs] holds the chosen token first; top_ids int64 [n, max_logprobs].
    """

    token_ids: Tensor
    failed: Tensor
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ForcedTokens:
    """Distinct rows of the step's logits, and the token that each row gets regardless of its logits; int64 [n]."""

    rows: Tensor
    token_ids: Tensor

    def of_row(self, row: int) -> "ForcedTokens | None":
        """The forced token of one row, for logits of that row alone; None if it has none."""
        token_ids = self.token_ids[self.rows == row]
        return ForcedTokens(torch.zeros_like(self.rows[:1]), token_ids) if len(token_ids) else None


class TokenCounts:
    """For rows with penalties: how often each token was generated, and whether the prompt has it. `recent`: the newest
    tokens, for rows with bad words.

    On a CPU, the pages of rows that never had a penalty take no memory.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        shape = (max_num_seqs, vocab_size)
        if device.type == "cpu":
            self.generated = torch.from_numpy(np.zeros(shape, np.int32))
            self.in_prompt = torch.from_numpy(np.zeros(shape, np.bool_))
        else:
            self.generated = torch.zeros(shape, dtype=torch.int32, device=device)
            self.in_prompt = torch.zeros(shape, dtype=torch.bool, device=device)
        self.recent = RecentTokens(max_num_seqs, device)

    def reset(self, row: int, prompt: Tensor, generated: Tensor) -> None:
        """Set the counts of a sequence that is new, or back after preemption. Token ids int64 [n]."""
        self.in_prompt[row].zero_().index_fill_(0, prompt, True)
        counts = self.generated[row].zero_()
        counts.index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))
        self.recent.reset(row, generated)

    def add(self, batch_rows: Tensor, token_ids: Tensor) -> None:
        """Count one more token in each of batch_rows, which are distinct."""
        self.generated[batch_rows, token_ids] += 1


@torch.inference_mode()
def sample(
    logits: Tensor,
    inputs: SamplingInputs | PlainDraws | None,
    counts: TokenCounts,
    mask: TokenMask | None = None,
    forced: ForcedTokens | None = None,
) -> SamplerOutput:
    """Sample one token per row of logits [rows, vocab_size].

    Logits have any float dtype. On a CPU fp32 logits get overwritten; on a GPU only the rows of `mask` are written.
    inputs None: the most likely token of each row; then, and with PlainDraws, no row may have a mask or a forced token.
    """
    if isinstance(inputs, PlainDraws):
        return SamplerOutput(*_without_failed(inputs.draw(logits)))
    choose = _choose_by_kernels if use_triton(logits) else _choose
    if inputs is None:
        return SamplerOutput(*choose(logits, None, counts))
    unchanged = None if inputs.logprob_rows is None else logits.index_select(0, inputs.logprob_rows)
    if not use_triton(logits) and (mask is not None or inputs.changed_rows is not None):
        logits = logits.float()
    if mask is not None:
        mask_tokens(logits, mask)
    token_ids, failed = choose(logits, inputs, counts)
    if forced is not None:
        token_ids.index_copy_(0, forced.rows, forced.token_ids)
    if (penalties := inputs.penalties) is not None and penalties.history is None:
        counts.add(penalties.batch_rows, token_ids.index_select(0, penalties.rows))
    if inputs.words is not None:
        rows, batch_rows = inputs.words.update
        counts.recent.add(batch_rows, token_ids.index_select(0, rows))
    if unchanged is None or inputs.logprob_rows is None:
        return SamplerOutput(token_ids, failed)
    chosen, k = token_ids.index_select(0, inputs.logprob_rows), min(inputs.max_logprobs, logits.shape[1])
    logprobs, _, top_ids = top_logprobs(unchanged, chosen, k)
    return SamplerOutput(token_ids, failed, logprobs.clamp_(min=MIN_LOGPROB), top_ids)


def _choose_by_kernels(logits: Tensor, inputs: SamplingInputs | None, counts: TokenCounts) -> tuple[Tensor, Tensor]:
    """(token_ids, failed) on a GPU, with a few launches whatever the rows ask for."""
    if inputs is None:
        token_ids, _, failed = largest_logits(logits)
        return token_ids, failed
    changed = None
    if inputs.changed_rows is not None:
        penalties = None
        if (p := inputs.penalties) is not None:
            penalties = TokenPenalties(
                rows=p.rows,
                batch_rows=p.batch_rows,
                repetition=p.repetition,
                presence=p.presence,
                frequency=p.frequency,
                generated=counts.generated,
                in_prompt=counts.in_prompt,
            )
        changed = change_logits(logits, inputs.changed_rows, inputs.bias, penalties, inputs.banned)
        _apply_bans(changed.values, inputs, counts)
    token_ids, largest, failed = largest_logits(logits, changed)
    for draw in inputs.draws:
        draw_tokens(
            logits, changed, largest, token_ids, rows=draw.rows, temperature=draw.temperature, uniform=draw.uniform,
            log_min_p=draw.log_min_p, top_k=draw.top_k, top_p=draw.top_p,
        )  # fmt: skip
    return token_ids, failed


def _choose(logits: Tensor, inputs: SamplingInputs | None, counts: TokenCounts) -> tuple[Tensor, Tensor]:
    """(token_ids, failed) on a CPU. Overwrites the logits."""
    token_ids = most_likely(logits)
    if inputs is None:
        return _without_failed(token_ids)
    failed = token_ids == FAILED
    if inputs.changed_rows is not None:
        _change_logits(logits, inputs, counts)
        token_ids = most_likely(logits)
        failed |= token_ids == FAILED
    for draw in inputs.draws:
        token_ids.index_copy_(0, draw.rows, _draw(logits, draw))
    return token_ids.masked_fill_(failed, 0), failed


def _without_failed(token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """(token_ids, failed) with 0 for FAILED."""
    failed = token_ids == FAILED
    return token_ids.masked_fill_(failed, 0), failed


def _change_logits(logits: Tensor, inputs: SamplingInputs, counts: TokenCounts) -> None:
    flat = logits.view(-1)
    if inputs.bias is not None:
        indices, values = inputs.bias
        flat.index_add_(0, indices, values)
    if inputs.penalties is not None:
        _penalise(logits, inputs.penalties, counts)
    if inputs.banned is not None:
        flat.index_fill_(0, inputs.banned, -torch.inf)
    _apply_bans(logits, inputs, counts)


def _apply_bans(logits: Tensor, inputs: SamplingInputs, counts: TokenCounts) -> None:
    if inputs.words is not None:
        ban_words(logits, inputs.words, counts.recent)
    if inputs.allowed is not None:
        allow_only(logits, inputs.allowed)


def _penalise(logits: Tensor, penalties: Penalties, counts: TokenCounts) -> None:
    """Apply the repetition penalty (CTRL), then frequency and presence (OpenAI)."""
    rows, batch_rows = penalties.rows, penalties.batch_rows
    if penalties.history is not None:
        cpu = cpu_kernels()
        assert cpu is not None, "SamplingRows has a history for its kernels alone"
        history, lengths = penalties.history
        cpu.penalties.penalise_rows(logits, rows, batch_rows, lengths, history)
        return
    changed = _penalised(
        logits.index_select(0, rows),
        counts.generated.index_select(0, batch_rows),
        counts.in_prompt.index_select(0, batch_rows),
        penalties.repetition,
        penalties.presence,
        penalties.frequency,
    )
    logits.index_copy_(0, rows, changed)


def _penalised(
    logits: Tensor, generated: Tensor, in_prompt: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    occurs = generated > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(occurs | in_prompt, repeated, logits)
    return logits - (frequency * generated + presence * occurs)


def _draw(logits: Tensor, draw: Draw) -> Tensor:
    """One token id per row of `draw`, int64 [n]; of a row that failed, any."""
    if (cpu := cpu_kernels()) is not None:
        filters = draw.log_min_p, draw.top_k, draw.top_p
        tokens: Tensor = cpu.draw.draw(logits, draw.rows, draw.temperature, draw.uniform, *filters)
        return tokens
    x = logits.index_select(0, draw.rows).float()  # a copy; its largest becomes 0, so that no temperature overflows
    x.sub_(x.amax(-1, keepdim=True)).div_(draw.temperature[:, None])
    threshold = draw.log_min_p
    if draw.top_k is not None:
        kth = _kth_largest(x, draw.top_k, draw.num_candidates)
        threshold = kth if threshold is None else torch.maximum(threshold, kth)
    weights = x.exp()
    if threshold is not None:
        _keep(weights, x >= threshold[:, None])
    if draw.top_p is not None:
        _keep(weights, x >= _nucleus_thresholds(x, weights, draw.top_p)[:, None])
    return _inverse_cdf(weights, draw.uniform)


def _keep(weights: Tensor, kept: Tensor) -> None:
    """Set all other weights to 0."""
    np.multiply(weights.numpy(), kept.numpy(), out=weights.numpy())  # four times faster than torch on one core


def _kth_largest(x: Tensor, top_k: Tensor, num_candidates: int) -> Tensor:
    """The k-th largest of each row; -inf if top_k is the whole vocabulary. num_candidates: the largest k otherwise."""
    if num_candidates < x.shape[1]:
        candidates = x.topk(num_candidates).values
    else:
        candidates = torch.from_numpy(np.sort(x.numpy(), -1)).flip(-1)  # 5 times faster than in torch
    kth = candidates.gather(1, top_k.clamp(max=candidates.shape[1])[:, None] - 1)[:, 0]
    return torch.where(top_k < x.shape[1], kth, -torch.inf)


def _nucleus_thresholds(x: Tensor, weights: Tensor, top_p: Tensor) -> Tensor:
    """Nucleus sampling (Holtzman et al. 2020, section 3.1): the smallest set of most likely tokens whose probability
    reaches top_p. Returns the logit of its last token, float32 [n]. weights: exp(x), or 0 for a token filtered out.

    It does not sort the row: a histogram finds the bin of logits in which top_p is reached, and only that bin is
    sorted. A bin is the exponent of |x| and 5 bits of its mantissa; exp(x) is 0 beyond the last bin.
    """
    distance, masses = np.abs(x.numpy()), weights.numpy()
    rows = len(distance)
    bins = (distance.view(np.uint32) >> 18).astype(np.int32) - FIRST_BIN
    np.clip(bins, 0, NUM_BINS - 1, out=bins)
    flat_bins = bins + np.arange(0, rows * NUM_BINS, NUM_BINS)[:, None]
    mass = np.bincount(flat_bins.ravel(), masses.ravel(), rows * NUM_BINS).reshape(rows, NUM_BINS).cumsum(-1)
    needed = top_p.numpy() * mass[:, -1]
    reached = np.minimum((mass < needed[:, None]).sum(-1), NUM_BINS - 1)
    before = np.where(reached > 0, mass[np.arange(rows), reached - 1], 0.0)
    thresholds = np.full(rows, -np.inf, np.float32)  # stays -inf for a row of NaN
    for row in range(rows):
        tokens = np.flatnonzero(bins[row] == reached[row])
        if len(tokens):
            tokens = tokens[distance[row, tokens].argsort()]
            last = (before[row] + masses[row, tokens].cumsum(dtype=np.float64)).searchsorted(needed[row])
            thresholds[row] = -distance[row, tokens[min(last, len(tokens) - 1)]]
    return torch.from_numpy(thresholds)


def _inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first token at which the cumulative weight exceeds uniform * total, int64 [n]; never a token of weight 0.

    weights fp32 [n, vocab_size] >= 0, not normalised; uniform float64 [n] in [0, 1). Works in two levels, the bucket
    and then the token inside, so that the float64 sums have few terms.
    """
    vocab_size = weights.shape[1]
    if vocab_size % BUCKET:
        weights = torch.nn.functional.pad(weights, (0, BUCKET - vocab_size % BUCKET))
    buckets = weights.view(len(weights), -1, BUCKET)
    sums = buckets.sum(-1).double()
    cumulative = sums.cumsum(-1)
    bucket = _first_above(cumulative, uniform[:, None] * cumulative[:, -1:])
    before = (cumulative - sums).gather(1, bucket)
    inside = buckets.gather(1, bucket[:, :, None].expand(-1, -1, BUCKET))[:, 0].cumsum(-1, dtype=torch.float64)
    token = _first_above(inside, uniform[:, None] * cumulative[:, -1:] - before)
    return (bucket * BUCKET + token)[:, 0].clamp_(max=vocab_size - 1)  # clamped for rows of NaN


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Index of the first entry above target, [n, 1]; if rounding leaves none, of the last entry that adds weight."""
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(cumulative, target, right=True), last).clamp_(max=cumulative.shape[1] - 1)
