"""GrammarMasks: the masks of a step on the device, from the rows' matchers on the host.

A mask needs every token before it. On a GPU the newest is still on its way when a step is launched; so the forward pass
is queued first, then the tokens of the step before are waited for, the matchers take them in, and the masks follow the
forward pass through the queue. The device computes meanwhile: it waits only where the host is slower than a forward
pass. Steps in which no sequence has a structured output wait for nothing.
"""

from dataclasses import dataclass

import numpy as np

from engine.sampling_params import SamplingParams
from engine.worker.batch.input_batch import InputBatch, SampleTargets
from engine.worker.batch.step_buffer import ALIGNMENT, StepBuffer
from engine.worker.device.queue import DeviceQueue, Mark
from engine.worker.sampling.grammar_cache import GrammarCache
from engine.worker.sampling.grammar_rows import GrammarRows
from engine.worker.sampling.results import SamplerRun, token_ids_of
from kernels.sampling.token_mask import TokenMask


@dataclass(frozen=True, slots=True)
class _Launched:
    at: SampleTargets
    sampled: tuple[SamplerRun, ...]
    ready: Mark


class GrammarMasks:
    def __init__(self, batch: InputBatch, eos_token_ids: list[int], queue: DeviceQueue | None) -> None:
        self.cache = GrammarCache()
        self._rows = GrammarRows(self.cache, eos_token_ids, batch.max_model_len)
        self._batch = batch
        self._queue = queue
        self._buffer: StepBuffer | None = None
        self._unread: list[_Launched] = []
        self._failed: dict[int, str] = {}
        self._expected: list[tuple[int, int]] = []  # rows, and where they are likely to sample next

    def add(self, row: int, params: SamplingParams, num_prompt_tokens: int) -> None:
        """Take the sequence in `row`, where it has a structured output. ValueError where that cannot be compiled."""
        if params.structured_output is not None:
            self._rows.add(row, params, num_prompt_tokens)

    def drop(self, row: int) -> None:
        self._rows.drop(row)

    def make(self, at: SampleTargets) -> TokenMask | None:
        """The masks of the step that samples `at`, once its forward pass is queued; None where nothing needs one."""
        if not self._rows or not len(places := self._rows.which(at.rows)):
            return None
        self._read_back()
        words, failed = self._rows.masks(at, places, self._batch.token_ids)
        self._failed |= failed
        buffer = self._step_buffer(words.shape[1])
        mask = TokenMask(buffer.put(places), buffer.put(words))
        buffer.upload()
        return mask

    def note_launched(self, at: SampleTargets, sampled: tuple[SamplerRun, ...], ready: Mark) -> None:
        """On a GPU: a step whose tokens the matchers will need."""
        if self._rows and len(self._rows.which(at.rows)):
            self._unread.append(_Launched(at, sampled, ready))

    def expect_next(self, at: SampleTargets) -> None:
        """On a CPU: a step whose tokens are known."""
        if self._rows:
            places = self._rows.which(at.rows)
            self._expected = list(zip(at.rows[places].tolist(), (at.positions[places] + 1).tolist(), strict=True))

    def prepare_one(self) -> bool:
        """While there is no plan: the mask that a row will need next; False where none is to be prepared."""
        if not self._expected:
            return False
        self._rows.prepare(*self._expected.pop(), self._batch.token_ids)
        return True

    def take_failed(self) -> dict[int, str]:
        """Sequences that the last step found cannot go on, with the reason."""
        failed, self._failed = self._failed, {}
        return failed

    def _read_back(self) -> None:
        for step in self._unread:
            step.ready.wait()
            self._batch.store_tokens(step.at, token_ids_of(step.sampled).numpy())
        self._unread.clear()

    def _step_buffer(self, num_words: int) -> StepBuffer:
        """Made with the first mask: a vocabulary of 150 thousand tokens takes 19 KB for each row."""
        if self._buffer is None:
            most = len(self._batch.num_tokens)
            self._buffer = StepBuffer(most * (4 * num_words + np.int64().itemsize) + 2 * ALIGNMENT, self._queue)
        self._buffer.start()
        return self._buffer
