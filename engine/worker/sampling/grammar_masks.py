"""GrammarMasks: makes the token masks of a step from the rows' matchers and uploads them to the device.

A mask depends on every earlier token. On a GPU the newest token is still on its way to the host when a step is
launched. So the runner queues the forward pass first; then GrammarMasks waits for the tokens of the step before, the
matchers consume them, and the masks are queued behind the forward pass. The device computes meanwhile and idles only if
the host takes longer than a forward pass. Steps without structured outputs wait for nothing.

The limits of GrammarRows count processor time, which differs from rank to rank. So the first rank of a tensor-parallel
group makes the masks for all of them: ranks that mask differently would sample different tokens.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engine.grammars.compiler import Words
from engine.models.parallel.ranks import Ranks
from engine.sampling_params import SamplingParams
from engine.worker.batch.input_batch import InputBatch, SampleTargets
from engine.worker.batch.step_buffer import ALIGNMENT, IntArray, StepBuffer
from engine.worker.device.queue import DeviceQueue, Mark
from engine.worker.sampling.grammar_cache import GrammarCache
from engine.worker.sampling.grammar_rows import GrammarRows
from engine.worker.sampling.results import SamplerRun, token_ids_of
from kernels.sampling.token_mask import TokenMask


@dataclass(frozen=True, slots=True)
class _Launched:
    targets: SampleTargets
    runs: tuple[SamplerRun, ...]
    ready: Mark


class GrammarMasks:
    def __init__(
        self, batch: InputBatch, eos_token_ids: list[int], queue: DeviceQueue | None, ranks: Ranks | None
    ) -> None:
        self._ranks = ranks
        self._makes_masks = ranks is None or ranks.rank == 0
        self.cache = GrammarCache()
        self._rows = GrammarRows(self.cache, eos_token_ids, batch.max_model_len)
        self._batch = batch
        self._queue = queue
        self._buffer: StepBuffer | None = None
        self._unread: list[_Launched] = []
        self._failed: dict[int, str] = {}
        self._expected: list[tuple[int, int]] = []  # (row, position of its next sample, presumably)

    def add(self, row: int, params: SamplingParams, num_prompt_tokens: int) -> None:
        """Add the sequence in `row` if it has a structured output. ValueError if that cannot be compiled."""
        if params.structured_output is not None:
            self._rows.add(row, params, num_prompt_tokens)

    def drop(self, row: int) -> None:
        self._rows.drop(row)
        self._expected = [expected for expected in self._expected if expected[0] != row]

    def make(self, targets: SampleTargets) -> TokenMask | None:
        """The masks of a step whose forward pass is queued; None if no target has a structured output."""
        if not self._rows or not len(places := self._rows.places_in(targets.rows)):
            return None
        if self._makes_masks:
            words = self._make_words(targets, places)
        else:
            words = np.zeros((len(places), self.cache.num_words), np.int32)
        buffer = self._step_buffer(words.shape[1])
        mask = TokenMask(buffer.put(places), buffer.put(words))
        buffer.upload()
        if self._ranks is not None:
            self._broadcast(mask.words, self._ranks)
        return mask

    def _make_words(self, targets: SampleTargets, places: IntArray) -> Words:
        self._read_back()
        words, failed = self._rows.masks(targets, places, self._batch.token_ids)
        self._failed |= failed
        return words

    def _broadcast(self, words: Tensor, ranks: Ranks) -> None:
        if self._queue is None:
            ranks.broadcast(words)
        else:
            self._queue.run(lambda: ranks.broadcast(words))

    def note_launched(self, targets: SampleTargets, runs: tuple[SamplerRun, ...], ready: Mark) -> None:
        """On a GPU: remember a step, whose tokens the matchers will need."""
        if self._rows and self._makes_masks and len(self._rows.places_in(targets.rows)):
            self._unread.append(_Launched(targets, runs, ready))

    def expect_next(self, targets: SampleTargets) -> None:
        """On a CPU: remember the rows of a sampled step, whose next masks idle time may make."""
        if self._rows and self._makes_masks:
            places = self._rows.places_in(targets.rows)
            next_positions = (targets.positions[places] + 1).tolist()
            self._expected = list(zip(targets.rows[places].tolist(), next_positions, strict=True))

    def prepare_one(self) -> bool:
        """Make one mask that a row will need next, in idle time; False if there is none to make."""
        if not self._expected:
            return False
        self._rows.prepare(*self._expected.pop(), self._batch.token_ids)
        return True

    def take_failed(self) -> dict[int, str]:
        """Sequences whose grammar failed since the last call, with the reason."""
        failed, self._failed = self._failed, {}
        return failed

    def take_slow(self) -> dict[int, float]:
        """Sequences whose masks took long since the last call, with the processor seconds."""
        return self._rows.take_slow() if self._rows else {}

    def _read_back(self) -> None:
        for step in self._unread:
            step.ready.wait()
            self._batch.store_tokens(step.targets, token_ids_of(step.runs).numpy())
        self._unread.clear()

    def _step_buffer(self, num_words: int) -> StepBuffer:
        """The upload buffer, made with the first mask: a vocabulary of 150 thousand tokens takes 19 KB per row."""
        if self._buffer is None:
            most = len(self._batch.num_tokens)
            self._buffer = StepBuffer(most * (4 * num_words + np.int64().itemsize) + 2 * ALIGNMENT, self._queue)
        self._buffer.start()
        return self._buffer
