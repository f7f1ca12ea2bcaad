"""Speculative decoding (Leviathan et al. 2023): which sequences get a draft, and how long it is.

A draft is a guess of the tokens that follow the last known token of a decode. They come from the client's prediction of
the output (Sequence.prediction), or, with `--speculative ngram:K`, followed the same n-gram earlier in prompt and
output. With `--speculative MODEL:K` a plan leaves them open, and a small model in the Worker proposes them
(engine/worker/speculation/draft_model.py). The Worker computes the last known token and the draft in one step and
samples at each position with that position's own draw, from (seed, position), with penalties, bans and grammar as after
the tokens before. It keeps the tokens up to the first one that differs from the draft.

This is exact: each kept token is the ordinary draw after a prefix that consists of ordinary draws. So greedy output is
the same with and without drafts, and so is each sampled token for its seed; no rejection sampling is needed because the
draft is a single sequence and not a distribution.

A longer draft makes a step slower, so a draft grows while its next token is likely enough to be kept: the estimate for
each sequence comes from its own drafts, and from guesses that were not computed but compared later. The bound comes
from measured steps (StepCosts): with many sequences a row costs nearly as much as it can gain, and drafts end. They
lengthen a step little while most of its sequences have none (MOST_LOSS). Most plans look for no guess while texts
repeat little (PATIENCE, REST): on a CPU a lookup takes its time from the step.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from engine.executor.step import OPEN_TOKEN, StepPlan, StepResult
from engine.memory.block_manager import BlockManager
from engine.memory.sequence import Sequence
from engine.scheduling.fair_share import StepScope
from engine.scheduling.plan_parts import RunningParts
from engine.scheduling.speculation.ngram_index import LONG, NgramIndex
from engine.scheduling.speculation.step_costs import PassCosts, StepCosts

MARGIN = 1.15  # how much more than its cost a row of a draft must promise
FIRST_CHANCE = 0.5  # the estimate that a guess is right, before the first comparison
# Steps of others that a sequence may lose to waiting for the token that its draft follows: at first, at most, and what
# a step without waiting adds, which is the share that a sequence with wrong drafts loses.
FIRST_CREDIT, MOST_CREDIT, EARNED_CREDIT = 2.0, 8.0, 1 / 32
MOST_LOSS = 0.25  # a share of the step: decodes without a draft lose it by those with one, all of them together
LEARN = 0.15  # weight of one comparison in the estimate
PREDICTED_TOKENS = 32  # longest draft from a prediction where `--speculative` sets no length
MAX_PROPOSERS = 64  # indexes that are kept: a long text takes some 130 bytes a token
MODEL_DECODES = 8  # in a step with drafts of a model, which computes the prompt of each sequence first
PROBE, LAST_PROBE = 16, 512  # drafts of a model that are left out, before one of a single token: first and most
SHORT_MATCH, LONG_MATCH, PREDICTION = range(3)  # sources of a guess
PATIENCE, REST = 8, 7  # after so many plans without a guess, one plan in 1 + REST looks for guesses


class Drafts:
    """No speculation. The Scheduler calls `entered` for each new sequence, `without_held`, `add_to` and `planned` for
    each plan, `computed` and `verified` for each result, `forget` for each sequence that ends, and `reset` for a new
    Worker."""

    num_drafts = num_draft_tokens = num_accepted_tokens = 0

    def entered(self, seq: Sequence) -> None:
        """`seq` is new."""

    def add_to(self, parts: RunningParts, block_manager: BlockManager, num_spare: int) -> None:
        """Adds drafts to the decodes of a plan, of at most `num_spare` tokens in all."""

    def planned(self, plan: StepPlan) -> None:
        """A plan is sent."""

    def computed(self, result: StepResult) -> None:
        """A result is back."""

    def verified(self, seq: Sequence, num_accepted: int) -> None:
        """The first `num_accepted` tokens of the draft of `seq` were right."""

    def holds(self, seq: Sequence) -> bool:
        """True if `seq` waits for a step under way, whose token its next draft follows."""
        return False

    def without_held(self, scope: StepScope) -> list[Sequence]:
        """Returns the sequences of a step without those that `holds`."""
        return scope.sequences

    def forget(self, seq: Sequence) -> None:
        """`seq` has ended."""

    def reset(self) -> None:
        """The steps under way are lost with their Worker."""


class DraftSource(Enum):
    """The source of drafts, apart from predictions of the client."""

    NONE = "none"
    TEXT = "text"  # n-grams of prompt and output
    MODEL = "model"  # a draft model in the Worker


@dataclass(frozen=True)
class DraftBounds:
    """The limits of a device. `max_decodes`: most sequences of a step with drafts. `weight_rows`: see StepCosts."""

    max_decodes: int
    weight_rows: float


# Beyond 8 decodes, ordinary text of the bundled model lost up to a tenth on a CPU, where the time of a step is noisy.
CPU_BOUNDS = DraftBounds(max_decodes=8, weight_rows=8.0)
# An H100 computes some 295 rows of bf16 while it reads the weights, and attention takes its part.
GPU_BOUNDS = DraftBounds(max_decodes=64, weight_rows=200.0)


def make_drafts(max_tokens: int, source: DraftSource = DraftSource.TEXT, bounds: DraftBounds = CPU_BOUNDS) -> Drafts:
    """Drafts of up to `max_tokens` tokens for each sequence of a step; 0: no speculation. `source`: where they come
    from, apart from predictions."""
    if not max_tokens:
        return Drafts()
    if source is DraftSource.MODEL:
        return ModelDrafts(max_tokens, bounds)
    return NgramDrafts(max_tokens, bounds, from_text=source is DraftSource.TEXT)


class Proposer:
    """The guesses for one sequence. `chances`: how likely a guess is right, by its source. `credit`: tokens that its
    drafts brought, less the steps that it waited for them while others went on."""

    __slots__ = ("_prediction", "_text", "caught_up", "chances", "credit", "guess", "source")

    def __init__(self, seq: Sequence, from_text: bool) -> None:
        self._text = NgramIndex(seq.token_ids if from_text else [])
        self._prediction = NgramIndex(list(seq.prediction))
        self.chances = [FIRST_CHANCE] * 3
        self.credit = FIRST_CREDIT
        self.guess: tuple[int, int] | None = None  # (place, token) that was guessed and is not known yet
        self.source = SHORT_MATCH  # the last guess or draft came from it
        self.caught_up = False  # all tokens are indexed

    def propose(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Returns up to `num_tokens` tokens that may follow; none without a match."""
        self.caught_up = all([self._prediction.catch_up(), self._text.catch_up()])
        return self._from_prediction(seq, num_tokens) or self._from_text(seq, num_tokens)

    def _from_prediction(self, seq: Sequence, num_tokens: int) -> list[int]:
        generated = seq.token_ids[max(seq.num_prompt_tokens, len(seq.token_ids) - LONG) :]
        if (match := self._prediction.find(generated, seq.num_generated_tokens)) is None:
            return []
        place = match[1]
        self.source = PREDICTION
        return self._prediction.tokens[place : place + num_tokens]

    def _from_text(self, seq: Sequence, num_tokens: int) -> list[int]:
        if (match := self._text.find(seq.token_ids[-LONG:], len(seq.token_ids))) is None:
            return []
        is_long, place = match
        self.source = LONG_MATCH if is_long else SHORT_MATCH
        tokens = seq.token_ids[place : place + num_tokens]
        while len(tokens) < num_tokens:  # the match reaches the end of the text: the text repeats itself
            tokens += tokens[: num_tokens - len(tokens)]
        return tokens

    @property
    def from_prediction(self) -> bool:
        """True if the last draft is a part of the prediction."""
        return self.source == PREDICTION

    @property
    def may_wait(self) -> bool:
        """True if the sequence may lose a step to waiting."""
        return self.credit >= 1.0

    def earn(self, amount: float) -> None:
        self.credit = min(MOST_CREDIT, self.credit + amount)

    def compare(self, seq: Sequence) -> None:
        """Learns from the last guess, if its token is known by now."""
        if self.guess is not None and (place := self.guess[0]) < len(seq.token_ids):
            self.learn(1, 1 if seq.token_ids[place] == self.guess[1] else 0)
            self.guess = None

    def learn(self, num_tokens: int, num_right: int) -> None:
        """The first `num_right` of `num_tokens` guessed tokens were right."""
        chance = self.chances[self.source]
        for _ in range(num_right):
            chance += LEARN * (1.0 - chance)
        if num_right < num_tokens:
            chance -= LEARN * chance
        self.chances[self.source] = chance


