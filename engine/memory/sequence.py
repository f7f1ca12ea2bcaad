"""Sequence: one sample of a request, or one hypothesis of a beam search, as the Driver knows it.

Tokens lie on one line; every count is a position on it:

    0        num_cached     num_prompt      num_computed   len(token_ids)    num_tokens    max_num_tokens
    |------------|--------------|----------------|---------------|----------------|----------------|
    |<- cached ->|              |                |               |                |                |
    |<-------- prompt --------->|<------------- generated ----------------------->|<- may follow ->|
    |<-------- computed: keys and values ------->|<- uncomputed: the next plans ->|
    |<----------- known: values at the Driver ------------------>|<-- pending --->|
    |<---- scored ---->|  num_scored_tokens of the prompt, with prompt_logprobs

`num_computed_tokens` may also lie within the prompt (chunked prefill) or fall back to 0 (preemption). Pending tokens
are those that plans already sent will sample; their values are not back yet (overlapped scheduling). The scheduler's
one rule: computed tokens chase known and pending tokens.
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from engine.executor.step import SampledToken
from engine.outputs import FinishReason
from engine.request import Adapter
from engine.sampling_params import SamplingParams


class BlockKey(NamedTuple):
    """The name of a full block in the prefix cache.

    `digest` is the hash of its tokens and of all tokens before them; `token_ids` are compared against collisions.
    """

    digest: bytes
    token_ids: tuple[int, ...]


class SequenceStatus(Enum):
    WAITING = auto()  # new, preempted, or waiting to be forked: holds no blocks
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """Known tokens, computed tokens, and the blocks that hold them.

    Only the Scheduler and the objects that it owns (BlockManager, FairShare, queues, groups) change a Sequence;
    Delivery sets how it ended if the text or the client decided that. `num_computed_tokens` counts a plan as computed
    when it is sent: the Worker runs plans in order, so a later plan may build on it.
    """

    __slots__ = (
        "adapter",
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
        "num_accepted_prediction_tokens",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_charged_tokens",
        "num_computed_tokens",
        "num_draft_tokens",
        "num_drafted_tokens",
        "num_pending_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_queued_tokens",
        "num_registered_blocks",
        "num_rejected_prediction_tokens",
        "num_scored_tokens",
        "num_tokens_when_preempted",
        "params",
        "prediction",
        "prediction_end",
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
        adapter: Adapter | None = None,
        prediction: tuple[int, ...] = (),
    ) -> None:
        self.seq_id = seq_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self.seed = seed
        self.max_num_tokens = max_num_tokens  # prompt and output together
        self.priority = priority
        self.arrival = arrival  # a counter, not a time: the order must not depend on clocks
        self.cache_salt = cache_salt
        self.adapter = adapter  # None: the base model
        self.tenant = tenant  # shares the engine with other tenants by `weight`
        self.weight = weight
        self.status = SequenceStatus.WAITING
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        # engine/scheduling/speculation: tokens of the draft that the Worker verifies now; drafted and accepted in all.
        self.num_draft_tokens = 0
        self.num_drafted_tokens = 0
        self.num_accepted_tokens = 0
        self.prediction = prediction  # the client's guess of the output
        self.num_accepted_prediction_tokens = self.num_rejected_prediction_tokens = 0  # in drafts
        self.prediction_end = 0  # length up to the last accepted one; a draft may go on behind the end of the text
        self.num_preemptions = 0
        self.num_tokens_when_preempted = 0
        self.num_charged_tokens = 0  # computed and charged to its tenant; a second computation is free
        self.num_queued_tokens = 0  # its count in the queue that holds it
        self.num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache at its first start
        self.first_scheduled_time: float | None = None
        # Leading prompt tokens whose logprobs are known, or not asked for.
        self.num_scored_tokens = 1 if params.prompt_logprobs is not None else self.num_prompt_tokens
        self.block_table: list[int] = []
        self.block_keys: list[BlockKey] = []  # one per full block of known tokens; survives preemption
        self.fork_of: Sequence | None = None  # the sample that computes the prompt for this one
        self.group: SequenceGroup | None = None  # sequences that are preempted and resumed together
        # Below this length a decode needs no check: it has a block and a row in the Worker, and is not the last token.
        self.decode_end = 0
        self.look_at = 0  # below this length a token neither fills a block nor is the last one
        self.end_token_ids: frozenset[int] = frozenset()  # tokens that may end it; the Scheduler checks
        self.in_worker = False  # True while a row of the Worker holds these tokens
        self.last_turn = 0  # its last turn in short steps (engine/scheduling/short_steps.py)
        self.num_registered_blocks = 0  # leading blocks that the prefix cache knows
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    @property
    def num_tokens(self) -> int:
        """Known and pending tokens."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_skippable_tokens(self) -> int:
        """Leading tokens that need no computation if their keys and values are cached.

        All but the last known token, whose logits are needed. With prompt_logprobs none whose logits score a token, and
        with pooling over all tokens none at all.
        """
        if (pooling := self.params.pooling) is not None and pooling.needs_every_token:
            return 0
        if self.num_scored_tokens < self.num_prompt_tokens:
            return self.num_scored_tokens - 1
        return len(self.token_ids) - 1

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens left to compute; 0 once the last allowed token is known or pending, and while a draft is verified."""
        if self.num_tokens >= self.max_num_tokens or self.num_draft_tokens:
            return 0
        return self.num_tokens - self.num_computed_tokens

    @property
    def has_started(self) -> bool:
        """True if its first generated token is known or pending."""
        return self.num_tokens > self.num_prompt_tokens

    @property
    def has_progressed(self) -> bool:
        """True if it got a token since its last preemption, apart from tokens that were pending then."""
        return len(self.token_ids) > self.num_tokens_when_preempted

    @property
    def order(self) -> tuple[int, int]:
        """The place in the order: lower priority values first, then by arrival."""
        return self.priority, self.arrival

    def lose_blocks(self) -> None:
        """The Worker is gone: the sequence waits to be computed from its first token on."""
        self.status = SequenceStatus.WAITING
        self.in_worker = False
        self.decode_end = 0
        self.block_table = []
        self.num_computed_tokens = self.num_pending_tokens = self.num_registered_blocks = self.num_draft_tokens = 0

    def move(self) -> None:
        """Another Scheduler goes on with it, under a new `seq_id`. It is out of its own, which ended it for that."""
        self.lose_blocks()
        self.arrival = self.seq_id
        self.block_keys = []
        self.finish_reason = self.stop_reason = None
        self.last_turn = 0

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.name}, computed {self.num_computed_tokens} of "
            f"{len(self.token_ids)}+{self.num_pending_tokens}, blocks {self.block_table})"
        )


def end_tokens(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Returns the tokens that end a text once it has min_tokens."""
    return (eos_token_ids if params.ends_at_eos else frozenset()).union(params.stop_token_ids)


