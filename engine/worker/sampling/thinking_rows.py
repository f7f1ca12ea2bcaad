"""ThinkingRows: finds the sequences that have used up their thinking budget and forces their closing tag.

A row's scan has read the generated tokens up to some position; before a step samples, it reads the tokens that came
since. As with grammars (grammar_rows.py), any step or Worker may have sampled them, so preemption and a new Worker
change nothing.

On a GPU the newest token is still on its way to the host when a step is launched. The scan waits for it only if the
number of tokens says that the budget may be used up: all earlier steps, and all steps behind the tag, wait for nothing.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from engine.sampling_params import SamplingParams
from engine.thinking import ThinkingScan, ThinkingTags
from engine.worker.batch.input_batch import InputBatch, SampleTargets
from engine.worker.batch.step_buffer import ALIGNMENT, BUFFERED_STEPS, IntArray, StepBuffer
from engine.worker.device.queue import DeviceQueue, Mark
from engine.worker.sampling.results import SamplerRun, token_ids_of
from engine.worker.sampling.sampler import ForcedTokens


@dataclass(slots=True)
class _Row:
    budget: int
    scan: ThinkingScan
    consumed: int  # tokens read so far, the prompt included

    def may_be_due(self, position: int) -> bool:
        """True if the thinking may have reached its budget before the token at `position`."""
        return self.scan.num_tokens + position - self.consumed >= self.budget

    def advance(self, token_ids: IntArray, position: int) -> None:
        self.scan.feed(token_ids[self.consumed : position].tolist())
        self.consumed = position

    @property
    def is_due(self) -> bool:
        return self.scan.inside and self.scan.num_tokens >= self.budget


class ThinkingRows:
    """The thinking budgets of live sequences, by row of InputBatch."""

    def __init__(self, batch: InputBatch, queue: DeviceQueue | None) -> None:
        self._batch = batch
        self._queue = queue
        self._buffer = StepBuffer(len(batch.num_tokens) * 2 * np.int64().itemsize + 2 * ALIGNMENT, queue)
        self._tags: ThinkingTags | None = None
        self._rows: dict[int, _Row] = {}
        self._unread: deque[tuple[SampleTargets, tuple[SamplerRun, ...], Mark]] = deque()

    def set_tags(self, tags: ThinkingTags) -> None:
        """Set the tokens of the model's thinking tags; comes before any sequence with a budget."""
        self._tags = tags

    def add(self, row: int, params: SamplingParams, num_prompt_tokens: int) -> None:
        """Add the sequence in `row` if it has a budget. ValueError if the tags are not known."""
        if params.thinking_token_budget is None:
            return
        if self._tags is None:
            raise ValueError("thinking_token_budget: the Worker was not told how this model marks its thinking")
        scan = ThinkingScan(self._tags, params.thinking_opened)
        self._rows[row] = _Row(params.thinking_token_budget, scan, num_prompt_tokens)

    def drop(self, row: int) -> None:
        self._rows.pop(row, None)

    def make(self, targets: SampleTargets) -> ForcedTokens | None:
        """The forced tokens of a step whose forward pass is queued; None if no token is forced."""
        if not self._rows:
            self._unread.clear()
            return None
        rows, positions = targets.rows.tolist(), targets.positions.tolist()
        due = [i for i, row in enumerate(rows) if (state := self._rows.get(row)) and state.may_be_due(positions[i])]
        if not due:
            return None
        self._read_back(0)
        places, token_ids = [], []
        for i in due:
            state = self._rows[rows[i]]
            state.advance(self._batch.token_ids[rows[i]], positions[i])
            if state.is_due:
                places.append(i)
                token_ids.append(state.scan.next_closing_token())
            elif state.scan.over:
                del self._rows[rows[i]]
        if not places:
            return None
        self._buffer.start()
        forced = ForcedTokens(
            self._buffer.put(np.array(places, np.int64)), self._buffer.put(np.array(token_ids, np.int64))
        )
        self._buffer.upload()
        return forced

    def note_launched(self, targets: SampleTargets, runs: tuple[SamplerRun, ...], ready: Mark) -> None:
        """On a GPU: remember a step, whose tokens the scans may need. Reads the tokens of steps that are no longer in
        flight, which waits for nothing."""
        if self._rows:
            self._unread.append((targets, runs, ready))
            self._read_back(BUFFERED_STEPS)

    def _read_back(self, num_left: int) -> None:
        while len(self._unread) > num_left:
            targets, runs, ready = self._unread.popleft()
            ready.wait()
            self._batch.store_tokens(targets, token_ids_of(runs).numpy())