class OpenProposer(Proposer):
    """Drafts that the Worker's draft model fills in, where a prediction of the client has none.

    A draft that is left out teaches nothing, so now and then one is made all the same, of one token: the first after
    PROBE that were left out, and each wrong one doubles the distance.
    """

    __slots__ = ("num_left_out", "probe_after")

    def __init__(self, seq: Sequence) -> None:
        super().__init__(seq, from_text=False)
        self.num_left_out, self.probe_after = 0, PROBE

    def learn(self, num_tokens: int, num_right: int) -> None:
        super().learn(num_tokens, num_right)
        self.probe_after = PROBE if num_right else min(2 * self.probe_after, LAST_PROBE)

    def propose(self, seq: Sequence, num_tokens: int) -> list[int]:
        if found := super().propose(seq, num_tokens):
            return found
        self.source = SHORT_MATCH  # this proposer matches no text, so the entry in `chances` is free for open drafts
        return [OPEN_TOKEN] * num_tokens

    def compare(self, seq: Sequence) -> None:
        if self.guess is not None and self.guess[1] == OPEN_TOKEN:
            self.guess = None
        super().compare(seq)


class Proposal(NamedTuple):
    """Tokens that may be the next draft of `seq`: at least one."""

    seq: Sequence
    proposer: Proposer
    tokens: list[int]