def end_after(
    seq: Sequence, token_id: int, eos_token_ids: frozenset[int]
) -> tuple[FinishReason, str | int | None] | None:
    """Returns (finish reason, stop reason) of `seq`, whose last token is `token_id`; None if it goes on."""
    params = seq.params
    if not params.generates:
        return FinishReason.LENGTH, None
    is_long_enough = seq.num_generated_tokens >= params.min_tokens
    if is_long_enough and token_id in params.stop_token_ids:
        return FinishReason.STOP, token_id
    # A form allows the end before min_tokens only where it allows nothing else.
    may_end = params.ends_at_eos and (is_long_enough or params.structured_output is not None)
    if may_end and token_id in eos_token_ids:
        return FinishReason.STOP, None
    return (FinishReason.LENGTH, None) if len(seq.token_ids) >= seq.max_num_tokens else None


class SequenceGroup:
    """Samples of one request, preempted and resumed together (gang scheduling: Kwon et al. 2023, section 4.5).

    `members` are Sequences of one prompt, adjacent in order. They share blocks: a single member would free little by
    giving up its own, and its return would delay all others. A `split` group comes and goes member by member until none
    of them runs: a group whose members together need more blocks than the pool has, or whose member gave way to another
    tenant.
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
        """Waiting members, without those that wait for another to compute their prompt."""
        return [seq for seq in self.members if seq.status is SequenceStatus.WAITING and seq.fork_of is None]

    @property
    def num_together(self) -> int:
        """Number of sequences when the whole group runs."""
        return sum(seq.status is not SequenceStatus.FINISHED for seq in self.members)

    @property
    def num_spare_rows(self) -> int:
        """Rows that the group needs while it runs, beyond those of its running sequences."""
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
    """Changes that a beam search asks of the Scheduler, which applies the fields in this order.

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
    """Returns the running sequences that are preempted with `seq`, including itself."""
    return [seq] if seq.group is None or seq.group.split else seq.group.running


def smallest_part(seq: Sequence) -> list[Sequence]:
    """Returns the running sequences that must give way with `seq`, including itself, if its place is needed."""
    return [seq] if seq.group is None or not seq.group.inseparable else seq.group.running


def num_forks_of(seq: Sequence) -> int:
    """Returns how many siblings will run beside `seq` if it is the first of its group to start; else 0."""
    return 0 if seq.group is None or seq.group.running else seq.group.num_together - 1
