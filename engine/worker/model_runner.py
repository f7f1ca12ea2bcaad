"""ModelRunner: executes StepPlans on one device. Rows -> metadata -> decoder -> sampler -> result."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.errors import EngineError
from engine.executor.step import (
    BlockCopy,
    BlockMove,
    FetchBlocks,
    NewSequence,
    PrepareGrammar,
    SequenceStep,
    StepPlan,
    StepResult,
    WorkerMessage,
)
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.outputs import PromptScores
from engine.structured_output import Vocabulary
from engine.thinking import ThinkingTags
from engine.worker.attention_warmup import make_attention_plan, warm_up_attention
from engine.worker.batch.decode_buffers import BUFFERED_STEPS
from engine.worker.batch.input_batch import InputBatch, SampledAt, StepInputs
from engine.worker.batch.step_buffer import IntArray, StepBuffer
from engine.worker.cache.host_cache import HostCache
from engine.worker.decode_runner import DecodeRunner, DecodeSettings
from engine.worker.device.host import StepLimits
from engine.worker.device.queue import DeviceQueue, Mark
from engine.worker.pooler import PooledStep, Pooler
from engine.worker.sampling.grammar_masks import GrammarMasks
from engine.worker.sampling.prompt_scorer import PromptScorer, ScoredStep, StepScores, score
from engine.worker.sampling.sampled import SampledRows, Samples, failed_row, num_logprobs, token_ids_of
from engine.worker.sampling.sampler import ForcedTokens, TokenCounts, sample
from engine.worker.sampling.sampling_rows import WARM_UP, Array, SamplingInputs, SamplingRows
from engine.worker.sampling.thinking_rows import ThinkingRows
from kernels.cache.copy_blocks import BlockCopier
from kernels.sampling.token_mask import TokenMask, mask_tokens

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Extras:
    """What a step yields beside tokens: logprobs of prompts, and `vectors` of what is pooled (see PooledStep.take)."""

    scored: ScoredStep | None = None
    pooled: PooledStep | None = None
    vectors: Tensor | None = None

    def results(self, failed: dict[int, str]) -> tuple[list[PromptScores], dict[int, bytes]]:
        """Once the step's mark has passed. Sequences that came to nothing go to `failed`."""
        scores = [] if self.scored is None else self.scored.results(failed)
        if self.pooled is None or self.vectors is None:
            return scores, {}
        return scores, self.pooled.results(self.vectors, failed)


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose work is queued on the device (or done, on a CPU). Call `result` once, in the order of launches.

    `sampled_at` is None where the plan samples nothing. Tokens are in `sampled`, or (greedy decodes) in token_ids.
    """

    step_id: int
    started: float  # time.perf_counter()
    failed: dict[int, str]  # by seq_id: what could not be served at all
    sampled_at: SampledAt | None = None
    sampled: tuple[SampledRows, ...] = ()
    token_ids: IntArray | None = None
    ready: Mark | None = None
    offloads: list[BlockMove] = field(default_factory=list)
    extras: Extras | None = None


class ModelRunner:
    """Owns the decoder, the KV cache and the rows of the live sequences."""

    def __init__(
        self,
        model: ModelConfig,
        decoder: Decoder,
        kv_caches: list[tuple[Tensor, Tensor]],
        *,
        limits: StepLimits,
        max_model_len: int,
        block_size: int,
        eos_token_ids: list[int],
        device: torch.device,
        host_cache: HostCache | None = None,
        queue: DeviceQueue | None = None,
        decode: DecodeSettings | None = None,
        batch_invariant: bool = False,
    ) -> None:
        """A GPU has a `queue`, and `decode` says how it decodes; a CPU works while it is told to. batch_invariant is
        about attention: the decoder's own operators were chosen when it was made."""
        self.vocab_size = model.vocab_size
        self.max_prompt_tokens = min(  # of one step
            limits.max_num_batched_tokens, max_model_len - 1, kv_caches[0][0].shape[0] * block_size
        )
        plan = make_attention_plan(model, limits.max_num_seqs, device, batch_invariant)
        self.batch = InputBatch(limits.max_num_seqs, max_model_len, block_size, plan)
        self.max_in_flight = 1 if queue is None else BUFFERED_STEPS
        self._decoder = decoder
        self._kv_caches = kv_caches
        self.host_cache = host_cache or HostCache(block_copier(kv_caches), 0, device)
        self._copier = self.host_cache.copier
        self.device = device
        self._queue = queue
        self._sampling = SamplingRows(
            limits.max_num_seqs, model.vocab_size, eos_token_ids, one_draw=device.type == "cuda"
        )
        self.grammars = GrammarMasks(self.batch, eos_token_ids, queue)
        self._thinking = ThinkingRows(self.batch, queue)
        self._scorer = PromptScorer()
        self._counts = TokenCounts(limits.max_num_seqs, model.vocab_size, device)
        self._buffer = StepBuffer(step_buffer_bytes(limits, max_model_len, block_size), queue)
        self._decodes: DecodeRunner | None = None
        if queue is not None and decode is not None:
            self._decodes = DecodeRunner(queue, decoder, kv_caches, self._counts, decode, plan)
            self.batch.changed_cells = []
            self._last_tokens = self._decodes.buffers.last_tokens
        else:
            self._last_tokens = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=device)
        # Prompt and generated tokens of rows that came with this plan and have penalties or bad words.
        self._new_counts: list[tuple[int, Array, Array]] = []
        self._pooler = Pooler()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Queue a step. Any exception means that plan and state disagree or the device failed: the Worker must end."""
        started = time.perf_counter()
        self._buffer.start()
        for seq_id in plan.removed:
            if (row := self.batch.remove(seq_id)) is not None:
                self.grammars.drop(row)
                self._thinking.drop(row)
            self._pooler.remove(seq_id)
            self._scorer.remove(seq_id)
        failed = {new.seq_id: error for new in plan.new if (error := self._add(new))}
        if plan.offloads or plan.loads or plan.block_copies or self._new_counts:
            self._move(plan)
        at: SampledAt | None = None
        sampled: tuple[SampledRows, ...] = ()
        token_ids: IntArray | None = None
        extras: Extras | None = None
        if self._decodes is not None and not plan.chunks and 0 < len(plan.decodes) <= self._decodes.capacity:
            at, sampled, token_ids = self._run_decodes(self._decodes, plan)
        elif plan.chunks or plan.decodes:
            at, sampled, extras = self._run(plan)
        ready = None if self._queue is None else self._queue.mark()
        if ready is None and at is not None and sampled:  # so that the next step's input ids are complete
            self.batch.store_tokens(at, token_ids_of(sampled).numpy())
            self.grammars.sampled(at)
        if ready is not None and at is not None and sampled:
            self.grammars.launched(at, sampled, ready)
            self._thinking.launched(at, sampled, ready)
        failed |= self.grammars.take_failed()
        return LaunchedStep(plan.step_id, started, failed, at, sampled, token_ids, ready, plan.offloads, extras)

    def result(self, step: LaunchedStep) -> StepResult:
        """Wait for a launched step and read its tokens."""
        if step.ready is not None:
            step.ready.wait()
        samples = Samples(dict(step.failed), [], [], [])
        scores, vectors = (step.extras or Extras()).results(samples.failed)
        if step.sampled_at is not None:
            seq_ids = step.sampled_at.seq_ids.tolist()
            if step.token_ids is not None:
                samples.add_tokens(seq_ids, step.token_ids.tolist())
            remaining = iter(seq_ids)
            for part in step.sampled:
                samples.add(remaining, part)
        if self.host_cache.has_disk:
            self.host_cache.keep(step.offloads, flush=step.sampled_at is None)
        seconds = time.perf_counter() - step.started
        return StepResult(
            step.step_id, samples.detailed, samples.failed, seconds, samples.seq_ids, samples.token_ids, scores, vectors
        )

    def take(
        self,
        message: FetchBlocks | Vocabulary | PrepareGrammar | ThinkingTags,
        send: Callable[[WorkerMessage], None],
    ) -> None:
        """What is done beside the steps; `send` gets the answer, if there is one."""
        if isinstance(message, FetchBlocks):
            self.host_cache.fetch(message, send)
        elif isinstance(message, Vocabulary):
            self.grammars.cache.set_vocabulary(message)
        elif isinstance(message, ThinkingTags):
            self._thinking.set_tags(message)
        else:
            self.grammars.cache.prepare(message, send)

    def use_idle_time(self) -> bool:
        """While no plan is there and none launched: something useful that takes milliseconds, or False."""
        return self._decodes.record_next() if self._decodes is not None else self.grammars.prepare_one()

    def check_device(self) -> None:
        """Wait until the device has done what it was told; raises what it has failed of, which may be long ago."""
        if self._queue is not None:
            self._queue.mark().wait()

    def warm_up(self) -> None:
        """Run a prefill, a decode, copies and every part of the sampler once, so that no request pays for a first time.

        Block 0 is written, which nothing reads before it is written again.
        """
        block = self._to_device(np.zeros(1, np.int64))
        self._in_queue(lambda: self._copier.copy(block, block))
        if self.host_cache.num_slots:
            self._in_queue(lambda: self._copier.unpack(self._copier.pack(block), block))
        if self._queue is not None:
            self._queue.run(self._warm_up_mask)
        batch = self.batch
        self._in_queue(lambda: warm_up_attention(self._decoder, self._kv_caches, batch.plan, batch.max_model_len))
        prompt = [0] * min(2, self.batch.max_model_len - 1)
        for params in WARM_UP:
            new = NewSequence(0, prompt, len(prompt), 0, [0], params, 0)
            for plan in (
                StepPlan(0, [], [new], [], [SequenceStep(0, len(prompt), True, [])]),
                StepPlan(0, [], [], [], [SequenceStep(0, 1, True, [])]),
                StepPlan(0, [0], [], [], []),
            ):
                self.result(self.launch(plan))
        if self._decodes is not None:
            self._decodes.record_first()

    def _warm_up_mask(self) -> None:
        """What the first structured output launches (engine/worker/sampling/grammar_masks.py)."""
        weight = self._decoder.embedding.weight
        hidden = torch.zeros((1, self._decoder.config.hidden_size), dtype=weight.dtype, device=self.device)
        row = torch.zeros(1, dtype=torch.int64, device=self.device)
        words = torch.zeros((1, -(-self.vocab_size // 32)), dtype=torch.int32, device=self.device)
        mask_tokens(self._decoder.compute_logits(hidden), TokenMask(row, words))

    def _in_queue(self, work: Callable[[], T]) -> T:
        return work() if self._queue is None else self._queue.run(work)

    def _move(self, plan: StepPlan) -> None:
        """Blocks to and from the host and to other blocks, and the counts of new rows: what comes before the step."""
        put = self._buffer.put
        offloads, loads = (sorted(part, key=lambda move: move.slot) for part in (plan.offloads, plan.loads))
        moved = [put(np.array([move.block_id for move in part], np.int64)) for part in (offloads, loads)]
        for copy in plan.block_copies:
            self.batch.replace_last_block(copy.seq_id, copy.target)
        copies = []
        for part in independent_copies(plan.block_copies):
            pairs = np.array([[copy.source, copy.target] for copy in part], np.int64)
            copies.append((put(pairs[:, 0]), put(pairs[:, 1])))
        counts, self._new_counts = [(row, put(a), put(b)) for row, a, b in self._new_counts], []
        self._buffer.upload()

        def work() -> None:
            self.host_cache.offload(offloads, moved[0])
            self.host_cache.load(loads, moved[1])
            for sources, targets in copies:
                self._copier.copy(sources, targets)
            for row, prompt, generated in counts:
                self._counts.reset(row, prompt, generated)

        self._in_queue(work)

    def _add(self, new: NewSequence) -> str:
        """Give a new sequence its rows; the reason why it cannot be served, or ""."""
        row = self.batch.add(new)
        self._pooler.add(new)
        token_ids = self.batch.token_ids[row, : len(new.token_ids)].astype(np.int64)
        try:
            if token_ids.min(initial=0) < 0 or token_ids.max(initial=0) >= self.vocab_size:
                raise ValueError(f"a token id of the prompt is not below {self.vocab_size}")
            self._sampling.set(row, new.params, new.seed, new.num_prompt_tokens)
            self.grammars.add(row, new.params, new.num_prompt_tokens)
            self._thinking.add(row, new.params, new.num_prompt_tokens)
        except ValueError as error:
            self.batch.token_ids[row] = 0  # steps of it may be on their way: let them compute something harmless
            self._sampling.set_greedy(row)
            return str(error)
        self._scorer.add(new)
        if self._sampling.needs_history(row):
            prompt, generated = np.split(token_ids, [new.num_prompt_tokens])
            self._new_counts.append((row, prompt, generated))
        return ""

    def _run_decodes(
        self, decodes: DecodeRunner, plan: StepPlan
    ) -> tuple[SampledAt, tuple[SampledRows, ...], IntArray | None]:
        """A step of decodes alone on a GPU: (what is sampled, its rows, or the tokens where all are greedy)."""
        at = decodes.stage(self.batch, plan.decodes, plan.decode_blocks, self._buffer)
        sampling = self._sampling.build(at.rows, at.positions, self._buffer.put)
        self._buffer.upload()
        hidden = decodes.forward()
        if sampling is None:
            return at, (), decodes.greedy()
        mask, forced = self.grammars.make(at), self._thinking.make(at)
        sampled = self._in_queue(lambda: self._sample(hidden, at, sampling, mask, forced))
        decodes.store(token_ids_of(sampled))
        return at, self._to_host(sampled), None

    def _run(self, plan: StepPlan) -> tuple[SampledAt, tuple[SampledRows, ...], Extras]:
        put, scores = self._buffer.put, self._scorer.wants(plan.chunks)
        every_row = scores or self._pooler.needs_every_row(plan.chunks)
        inputs = self.batch.build(plan.decodes, plan.decode_blocks, plan.chunks, self._buffer, every_row=every_row)
        to_score = self._scorer.build(inputs, self.batch, put) if scores else None
        pooled = self._pooler.begin(inputs, self.batch, put)
        at = inputs.sampled if pooled is None else pooled.sampled
        sampling = self._sampling.build(at.rows, at.positions, put, self._host_tokens())
        device_rows = put(at.rows)
        self._buffer.upload()
        hidden, extras = self._in_queue(lambda: self._forward(inputs, to_score, pooled))
        if not len(at.rows):
            return at, (), extras
        mask, forced = self.grammars.make(at), self._thinking.make(at)
        sampled = self._in_queue(lambda: self._sample_step(hidden, at, sampling, mask, forced, device_rows))
        return at, self._to_host(sampled), extras

    def _forward(
        self, inputs: StepInputs, to_score: StepScores | None, pooled: PooledStep | None
    ) -> tuple[Tensor, Extras]:
        """Hidden states of what is sampled, and what else the step yields."""
        hidden = self._decoder.forward(self._input_ids(inputs), inputs.metadata, self._kv_caches)
        scored = None if to_score is None else score(hidden, self._decoder.compute_logits, to_score, self.vocab_size)
        last = hidden if inputs.sample_indices is None else hidden.index_select(0, inputs.sample_indices)
        vectors = None
        if pooled is not None:
            vectors, last = pooled.take(hidden, last)
        return last, Extras(scored, pooled, vectors)

    def _sample_step(
        self,
        hidden: Tensor,
        at: SampledAt,
        sampling: SamplingInputs | None,
        mask: TokenMask | None,
        forced: ForcedTokens | None,
        device_rows: Tensor,
    ) -> list[SampledRows]:
        sampled = self._sample(hidden, at, sampling, mask, forced)
        self._last_tokens.index_copy_(0, device_rows, token_ids_of(sampled))
        return sampled

    def _to_host(self, sampled: list[SampledRows]) -> tuple[SampledRows, ...]:
        return tuple([part.to_host() for part in sampled])

    def _input_ids(self, inputs: StepInputs) -> Tensor:
        """Tokens that the host has not seen are taken from the device."""
        ids = inputs.input_ids
        if not inputs.has_pending:
            return ids
        return torch.where(ids < 0, self._last_tokens[(-1 - ids).clamp_(min=0)], ids)

    def _sample(
        self,
        hidden: Tensor,
        at: SampledAt,
        sampling: SamplingInputs | None,
        mask: TokenMask | None,
        forced: ForcedTokens | None,
    ) -> list[SampledRows]:
        """All rows at once; if that raises, one at a time, so that only those fail that raise alone."""
        try:
            output = sample(self._decoder.compute_logits(hidden), sampling, self._counts, mask, forced)
            return [SampledRows(output, num_logprobs(sampling, len(hidden)))]
        except Exception as error:
            if len(hidden) == 1:
                logger.exception("sampling a sequence failed")
                return [failed_row(error, self.device)]
            logger.exception("sampling %d sequences failed: trying one at a time", len(hidden))
        parts = [self._sample_row(hidden, at, mask, forced, i) for i in range(len(hidden))]
        if all(part.error for part in parts):
            raise EngineError(f"sampling failed for every sequence: {parts[0].error}")
        return parts

    def _sample_row(
        self, hidden: Tensor, at: SampledAt, mask: TokenMask | None, forced: ForcedTokens | None, i: int
    ) -> SampledRows:
        rows, positions = at.rows[i : i + 1], at.positions[i : i + 1]
        try:
            sampling = self._sampling.build(rows, positions, self._to_device, self._host_tokens())
            logits = self._decoder.compute_logits(hidden[i : i + 1])
            output = sample(logits, sampling, self._counts, mask and mask.of_row(i), forced and forced.of_row(i))
        except Exception as error:
            return failed_row(error, self.device)
        return SampledRows(output, num_logprobs(sampling, 1))

    def _host_tokens(self) -> Array | None:
        """The rows of known tokens where they are complete: on a GPU the newest may still be on its way."""
        return self.batch.token_ids if self._queue is None else None

    def _to_device(self, array: Array) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def independent_copies(copies: list[BlockCopy]) -> Iterator[list[BlockCopy]]:
    """Cut into runs that may be copied in any order: in one, no target is a source or a target of another.

    Nearly always one run: only where the last holder of a source was preempted in between is it a target as well.
    """
    run: list[BlockCopy] = []
    sources: set[int] = set()
    targets: set[int] = set()
    for copy in copies:
        if copy.target in sources | targets or copy.source in targets:
            yield run
            run, sources, targets = [], set(), set()
        run.append(copy)
        sources.add(copy.source)
        targets.add(copy.target)
    if run:
        yield run


def block_copier(kv_caches: list[tuple[Tensor, Tensor]]) -> BlockCopier:
    """Over all tensors of the cache."""
    return BlockCopier([tensor for layer in kv_caches for tensor in layer])


def step_buffer_bytes(limits: StepLimits, max_model_len: int, block_size: int) -> int:
    """Room for all arrays of the largest step: ids, positions, slots, rows that are scored and their ids; block tables,
    also of the output rows; some 200 bytes per row sampled."""
    max_blocks = -(-max_model_len // block_size)
    return 40 * limits.max_num_batched_tokens + limits.max_num_seqs * (8 * max_blocks + 256) + 4096
