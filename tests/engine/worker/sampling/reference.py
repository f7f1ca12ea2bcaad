"""The sampler in slow, clear numpy, and the sampling parameters that it is compared over."""

import numpy as np
import torch

from engine.sampling_params import SamplingParams
from engine.worker.sampling.sampler import (
    TokenCounts,
    sample,
)
from engine.worker.sampling.sampling_rows import MAX_SELECTED, SamplingRows

VOCAB = 1000


EOS = [3, 5]


CPU = torch.device("cpu")


def sampling(**more):
    return SamplingParams(**more)


class Batch:
    """Sequences side by side, as the runner holds them: row i is sequence i."""

    def __init__(
        self, params, *, prompts=None, generated=None, seeds=None, vocab_size=VOCAB, sparse=True, one_draw=False
    ):
        n = len(params)
        self.prompts = prompts or [[1, 2]] * n
        self.generated = generated or [[]] * n
        self.counts = TokenCounts(n, vocab_size, CPU)
        self.token_ids = np.zeros((n, 64), np.int32)
        known = self.token_ids if sparse else None
        self.rows = SamplingRows(n, vocab_size, EOS, one_draw=one_draw, token_ids=known)
        self.lengths = np.array([len(p) + len(g) for p, g in zip(self.prompts, self.generated, strict=True)])
        for row, one in enumerate(params):
            tokens = self.prompts[row] + self.generated[row]
            self.token_ids[row, : len(tokens)] = tokens
            self.rows.set(row, one, seeds[row] if seeds else row, len(self.prompts[row]))
            self.counts.reset(row, torch.tensor(self.prompts[row]), torch.tensor(self.generated[row], dtype=torch.long))

    def sample(self, logits, rows=None, positions=None):
        rows = np.arange(len(self.lengths)) if rows is None else np.array(rows)
        positions = self.lengths[rows] if positions is None else np.array(positions)
        inputs = self.rows.build(rows, positions, torch.from_numpy)
        return sample(torch.as_tensor(logits, dtype=torch.float32).clone(), inputs, self.counts)


def reference_logits(logits, params, prompt, generated):
    """One row's logits after every filter, float64; -inf for tokens that cannot be drawn."""
    x = np.array(logits, np.float64)
    for token_id, bias in (params.logit_bias or {}).items():
        x[token_id] += bias
    for token_id in set(prompt) | set(generated):
        x[token_id] = (
            x[token_id] / params.repetition_penalty if x[token_id] > 0 else x[token_id] * params.repetition_penalty
        )
    for token_id in set(generated):
        x[token_id] -= generated.count(token_id) * params.frequency_penalty + params.presence_penalty
    if len(generated) < params.min_tokens:
        x[[*EOS, *params.stop_token_ids]] = -np.inf
    if params.greedy:
        return np.where(np.arange(len(x)) == x.argmax(), 0.0, -np.inf)
    x = (x - x.max()) / params.temperature
    x[np.exp(x) < params.min_p] = -np.inf
    if 0 < params.top_k < len(x):
        x[x < np.sort(x)[-params.top_k]] = -np.inf
    order = np.argsort(-x, kind="stable")
    mass = np.cumsum(np.exp(x[order]))
    last = order[np.searchsorted(mass, params.top_p * mass[-1])] if params.top_p < 1 else order[-1]
    x[x < x[last]] = -np.inf
    return x


def reference_draw(x, uniform):
    """Inverse CDF in token-id order."""
    cumulative = np.cumsum(np.exp(x))
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))


def random_logits(rows, vocab=VOCAB, scale=3.0, seed=0):
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * scale).astype(np.float32)


CASES = {
    "greedy": sampling(temperature=0.0),
    "plain": sampling(),
    "cold": sampling(temperature=0.3),
    "hot": sampling(temperature=5.0),
    "tiny temperature": sampling(temperature=2e-5),
    "top_k": sampling(top_k=7),
    "top_k 1": sampling(top_k=1),
    "large top_k": sampling(top_k=MAX_SELECTED + 100),
    "top_k past the vocabulary": sampling(top_k=10 * VOCAB),
    "top_p": sampling(top_p=0.8),
    "small top_p": sampling(top_p=1e-6),
    "flat top_p": sampling(top_p=0.99, temperature=50.0),
    "min_p": sampling(min_p=0.1),
    "min_p 1": sampling(min_p=1.0),
    "top_k and top_p": sampling(top_k=20, top_p=0.7, temperature=1.5),
    "all filters": sampling(top_k=300, top_p=0.9, min_p=0.01, temperature=1.3),
    "repetition": sampling(repetition_penalty=1.7),
    "presence": sampling(presence_penalty=2.0),
    "frequency": sampling(frequency_penalty=1.1),
    "encouraged": sampling(presence_penalty=-2.0, frequency_penalty=-1.0, repetition_penalty=0.6),
    "bias": sampling(logit_bias={0: 5.0, 17: 100.0, 999: -100.0}, top_p=0.9),
    "greedy bias": sampling(logit_bias={42: 100.0}, temperature=0.0),
    "min_tokens": sampling(min_tokens=4, max_tokens=8, stop_token_ids=(8, 9), temperature=0.7),
    "everything": sampling(
        temperature=0.9, top_k=50, top_p=0.9, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.5,
        frequency_penalty=0.3, logit_bias={7: 3.0}, min_tokens=5, max_tokens=9, logprobs=5,
    ),
}  # fmt: skip


PROMPT, GENERATED = [1, 2, 3, 4, 4, 8], [5, 9, 9, 17]


def with_logprobs(params):
    return SamplingParams(**{name: getattr(params, name) for name in params.__struct_fields__} | {"logprobs": 3})
