"""EncoderRunner: executes StepPlans for a model that only embeds. Whole sequences -> rows -> encoder -> vectors.

Each sequence is computed in one step, so the runner keeps no rows and no KV cache between steps. The block ids in plans
are the Driver's accounting; this runner ignores them.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.checkpoint.json_files import read_json_object
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineError
from engine.executor.step import (
    ONE_PLACE,
    GrammarPrepared,
    NewSequence,
    Place,
    PrepareGrammar,
    SequenceStep,
    SideMessage,
    StepPlan,
    StepResult,
    WorkerMessage,
    WorkerReady,
)
from engine.models.config import ModelConfig
from engine.models.encoder import AttentionGroup, Encoder, EncoderBatch, SequenceBlocks
from engine.models.loading.load import load_model, weight_bytes
from engine.models.reader import ConfigReader
from engine.sampling_params import Pooling, SamplingParams
from engine.worker.batch.step_buffer import BUFFERED_STEPS, StepBuffer
from engine.worker.cache.kv_cache import NoRoomForWeightsError, model_max_len
from engine.worker.device.choice import resolve_device, resolve_dtype
from engine.worker.device.host import StepLimits, available_host_bytes, resolve_step_limits
from engine.worker.device.queue import CudaQueue, DeviceQueue, Mark
from engine.worker.pooler import PooledSequence, finish_vectors

MAX_PADDING = 0.125  # largest share of padding in a rectangle; with more, attention gets fewer sequences per call
DEFAULT_MAX_SEQS = 1024  # sequences cost no memory between steps
MAX_POSITIONS_FILE = "sentence_bert_config.json"


@dataclass(frozen=True, slots=True)
class PoolInputs:
    """Reads the vectors of a step off its hidden states, each from one row, or as the mean of a sequence's rows.

    rows: int64 [sequences], the row of each; None if all are means. For means: owners int64 [tokens], the number of the
    sequence of each row; lengths int64 [sequences, 1] in tokens; is_mean bool [sequences, 1], None if all are means.
    """

    rows: Tensor | None = None
    owners: Tensor | None = None
    lengths: Tensor | None = None
    is_mean: Tensor | None = None

    def pool(self, hidden: Tensor) -> Tensor:
        """[tokens, hidden] -> fp32 [sequences, hidden]"""
        one_row = None if self.rows is None else hidden.index_select(0, self.rows).float()
        if self.owners is None or self.lengths is None:
            assert one_row is not None, "a sequence is pooled in one way or the other"
            return one_row
        sums = torch.zeros(len(self.lengths), hidden.shape[1], dtype=torch.float32, device=hidden.device)
        means = sums.index_add_(0, self.owners, hidden.float()) / self.lengths
        return means if one_row is None or self.is_mean is None else torch.where(self.is_mean, means, one_row)


@dataclass(frozen=True, slots=True)
class EncodedStep:
    """A step whose work is queued on the device up to the copy of its fp32 vectors [sequences, hidden] to the host (or
    done, on a CPU)."""

    step_id: int
    started: float
    failed: dict[int, str]
    sequences: list[NewSequence]
    vectors: Tensor | None = None
    ready: Mark | None = None

    def done(self) -> bool:
        """True if `EncoderRunner.result` need not wait for the device."""
        return self.ready is None or self.ready.done()


class EncoderRunner:
    """Owns the encoder. It has the methods of ModelRunner that the Worker calls."""

    def __init__(
        self,
        encoder: Encoder,
        device: torch.device,
        limits: StepLimits,
        *,
        queue: DeviceQueue | None = None,
        batch_invariant: bool = False,
    ) -> None:
        """`queue` is the device's, None on a CPU, which computes while it is told to."""
        self.vocab_size = encoder.config.vocab_size
        self.device = device
        self.max_in_flight = 1 if queue is None else BUFFERED_STEPS
        self._encoder = encoder
        self._queue = queue
        # Token ids, positions, owners and three arrays of attention groups; some arrays of one number per sequence.
        self._buffer = StepBuffer(64 * limits.max_num_batched_tokens + 64 * limits.max_num_seqs + 4096, queue)
        self._padding = 0.0 if batch_invariant else MAX_PADDING
        self._one_by_one = batch_invariant

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> EncodedStep:
        """Queue a step, and compute it on a CPU. Any exception means that plan and state disagree or the device
        failed."""
        started = time.perf_counter()
        new = {sequence.seq_id: sequence for sequence in plan.new}
        sequences = [new[step.seq_id] for step in plan.chunks]
        for step, sequence in zip(plan.chunks, sequences, strict=True):
            if step.num_tokens != len(sequence.token_ids) or sequence.params.pooling is None or not step.sample:
                raise EngineError("the plan has an encoder compute something else than whole sequences to embed")
        failed = {sequence.seq_id: error for sequence in sequences if (error := self._wrong_token(sequence))}
        sequences = sorted((s for s in sequences if s.seq_id not in failed), key=lambda s: len(s.token_ids))
        if not sequences:
            return EncodedStep(plan.step_id, started, failed, [])
        vectors = self._embed(sequences)
        ready = None if self._queue is None else self._queue.mark()
        return EncodedStep(plan.step_id, started, failed, sequences, vectors, ready)

    def result(self, step: EncodedStep) -> StepResult:
        """Wait for a launched step and read its vectors."""
        done: dict[int, bytes] = {}
        failed = dict(step.failed)
        if step.vectors is not None:
            if step.ready is not None:
                step.ready.wait()
            pooled = [PooledSequence(s.seq_id, _pooling(s), len(s.token_ids)) for s in step.sequences]
            done = finish_vectors(step.vectors, pooled, failed, self._encoder.decoder.dense)
        return StepResult(step.step_id, [], failed, time.perf_counter() - step.started, vectors=done)

    def close(self) -> None:
        """No thread of an encoder answers messages."""

    def use_idle_time(self) -> bool:
        return False

    def handle_message(self, message: SideMessage, send: Callable[[WorkerMessage], None]) -> None:
        """Refuse a grammar, because an encoder generates no text; ignore all other messages."""
        if isinstance(message, PrepareGrammar):
            send(GrammarPrepared(message.output.digest(), "this model is an encoder, which generates no text"))

    def check_device(self) -> None:
        """Wait until the device has done all queued work."""
        if self._queue is not None:
            self._queue.mark().wait()

    def warm_up(self, max_tokens: int) -> None:
        """Run a small and a large step, so that no request pays for first-time work."""
        pooling = SamplingParams(pooling=Pooling("mean"))
        for num_tokens in (2, min(16, max_tokens)):
            new = [
                NewSequence(
                    seq_id=i,
                    token_ids=[0] * num_tokens,
                    num_prompt_tokens=num_tokens,
                    num_computed_tokens=0,
                    block_ids=[],
                    params=pooling,
                    seed=0,
                )
                for i in range(2)
            ]
            steps = [SequenceStep(i, num_tokens, True, []) for i in range(2)]
            self.result(self.launch(StepPlan(0, [], new, [], steps)))

    def _wrong_token(self, sequence: NewSequence) -> str:
        if min(sequence.token_ids) < 0 or max(sequence.token_ids) >= self.vocab_size:
            return f"a token id of the prompt is not below {self.vocab_size}"
        return ""

    def _embed(self, sequences: list[NewSequence]) -> Tensor:
        """Vectors fp32 [sequences, hidden] on the host, not normalised; from a GPU their copy is queued.

        `sequences` are sorted by length.
        """
        lengths = np.array([len(sequence.token_ids) for sequence in sequences], np.int64)
        ends = np.cumsum(lengths)
        put = self._buffer.put
        self._buffer.start()
        input_ids = put(np.concatenate([np.array(sequence.token_ids, np.int64) for sequence in sequences]))
        positions = put(np.arange(ends[-1]) - np.repeat(ends - lengths, lengths))
        if self._encoder.attends_in_blocks:
            batch = EncoderBatch(positions, [], SequenceBlocks.of(lengths))
        else:
            cuts = self._cuts(lengths)
            batch = EncoderBatch(positions, [self._group(lengths, ends, first, last) for first, last in cuts])
        pooling = self._pool_inputs(sequences, lengths, ends)
        self._buffer.upload()

        def work() -> Tensor:
            hidden = self._encoder.forward(input_ids, batch)
            return pooling.pool(hidden).to("cpu", non_blocking=True)

        return work() if self._queue is None else self._queue.run(work)

    def _pool_inputs(self, sequences: list[NewSequence], lengths: np.ndarray, ends: np.ndarray) -> PoolInputs:
        put = self._buffer.put
        kinds = np.array([_pooling(sequence).kind for sequence in sequences])
        is_mean = kinds == "mean"
        rows = None if is_mean.all() else put(np.where(kinds == "cls", ends - lengths, ends - 1))
        if not is_mean.any():
            return PoolInputs(rows)
        owners = put(np.repeat(np.arange(len(lengths)), lengths))
        return PoolInputs(rows, owners, put(lengths[:, None]), None if rows is None else put(is_mean[:, None]))

    def _cuts(self, lengths: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yields (first, end) of each attention group: runs of sequences whose padding stays below the limit."""
        first = 0
        for i in range(1, len(lengths) + 1):
            if i < len(lengths) and not self._one_by_one:
                num_places = lengths[i] * (i + 1 - first)
                if num_places - lengths[first : i + 1].sum() <= self._padding * num_places:
                    continue
            yield first, i
            first = i

    def _group(self, lengths: np.ndarray, ends: np.ndarray, first: int, last: int) -> AttentionGroup:
        start, end, longest = int(ends[first] - lengths[first]), int(ends[last - 1]), int(lengths[last - 1])
        num_seqs = last - first
        if num_seqs * longest == end - start:
            return AttentionGroup(start, end, num_seqs, longest)
        columns, own = np.arange(longest), lengths[first:last, None]
        starts = (ends - lengths)[first:last, None]
        counts = columns < own
        return AttentionGroup(
            start,
            end,
            num_seqs,
            longest,
            rows=self._buffer.put((starts + np.minimum(columns, own - 1)).reshape(-1)),
            mask=self._buffer.put(counts[:, None, None, :]),
            places=self._buffer.put(np.flatnonzero(counts)),
        )


def _pooling(sequence: NewSequence) -> Pooling:
    assert sequence.params.pooling is not None, "launch() checked it"
    return sequence.params.pooling


def load_encoder(
    config: EngineConfig, model_dir: Path, model: ModelConfig, progress: Callable[[str], None], place: Place = ONE_PLACE
) -> tuple[EncoderRunner, WorkerReady]:
    """Load the weights. `place`: of the replica, whose GPU it takes. Raises ConfigError and ModelError."""
    if config.serves_adapters:
        raise ConfigError("lora: an encoder is served without adapters; leave lora and allow_runtime_lora out.")
    _refuse_cache_settings(config)
    device = resolve_device(config.device, place.gpu)
    dtype = resolve_dtype(config, model, device)
    longest = encoder_max_len(config, model_dir, model)
    check_encoder_fits(model, dtype, device)
    total_bytes = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0
    limits = _limits(config, resolve_step_limits(config, device.type, total_bytes), longest)
    progress("loading weights")
    encoder = load_model(
        model_dir,
        model,
        dtype=dtype,
        device=device,
        load_format=config.load_format,
        seed=config.seed,
        progress=progress,
        max_model_len=longest,
        batch_invariant=config.batch_invariant,
        pooling=config.pooling,
    )
    assert isinstance(encoder, Encoder), "a model that is not causal is an encoder"
    queue = CudaQueue(device) if device.type == "cuda" else None
    runner = EncoderRunner(encoder, device, limits, queue=queue, batch_invariant=config.batch_invariant)
    progress("warming up")
    runner.warm_up(longest)
    # The Driver counts in blocks: offer as many as two steps can fill.
    num_blocks = 2 * (-(-limits.max_num_batched_tokens // config.block_size) + limits.max_num_seqs)
    return runner, WorkerReady(
        num_blocks=num_blocks,
        max_model_len=longest,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        vocab_size=model.vocab_size,
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        memory={"weights": weight_bytes(model, dtype.itemsize), "kv_cache": 0},
        hidden_size=encoder.decoder.vector_size,
        encoder=True,
        embeds_only=True,
    )


def check_encoder_fits(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """NoRoomForWeightsError if the device has less free memory than the weights take, which are never quantised."""
    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else available_host_bytes()
    if (needed := weight_bytes(model, dtype.itemsize)) > free:
        halves = dtype.itemsize == 4 and weight_bytes(model, 2) <= free
        advice = f"--dtype {'float16' if on_gpu else 'bfloat16'} fits." if halves else "Use a smaller model."
        raise NoRoomForWeightsError(needed, free, on_gpu, advice)


def encoder_max_len(config: EngineConfig, model_dir: Path, model: ModelConfig) -> int:
    """The longest text in tokens: max_model_len if set, else the limit of sentence-transformers, else of the model."""
    longest, path = model_max_len(config, model), model_dir / MAX_POSITIONS_FILE
    if config.max_model_len is not None or not path.is_file():
        return longest
    return min(longest, ConfigReader(read_json_object(path), MAX_POSITIONS_FILE).size("max_seq_length", longest))


def _limits(config: EngineConfig, limits: StepLimits, longest: int) -> StepLimits:
    """The step limits, raised so that a step holds the longest sequence as a whole."""
    if config.max_num_batched_tokens is not None and config.max_num_batched_tokens < longest:
        raise ConfigError(
            f"max_num_batched_tokens: an encoder computes whole texts, of up to {longest} tokens here; raise it to "
            f"that, or lower --max-model-len."
        )
    num_tokens = max(limits.max_num_batched_tokens, longest)
    num_seqs = limits.max_num_seqs if config.max_num_seqs else min(DEFAULT_MAX_SEQS, num_tokens)
    return replace(limits, max_num_batched_tokens=num_tokens, max_num_seqs=num_seqs)


def _refuse_cache_settings(config: EngineConfig) -> None:
    if config.attention_backend == "flashinfer":
        raise ConfigError("attention_backend: this model is an encoder, which flashinfer does not serve; use triton.")
    defaults = EngineConfig()
    for name in ("kv_cache_dtype", "kv_cache_memory", "num_blocks", "swap_space", "disk_cache"):
        if getattr(config, name) != getattr(defaults, name):
            raise ConfigError(f"{name}: this model is an encoder and has no KV cache; leave the option out.")
    if config.compressed_weights:
        raise ConfigError(
            "compressed_weights: this model is an encoder, which has no steps of few tokens; leave the option out."
        )
