"""Pooler: from the hidden states of a step to the vectors of the embedded sequences among its rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engine.executor.step import NewSequence, SequenceStep
from engine.sampling_params import Pooling
from engine.worker.batch.input_batch import InputBatch, SampleTargets, StepInputs
from engine.worker.sampling.sampling_rows import Put

SMALLEST_NORM = 1e-12  # a vector of zeros stays one
NOT_FINITE = "the model's hidden states hold NaN or infinity"


@dataclass(slots=True, eq=False)
class PooledSequence:
    """`total`: fp32 [hidden], the sum of the hidden states of the chunks so far, where the mean is asked for."""

    seq_id: int
    pooling: Pooling
    num_tokens: int
    total: Tensor | None = None

    def add(self, hidden: Tensor) -> None:
        """The hidden states of the next chunk, [num_tokens, hidden]."""
        chunk = hidden.float().sum(0)
        self.total = chunk if self.total is None else self.total + chunk


@dataclass(frozen=True, slots=True)
class PooledStep:
    """What of a step is pooled: `chunks` as (sequence, its first row, its end); `ending` are those that are complete.

    `targets` is what remains to be sampled. places, rest: int64, the rows of `ending` and of `targets` among the
    hidden states of all last tokens.
    """

    chunks: list[tuple[PooledSequence, int, int]]
    ending: list[PooledSequence]
    targets: SampleTargets
    places: Tensor
    rest: Tensor

    def pool(self, hidden: Tensor, last_hidden: Tensor) -> tuple[Tensor | None, Tensor]:
        """(fp32 [ending, hidden] on the host, None for none; the rows of `last_hidden` that are to be sampled).

        hidden: all rows of the step, read only where `chunks` has any; last_hidden: of the last tokens. From a GPU the
        copy is queued.
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
        """The vectors of `ending`, whose rows are on the host by now; see finish_vectors."""
        return finish_vectors(vectors, self.ending, failed)


class Pooler:
    """The embedded sequences that the Worker holds; no cost where there are none."""

    def __init__(self) -> None:
        self._sequences: dict[int, PooledSequence] = {}

    def add(self, new: NewSequence) -> None:
        """Take note of a new sequence, if it is one to embed. One that was preempted begins again."""
        if (pooling := new.params.pooling) is not None:
            self._sequences[new.seq_id] = PooledSequence(new.seq_id, pooling, new.num_prompt_tokens)

    def remove(self, seq_id: int) -> None:
        self._sequences.pop(seq_id, None)

    def needs_every_row(self, chunks: Sequence[SequenceStep]) -> bool:
        """Whether a step reads more hidden states than those of last tokens."""
        if not self._sequences:
            return False
        found = (self._sequences.get(step.seq_id) for step in chunks)
        return any(seq is not None and seq.pooling.needs_every_token for seq in found)

    def begin(self, inputs: StepInputs, batch: InputBatch, put: Put) -> PooledStep | None:
        """What is to be pooled in a step, None for nothing; `put` sends an array to the device with the step's own."""
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
        return PooledStep(chunks, ending, targets, put(np.flatnonzero(is_pooled)), put(rest))


def finish_vectors(vectors: Tensor, sequences: Sequence[PooledSequence], failed: dict[int, str]) -> dict[int, bytes]:
    """Cut and normalise fp32 rows [sequences, hidden] on the host, as each sequence asks for it.

    Returns little-endian fp32 numbers by seq_id; a sequence whose row is not finite goes to `failed`.
    """
    done = {}
    for row, seq in zip(vectors.numpy(), sequences, strict=True):
        vector = row[: seq.pooling.dimensions]
        if not np.isfinite(row).all():
            failed.setdefault(seq.seq_id, NOT_FINITE)
        elif seq.seq_id not in failed:
            norm = float(np.linalg.norm(vector)) if seq.pooling.normalize else 1.0
            done[seq.seq_id] = (vector / np.float32(max(norm, SMALLEST_NORM))).astype("<f4").tobytes()
    return done
