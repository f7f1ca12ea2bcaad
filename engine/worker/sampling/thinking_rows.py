"""ThinkingRows: which sequences have used up their thinking budget, and the closing tag that they must write instead.

A row's scan has read the generated tokens up to some position; before a step samples it reads those that came since. As
with grammars (grammar_rows.py) it does not matter who sampled them, so preemption and a new Worker change nothing.

On a GPU the newest token is still on its way when a step is launched. The scan waits for it only where the budget may
be used up by then, which the number of tokens tells: all steps before that, and all steps behind the tag, wait for
nothing.
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
    consumed: int  # tokens of the sequence, the prompt included

    def may_be_due(self, position: int) -> bool:
        """Whether the thinking may have reached its budget before the token at `position`."""
        return self.scan.num_tokens + position - self.consumed >= self.budget

    def advance(self, token_ids: IntArray, position: int) -> None:
        self.scan.feed(token_ids[self.consumed : position].tolist())
        self.consumed = position

    @property
    def is_due(self) -> bool:
        return self.scan.inside and self.scan.num_tokens >= self.budget


class ThinkingRows:
    """Rows are those of InputBatch."""

    def __init__(self, batch: InputBatch, queue: DeviceQueue | None) -> None:
        self._batch = batch
        self._queue = queue
        self._buffer = StepBuffer(len(batch.num_tokens) * 2 * np.int64().itemsize + 2 * ALIGNMENT, queue)
        self._tags: ThinkingTags | None = None
        self._rows: dict[int, _Row] = {}
        self._unread: deque[tuple[SampleTargets, tuple[SamplerRun, ...], Mark]] = deque()

    def set_tags(self, tags: ThinkingTags) -> None:
        """How this model's vocabulary writes them; comes before any sequence that has a budget."""
        self._tags = tags

    def add(self, row: int, params: SamplingParams, num_prompt_tokens: int) -> None:
        """Take the sequence in `row`, where it has a budget. ValueError where the tags are not known."""
        if params.thinking_token_budget is None:
            return
        if self._tags is None:
            raise ValueError("thinking_token_budget: the Worker was not told how this model marks its thinking")
        scan = ThinkingScan(self._tags, params.thinking_opened)
        self._rows[row] = _Row(params.thinking_token_budget, scan, num_prompt_tokens)

    def drop(self, row: int) -> None:
        self._rows.pop(row, None)

    def make(self, at: SampleTargets) -> ForcedTokens | None:
        """What the step that samples `at` must write, once its forward pass is queued; None where nothing is forced."""
        if not self._rows:
            self._unread.clear()
            return None
        rows, positions = at.rows.tolist(), at.positions.tolist()
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

    def note_launched(self, at: SampleTargets, sampled: tuple[SamplerRun, ...], ready: Mark) -> None:
        """On a GPU: a step whose tokens the scans may need. Those of steps that are not in flight any more are taken in
        at once, which waits for nothing."""
        if self._rows:
            self._unread.append((at, sampled, ready))
            self._read_back(BUFFERED_STEPS)

    def _read_back(self, num_left: int) -> None:
        while len(self._unread) > num_left:
            at, sampled, ready = self._unread.popleft()
            ready.wait()
            self._batch.store_tokens(at, token_ids_of(sampled).numpy())