class NgramDrafts(Drafts):
    """Drafts of up to `max_tokens` tokens. `from_text`: for each sequence, also from n-grams of its prompt and output;
    else only from predictions."""

    def __init__(self, max_tokens: int, bounds: DraftBounds = CPU_BOUNDS, from_text: bool = True) -> None:
        self.max_tokens = max_tokens
        self.max_decodes = bounds.max_decodes
        self._from_text = from_text
        self._candidates: set[Sequence] = set()  # sequences that may get a draft; without any, a step costs no time
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self._costs: StepCosts = StepCosts(bounds.weight_rows)
        self._proposers: dict[int, Proposer] = {}
        self._promising: set[Sequence] = set()  # their next draft follows the token that is under way
        self._rows: dict[int, int] = {}  # rows by step id, for decode steps under way
        self._num_in_vain = 0  # plans since the last guess, or the last new candidate
        self._num_to_rest = 0  # the next plans, which look for no guess

    def entered(self, seq: Sequence) -> None:
        if self._from_text or seq.prediction:
            self._candidates.add(seq)
            self._num_in_vain = self._num_to_rest = 0

    def add_to(self, parts: RunningParts, block_manager: BlockManager, num_spare: int) -> None:
        num_rows = len(parts.decodes)
        if not self._begin_search(num_rows, num_spare):
            if self._promising:
                self._promising.difference_update(parts.decodes)  # the draft for which they would wait does not come
            return
        self._num_in_vain += 1
        proposals = self._proposals(parts, block_manager)
        if self._num_in_vain >= PATIENCE:
            self._num_to_rest = REST
        num_spare = min(num_spare, self._most_rows(len(parts.decodes), len(proposals)))
        num_kept = float(num_rows)  # tokens that the step is expected to bring
        for num_before, (seq, proposer, tokens) in enumerate(proposals):
            share = -(-num_spare // (len(proposals) - num_before))
            room = min(share, self._room(seq, parts, block_manager))  # the drafts before this one took blocks
            length, num_kept = self._length(proposer, tokens[: max(0, room)], num_rows, num_kept)
            if not length:
                proposer.guess = seq.num_tokens, tokens[0]
            if not length or (blocks := block_manager.allocate(seq, 1 + length)) is None:
                self._promising.discard(seq)
                continue
            parts.add_draft(seq, tokens[:length], blocks)
            num_rows += length
            num_spare -= length

    def _begin_search(self, num_rows: int, num_spare: int) -> bool:
        """Returns True if a plan of `num_rows` decodes looks for guesses; False if a draft has no room or cannot pay,
        or if the search rests, which ends after REST such plans."""
        if not (self._candidates and 0 < num_rows <= self.max_decodes and num_spare > 0):
            return False
        if self._num_to_rest:
            self._num_to_rest -= 1
            return False
        return self._may_pay(num_rows)

    def _proposals(self, parts: RunningParts, block_manager: BlockManager) -> list[Proposal]:
        """Returns the decodes that may have a draft in this step."""
        found = []
        for seq in parts.decodes:
            if seq not in self._candidates or (seq.group is not None and seq.group.inseparable):
                continue
            if seq.num_pending_tokens:
                self._look_ahead(seq)
                continue
            proposer = self._proposer_of(seq)
            proposer.compare(seq)
            room = min(self._room(seq, parts, block_manager), self.max_tokens)
            if room > 0 and (tokens := self._propose(proposer, seq, room)):
                found.append(Proposal(seq, proposer, tokens))
            else:
                self._promising.discard(seq)
        return found

    def _most_rows(self, num_decodes: int, num_drafts: int) -> int:
        """Returns how many rows drafts may have: they must not take much time from the decodes without a draft."""
        num_others = num_decodes - num_drafts
        if num_others <= 0:
            return num_decodes * self.max_tokens
        rows = self._costs.rows_within(num_decodes, MOST_LOSS * num_decodes / num_others)
        return int(min(rows, num_decodes * self.max_tokens))

    def _may_pay(self, num_rows: int) -> bool:
        """False if not even a guess that is sure to be right pays in a step of `num_rows` decodes."""
        return MARGIN * self._costs.needed(num_rows, num_rows) < 1.0

    def _look_ahead(self, seq: Sequence) -> None:
        """Guesses the token that is under way. With a likely guess `seq` waits for it and gets a draft then."""
        proposer = self._proposer_of(seq)
        proposer.earn(EARNED_CREDIT)
        proposer.compare(seq)
        if proposer.guess is None and (tokens := self._propose(proposer, seq, 1)):
            proposer.guess = len(seq.token_ids), tokens[0]
            if proposer.chances[proposer.source] >= FIRST_CHANCE and proposer.may_wait:
                self._promising.add(seq)

    def _propose(self, proposer: Proposer, seq: Sequence, num_tokens: int) -> list[int]:
        tokens = proposer.propose(seq, num_tokens)
        if tokens or not proposer.caught_up:
            self._num_in_vain = 0
        return tokens

    def _proposer_of(self, seq: Sequence) -> Proposer:
        if (proposer := self._proposers.get(seq.seq_id)) is None:
            if len(self._proposers) >= MAX_PROPOSERS:
                del self._proposers[next(iter(self._proposers))]
            proposer = self._proposers[seq.seq_id] = self._new_proposer(seq)
        return proposer

    def _new_proposer(self, seq: Sequence) -> Proposer:
        return Proposer(seq, self._from_text)

    def _room(self, seq: Sequence, parts: RunningParts, block_manager: BlockManager) -> int:
        """Returns how many tokens of a draft fit the limits of `seq` and its blocks. New blocks are taken only while
        enough stay free for the next token of every decode."""
        room = seq.max_num_tokens - seq.num_tokens - 1
        if len(block_manager.free_blocks) <= len(parts.decodes) + self.max_tokens:
            room = min(room, len(seq.block_table) * block_manager.block_size - seq.num_computed_tokens - 1)
        return room

    def _length(self, proposer: Proposer, tokens: list[int], num_rows: int, num_kept: float) -> tuple[int, float]:
        """Returns how many of `tokens` are worth their time in a step of `num_rows` that brings `num_kept` tokens, and
        `num_kept` with them."""
        chance = right = proposer.chances[proposer.source]  # that all tokens so far are right
        length = 0
        while length < len(tokens) and right > MARGIN * self._costs.needed(num_rows + length, num_kept):
            num_kept += right
            right *= chance
            length += 1
        return length, num_kept

    def planned(self, plan: StepPlan) -> None:
        if not self._candidates or self._num_to_rest:
            return
        if not (plan.chunks or plan.new or plan.block_copies or plan.loads):
            self._rows[plan.step_id] = plan.num_rows

    def computed(self, result: StepResult) -> None:
        if (rows := self._rows.pop(result.step_id, 0)) and not result.failed:
            self._costs.add(rows, result.compute_seconds - result.draft_seconds)

    def verified(self, seq: Sequence, num_accepted: int) -> None:
        num_tokens = seq.num_draft_tokens
        self.num_drafts += 1
        self.num_draft_tokens += num_tokens
        self.num_accepted_tokens += num_accepted
        seq.num_drafted_tokens += num_tokens
        seq.num_accepted_tokens += num_accepted
        if (proposer := self._proposers.get(seq.seq_id)) is not None:
            proposer.learn(num_tokens, num_accepted)
            proposer.earn(num_accepted)
            if proposer.from_prediction:
                seq.num_accepted_prediction_tokens += num_accepted
                seq.num_rejected_prediction_tokens += num_tokens - num_accepted
                seq.prediction_end = seq.num_tokens + num_accepted
        if num_accepted and (proposer is None or proposer.may_wait):
            self._promising.add(seq)
        else:
            self._promising.discard(seq)

    def holds(self, seq: Sequence) -> bool:
        return seq.num_pending_tokens > 0 and seq in self._promising

    def without_held(self, scope: StepScope) -> list[Sequence]:
        if not self._promising or scope.resting:  # decodes that take turns keep them
            return scope.sequences
        others = [seq for seq in scope.sequences if not self.holds(seq)]
        if others:
            for seq in self._promising.intersection(scope.sequences).difference(others):
                if (proposer := self._proposers.get(seq.seq_id)) is not None:
                    proposer.credit -= 1.0
        return others

    def reset(self) -> None:
        self._rows.clear()

    def forget(self, seq: Sequence) -> None:
        self._candidates.discard(seq)
        self._proposers.pop(seq.seq_id, None)
        self._promising.discard(seq)


class ModelDrafts(NgramDrafts):
    """Drafts from the Worker's draft model."""

    def __init__(self, max_tokens: int, bounds: DraftBounds) -> None:
        super().__init__(max_tokens, DraftBounds(MODEL_DECODES, bounds.weight_rows))
        self._costs: PassCosts = PassCosts(bounds.weight_rows)
        self._passes: dict[int, int] = {}  # by step id, for steps under way

    def add_to(self, parts: RunningParts, block_manager: BlockManager, num_spare: int) -> None:
        self._costs.num_sharing = max(1, len(parts.decodes))
        super().add_to(parts, block_manager, num_spare)

    def _may_pay(self, num_rows: int) -> bool:
        return True  # a draft now and then learns what a pass costs

    def planned(self, plan: StepPlan) -> None:
        super().planned(plan)
        if passes := max([len(draft.token_ids) for draft in plan.drafts if draft.is_open], default=0):
            self._passes[plan.step_id] = passes

    def computed(self, result: StepResult) -> None:
        super().computed(result)
        if passes := self._passes.pop(result.step_id, 0):
            self._costs.add_passes(passes, result.draft_seconds)

    def reset(self) -> None:
        super().reset()
        self._passes.clear()

    def _new_proposer(self, seq: Sequence) -> Proposer:
        return OpenProposer(seq)

    def _length(self, proposer: Proposer, tokens: list[int], num_rows: int, num_kept: float) -> tuple[int, float]:
        assert isinstance(proposer, OpenProposer), "_new_proposer makes it"
        length, num_kept = super()._length(proposer, tokens, num_rows, num_kept)
        proposer.num_left_out = 0 if length else proposer.num_left_out + 1
        if proposer.num_left_out >= proposer.probe_after and tokens:
            proposer.num_left_out = 0
            return 1, num_kept
        return length, num_kept
