"""ModelRunner: executes StepPlans on one device. Rows -> metadata -> decoder -> sampler -> result."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.executor.step import (
    BlockMove,
    FetchBlocks,
    LoadAdapter,
    NewSequence,
    SampledToken,
    SequenceStep,
    SideMessage,
    StepPlan,
    StepResult,
    UnloadAdapter,
    WorkerMessage,
)
from engine.models.decoder import Decoder
from engine.worker.attention_warmup import AttentionSettings, make_attention_plan, warm_up_attention
from engine.worker.batch import HostDecodes, InputBatch, SampleTargets, StepInputs
from engine.worker.batch.adapter_slots import AdapterSlots, StagedSlots
from engine.worker.batch.step_buffer import BUFFERED_STEPS, IntArray, StepBuffer, step_buffer_bytes
from engine.worker.bucket_runner import BucketRunner, BucketSettings
from engine.worker.cache.host_cache import HostCache, block_copier, independent_copies
from engine.worker.device.host import StepLimits
from engine.worker.device.queue import DeviceQueue, Mark
from engine.worker.pooler import Extras, PooledStep, Pooler
from engine.worker.sampling.prompt_scorer import PromptScorer, StepScores, score
from engine.worker.sampling.results import ResultBuilder, SamplerRun, token_ids_of
from engine.worker.sampling.step_sampler import StepSampler
from engine.worker.speculation import DraftModel, DraftRounds, HostPasses, NoDraftModel, QueuedPasses

T = TypeVar("T")

NO_EXTRAS = Extras()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerParts:
    """The decoder, the memory and the settings that a ModelRunner is made of.

    host_cache: None for a host tier without slots. queue: the device's, None on a CPU, which computes while it is told
    to. buckets: the sizes of padded steps on a device with a queue; None on a CPU. attention: only its kernels; the
    decoder's own operators were chosen when it was made. draft: the draft model, with its own caches.
    """

    decoder: Decoder
    kv_caches: list[tuple[Tensor, Tensor]]
    limits: StepLimits
    max_model_len: int
    block_size: int
    eos_token_ids: list[int]
    device: torch.device
    host_cache: HostCache | None = None
    queue: DeviceQueue | None = None
    buckets: BucketSettings | None = None
    attention: AttentionSettings = field(default_factory=AttentionSettings)
    draft: Decoder | None = None
    draft_caches: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Computation:
    """The results of a step that is queued on the device, or done. The tokens of its `targets` are in `runs`, or in
    `token_ids` (int64, or FAILED) where one program or graph found all of them, or in `rounds` for a step with drafts.
    """

    targets: SampleTargets
    runs: tuple[SamplerRun, ...] = ()
    token_ids: IntArray | None = None
    rounds: DraftRounds | None = None
    extras: Extras = NO_EXTRAS


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose work is queued on the device (or done, on a CPU). Call `result` once, in the order of launches.

    `computation` is None where the plan only moves blocks or removes sequences. `slow_masks`: see StepResult.
    """

    step_id: int
    started: float  # time.perf_counter()
    failed: dict[int, str]  # sequence id -> why the sequence cannot be served at all
    computation: Computation | None
    ready: Mark | None
    offloads: list[BlockMove]
    draft_seconds: float
    slow_masks: dict[int, float]

    def done(self) -> bool:
        """True if `ModelRunner.result` need not wait for the device."""
        return self.ready is None or self.ready.done()


