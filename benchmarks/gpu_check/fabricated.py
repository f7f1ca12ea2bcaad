"""Sequences whose keys and values were never computed, on a runner that has run nothing before.

load_runner runs prefill kernels, the sampler and graphs of every kind before the first step: it profiles and warms up.
Here the weights are loaded and the cache is filled with random numbers, and nothing else runs. So a kernel that faults
costs the steps that need it, and no others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.executor.step import NewSequence
from engine.models.config import ModelConfig
from engine.models.families import read_model_config
from engine.models.layers.operators import FastOperators, Operators
from engine.models.loading.load import load_model
from engine.sampling_params import SamplingParams
from engine.worker.cache.kv_cache import allocate_kv_caches
from engine.worker.device.host import resolve_step_limits
from engine.worker.device.queue import CudaQueue
from engine.worker.loaded import LoadedDecoder
from engine.worker.model_runner import ModelRunner, RunnerParts
from kernels.linear.choice import LinearChoices

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
FREE_SHARE = 0.8  # the KV cache takes this share of the memory that the weights leave
MAX_GPU_TOKENS = 8192  # in one step with prompts


@dataclass(frozen=True, slots=True)
class BareRunner:
    """A runner, and the parts that it was made of."""

    runner: ModelRunner
    operators: Operators
    model: ModelConfig
    kv_caches: list[tuple[Tensor, Tensor]]
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int

    def uses_graph(self, batch: int) -> bool:
        """Whether a decode step of this many sequences is replayed; False, too, once a capture has failed."""
        buckets = self.runner.buckets
        return buckets is not None and buckets.has_decode_graph(batch)

    def chosen_kernels(self) -> dict[str, dict[int, str]]:
        """The kernel of each kind of linear layer by rows; empty on a CPU."""
        choices = self.operators.choices if isinstance(self.operators, FastOperators) else LinearChoices()
        return {kind.name: choices.names(kind) for kind in choices.layers}

    def record(self, batch: int) -> None:
        """Record the two graphs of a decode step of this size: the last step asked for them, so they come next."""
        if not self.uses_graph(batch):
            self._record_two()

    def uses_mixed_graph(self, num_tokens: int, num_seqs: int) -> bool:
        """Whether a step with a prompt chunk, of this many tokens and sequences in all, is replayed."""
        buckets = self.runner.buckets
        return buckets is not None and buckets.mixed_bucket(num_tokens, num_seqs) is not None

    def record_mixed(self, num_tokens: int, num_seqs: int) -> None:
        """`record` for a step with a chunk."""
        if not self.uses_mixed_graph(num_tokens, num_seqs):
            self._record_two()

    def _record_two(self) -> None:
        for _ in range(2):  # the forward pass, and greedy sampling
            self.runner.use_idle_time()


def load_bare(
    folder: Path,
    device: torch.device,
    num_tokens: int,
    graphs: bool = True,
    choose: bool = False,
    quantization: str | None = None,
) -> BareRunner:
    """Random weights in bf16, and a cache of `num_tokens` tokens, or of as many as fit, filled with random numbers.

    choose: time the candidates of each linear layer, as a server does at its start; else cuBLAS computes all of them.
    quantization: as the server's option.
    """
    config = EngineConfig(model=str(folder), load_format="dummy", dtype="bfloat16", device=device.type,
                          cuda_graphs=graphs, quantization=quantization)  # fmt: skip
    model = read_model_config(folder, quantization)
    on_gpu = device.type == "cuda"
    limits = resolve_step_limits(config, device.type, torch.cuda.mem_get_info(device)[1] if on_gpu else 0)
    max_model_len = model.max_position_embeddings
    decoder = load_model(folder, model, dtype=torch.bfloat16, device=device, load_format="dummy", seed=config.seed,
                         progress=lambda phase: None, max_model_len=max_model_len, batch_invariant=False)  # fmt: skip
    if choose and on_gpu:
        decoder.operators.choose_kernels(device, limits.max_num_batched_tokens)
    num_blocks = -(-num_tokens // config.block_size)
    if on_gpu:
        block_bytes = config.block_size * model.kv_bytes_per_token(2)
        num_blocks = min(num_blocks, int(torch.cuda.mem_get_info(device)[0] * FREE_SHARE) // block_bytes)
    kv_caches = allocate_kv_caches(model, num_blocks, config.block_size, torch.bfloat16, device)
    fill(kv_caches)
    loaded = LoadedDecoder(config, model, decoder, limits, torch.bfloat16, device)
    runner = ModelRunner(
        RunnerParts(
            decoder=decoder,
            kv_caches=kv_caches,
            limits=limits,
            max_model_len=max_model_len,
            block_size=config.block_size,
            eos_token_ids=[],
            device=device,
            queue=CudaQueue(device) if on_gpu else None,
            buckets=loaded.bucket_settings(max_model_len),
        )
    )
    return BareRunner(
        runner=runner,
        operators=decoder.operators,
        model=model,
        kv_caches=kv_caches,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
    )


def fill(kv_caches: list[tuple[Tensor, Tensor]]) -> None:
    """Normal random numbers everywhere: zeros would hide what is not read, and can be faster."""
    for pair in kv_caches:
        for cache in pair:
            cache.normal_()


@dataclass
class Fabricated:
    """Gives out sequence ids and blocks, as the Driver would. Call `forget` between measurements."""

    bare: BareRunner
    device: torch.device
    num_tokens: dict[int, int] = field(default_factory=dict)  # cached, by seq_id
    _held: dict[int, list[int]] = field(default_factory=dict)
    _removed: list[int] = field(default_factory=list)
    _free: list[int] = field(default_factory=list)
    _next_id: int = 0
    _step_id: int = 0

    def __post_init__(self) -> None:
        self._free = torch.randperm(self.bare.num_blocks).tolist()  # out of order, as after hours of serving

    @property
    def model(self) -> ModelConfig:
        return self.bare.model

    def arrive(self, length: int, computed: int, room: int, prefix: Sequence[int] = ()) -> tuple[int, NewSequence]:
        """A new sequence of random ids, `computed` of which count as computed. room: tokens that it may grow by;
        prefix: the first blocks, which another sequence holds.

        RuntimeError where the cache, the model or the step limits have no place for it.
        """
        bare, seq_id = self.bare, self._next_id
        if length + room > bare.max_model_len:
            raise RuntimeError(f"{length + room} tokens exceed max_model_len {bare.max_model_len}")
        if len(self._held) == bare.max_num_seqs:
            raise RuntimeError(f"{bare.max_num_seqs} sequences are the most of one step")
        count = -(-(length + room) // bare.block_size) - len(prefix)
        if count > len(self._free):
            raise RuntimeError(f"the KV cache has {len(self._free)} free blocks, {count} are needed")
        blocks, self._free = self._free[:count], self._free[count:]
        self._held[seq_id], self.num_tokens[seq_id] = blocks, length
        self._next_id += 1
        generator = torch.Generator().manual_seed(seq_id)
        ids = torch.randint(self.model.vocab_size, (length,), generator=generator).tolist()
        return seq_id, NewSequence(
            seq_id=seq_id, token_ids=ids, num_prompt_tokens=length, num_computed_tokens=computed,
            block_ids=[*prefix, *blocks], params=GREEDY, seed=seq_id,
        )  # fmt: skip

    def remove(self, seq_id: int) -> None:
        """The next plan that takes `take_removed` ends this sequence; its blocks go to sequences that arrive later."""
        self._free += self._held.pop(seq_id)
        del self.num_tokens[seq_id]
        self._removed.append(seq_id)

    def forget(self) -> None:
        """Remove all sequences."""
        for seq_id in list(self._held):
            self.remove(seq_id)

    def take_removed(self) -> list[int]:
        removed, self._removed = self._removed, []
        return removed

    def count(self, seq_ids: list[int]) -> None:
        """Each of these computes one more token."""
        for seq_id in seq_ids:
            self.num_tokens[seq_id] += 1

    def next_step(self) -> int:
        self._step_id += 1
        return self._step_id
