"""Runs a Decoder over a paged cache the way the Worker does, for the tests of models."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine.memory import sequence as driver
from engine.memory.block_manager import BlockManager
from engine.models.decoder import Decoder
from engine.models.layers.attention import BatchMetadata, OutputRows
from engine.sampling_params import SamplingParams
from engine.worker.cache.host_cache import block_copier
from engine.worker.cache.kv_cache import allocate_kv_caches

BLOCK_SIZE = 8


@dataclass
class Sequence:
    """token_ids so far, of which the first num_computed are in the cache, in the pages of block_ids."""

    token_ids: list[int]
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)


class PagedRunner:
    """A pool of pages handed out in random order, so that no test passes by chance on contiguous memory."""

    def __init__(
        self,
        model: Decoder,
        num_blocks: int = 256,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        block_size: int = BLOCK_SIZE,
    ) -> None:
        config = model.config
        self.model, self.device, self.block_size = model, device, block_size
        self.kv_caches = allocate_kv_caches(config, num_blocks, block_size, dtype, torch.device(device))
        for pair in self.kv_caches:
            for cache in pair:
                cache.fill_(float("nan"))  # whatever reads a slot that was never written shows
        self.free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()

    def step(self, work: list[tuple[Sequence, int]], last_only: bool = False) -> list[Tensor]:
        """Compute the next n tokens of each sequence in one batch; their logits [n, vocab] in the order given.

        last_only: only the last token's [1, vocab], which is all that the last layer computes then.
        """
        order = sorted(range(len(work)), key=lambda i: work[i][1] != 1)  # single tokens first, as decodes
        metadata, input_ids = self._batch([work[i] for i in order])
        counts = [work[i][1] for i in order]
        if last_only:
            last = torch.tensor(counts).cumsum(0) - 1
            metadata = replace(metadata, outputs=OutputRows(last, metadata.block_tables, metadata.seq_lens))
            counts = [1] * len(work)
        logits = self.model.compute_logits(self.model.forward(input_ids, metadata, self.kv_caches))
        parts = logits.split(counts)
        for sequence, n in work:
            sequence.num_computed += n
        return [parts[order.index(i)] for i in range(len(work))]

    def _batch(self, work: list[tuple[Sequence, int]]) -> tuple[BatchMetadata, Tensor]:
        ids, positions, slots = [], [], []
        for sequence, n in work:
            while len(sequence.block_ids) * self.block_size < sequence.num_computed + n:
                sequence.block_ids.append(self.free.pop())
            here = range(sequence.num_computed, sequence.num_computed + n)
            ids += sequence.token_ids[here.start : here.stop]
            positions += here
            size, blocks = self.block_size, sequence.block_ids
            slots += [blocks[p // size] * size + p % size for p in here]
        num_decodes = sum(n == 1 for _, n in work)
        lengths = [n for _, n in work[num_decodes:]]
        width = max(len(sequence.block_ids) for sequence, _ in work)
        tables = [sequence.block_ids + [0] * (width - len(sequence.block_ids)) for sequence, _ in work]
        metadata = BatchMetadata(
            positions=self._tensor(positions),
            slot_mapping=self._tensor(slots),
            num_decodes=num_decodes,
            block_tables=self._tensor(tables, torch.int32),
            seq_lens=self._tensor([sequence.num_computed + n for sequence, n in work], torch.int32),
            cu_seqlens_q=self._tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], torch.int32),
            max_seqlen_q=max(lengths, default=0),
        )
        return metadata, self._tensor(ids)

    def _tensor(self, values: list, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


@dataclass
class HeldSequence(Sequence):
    """A Sequence whose blocks the BlockManager gives out; `held` is the Driver's view of it."""

    held: driver.Sequence | None = None


class SharingRunner(PagedRunner):
    """A PagedRunner whose sequences share blocks as in the engine: BlockManager and BlockCopier do the work."""

    def __init__(self, model: Decoder, num_blocks: int = 64) -> None:
        super().__init__(model, num_blocks)
        self.manager = BlockManager(num_blocks, BLOCK_SIZE)
        self.copier = block_copier(self.kv_caches)
        self.num_sequences = self.num_copies = 0

    def start(self, token_ids: list[int]) -> HeldSequence:
        """A sequence that begins with the cached blocks of its prefix."""
        sequence = self._new(token_ids)
        assert sequence.held is not None
        self.manager.adopt_prefix(sequence.held, self.manager.match_prefix(sequence.held))
        return self._follow(sequence)

    def fork(self, parent: HeldSequence, token_ids: list[int]) -> HeldSequence:
        """A sequence that shares all blocks of `parent`, and continues with token_ids."""
        child = self._new(parent.token_ids + token_ids)
        assert parent.held is not None and child.held is not None
        self.manager.fork(parent.held, child.held)
        return self._follow(child)

    def compute(self, *sequences: HeldSequence) -> list[Tensor]:
        """Logits of all uncomputed tokens of each sequence, in one step."""
        for sequence in sequences:
            held = sequence.held
            assert held is not None
            held.token_ids = list(sequence.token_ids)
            allocation = self.manager.allocate(held, len(held.token_ids) - held.num_computed_tokens)
            assert allocation is not None, "the pool is too small for the test"
            if allocation.copy is not None:
                self.copier.copy(*(torch.tensor([block_id]) for block_id in allocation.copy))
                self.num_copies += 1
            held.num_computed_tokens = len(held.token_ids)
            sequence.block_ids = list(held.block_table)
        logits = self.step([(s, len(s.token_ids) - s.num_computed) for s in sequences])
        for sequence in sequences:
            assert sequence.held is not None
            self.manager.register_full_blocks(sequence.held)
        return logits

    def _new(self, token_ids: list[int]) -> HeldSequence:
        self.num_sequences += 1
        held = driver.Sequence(self.num_sequences, token_ids, SamplingParams(), seed=0, max_num_tokens=len(token_ids))
        return HeldSequence(list(token_ids), held=held)

    def _follow(self, sequence: HeldSequence) -> HeldSequence:
        assert sequence.held is not None
        sequence.num_computed, sequence.block_ids = sequence.held.num_computed_tokens, list(sequence.held.block_table)
        return sequence


def greedy(runner: PagedRunner, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy continuations of all prompts in one batch."""
    sequences = [Sequence(list(prompt)) for prompt in prompts]
    for _ in range(num_tokens):
        logits = runner.step([(s, len(s.token_ids) - s.num_computed) for s in sequences], last_only=True)
        for sequence, rows in zip(sequences, logits, strict=True):
            sequence.token_ids.append(int(rows[-1].argmax()))
    return [s.token_ids[len(prompt) :] for s, prompt in zip(sequences, prompts, strict=True)]
