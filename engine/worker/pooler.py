"""Pooler: makes the vectors of embedded sequences from the hidden states of a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engine.executor.step import NewSequence, SequenceStep
from engine.outputs import PromptScores
from engine.sampling_params import Pooling
from engine.worker.batch.input_batch import InputBatch, SampleTargets, StepInputs
from engine.worker.sampling.prompt_scorer import ScoredStep
from engine.worker.sampling.sampling_rows import Put

Layer = Callable[[Tensor], Tensor]  # engine/models/dense.py

MIN_NORM = 1e-12  # a smaller norm divides as this, so that a vector of zeros stays zeros
NOT_FINITE = "the model's hidden states hold NaN or infinity"


@dataclass(slots=True, eq=False)
class PooledSequence:
    """A sequence to embed. `total` fp32 [hidden] (for mean pooling): the sum of the hidden states of its chunks so
    far."""

    seq_id: int
    pooling: Pooling
    num_tokens: int
    total: Tensor | None = None

    def add(self, hidden: Tensor) -> None:
        """Add the hidden states of the next chunk, [num_tokens, hidden], to the sum."""
        chunk = hidden.float().sum(0)
        self.total = chunk if self.total is None else self.total + chunk


@dataclass(frozen=True, slots=True)
class PooledStep:
    """The pooling of one step. `chunks`: (sequence, its first row, its end row); `ending`: the sequences that end here.

    `targets` are the targets left to sample. places, rest: int64, the rows of `ending` and of `targets` among the
    hidden states of all last tokens. `dense`: the layers behind the pooling.
    """

    chunks: list[tuple[PooledSequence, int, int]]
    ending: list[PooledSequence]
    targets: SampleTargets
    places: Tensor
    rest: Tensor
    dense: Sequence[Layer]

    def pool(self, hidden: Tensor, last_hidden: Tensor) -> tuple[Tensor | None, Tensor]:
        """(vectors fp32 [ending, hidden] on the host or None, the rows of `last_hidden` to sample).

        hidden: all rows of the step, read only if `chunks` has any. last_hidden: the rows of last tokens. From a GPU
        the copy of the vectors is queued.
        """
        for seq, start, end in self.chunks:
            seq.add(hidden[start:end])
        if not self.ending:
            return None, last_hidden
        vectors = last_hidden.index_select(0, self.places).float()
        for i, seq in enumerate(self.ending):
            if seq.total is not None:
                vectors[i] = seq.total / seq.num_tokens
        return vectors.to("cpu", non_blocking=True), last_hidden.index_select(0, self.rest)

    def results(self, vectors: Tensor, failed: dict[int, str]) -> dict[int, bytes]:
        """The vectors of `ending` by sequence id, once their copy is done; see finish_vectors."""
        return finish_vectors(vectors, self.ending, failed, self.dense)


class Pooler:
    """The sequences to embed that the Worker holds; costs nothing where there are none."""

    def __init__(self, dense: Sequence[Layer]) -> None:
        self._dense = dense
        self._sequences: dict[int, PooledSequence] = {}

    def add(self, new: NewSequence) -> None:
        """Remember a new sequence if it is one to embed. A preempted sequence starts over."""
        if (pooling := new.params.pooling) is not None:
            self._sequences[new.seq_id] = PooledSequence(new.seq_id, pooling, new.num_prompt_tokens)

    def remove(self, seq_id: int) -> None:
        self._sequences.pop(seq_id, None)

    @property
    def has_sequences(self) -> bool:
        """True if any live sequence is one to embed."""
        return bool(self._sequences)

    def needs_every_row(self, chunks: Sequence[SequenceStep]) -> bool:
        """True if a step reads more hidden states than those of last tokens."""
        if not self._sequences:
            return False
        found = (self._sequences.get(step.seq_id) for step in chunks)
        return any(seq is not None and seq.pooling.needs_every_token for seq in found)

    def begin(self, inputs: StepInputs, batch: InputBatch, put: Put) -> PooledStep | None:
        """The pooling of a step; None if it has none. `put` sends an array to the device with the step's other
        arrays."""
        if not self._sequences:
            return None
        find, starts = self._sequences.get, [0, *inputs.ends.tolist()]
        chunks = [
            (seq, starts[i], starts[i + 1])
            for i, seq_id in enumerate(batch.seq_ids[inputs.rows].tolist())
            if (seq := find(seq_id)) is not None and seq.pooling.needs_every_token
        ]
        at = inputs.targets
        found = [find(seq_id) for seq_id in at.seq_ids.tolist()]
        ending = [seq for seq in found if seq is not None]
        if not ending and not chunks:
            return None
        is_pooled = np.array([seq is not None for seq in found], np.bool_)
        rest = np.flatnonzero(~is_pooled)
        targets = SampleTargets(at.seq_ids[rest], at.rows[rest], at.positions[rest])
        return PooledStep(chunks, ending, targets, put(np.flatnonzero(is_pooled)), put(rest), self._dense)


def finish_vectors(
    vectors: Tensor, sequences: Sequence[PooledSequence], failed: dict[int, str], dense: Sequence[Layer]
) -> dict[int, bytes]:
    """Pass fp32 rows [sequences, hidden] on the host through `dense`, cut and normalise them as the parameters of each
    sequence say.

    Returns little-endian fp32 bytes by sequence id. A sequence whose row is not finite is added to `failed`.
    """
    for layer in dense:
        vectors = layer(vectors)
    done = {}
    for row, seq in zip(vectors.numpy(), sequences, strict=True):
        vector = row[: seq.pooling.dimensions]
        if not np.isfinite(row).all():
            failed.setdefault(seq.seq_id, NOT_FINITE)
        elif seq.seq_id not in failed:
            norm = float(np.linalg.norm(vector)) if seq.pooling.normalize else 1.0
            done[seq.seq_id] = (vector / np.float32(max(norm, MIN_NORM))).astype("<f4").tobytes()
    return done


@dataclass(frozen=True, slots=True)
class Extras:
    """Results of a step beside its tokens: logprobs of prompts, and the `vectors` of pooled sequences on their way to
    the host (PooledStep.pool)."""

    scored: ScoredStep | None = None
    pooled: PooledStep | None = None
    vectors: Tensor | None = None

    def results(self, failed: dict[int, str]) -> tuple[list[PromptScores], dict[int, bytes]]:
        """(logprobs of prompts, vectors by sequence id), once the step's mark is reached. Adds to `failed` the
        sequences whose numbers are not finite."""
        scores = [] if self.scored is None else self.scored.results(failed)
        if self.pooled is None or self.vectors is None:
            return scores, {}
        return scores, self.pooled.results(self.vectors, failed)
