"""A device without arithmetic: it stands in for the Worker's model, checks what the plans make it read, and is exact.

Its KV cache holds (token, position) in each slot. Every step reads the whole context back through the block table, so
a block that was given to two sequences, freed too early or never filled shows at once. The next token is a function of
the context and the seed alone: `expected_tokens` is the unbatched oracle.
"""

import random
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import msgspec

from engine.executor.step import (
    BlockCopy,
    FetchBlocks,
    FetchedBlocks,
    NewSequence,
    SampledToken,
    StepPlan,
    StepResult,
)
from engine.outputs import PromptScores, pack_top
from engine.sampling_params import Pooling

VOCAB_SIZE = 260
HIDDEN_SIZE = 8
EOS_TOKEN_ID = 257


def next_token(context: list[int], seed: int, eos_every: int = 0) -> int:
    """A letter or a space that depends on every token before it; about one in `eos_every` ends the sequence."""
    digest = zlib.crc32(b"".join(token.to_bytes(2, "little") for token in context) + seed.to_bytes(8, "little"))
    if eos_every and digest % eos_every == 0:
        return EOS_TOKEN_ID
    return 32 if digest % 7 == 0 else 97 + digest % 26


def top_candidates(context: list[int], count: int) -> list[tuple[int, float]]:
    """The `count` most likely next tokens with their logprobs, which fp32 can hold: letters, the space and the end in a
    random order that depends on every token before, then all others.
    """
    rng = random.Random(zlib.crc32(b"".join(token.to_bytes(2, "little") for token in context)))
    likely = [32, EOS_TOKEN_ID, *range(97, 123)]
    rng.shuffle(likely)
    ranked = likely + [token for token in range(VOCAB_SIZE) if token not in likely]
    logprobs = sorted((rng.uniform(-5, -0.5) for _ in likely), reverse=True) + [-50.0 - i for i in range(VOCAB_SIZE)]
    return list(zip(ranked[:count], array("f", logprobs), strict=False))


def expected_score(context: list[int]) -> tuple[float, int]:
    """(logprob, rank) of the last token of a prompt's start, given those before it: a function of all of them."""
    digest = zlib.crc32(b"".join(token.to_bytes(2, "little") for token in context))
    return -(digest % 1024) / 64, 1 + digest % VOCAB_SIZE


def hidden_state(context: list[int]) -> list[float]:
    """The hidden state of the last token of `context`: numbers from -1 to 1 that depend on every token."""
    rng = random.Random(zlib.crc32(b"".join(token.to_bytes(2, "little") for token in context)))
    return [rng.uniform(-1, 1) for _ in range(HIDDEN_SIZE)]


def expected_vector(prompt: list[int], pooling: Pooling) -> list[float]:
    """The embedding of a prompt, in fp32."""
    states = [hidden_state(prompt[: i + 1]) for i in range(len(prompt))]
    vector = {
        "last": states[-1],
        "cls": states[0],
        "mean": [sum(column) / len(states) for column in zip(*states, strict=True)],
    }[pooling.kind]
    vector = vector[: pooling.dimensions]
    norm = sum(x * x for x in vector) ** 0.5 if pooling.normalize else 1.0
    return array("f", [x / norm for x in vector]).tolist()


def expected_tokens(prompt: list[int], seed: int, num_tokens: int, eos_every: int = 0) -> list[int]:
    """The tokens that an unbatched loop generates: `num_tokens`, or up to the first end-of-sequence token."""
    context = list(prompt)
    while len(context) < len(prompt) + num_tokens:
        context.append(next_token(context, seed, eos_every))
        if context[-1] == EOS_TOKEN_ID:
            break
    return context[len(prompt) :]


def compute_seconds(plan: StepPlan) -> float:
    """Seconds of a step: 1 ms, 0.5 ms more per decode, 0.1 ms more per token of a chunk."""
    num_decodes = len(plan.decodes)
    return 1e-3 + 5e-4 * num_decodes + 1e-4 * (plan.num_tokens - num_decodes)


