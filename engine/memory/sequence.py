"""Sequence: one sample, or one hypothesis of a beam search, of a request, as the Driver knows it."""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from engine.executor.step import SampledToken
from engine.outputs import FinishReason
from engine.sampling_params import SamplingParams


class BlockKey(NamedTuple):
    """What a full block is known by: the hash of its tokens and of all before them, and its tokens, to be compared."""

    digest: bytes
    token_ids: tuple[int, ...]


class SequenceStatus(Enum):
    WAITING = auto()  # new, preempted, or to be forked off another: holds no blocks
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """Known tokens, computed tokens, and the blocks that hold them.

    The Scheduler changes it, with what it owns: BlockManager, FairShare, the queues, the groups. From outside comes
    only how it ended, where the text or the client decided that. `token_ids` holds what the Driver has seen;
    `num_pending_tokens` counts tokens that plans already sent will sample but whose values are not back yet
    (overlapped scheduling). `num_computed_tokens` counts plans as computed when they are sent: the Worker runs them in
    order, so a later plan may build on them.
    """

    __slots__ = (
        "arrival",
        "block_keys",
        "block_table",
        "cache_salt",
        "decode_end",
        "end_token_ids",
        "finish_reason",
        "first_scheduled_time",
        "fork_of",
        "group",
        "in_worker",
        "last_turn",
        "look_at",
        "max_num_tokens",
        "num_cached_tokens",
        "num_charged_tokens",
        "num_computed_tokens",
        "num_pending_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_queued_tokens",
        "num_registered_blocks",
        "num_scored_tokens",
        "num_tokens_when_preempted",
        "params",
        "priority",
        "seed",
        "seq_id",
        "status",
        "stop_reason",
        "tenant",
        "token_ids",
        "weight",
    )

    def __init__(
        self,
        seq_id: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        seed: int,
        max_num_tokens: int,
        priority: int = 0,
        arrival: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        weight: float = 1.0,
    ) -> None:
        self.seq_id = seq_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self.seed = seed
        self.max_num_tokens = max_num_tokens  # prompt + output never goes past it
        self.priority = priority
        self.arrival = arrival  # a counter, not a time: order must not depend on clocks
        self.cache_salt = cache_salt
        self.tenant = tenant  # who shares the engine with others by `weight`
        self.weight = weight
        self.status = SequenceStatus.WAITING
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        self.num_preemptions = 0
        self.num_tokens_when_preempted = 0
        self.num_charged_tokens = 0  # computed, and on its tenant's account; a second computation costs nothing
        self.num_queued_tokens = 0  # what the queue that holds it counts it as
        self.num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache when first admitted
        self.first_scheduled_time: float | None = None
        # Leading tokens of the prompt whose logprobs are known or not wanted.
        self.num_scored_tokens = 1 if params.prompt_logprobs is not None else self.num_prompt_tokens
        self.block_table: list[int] = []
        self.block_keys: list[BlockKey] = []  # of the full blocks of known tokens; survives preemption
        self.fork_of: Sequence | None = None  # the sample of the same prompt that computes it for both
        self.group: SequenceGroup | None = None  # with whom it is preempted and resumed
        # Where plain decoding stops: below it a token needs no block, is not the last one, and the Worker has the row.
        self.decode_end = 0
        self.look_at = 0  # a token before this length neither fills a block nor is the last one allowed
        self.end_token_ids: frozenset[int] = frozenset()  # any of these may end it; the scheduler knows
        self.in_worker = False  # whether the Worker holds these very tokens in a row
        self.last_turn = 0  # when it last decoded while others rested: see engine/scheduling/short_steps.py
        self.num_registered_blocks = 0  # leading blocks of the table that the prefix cache knows
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    @property
    def num_tokens(self) -> int:
        """Known tokens, those on their way included."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_skippable_tokens(self) -> int:
        """Leading tokens that need not be computed where their keys and values are found: all but the last known one,
        whose logits are needed; but none whose logits score a token of the prompt, and none at all where the hidden
        states of all are wanted.
        """
        if (pooling := self.params.pooling) is not None and pooling.needs_every_token:
            return 0
        if self.num_scored_tokens < self.num_prompt_tokens:
            return self.num_scored_tokens - 1
        return len(self.token_ids) - 1

    @property
    def num_uncomputed_tokens(self) -> int:
        """What is left to compute; nothing once the last token it may have is known or on its way."""
        if self.num_tokens >= self.max_num_tokens:
            return 0
        return self.num_tokens - self.num_computed_tokens

    @property
    def has_started(self) -> bool:
        """Whether its first token is known or on its way."""
        return self.num_tokens > self.num_prompt_tokens

    @property
    def has_progressed(self) -> bool:
        """Whether it got a token since it was last preempted, beside one that was on its way then."""
        return len(self.token_ids) > self.num_tokens_when_preempted

    @property
    def order(self) -> tuple[int, int]:
        """First come, first served within a priority; lower runs first."""
        return self.priority, self.arrival

    def lose_blocks(self) -> None:
        """The Worker is gone: it waits to be computed from the first token on."""
        self.status = SequenceStatus.WAITING
        self.in_worker = False
        self.decode_end = 0
        self.block_table = []
        self.num_computed_tokens = self.num_pending_tokens = self.num_registered_blocks = 0

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.name}, computed {self.num_computed_tokens} of "
            f"{len(self.token_ids)}+{self.num_pending_tokens}, blocks {self.block_table})"
        )


def end_tokens(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end a text once it has min_tokens."""
    return (eos_token_ids if params.ends_at_eos else frozenset()).union(params.stop_token_ids)


