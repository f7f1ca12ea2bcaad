"""StepSampler: from the hidden states of a step to the next token of every sequence that the step samples.

It holds everything that sampling remembers of a live sequence: its parameters (SamplingRows), the tokens that penalties
and bad words look back at (TokenCounts), its grammar (GrammarMasks) and its thinking budget (ThinkingRows).

For each step, in this order: `build_inputs` before the step's arrays are uploaded; `constrain` once the forward pass is
queued, because it may wait for the tokens of the step before; `sample` inside the device's queue; `note_launched`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.errors import EngineError
from engine.executor.step import NewSequence, PrepareGrammar, WorkerMessage
from engine.models.decoder import Decoder
from engine.structured_output import Vocabulary
from engine.thinking import ThinkingTags
from engine.worker.batch.adapter_slots import AdapterSlots
from engine.worker.batch.input_batch import InputBatch, SampleTargets
from engine.worker.device.queue import DeviceQueue, Mark
from engine.worker.sampling.grammar_masks import GrammarMasks
from engine.worker.sampling.results import SamplerRun, failed_run, num_logprobs, token_ids_of
from engine.worker.sampling.sampler import ForcedTokens, TokenCounts, sample
from engine.worker.sampling.sampling_rows import WARM_UP, Array, PlainDraws, Put, SamplingInputs, SamplingRows
from engine.worker.sampling.thinking_rows import ThinkingRows
from kernels.dispatch import cpu_kernels
from kernels.sampling.token_mask import TokenMask, mask_tokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Constraints:
    """The tokens that grammars allow and that thinking budgets force, for the rows of one step; None where no row has
    any."""

    mask: TokenMask | None = None
    forced: ForcedTokens | None = None

    def of_row(self, i: int) -> "Constraints":
        """The constraints of row `i` for logits of that row alone."""
        return Constraints(self.mask and self.mask.of_row(i), self.forced and self.forced.of_row(i))


@dataclass(frozen=True, slots=True)
class StagedCounts:
    """The known tokens of a new sequence, int64 on the device, for the counts of its row."""

    row: int
    prompt: Tensor
    generated: Tensor


class StepSampler:
    """Rows are those of `batch`. A GPU has a `queue`."""

    warm_up_params = WARM_UP  # for steps that compile what a request may need

    def __init__(
        self,
        decoder: Decoder,
        batch: InputBatch,
        *,
        vocab_size: int,
        eos_token_ids: list[int],
        device: torch.device,
        queue: DeviceQueue | None,
        adapters: AdapterSlots | None,
    ) -> None:
        self._decoder = decoder
        self._adapters = adapters
        self._batch = batch
        self._device = device
        self._queue = queue
        max_num_seqs = len(batch.num_tokens)
        self._rows = SamplingRows(
            max_num_seqs,
            vocab_size,
            eos_token_ids,
            one_draw=device.type == "cuda" or cpu_kernels() is not None,
            token_ids=batch.token_ids if queue is None else None,  # on a GPU the newest may still be on its way
        )
        self.counts = TokenCounts(max_num_seqs, vocab_size, device)
        self.grammars = GrammarMasks(batch, eos_token_ids, queue, decoder.operators.ranks)
        self.thinking = ThinkingRows(batch, queue)
        # Rows added since the last step whose counts have to be set: the row, its prompt and its generated tokens.
        self._uncounted: list[tuple[int, Array, Array]] = []

    def add(self, row: int, new: NewSequence, token_ids: Array) -> None:
        """Start to sample the sequence in `row`; token_ids int64 are the tokens known of it.

        ValueError where its parameters cannot be served: its row then samples greedily until it is removed.
        """
        try:
            self._rows.set(row, new.params, new.seed, new.num_prompt_tokens)
            self.grammars.add(row, new.params, new.num_prompt_tokens)
            self.thinking.add(row, new.params, new.num_prompt_tokens)
        except ValueError:
            self.add_greedy(row)
            raise
        if self._rows.needs_history(row):
            prompt, generated = np.split(token_ids, [new.num_prompt_tokens])
            self._uncounted.append((row, prompt, generated))

    def add_greedy(self, row: int) -> None:
        """Sample `row` greedily: for a sequence that failed already but may still be in a step."""
        self._rows.set_greedy(row)

    def remove(self, row: int) -> None:
        self.grammars.drop(row)
        self.thinking.drop(row)

    def handle_message(
        self, message: Vocabulary | PrepareGrammar | ThinkingTags, send: Callable[[WorkerMessage], None]
    ) -> None:
        """Take in a message that concerns sampling; `send` gets the answer to PrepareGrammar, perhaps later."""
        if isinstance(message, Vocabulary):
            self.grammars.cache.set_vocabulary(message)
        elif isinstance(message, ThinkingTags):
            self.thinking.set_tags(message)
        else:
            self.grammars.cache.prepare(message, send)

    @property
    def has_uncounted(self) -> bool:
        """True if rows were added whose counts have to be set before they are sampled."""
        return bool(self._uncounted)

    def stage_counts(self, put: Put) -> list[StagedCounts]:
        """The tokens to count in the rows added since the last call; valid after the upload that `put` belongs to."""
        uncounted, self._uncounted = self._uncounted, []
        return [StagedCounts(row, put(prompt), put(generated)) for row, prompt, generated in uncounted]

    def set_counts(self, staged: list[StagedCounts]) -> None:
        """Count what `stage_counts` staged. Runs inside the device's queue."""
        for part in staged:
            self.counts.reset(part.row, part.prompt, part.generated)

    def is_greedy(self, targets: SampleTargets) -> bool:
        """True if every target wants its most likely token."""
        return self._rows.is_greedy(targets.rows)

    def is_plain(self, targets: SampleTargets) -> bool:
        """True if compiled kernels of a CPU draw every target by themselves; see SamplingRows."""
        return self._rows.is_plain(targets.rows)

    def plain_draws(self, rows: Array, positions: Array) -> Callable[[Tensor], Tensor]:
        """The draws of steps whose targets are plain, a function of the logits; see SamplingRows."""
        return self._rows.plain_draws(rows, positions)

    def build_inputs(self, targets: SampleTargets, put: Put) -> SamplingInputs | PlainDraws | None:
        """The sampling parameters of a step; None where every target wants its most likely token."""
        return self._rows.build(targets.rows, targets.positions, put)

    def constrain(self, targets: SampleTargets) -> Constraints:
        """The constraints that grammars and thinking budgets put on a step whose forward pass is queued.

        On a GPU this waits for the tokens of the step before, but only where a grammar or a budget needs them.
        """
        return Constraints(self.grammars.make(targets), self.thinking.make(targets))

    def sample(
        self,
        hidden: Tensor,
        targets: SampleTargets,
        inputs: SamplingInputs | PlainDraws | None,
        constraints: Constraints,
    ) -> list[SamplerRun]:
        """Sample hidden [rows, hidden]: all rows at once; if that raises, row by row, so that only rows that raise
        alone fail. Runs inside the device's queue. EngineError where every row fails. A rank of several raises at once:
        if it tried again alone, or failed a row alone, the others would make other calls and sample other tokens."""
        try:
            logits = self._decoder.compute_logits(hidden)
            output = sample(logits, inputs, self.counts, constraints.mask, constraints.forced)
            return [SamplerRun(output, num_logprobs(inputs, len(hidden)))]
        except Exception as error:
            if self._decoder.operators.ranks is not None:
                raise
            if len(hidden) == 1:
                logger.exception("sampling a sequence failed")
                return [failed_run(error, self._device)]
            logger.exception("sampling %d sequences failed: trying one at a time", len(hidden))
        runs = [self._sample_row(hidden, targets, constraints, i) for i in range(len(hidden))]
        if all(run.error for run in runs):
            raise EngineError(f"sampling failed for every sequence: {runs[0].error}")
        return runs

    def note_launched(self, targets: SampleTargets, runs: tuple[SamplerRun, ...], ready: Mark | None) -> None:
        """Remember a step that was sampled: its tokens are known once `ready` is reached; None (on a CPU): now."""
        if ready is None:
            self._batch.store_tokens(targets, token_ids_of(runs).numpy())
            self.grammars.expect_next(targets)
        else:
            self.grammars.note_launched(targets, runs, ready)
            self.thinking.note_launched(targets, runs, ready)

    def depends_on_tokens(self, row: int) -> bool:
        """True if the tokens before a position change the draw of `row` there beyond its logits."""
        return self._rows.depends_on_tokens(row)

    def take_failed(self) -> dict[int, str]:
        """Sequences that the last step found cannot go on, with the reason."""
        return self.grammars.take_failed()

    def take_slow_masks(self) -> dict[int, float]:
        """Sequences whose masks in the last step took long, with the processor seconds."""
        return self.grammars.take_slow()

    def prepare_next_mask(self) -> bool:
        """Use idle time to make a mask that a row will need next; False where none is to be made."""
        return self.grammars.prepare_one()

    def warm_up_mask(self) -> None:
        """Launch the kernel of the first structured output, so that no request waits for its compilation."""
        weight = self._decoder.embedding.weight
        hidden = torch.zeros((1, self._decoder.config.hidden_size), dtype=weight.dtype, device=self._device)
        row = torch.zeros(1, dtype=torch.int64, device=self._device)
        words = torch.zeros((1, -(-self._rows.vocab_size // 32)), dtype=torch.int32, device=self._device)
        mask_tokens(self._decoder.compute_logits(hidden), TokenMask(row, words))

    def _sample_row(self, hidden: Tensor, targets: SampleTargets, constraints: Constraints, i: int) -> SamplerRun:
        alone = SampleTargets(targets.seq_ids[i : i + 1], targets.rows[i : i + 1], targets.positions[i : i + 1])
        try:
            inputs = self.build_inputs(alone, self._to_device)
            if self._adapters is not None:
                slots = self._to_device(self._adapters.row_slots[alone.rows])
                self._adapters.layers.set_logits_rows(slots, bool((self._adapters.row_slots[alone.rows] >= 0).any()))
            logits = self._decoder.compute_logits(hidden[i : i + 1])
            own = constraints.of_row(i)
            output = sample(logits, inputs, self.counts, own.mask, own.forced)
        except Exception as error:
            return failed_run(error, self._device)
        return SamplerRun(output, num_logprobs(inputs, 1))

    def _to_device(self, array: Array) -> Tensor:
        return torch.from_numpy(array).to(self._device)