def step_result(
    plan: StepPlan, samples: list[SampledToken], failed: dict[int, str], scores: Sequence[PromptScores] = ()
) -> StepResult:
    """As the Worker sends it: in columns what has no logprobs."""
    detailed = [sample for sample in samples if sample.packed_top or sample.logprob]
    plain = [sample for sample in samples if not (sample.packed_top or sample.logprob)]
    seq_ids, token_ids = [sample.seq_id for sample in plain], [sample.token_id for sample in plain]
    return StepResult(plan.step_id, detailed, failed, compute_seconds(plan), seq_ids, token_ids, list(scores))


@dataclass
class _Row:
    token_ids: list[int]
    num_computed: int
    block_ids: list[int]
    seed: int
    num_logprobs: int | None
    ranked: bool  # greedy with logprobs, as of a beam search: next come top_candidates()
    fork_of: int | None
    unscored: range  # positions of the prompt
    num_scores: int
    pooling: Pooling | None


@dataclass
class FakeDevice:
    num_blocks: int
    block_size: int
    eos_every: int = 0
    fail_on_token: int | None = None  # a sequence that ends in it cannot be sampled
    rows: dict[int, _Row] = field(default_factory=dict)
    slots: dict[int, tuple[int, int]] = field(default_factory=dict)
    host: dict[int, list[tuple[int, int] | None]] = field(default_factory=dict)  # the host tier
    disk: dict[bytes, list[tuple[int, int] | None]] = field(default_factory=dict)

    def execute(self, plan: StepPlan) -> StepResult:
        for seq_id in plan.removed:
            del self.rows[seq_id]
        for new in plan.new:
            self._add(new)
        for move in plan.offloads:
            self.host[move.slot] = self._content(move.block_id)
            if move.digest:
                self.disk[move.digest] = self.host[move.slot]
        for copy in plan.block_copies:
            self._copy_block(copy)
        for move in plan.loads:
            self._fill(move.block_id, self.host[move.slot])
        for step in plan.steps:  # all keys and values are written before any are read, as in a layer
            self.rows[step.seq_id].block_ids += step.new_block_ids
            self._write(self.rows[step.seq_id], step.num_tokens)
        drafts = {draft.seq_id: draft.token_ids for draft in plan.drafts}
        for seq_id, draft in drafts.items():
            self._write_draft(self.rows[seq_id], draft)
        computing = {step.seq_id for step in plan.steps if step.num_tokens}
        samples: list[SampledToken] = []
        failed: dict[int, str] = {}
        scores: list[PromptScores] = []
        vectors: dict[int, bytes] = {}
        verified: list[list[SampledToken]] = []
        for step in plan.steps:
            row = self.rows[step.seq_id]
            scores += self._score(step.seq_id, row, step.num_tokens)
            self._check_context(row)
            assert step.num_tokens or row.fork_of in computing, "a fork's parent does not compute in its step"
            assert step.sample == (row.num_computed == len(row.token_ids)), "the plan samples at the wrong token"
            if not step.sample:
                continue
            if row.token_ids[-1] == self.fail_on_token:
                failed[step.seq_id] = "the logits are not finite"
                row.token_ids.append(0)  # the next plan may be under way already and count on a token
                continue
            if row.pooling is not None:
                vectors[step.seq_id] = array("f", expected_vector(row.token_ids, row.pooling)).tobytes()
                row.token_ids.append(0)
                continue
            if (draft := drafts.get(step.seq_id)) is not None:
                verified.append(self._verify(step.seq_id, row, draft))
                continue
            samples.append(self._sample(step.seq_id, row))
            row.token_ids.append(samples[-1].token_id)
        result = step_result(plan, samples, failed, scores)
        return msgspec.structs.replace(result, vectors=vectors, verified=verified)

    def fetch(self, message: FetchBlocks) -> FetchedBlocks:
        contents = list(takewhile(bool, map(self.disk.get, message.digests)))
        self.host.update(zip(message.slots, contents, strict=False))
        return FetchedBlocks(message.fetch_id, len(contents))

    def _write_draft(self, row: _Row, draft: list[int]) -> None:
        for position, token in enumerate(draft, start=row.num_computed):
            self.slots[self._slot(row, position)] = token, position

    def _verify(self, seq_id: int, row: _Row, draft: list[int]) -> list[SampledToken]:
        """The tokens of a sequence with a draft, up to the first one that differs from it."""
        tokens: list[SampledToken] = []
        for proposed in (*draft, None):
            tokens.append(self._sample(seq_id, row))
            row.token_ids.append(tokens[-1].token_id)
            if tokens[-1].token_id != proposed or proposed == self.fail_on_token:
                break
            row.num_computed += 1
            self._check_context(row)
        del row.block_ids[-(-row.num_computed // self.block_size) :]
        return tokens

    def _sample(self, seq_id: int, row: _Row) -> SampledToken:
        if row.ranked:
            top = top_candidates(row.token_ids, row.num_logprobs)
            return SampledToken(seq_id, *top[0], pack_top(top))
        token = next_token(row.token_ids, row.seed, self.eos_every)
        if row.num_logprobs is None:
            return SampledToken(seq_id, token)
        return SampledToken(seq_id, token, -0.25, pack_top([(token, -0.25), (1, -2.0)]))

    def _score(self, seq_id: int, row: _Row, num_tokens: int) -> list[PromptScores]:
        """The token before each has its row in this step; all that is asked for must come in order."""
        start = row.num_computed - num_tokens
        scored = range(max(row.unscored.start, start + 1), min(row.unscored.stop, row.num_computed + 1))
        if not scored:
            return []
        assert scored.start == row.unscored.start, "the row of a token that was to be scored was not computed"
        row.unscored = range(scored.stop, row.unscored.stop)
        k, found = row.num_scores, [expected_score(row.token_ids[: position + 1]) for position in scored]
        logprobs = array("f", [value for logprob, _ in found for value in (logprob, *range(-1, -1 - k, -1))])
        top_ids = array("i", [token_id for _ in found for token_id in range(97, 97 + k)])
        ranks = array("i", [rank for _, rank in found])
        return [PromptScores(seq_id, scored.start, k, logprobs.tobytes(), ranks.tobytes(), top_ids.tobytes())]

    def _add(self, new: NewSequence) -> None:
        assert new.seq_id not in self.rows, "the Worker holds this sequence already"
        k = new.params.prompt_logprobs
        self.rows[new.seq_id] = _Row(
            list(new.token_ids),
            new.num_computed_tokens,
            list(new.block_ids),
            new.seed,
            new.params.logprobs,
            new.params.greedy and bool(new.params.logprobs),
            new.fork_of,
            range(0) if k is None else range(new.num_scored_tokens, new.num_prompt_tokens),
            k or 0,
            new.params.pooling,
        )
        if new.params.pooling is not None and new.params.pooling.needs_every_token:
            assert new.num_computed_tokens == 0, "the hidden states of a cached prefix are not there to be pooled"

    def _copy_block(self, copy: BlockCopy) -> None:
        row = self.rows[copy.seq_id]
        assert row.block_ids[-1] == copy.source, "only the last block of a table is ever replaced"
        row.block_ids[-1] = copy.target
        self._fill(copy.target, self._content(copy.source))

    def _content(self, block_id: int) -> list[tuple[int, int] | None]:
        return [self.slots.get(block_id * self.block_size + offset) for offset in range(self.block_size)]

    def _fill(self, block_id: int, content: list[tuple[int, int] | None]) -> None:
        for offset, token in enumerate(content):
            self.slots.pop(block_id * self.block_size + offset, None)
            if token is not None:
                self.slots[block_id * self.block_size + offset] = token

    def _slot(self, row: _Row, position: int) -> int:
        block_id = row.block_ids[position // self.block_size]
        assert 0 <= block_id < self.num_blocks
        return block_id * self.block_size + position % self.block_size

    def _write(self, row: _Row, num_tokens: int) -> None:
        for position in range(row.num_computed, row.num_computed + num_tokens):
            self.slots[self._slot(row, position)] = row.token_ids[position], position
        row.num_computed += num_tokens

    def _check_context(self, row: _Row) -> None:
        for position in range(row.num_computed):
            found = self.slots.get(self._slot(row, position))
            assert found == (row.token_ids[position], position), f"position {position} holds {found}"
