"""LoadedDecoder: a decoder with its weights, from which the profile of memory and the server make runners."""

from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.worker.attention_warmup import AttentionSettings, make_attention_plan, warm_up_attention
from engine.worker.bucket_runner import BucketSettings
from engine.worker.cache.host_cache import HostCache
from engine.worker.cache.kv_cache import allocate_kv_caches, model_max_len, resolve_kv_format
from engine.worker.device.host import StepLimits
from engine.worker.device.queue import DeviceQueue
from engine.worker.model_runner import ModelRunner, RunnerParts
from kernels.attention.flashinfer import FlashInferPrefill


@dataclass(frozen=True, slots=True)
class LoadedDecoder:
    """A decoder with its weights on `device` in `dtype`, and the limits of its steps."""

    config: EngineConfig
    model: ModelConfig
    decoder: Decoder
    limits: StepLimits
    dtype: torch.dtype
    device: torch.device
    flashinfer: FlashInferPrefill | None = None

    @property
    def max_model_len(self) -> int:
        """The longest sequence in tokens, before the size of the KV cache cuts it."""
        return model_max_len(self.config, self.model)

    @property
    def attention(self) -> AttentionSettings:
        return AttentionSettings(self.config.batch_invariant, self.flashinfer)

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
    ) -> ModelRunner:
        """A runner with all its buffers for sequences of up to max_model_len tokens."""
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
            )
        )

    def one_block(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A KV cache of one block, for steps that write no token and whose results nothing reads."""
        kv_format = resolve_kv_format(self.config, self.model)
        return allocate_kv_caches(self.model, 1, self.config.block_size, self.dtype, self.device, kv_format)

    @torch.inference_mode()
    def compile_kernels(self) -> None:
        """Run short steps, so that the memory profile does not wait for the compiler. Does nothing on a CPU."""
        if self.device.type == "cuda":
            settings = self.attention
            plan = make_attention_plan(
                self.model, self.limits.max_num_seqs, self.device, settings.batch_invariant, settings.flashinfer
            )
            warm_up_attention(self.decoder, self.one_block(), plan, self.max_model_len)