class ModelRunner:
    """Owns the decoder, the KV cache and the rows of the live sequences."""

    def __init__(self, parts: RunnerParts) -> None:
        limits, queue, device = parts.limits, parts.queue, parts.device
        layers = parts.decoder.operators.adapters
        self._adapters = None if layers is None else AdapterSlots(layers, limits.max_num_seqs, queue)
        self.vocab_size = parts.decoder.config.vocab_size
        num_cached_tokens = parts.kv_caches[0][0].shape[0] * parts.block_size
        self.max_prompt_tokens = min(  # in one step
            limits.max_num_batched_tokens, parts.max_model_len - 1, num_cached_tokens
        )
        attention_plan = make_attention_plan(
            parts.decoder.config,
            limits.max_num_seqs,
            device,
            parts.attention.batch_invariant,
            parts.attention.flashinfer,
        )
        self.batch = InputBatch(limits.max_num_seqs, parts.max_model_len, parts.block_size, attention_plan)
        self.max_in_flight = 1 if queue is None else BUFFERED_STEPS
        self._decoder = parts.decoder
        self._kv_caches = parts.kv_caches
        self.host_cache = parts.host_cache or HostCache(block_copier(parts.kv_caches), 0, device)
        self._copier = self.host_cache.copier
        self.device = device
        self._queue = queue
        self.sampler = StepSampler(
            parts.decoder,
            self.batch,
            vocab_size=self.vocab_size,
            eos_token_ids=parts.eos_token_ids,
            device=device,
            queue=queue,
            adapters=self._adapters,
        )
        self._scorer = PromptScorer()
        self._pooler = Pooler(parts.decoder.dense)
        self._buffer = StepBuffer(step_buffer_bytes(limits, parts.max_model_len, parts.block_size), queue)
        self.buckets: BucketRunner | None = None
        if queue is not None and parts.buckets is not None:
            self.buckets = BucketRunner(
                queue,
                parts.decoder,
                parts.kv_caches,
                self.sampler.counts,
                parts.buckets,
                attention_plan,
                self._adapters,
            )
            self.batch.changed_cells = []
            self._last_tokens = self.buckets.device_rows.last_tokens
        else:
            self._last_tokens = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=device)
        recorded = parts.decoder.recorded
        self._host_decodes = None if recorded is None else HostDecodes(self.batch, recorded, self.sampler.plain_draws)
        self.draft_model = NoDraftModel() if parts.draft is None else self._take_draft_model(parts, parts.draft)

    def _take_draft_model(self, parts: RunnerParts, decoder: Decoder) -> DraftModel:
        limits, caches = parts.limits, parts.draft_caches
        passes: HostPasses | QueuedPasses = HostPasses(decoder, caches, self.batch)
        if self._queue is not None and self.buckets is not None:
            num_rows = max(limits.max_num_seqs, QueuedPasses.max_rows)
            passes = QueuedPasses(
                decoder,
                caches,
                self.batch,
                self._queue,
                self.buckets.graphs,
                self.buckets.device_rows,
                make_attention_plan(decoder.config, num_rows, self.device),
                limits.max_num_batched_tokens,
            )
        return DraftModel(
            passes,
            self.batch,
            num_blocks=len(caches[0][0]),
            max_num_tokens=limits.max_num_batched_tokens,
            num_host_blocks=self.host_cache.num_slots,
        )

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Queue a step. Any exception means that plan and state disagree or the device failed: the Worker must end."""
        started = time.perf_counter()
        self._buffer.start()
        for seq_id in plan.removed:
            if (row := self.batch.remove(seq_id)) is not None:
                self.sampler.remove(row)
                if self._adapters is not None:
                    self._adapters.remove(row)
            self._pooler.remove(seq_id)
            self._scorer.remove(seq_id)
        failed = {new.seq_id: error for new in plan.new if (error := self._add(new))}
        if plan.offloads or plan.loads or plan.block_copies or self.sampler.has_uncounted:
            self._move_blocks(plan)
        if self._adapters is not None and self._adapters.has_changes:
            enter = self._adapters.enter_changes(self._buffer.put)
            self._buffer.upload()
            self._in_queue(enter)
        plan, draft_seconds = self.draft_model.propose(plan)
        computation = self._compute(plan)
        ready = None if self._queue is None else self._queue.mark()
        if computation is not None and computation.runs:  # the input ids of the next step need these tokens
            self.sampler.note_launched(computation.targets, computation.runs, ready)
        failed |= self.sampler.take_failed()
        return LaunchedStep(
            step_id=plan.step_id,
            started=started,
            failed=failed,
            computation=computation,
            ready=ready,
            offloads=plan.offloads,
            draft_seconds=draft_seconds,
            slow_masks=self.sampler.take_slow_masks(),
        )

    def result(self, step: LaunchedStep) -> StepResult:
        """Wait for a launched step and read its tokens."""
        if step.ready is not None:
            step.ready.wait()
        builder, computation = ResultBuilder(dict(step.failed), [], [], []), step.computation
        extras = NO_EXTRAS if computation is None else computation.extras
        scores, vectors = extras.results(builder.failed)
        verified: list[list[SampledToken]] = []
        if computation is not None:
            verified = self._read_tokens(computation, builder)
            if step.ready is not None and self.draft_model.reads_tokens:
                self._store_tokens(computation.targets, builder)
        if self.host_cache.has_disk:
            self.host_cache.keep(step.offloads, flush=computation is None)
        return StepResult(
            step_id=step.step_id,
            detailed=builder.detailed,
            failed=builder.failed,
            compute_seconds=time.perf_counter() - step.started,
            seq_ids=builder.seq_ids,
            token_ids=builder.token_ids,
            prompt_scores=scores,
            vectors=vectors,
            verified=verified,
            draft_seconds=step.draft_seconds,
            slow_masks=step.slow_masks,
        )

    def _read_tokens(self, computation: Computation, builder: ResultBuilder) -> list[list[SampledToken]]:
        """Add the sampled tokens to `builder`; returns those of sequences with a draft (StepResult.verified)."""
        if computation.rounds is not None:
            return computation.rounds.results(builder, self.batch)
        seq_ids = computation.targets.seq_ids.tolist()
        if computation.token_ids is not None:
            builder.add_tokens(seq_ids, computation.token_ids.tolist())
        remaining = iter(seq_ids)
        for run in computation.runs:
            builder.add_run(remaining, run)
        return []

    def _store_tokens(self, targets: SampleTargets, builder: ResultBuilder) -> None:
        """Enter the tokens that a GPU sampled; DraftRounds.results has entered those of sequences with a draft."""
        found = dict(zip(builder.seq_ids, builder.token_ids, strict=True))
        found |= {token.seq_id: token.token_id for token in builder.detailed}
        seq_ids = targets.seq_ids.tolist()
        places = np.array([place for place, seq_id in enumerate(seq_ids) if seq_id in found], np.int64)
        known = SampleTargets(targets.seq_ids[places], targets.rows[places], targets.positions[places])
        self.batch.store_tokens(known, np.array([found[seq_ids[place]] for place in places], np.int64))

    def handle_message(self, message: SideMessage, send: Callable[[WorkerMessage], None]) -> None:
        """Do what a message asks for beside the steps; `send` gets the answer, if there is one."""
        if isinstance(message, FetchBlocks):
            self.host_cache.fetch(message, send)
        elif isinstance(message, LoadAdapter | UnloadAdapter):
            assert self._adapters is not None, "the Driver has the same config"
            self._adapters.handle(message, send)
        else:
            self.sampler.handle_message(message, send)

    def close(self) -> None:
        """Wait for the answers to messages that threads still work on: none is sent after WorkerAsleep."""
        if self._adapters is not None:
            self._adapters.close()
        self.sampler.grammars.cache.close()

    def use_idle_time(self) -> bool:
        """Do some milliseconds of useful work while no plan is there and none is launched; False if there is none."""
        return self.sampler.prepare_next_mask() if self.buckets is None else self.buckets.graphs.record_next()

    def check_device(self) -> None:
        """Wait until the device has done everything queued; raises the error of any of that work, however old."""
        if self._queue is not None:
            self._queue.mark().wait()

    def warm_up(self) -> None:
        """Run a prefill, a decode, copies and every part of the sampler once, so that no request waits for a compiler.

        This writes block 0, which no step reads before a later step writes it.
        """
        block = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._in_queue(lambda: self._copier.copy(block, block))
        if self.host_cache.num_slots:
            self._in_queue(lambda: self._copier.unpack(self._copier.pack(block), block))
        if self._queue is not None:
            self._queue.run(self.sampler.warm_up_mask)
        batch = self.batch
        self._in_queue(
            lambda: warm_up_attention(self._decoder, self._kv_caches, batch.attention_plan, batch.max_model_len)
        )
        self._in_queue(self.draft_model.warm_up)
        if self._adapters is not None:
            self._adapters.warm_up(True)
        prompt = [0] * min(2, self.batch.max_model_len - 1)
        for params in self.sampler.warm_up_params:
            new = NewSequence(
                seq_id=0,
                token_ids=prompt,
                num_prompt_tokens=len(prompt),
                num_computed_tokens=0,
                block_ids=[0],
                params=params,
                seed=0,
            )
            for plan in (
                StepPlan(0, [], [new], [], [SequenceStep(0, len(prompt), True, [])]),
                StepPlan(0, [], [], [], [SequenceStep(0, 1, True, [])]),
                *self.draft_model.warm_up_plans(len(prompt)),
                StepPlan(0, [0], [], [], []),
            ):
                self.result(self.launch(plan))
        if self._adapters is not None:
            self._adapters.warm_up(False)

    def record_graphs(self) -> None:
        """Record the CUDA graphs of start-up (engine/worker/device/cuda_graphs.py)."""
        if self.buckets is not None:
            self.buckets.graphs.record_first(self._decoder.operators.ranks)

    def _in_queue(self, work: Callable[[], T]) -> T:
        return work() if self._queue is None else self._queue.run(work)

    def _move_blocks(self, plan: StepPlan) -> None:
        """Queue what comes before the step's computation: moves to and from the host, copies of blocks, and the counts
        of new rows."""
        put = self._buffer.put
        offloads, loads = (sorted(part, key=lambda move: move.slot) for part in (plan.offloads, plan.loads))
        moved = [put(np.array([move.block_id for move in part], np.int64)) for part in (offloads, loads)]
        for copy in plan.block_copies:
            self.batch.replace_last_block(copy.seq_id, copy.target)
        copies = []
        for part in independent_copies(plan.block_copies):
            pairs = np.array([[copy.source, copy.target] for copy in part], np.int64)
            copies.append((put(pairs[:, 0]), put(pairs[:, 1])))
        counts = self.sampler.stage_counts(put)
        self._buffer.upload()

        def work() -> None:
            self.host_cache.offload(offloads, moved[0])
            for sources, targets in copies:
                self._copier.copy(sources, targets)
            self.host_cache.load(loads, moved[1])
            self.sampler.set_counts(counts)

        self._in_queue(work)

    def _add(self, new: NewSequence) -> str:
        """Give a new sequence its rows; returns the reason why it cannot be served, or ""."""
        row = self.batch.add(new)
        self._pooler.add(new)
        token_ids = self.batch.token_ids[row, : len(new.token_ids)].astype(np.int64)
        try:
            if token_ids.min(initial=0) < 0 or token_ids.max(initial=0) >= self.vocab_size:
                self.sampler.add_greedy(row)
                raise ValueError(f"a token id of the prompt is not below {self.vocab_size}")
            self.sampler.add(row, new, token_ids)
            if self._adapters is not None:
                self._adapters.add(row, new.adapter_id)
        except ValueError as error:
            self.batch.token_ids[row] = 0  # a step of the sequence may be on its way: it computes harmless tokens
            return str(error)
        self._scorer.add(new)
        return ""

    def _compute(self, plan: StepPlan) -> Computation | None:
        """Queue the computation of a plan; None for a plan without any."""
        if (staged := self._stage_bucket(plan)) is not None:
            return self._run_bucket(plan, *staged)
        return self._run(plan) if plan.chunks or plan.decodes else None

    def _stage_bucket(self, plan: StepPlan) -> tuple[BucketRunner, SampleTargets] | None:
        """Stage a plan that runs in a bucket: decodes alone, or a step with chunks whose graph is recorded.

        Steps that read more hidden states than those of last tokens (logprobs of prompts, embeddings), and forks, which
        share one, run without buckets.
        """
        buckets = self.buckets
        num_seqs = plan.num_rows + len(plan.chunks)
        if buckets is None or not 0 < num_seqs <= buckets.max_seqs:
            return None
        if not plan.chunks:
            return buckets, buckets.stage_decodes(self.batch, plan, self._buffer)
        if self._pooler.has_sequences or any(not step.num_tokens for step in plan.chunks):
            return None
        if self._scorer.wants(plan.chunks) or (bucket := buckets.mixed_bucket(plan.num_tokens, num_seqs)) is None:
            return None
        return buckets, buckets.stage_mixed(bucket, self.batch, plan, self._buffer)

    def _rounds(self, plan: StepPlan, targets: SampleTargets) -> DraftRounds | None:
        return DraftRounds(plan, targets, self.sampler.depends_on_tokens) if plan.drafts else None

    def _run_bucket(self, plan: StepPlan, buckets: BucketRunner, targets: SampleTargets) -> Computation:
        """Run a staged step."""
        self.draft_model.computed(buckets.slots)
        rounds = self._rounds(plan, targets)
        sampling = self.sampler.build_inputs(targets, self._buffer.put)
        self._buffer.upload()
        hidden = buckets.forward()
        if not len(targets.rows):
            return Computation(targets)
        if sampling is None:
            token_ids = buckets.greedy()
            if rounds is not None:
                rounds.add_all(token_ids)
            return Computation(targets, token_ids=token_ids, rounds=rounds)
        if rounds is not None:
            buckets.store(self._sample_rounds(hidden, rounds))
            return Computation(targets, rounds=rounds)
        buckets.begin_sampling()
        constraints = self.sampler.constrain(targets)
        runs = self._in_queue(lambda: self.sampler.sample(hidden, targets, sampling, constraints))
        buckets.store(token_ids_of(runs))
        return Computation(targets, tuple([run.to_host() for run in runs]))

    def _sample_rounds(self, hidden: Tensor, rounds: DraftRounds) -> Tensor:
        """Sample a step with drafts, whose hidden states are queued. Returns the token of each target, int64 on the
        device: 0 for those that no round samples. A round after the first waits for the tokens before it."""
        found = torch.zeros(len(rounds.targets.rows), dtype=torch.int64, device=self.device)
        places = rounds.first
        while len(places):
            ready = self._sample_places(hidden, rounds, places, found)
            if not rounds.has_more:
                break
            if ready is not None:
                ready.wait()
            places = rounds.next_places()
        return found

    def _sample_places(self, hidden: Tensor, rounds: DraftRounds, places: IntArray, found: Tensor) -> Mark | None:
        """Sample one round, and write its tokens to `found`. Returns the mark at which they are on the host; None on a
        CPU."""
        sampler, queue, part = self.sampler, self._queue, rounds.part(places)
        sampling, indices = sampler.build_inputs(part, self._buffer.put), self._buffer.put(places)
        self._buffer.upload()
        constraints = sampler.constrain(part)

        def sample() -> list[SamplerRun]:
            runs = sampler.sample(hidden.index_select(0, indices), part, sampling, constraints)
            found.index_copy_(0, indices, token_ids_of(runs))
            return runs

        runs = tuple([run.to_host() for run in self._in_queue(sample)])
        rounds.add(places, runs)
        ready = None if queue is None else queue.mark()
        sampler.note_launched(part if queue is None else rounds.noted(places), runs, ready)
        return ready

    def _run(self, plan: StepPlan) -> Computation:
        """Run a step without a bucket."""
        put, scores = self._buffer.put, self._scorer.wants(plan.chunks)
        if self._queue is None and not plan.chunks:
            inputs = self._build_decodes(plan)
        else:
            inputs = self.batch.build(
                plan.decodes,
                plan.decode_blocks,
                plan.chunks,
                self._buffer,
                plan.drafts,
                every_row=scores or self._pooler.needs_every_row(plan.chunks),
                device_rows=None if self.buckets is None else self.buckets.device_rows,
            )
        self.draft_model.computed(inputs.slots)
        to_score = self._scorer.build(inputs, self.batch, put) if scores else None
        pooled = self._pooler.begin(inputs, self.batch, put)
        targets = inputs.targets if pooled is None else pooled.targets
        slots = None if self._adapters is None else self._adapters.stage(inputs, targets.rows, put)
        alone = self._queue is None and not plan.chunks and pooled is None
        if alone and (token_ids := self._decode_tokens(inputs, slots)) is not None:
            if (rounds := self._rounds(plan, targets)) is not None:
                rounds.add_all(token_ids)
            return Computation(targets, token_ids=token_ids, rounds=rounds)
        sampling = None if plan.drafts else self.sampler.build_inputs(targets, put)
        device_rows = put(targets.rows)
        self._buffer.upload()
        hidden, extras = self._in_queue(lambda: self._forward(inputs, to_score, pooled, slots))
        if not len(targets.rows):
            return Computation(targets, extras=extras)
        if (rounds := self._rounds(plan, targets)) is not None:
            found = self._sample_rounds(hidden, rounds)
            self._in_queue(lambda: self._last_tokens.index_copy_(0, device_rows, found))
            return Computation(targets, rounds=rounds, extras=extras)
        constraints = self.sampler.constrain(targets)

        def sample_and_store() -> list[SamplerRun]:
            runs = self.sampler.sample(hidden, targets, sampling, constraints)
            self._last_tokens.index_copy_(0, device_rows, token_ids_of(runs))
            return runs

        runs = self._in_queue(sample_and_store)
        return Computation(targets, tuple([run.to_host() for run in runs]), extras=extras)

    def _build_decodes(self, plan: StepPlan) -> StepInputs:
        rows = self.batch.decode_rows(plan.decodes, plan.decode_blocks)
        if self._host_decodes is not None and (inputs := self._host_decodes.build(rows, plan.drafts)) is not None:
            return inputs
        return self.batch.build_decodes(rows, self._buffer, plan.drafts)

    def _decode_tokens(self, inputs: StepInputs, slots: StagedSlots | None) -> IntArray | None:
        """The token of each row of a step of decodes and drafts, int64 [rows], or FAILED. None, and nothing is done,
        where no program computes them."""
        targets, host = inputs.targets, self._host_decodes
        is_greedy, staged = self.sampler.is_greedy(targets), host is not None and host.has_built(inputs)
        if inputs.has_pending or not (is_greedy or (staged and self.sampler.is_plain(targets))):
            return None
        if slots is not None:
            slots.begin_forward()
            slots.begin_sampling()
        tokens = self._decoder.decode_tokens(inputs.input_ids, inputs.metadata, self._kv_caches, not is_greedy)
        if tokens is None:
            return None
        if host is not None and staged:
            host.store(tokens)
        else:
            self.batch.store_tokens(targets, tokens.token_ids.clip(min=0))
        return tokens.token_ids.copy()

    def _forward(
        self,
        inputs: StepInputs,
        to_score: StepScores | None,
        pooled: PooledStep | None,
        slots: StagedSlots | None,
    ) -> tuple[Tensor, Extras]:
        """(hidden states [targets, hidden_size], the step's other results)."""
        inputs.prepare()
        if slots is not None:
            slots.begin_forward()
        hidden = self._decoder.forward(self._input_ids(inputs), inputs.metadata, self._kv_caches)
        scored = None
        if to_score is not None:
            plain = self._decoder.compute_logits
            compute = plain if slots is None else slots.logits_of(plain, to_score.rows)
            scored = score(hidden, compute, to_score, self.vocab_size)
        if slots is not None:
            slots.begin_sampling()
        last = hidden if inputs.sample_indices is None else hidden.index_select(0, inputs.sample_indices)
        vectors = None
        if pooled is not None:
            vectors, last = pooled.pool(hidden, last)
        return last, Extras(scored, pooled, vectors)

    def _input_ids(self, inputs: StepInputs) -> Tensor:
        """The step's token ids; tokens that the host has not seen yet are read on the device."""
        ids = inputs.input_ids
        if not inputs.has_pending:
            return ids
        return torch.where(ids < 0, self._last_tokens[(-1 - ids).clamp_(min=0)], ids)
