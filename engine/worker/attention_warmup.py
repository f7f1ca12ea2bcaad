"""Prepares the attention kernels before the first request: their AttentionPlan, and steps that compile every
variant."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.layers.attention import BatchMetadata, KVCache, OutputRows
from kernels.attention.flashinfer import FlashInferPrefill
from kernels.attention.plan import SMALL_ROWS, AttentionPlan, AttentionShape, attention_plan, attention_shape
from kernels.attention.shared import LEAST_MEMBERS


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """batch_invariant: see AttentionPlan. flashinfer: computes the prefills of steps without a graph; None: our own
    kernel."""

    batch_invariant: bool = False
    flashinfer: FlashInferPrefill | None = None


def make_attention_plan(
    model: ModelConfig,
    max_num_seqs: int,
    device: torch.device,
    batch_invariant: bool = False,
    flashinfer: FlashInferPrefill | None = None,
) -> AttentionPlan | None:
    """The AttentionPlan of a model's kernels; None on a CPU without batch_invariant, where each call chooses its
    tiles."""
    if device.type == "cpu" and not batch_invariant:
        return None
    plans = (
        attention_plan(
            device,
            max_num_seqs=max_num_seqs,
            num_heads=model.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            batch_invariant=batch_invariant,
            flashinfer=flashinfer,
        )
        for heads in model.head_shapes()
    )
    return max(plans, key=lambda plan: plan.partial.numel())


@torch.inference_mode()
def warm_up_attention(
    decoder: Decoder, kv_caches: Sequence[KVCache], plan: AttentionPlan | None, max_model_len: int
) -> None:
    """Run `warm_up_steps` through the decoder, so that no request waits for a compiler. Writes no slot of the caches.

    Does nothing without a plan: on a CPU the steps would compile nothing.
    """
    if plan is None:
        return
    config = decoder.config
    for heads in config.head_shapes():
        layer = next(i for i in range(config.num_layers) if config.heads(i) == heads)
        k_cache = kv_caches[layer][0]
        q = torch.empty((1, config.num_heads, heads.head_dim), dtype=decoder.embedding.weight.dtype)
        shape = attention_shape(q, k_cache, None, 0, 0.0)
        for input_ids, metadata in warm_up_steps(shape, plan, max_model_len, k_cache.device):
            decoder.forward(input_ids, metadata, kv_caches)


def warm_up_steps(
    shape: AttentionShape, plan: AttentionPlan, max_model_len: int, device: torch.device
) -> Iterator[tuple[Tensor, BatchMetadata]]:
    """Yields (input_ids, metadata) of steps of one sequence, and of as many decodes as may share keys. Together they
    launch every variant that later steps can launch: decode, the reduction of chunks, each tile of prefill, and the
    last layer's decode of one output row and of several. Large tiles of prefill are for prompts that fill the device; a
    device without SMs is filled by a short one.

    Every token is 0 and its keys are read from block 0.
    """
    lengths = [n for n in shape.prefill_lengths(plan.capability) if n < max_model_len]
    max_blocks = -(-max_model_len // shape.block_size)
    for num_blocks in (1, max_blocks):  # without the reduction, and with it
        for n in (1, *lengths):
            yield _step(n, max(num_blocks, -(-n // shape.block_size)), num_blocks, plan, device)
    for n in lengths:
        if n * shape.group > SMALL_ROWS:
            yield _step(n, -(-n // shape.block_size), 1, replace(plan, num_sms=0), device)
    if len(plan.row_starts) > LEAST_MEMBERS:
        for has_outputs in (False, True):
            yield _decodes(LEAST_MEMBERS, max_blocks, has_outputs, plan, device)


def _decodes(
    num_seqs: int, num_blocks: int, has_outputs: bool, plan: AttentionPlan, device: torch.device
) -> tuple[Tensor, BatchMetadata]:
    """The first token of each sequence. has_outputs: the last layer computes them as output rows."""
    rows = torch.zeros(num_seqs, dtype=torch.int64, device=device)
    tables = torch.zeros((num_seqs, num_blocks), dtype=torch.int32, device=device)
    seq_lens = torch.ones(num_seqs, dtype=torch.int32, device=device)
    metadata = BatchMetadata(
        positions=rows,
        slot_mapping=rows - 1,
        num_decodes=num_seqs,
        block_tables=tables,
        seq_lens=seq_lens,
        cu_seqlens_q=torch.zeros(1, dtype=torch.int32, device=device),
        max_seqlen_q=0,
        outputs=OutputRows(rows, tables, seq_lens) if has_outputs else None,
        plan=plan,
    )
    return rows, metadata


def _step(
    num_tokens: int, num_blocks: int, num_output_blocks: int, plan: AttentionPlan, device: torch.device
) -> tuple[Tensor, BatchMetadata]:
    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    is_decode = num_tokens == 1
    outputs = OutputRows(zeros(1, dtype=torch.int64), zeros(1, num_output_blocks), zeros(1) + 1)
    metadata = BatchMetadata(
        positions=torch.arange(num_tokens, device=device),
        slot_mapping=zeros(num_tokens, dtype=torch.int64) - 1,
        num_decodes=int(is_decode),
        block_tables=zeros(1, num_blocks),
        seq_lens=zeros(1) + num_tokens,
        cu_seqlens_q=zeros(1) if is_decode else torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        max_seqlen_q=0 if is_decode else num_tokens,
        outputs=None if is_decode else outputs,
        plan=plan,
    )
    return zeros(num_tokens, dtype=torch.int64), metadata
