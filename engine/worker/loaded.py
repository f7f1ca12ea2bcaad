"""LoadedDecoder: a decoder with its weights, from which the profile of memory and the server make runners."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.executor.step import ONE_PLACE, Place
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.loading.load import load_model, slot_bytes, weight_bytes
from engine.worker.attention_warmup import AttentionSettings, make_attention_plan, warm_up_attention
from engine.worker.bucket_runner import BucketSettings
from engine.worker.cache.host_cache import HostCache
from engine.worker.cache.kv_cache import (
    NoRoomForWeightsError,
    allocate_kv_caches,
    host_cache_bytes,
    model_max_len,
    most_positions,
    resolve_kv_format,
)
from engine.worker.device.choice import (
    check_attention,
    check_quantization,
    compile_kernels,
    compressed_bytes,
    keeps_compressed,
    make_flashinfer,
    multiplies_pairs,
    resolve_dtype,
    take_place,
)
from engine.worker.device.host import StepLimits, available_host_bytes, resolve_step_limits
from engine.worker.device.queue import DeviceQueue
from engine.worker.memory_plan import Machine, nearest_settings
from engine.worker.model_runner import ModelRunner, RunnerParts
from engine.worker.speculation.loaded_draft import LoadedDraft, load_draft, read_draft_config


@dataclass(frozen=True, slots=True)
class LoadedDecoder:
    """A decoder with its weights on `device` in `dtype`, and the limits of its steps."""

    config: EngineConfig
    model: ModelConfig
    decoder: Decoder
    limits: StepLimits
    dtype: torch.dtype
    device: torch.device
    attention: AttentionSettings = field(default_factory=AttentionSettings)
    draft: LoadedDraft | None = None
    finish_kernels: Callable[[], None] | None = None
    compressed_bytes: int = 0  # second copies of weights

    @property
    def packed(self) -> bool:
        """See weight_bytes."""
        return multiplies_pairs(self.device.type)

    @property
    def max_model_len(self) -> int:
        """The longest sequence in tokens, before the size of the KV cache cuts it."""
        return model_max_len(self.config, self.model)

    def bucket_settings(self, max_model_len: int, graph_bytes: int | None = None) -> BucketSettings:
        """The sizes of padded steps. Steps of more than cuda_graph_max_num_seqs sequences run without buckets."""
        return BucketSettings(
            max_seqs=min(self.limits.max_num_seqs, self.config.cuda_graph_max_num_seqs),
            max_num_seqs=self.limits.max_num_seqs,
            max_tokens=self.limits.max_num_batched_tokens,
            max_blocks=-(-max_model_len // self.config.block_size),
            hidden_size=self.model.hidden_size,
            dtype=self.dtype,
            graphs=self.config.cuda_graphs,
            graph_bytes=graph_bytes,
        )

    def make_runner(
        self,
        kv_caches: list[tuple[torch.Tensor, torch.Tensor]],
        max_model_len: int,
        queue: DeviceQueue | None,
        *,
        eos_token_ids: list[int],
        host_cache: HostCache | None = None,
        graph_bytes: int | None = None,
        draft_caches: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> ModelRunner:
        """A runner with all its buffers for sequences of up to max_model_len tokens. draft_caches: None to make no
        drafts."""
        draft = None if draft_caches is None or self.draft is None else self.draft.decoder
        if queue is None:
            max_blocks = -(-max_model_len // self.config.block_size)
            # a sequence with a draft takes several rows of a step
            self.decoder.record_steps(kv_caches, self.limits.max_num_batched_tokens, max_blocks)
            if draft is not None and draft_caches is not None:
                draft.record_steps(draft_caches, self.limits.max_num_seqs, max_blocks)
        return ModelRunner(
            RunnerParts(
                decoder=self.decoder,
                kv_caches=kv_caches,
                limits=self.limits,
                max_model_len=max_model_len,
                block_size=self.config.block_size,
                eos_token_ids=eos_token_ids,
                device=self.device if queue is None else queue.device,
                host_cache=host_cache,
                queue=queue,
                buckets=None if queue is None else self.bucket_settings(max_model_len, graph_bytes),
                attention=self.attention,
                draft=draft,
                draft_caches=draft_caches or [],
            )
        )

    def forget_caches(self) -> None:
        """Undo what make_runner left in the decoders, so that the runner's caches are freed with it."""
        self.decoder.forget_recorded()
        if self.draft is not None:
            self.draft.decoder.forget_recorded()

    def one_block(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A KV cache of one block, for steps that write no token and whose results nothing reads."""
        kv_format = resolve_kv_format(self.config, self.model)
        return allocate_kv_caches(self.model, 1, self.config.block_size, self.dtype, self.device, kv_format)

    @torch.inference_mode()
    def compile_kernels(self) -> None:
        """Compile the kernels of a CPU. On a GPU run short steps, so that the memory profile does not wait for the
        compiler."""
        if self.finish_kernels is not None:
            self.finish_kernels()
        if self.device.type == "cuda":
            settings = self.attention
            plan = make_attention_plan(
                self.model, self.limits.max_num_seqs, self.device, settings.batch_invariant, settings.flashinfer
            )
            warm_up_attention(self.decoder, self.one_block(), plan, self.max_model_len)


def check_weights_fit(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    num_ranks: int = 1,
    draft: ModelConfig | None = None,
    compressed: int = 0,
) -> None:
    """DoesNotFitError, with the settings that would fit, if the device has less free memory than the weights take,
    those of a draft model and the `compressed` bytes of second copies included. The ranks of a group share the host's
    memory evenly."""
    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else available_host_bytes() // num_ranks
    packed = multiplies_pairs(device.type)
    needed = weight_bytes(model, dtype.itemsize, packed) + compressed
    if draft is not None:
        needed += weight_bytes(draft, dtype.itemsize, packed)
    if on_gpu:
        needed += slot_bytes(model, config.lora_slots, dtype.itemsize)
    if needed <= free:
        return
    changes = list(nearest_settings(config, model, Machine(device.type, free), draft))
    advice = f"Any of these fits: {'; '.join(changes)}." if changes else "Use a smaller or a quantised model."
    raise NoRoomForWeightsError(needed, free, on_gpu, advice)


def load_decoder(
    config: EngineConfig,
    model_dir: Path,
    model: ModelConfig,
    progress: Callable[[str], None],
    place: Place = ONE_PLACE,
    draft_dir: Path | None = None,
) -> LoadedDecoder:
    """Choose the device, the dtype and the limits of steps, and load the weights. `model` is the part of the rank at
    `place`. `draft_dir`: the draft model, if there is one. Raises ConfigError and ModelError."""
    device, ranks = take_place(config, place)
    dtype = resolve_dtype(config, model, device)
    check_quantization(config, dtype, device)
    check_attention(config, model, dtype, device)
    draft_config = None if draft_dir is None else read_draft_config(config, draft_dir, model)
    models = [model] if draft_config is None else [model, draft_config]
    dtype_name, free = str(dtype).removeprefix("torch."), available_host_bytes() // config.num_processes
    compresses = keeps_compressed(config, models, dtype_name, device.type, free)
    compressed = compressed_bytes(models) if compresses else 0
    check_weights_fit(config, model, dtype, device, place.size, draft_config, compressed)
    total_bytes = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0
    limits = resolve_step_limits(config, device.type, total_bytes)
    if config.attention_backend == "flashinfer":
        progress("compiling FlashInfer")  # minutes at the first start of a machine
    flashinfer = make_flashinfer(config, model, limits.max_num_seqs, dtype, device)
    longest = model_max_len(config, model)
    # Memory that is free now bounds the memory that the KV cache can have once the weights are loaded.
    budget = total_bytes if total_bytes else host_cache_bytes(config, available_host_bytes() // place.size)
    num_positions = max(limits.max_num_batched_tokens, most_positions(config, model, dtype.itemsize, budget))
    finish_kernels = compile_kernels(config, model, dtype, device, compresses)
    progress("loading weights")
    decoder = load_model(
        model_dir,
        model,
        dtype=dtype,
        device=device,
        load_format=config.load_format,
        seed=config.seed,
        progress=progress,
        max_model_len=min(longest, num_positions),
        batch_invariant=config.batch_invariant,
        ranks=ranks,
        lora=config.lora_slots,
        compresses=compresses,
        pooling=config.pooling,
    )
    assert isinstance(decoder, Decoder), "a causal model is a decoder"
    draft = None
    if draft_dir is not None and draft_config is not None:
        progress("loading the draft model")
        draft = load_draft(config, draft_dir, draft_config, dtype, device, min(longest, num_positions), compresses)
    attention = AttentionSettings(config.batch_invariant, flashinfer)
    return LoadedDecoder(config, model, decoder, limits, dtype, device, attention, draft, finish_kernels, compressed)