def end_after(
    seq: Sequence, token_id: int, eos_token_ids: frozenset[int]
) -> tuple[FinishReason, str | int | None] | None:
    """The (finish reason, stop reason) of `seq`, whose last token is `token_id`; None where it goes on."""
    params = seq.params
    if not params.generates:
        return FinishReason.LENGTH, None
    if seq.num_generated_tokens >= params.min_tokens:
        if token_id in params.stop_token_ids:
            return FinishReason.STOP, token_id
        if token_id in eos_token_ids and params.ends_at_eos:
            return FinishReason.STOP, None
    return (FinishReason.LENGTH, None) if len(seq.token_ids) >= seq.max_num_tokens else None


class SequenceGroup:
    """`members` are Sequences of one prompt, adjacent in order.

    A group whose members together need more blocks than there are is `split`: they come and go in order, one by one,
    until none of them runs. So it is from when one of them gave way to another tenant's sequence.
    """

    inseparable = False  # True: members cannot continue without each other
    member_name = "samples of this request"

    def __init__(self, members: list[Sequence]) -> None:
        self.members = members
        self.split = False
        self.error = ""
        for seq in members:
            seq.group = self

    @property
    def live(self) -> bool:
        return any(seq.status is not SequenceStatus.FINISHED for seq in self.members)

    @property
    def running(self) -> list[Sequence]:
        return [seq for seq in self.members if seq.status is SequenceStatus.RUNNING]

    @property
    def waiting(self) -> list[Sequence]:
        """Without those that wait for another to compute the prompt for them."""
        return [seq for seq in self.members if seq.status is SequenceStatus.WAITING and seq.fork_of is None]

    @property
    def num_together(self) -> int:
        """Sequences that run when all of the group do."""
        return sum(seq.status is not SequenceStatus.FINISHED for seq in self.members)

    @property
    def num_spare_rows(self) -> int:
        """Rows beyond those of its running sequences that the group needs while it runs."""
        return 0

    @property
    def num_rows_to_start(self) -> int:
        """Rows that must be free before the next member may run: for all if none runs yet, then one by one."""
        return 1 if self.running else len(self.waiting)

    @property
    def max_new_tokens(self) -> int | None:
        """Tokens that a member may generate; None if every member has a limit of its own."""
        return None

    def add_candidates(self, seq: Sequence, token: SampledToken) -> "GroupChoice | None":
        """Takes a token with its logprobs, if the group chooses together; None if `seq` goes on with its own token."""
        return None

    def fail(self, num_blocks: int, block_size: int) -> None:
        """Notes that the whole pool is too small for the group."""
        self.error = (
            f"The {len(self.members)} {self.member_name} need more KV cache than there is: "
            f"{num_blocks} blocks of {block_size} tokens. Lower n or max_tokens."
        )

    def write_results(self) -> None:
        """Called once after the end of a group that chooses together."""


@dataclass(slots=True)
class GroupChoice:
    """What a group that chooses together asks of the Scheduler, which applies the fields in this order.

    finished: members that give up their blocks.
    forked: (parent, child): the child takes over the parent's tokens and shares its blocks.
    resent: members whose last token is not the one that the Worker sampled.
    appended: (member, token id): the new last token of every member that goes on.
    ended: the search is over.
    """

    finished: list[Sequence] = field(default_factory=list)
    forked: list[tuple[Sequence, Sequence]] = field(default_factory=list)
    resent: list[Sequence] = field(default_factory=list)
    appended: list[tuple[Sequence, int]] = field(default_factory=list)
    ended: bool = False


def together(seq: Sequence) -> list[Sequence]:
    """The running sequences that are preempted with `seq`, itself among them."""
    return [seq] if seq.group is None or seq.group.split else seq.group.running


def smallest_part(seq: Sequence) -> list[Sequence]:
    """The running sequences that must give way with `seq`, itself among them, when its place is needed."""
    return [seq] if seq.group is None or not seq.group.inseparable else seq.group.running


def num_forks_of(seq: Sequence) -> int:
    """How many others will run beside `seq`, the first of its group to be admitted."""
    return 0 if seq.group is None or seq.group.running else seq.group.num_together - 1
