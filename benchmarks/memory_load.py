"""The loads of benchmarks/memory.py, run on the real Scheduler and BlockManager step by step.

No model computes anything: a stand-in for the Worker returns a token for each sequence that a plan samples, and ends a
sequence at the length that was drawn for it, which the scheduler does not know. The figures count blocks.
"""

import heapq
import math
import random
from collections import deque
from dataclasses import astuple, dataclass
from itertools import count
from typing import NamedTuple

from engine.executor.step import SampledToken, SequenceStep, StepPlan, StepResult
from engine.memory.block_manager import BlockManager
from engine.memory.sequence import Sequence
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler

EOS_TOKEN_ID = 0
VOCAB_SIZE = 50_000
MAX_MODEL_LEN = 2048  # context of OPT, which the paper serves
POOL_SLOTS = 15_696  # tokens: what an A100 with 40 GB has left beside OPT-13B (the paper's table 1: 15.7 K)
PARAMS = SamplingParams(max_tokens=MAX_MODEL_LEN)


class Lengths(NamedTuple):
    prompt: int
    output: int


@dataclass(frozen=True)
class Lognormal:
    """Mean lengths in tokens as published: Kwon et al. 2023, section 6.1 and figure 11.

    The paper shows the spread as a histogram only. Ours is an assumption: log-normal with a standard deviation equal to
    the mean, as skewed as an exponential.
    """

    name: str
    prompt_mean: float
    output_mean: float

    def draw(self, rng: random.Random) -> Lengths:
        """One request of at least 4 tokens each way that fits the context; others are drawn again."""
        while True:
            prompt, output = (round(_lognormal(rng, mean)) for mean in (self.prompt_mean, self.output_mean))
            if 4 <= prompt <= MAX_MODEL_LEN // 2 and 4 <= output <= MAX_MODEL_LEN - prompt:
                return Lengths(prompt, output)

    def load(self, num_requests: int, seed: int = 0) -> list[Lengths]:
        rng = random.Random(seed)
        return [self.draw(rng) for _ in range(num_requests)]


SHAREGPT = Lognormal("ShareGPT-like", 161.31, 337.99)
ALPACA = Lognormal("Alpaca-like", 19.31, 58.45)


def _lognormal(rng: random.Random, mean: float) -> float:
    variance_of_log = math.log(2)  # log(1 + (standard deviation / mean) ** 2)
    return rng.lognormvariate(math.log(mean) - variance_of_log / 2, math.sqrt(variance_of_log))


@dataclass(frozen=True)
class Shares:
    """The use of a pool's slots, as shares: figure 2 of the paper. `num_running`: concurrent requests."""

    tokens: float  # keys and values of tokens
    reserved: float  # will be used by a later token of the request that holds it
    internal: float  # never used by the request that holds it
    external: float  # held by nobody, and yet the next request finds no room
    num_running: float

    @property
    def waste(self) -> float:
        return 1 - self.tokens

    @property
    def waste_of_held(self) -> float:
        """The unused share of the slots that requests hold."""
        return (self.reserved + self.internal) / (1 - self.external)


def mean_of(found: list[Shares]) -> Shares:
    """ValueError where the load was too small for a single step to be measured."""
    if not found:
        raise ValueError("the queue was empty before a quarter of the requests had ended: send more requests")
    return Shares(*(sum(values) / len(found) for values in zip(*map(astuple, found), strict=True)))


class Engine:
    """The Driver's loop without a Worker. `output` tokens after its prompt a sequence ends."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True, seed: int = 0) -> None:
        self.blocks = BlockManager(num_blocks, block_size, prefix_caching)
        # Rows and budget are wide: memory alone is to be the limit.
        self.scheduler = Scheduler(
            self.blocks, max_num_seqs=4096, max_num_batched_tokens=16_384, eos_token_ids=[EOS_TOKEN_ID]
        )
        self.rng = random.Random(seed)
        self.num_added = self.num_ended = 0  # both in sequences
        self.num_prompt_tokens_computed = 0
        self._limits: dict[int, int] = {}  # seq_id -> tokens with the end-of-sequence token
        self._numbers = count()

    def tokens(self, number: int) -> list[int]:
        """Random ones, of which none ends a sequence."""
        return [self.rng.randrange(1, VOCAB_SIZE) for _ in range(number)]

    def add(self, prompt: list[int], output: int, num_samples: int = 1) -> list[Sequence]:
        """Let samples of one prompt wait; each of them ends after `output` tokens."""
        seqs = []
        for _ in range(num_samples):
            number = next(self._numbers)
            self._limits[number] = len(prompt) + output
            seqs.append(Sequence(number, prompt, PARAMS, seed=0, max_num_tokens=1 << 30, arrival=number))
        self.num_added += num_samples
        self.scheduler.add(seqs[0], seqs[1:])
        return seqs

    def plan(self) -> StepPlan:
        """The next step, which `finish` ends; between the two the blocks are as the Worker would see them."""
        plan = self.scheduler.schedule()
        assert plan is not None, "there is work, and nothing is under way"
        for step in plan.steps:
            self.num_prompt_tokens_computed += self.num_computed_below(
                step, self._sequence(step.seq_id).num_prompt_tokens
            )
        return plan

    def num_computed_below(self, step: SequenceStep, position: int) -> int:
        """Tokens before `position` that a step of the plan under way computes."""
        computed = self._sequence(step.seq_id).num_computed_tokens
        return max(0, min(computed, position) - (computed - step.num_tokens))

    def finish(self, plan: StepPlan) -> list[Sequence]:
        """Return a token for each sampled sequence; those that end with it."""
        samples = [SampledToken(step.seq_id, self._token(step.seq_id)) for step in plan.steps if step.sample]
        ended = [
            seq for seq, _ in self.scheduler.update(StepResult(plan.step_id, samples, {}, 0.0)) if seq.finish_reason
        ]
        self.num_ended += len(ended)
        for seq in ended:
            del self._limits[seq.seq_id]
        return ended

    @property
    def num_live(self) -> int:
        return self.num_added - self.num_ended

    @property
    def num_used(self) -> int:
        return self.blocks.num_blocks - len(self.blocks.free_blocks)

    @property
    def num_logical(self) -> int:
        """Blocks that the running sequences would need if they shared none."""
        return sum(len(seq.block_table) for seq in self.scheduler.running)

    def shares(self) -> Shares:
        """Only the last block of a table can have room left; who shares it has filled it as far."""
        size = self.blocks.block_size
        rooms = {seq.block_table[-1]: -seq.num_computed_tokens % size for seq in self.scheduler.running}
        slots = self.blocks.num_blocks * size
        held, room = self.num_used * size / slots, sum(rooms.values()) / slots
        return Shares(held - room, 0.0, room, 1 - held, len(self.scheduler.running))

    def _sequence(self, seq_id: int) -> Sequence:
        seq = self.scheduler.sequence(seq_id)
        assert seq is not None
        return seq

    def _token(self, seq_id: int) -> int:
        last = len(self._sequence(seq_id).token_ids) + 1 == self._limits[seq_id]
        return EOS_TOKEN_ID if last else self.rng.randrange(1, VOCAB_SIZE)


def paged(load: list[Lengths], block_size: int = 16) -> tuple[Shares, int]:
    """Serve `load` from a full queue until nobody waits; measured once a quarter of the requests has ended.

    Returns where the slots of the pool were, a mean over steps, and the number of preemptions.
    """
    engine = Engine(POOL_SLOTS // block_size, block_size)
    for lengths in load:
        engine.add(engine.tokens(lengths.prompt), lengths.output)
    found = []
    while engine.scheduler.waiting:
        plan = engine.plan()
        if engine.num_ended >= len(load) // 4 and engine.scheduler.waiting:
            found.append(engine.shares())
        engine.finish(plan)
    return mean_of(found), engine.scheduler.num_preemptions


def sharing(load: list[Lengths], num_samples: int, at_once: int = 16, block_size: int = 16) -> float:
    """The share of the blocks that parallel sampling saves: 1 - blocks in use / blocks of all tables.

    That is the measure of the paper's section 6.3, here the mean over steps. `at_once` requests run at any time in a
    pool that holds them all, all samples of a request are as long as each other, as in the paper. Measured once a
    quarter of the requests has ended, while further ones wait.
    """
    engine = Engine(at_once * num_samples * (MAX_MODEL_LEN // block_size + 1), block_size)
    waiting = deque(load)
    saved = []
    while waiting:
        for _ in range(min(len(waiting), at_once - engine.num_live // num_samples)):
            lengths = waiting.popleft()
            engine.add(engine.tokens(lengths.prompt), lengths.output, num_samples)
        plan = engine.plan()
        if engine.num_ended >= len(load) * num_samples // 4:
            saved.append(1 - engine.num_used / engine.num_logical)
        engine.finish(plan)
    return sum(saved) / len(saved)


@dataclass(frozen=True)
class ChatFigures:
    """`used` and `logical` are blocks, means over steps; what idle users left in the prefix cache is not in use."""

    used: float
    logical: float  # blocks that the running sequences would need if they shared none
    peak_used: int
    prompt_tokens: int
    prompt_tokens_computed: int
    prompt_tokens_needed: int  # each token once, whoever asks: the system prompt, then only what is new in a turn
    system_computed: float  # how often the system prompt was computed, in whole ones
    hit_rate: float

    @property
    def times_less(self) -> float:
        return self.logical / self.used


class Chats:
    """Users who talk to an assistant with one system prompt: each turn's prompt is all that was said before.

    Messages and answers have Alpaca-like lengths. After an answer a user takes 20 steps on average to ask again.
    """

    def __init__(self, engine: Engine, num_users: int, num_turns: int, system_tokens: int) -> None:
        system = engine.tokens(system_tokens)
        self.prompt_tokens, self.prompt_tokens_needed = 0, system_tokens
        self._engine, self._num_turns = engine, num_turns
        self._rng = random.Random(2)
        self._history = [list(system) for _ in range(num_users)]
        self._due = [(self._pause(), user, 1) for user in range(num_users)]  # (step, user, turn)
        heapq.heapify(self._due)
        self._asking: dict[Sequence, tuple[int, int]] = {}

    @property
    def over(self) -> bool:
        return not self._due and not self._asking

    def ask(self, step: int) -> None:
        """Add the requests of those whose turn has come."""
        while self._due and self._due[0][0] <= step:
            _, user, turn = heapq.heappop(self._due)
            lengths = ALPACA.draw(self._rng)
            prompt = self._history[user] + self._engine.tokens(lengths.prompt)
            self.prompt_tokens += len(prompt)
            self.prompt_tokens_needed += lengths.prompt + (
                turn > 1
            )  # the last token of an answer is not computed in it
            self._asking[self._engine.add(prompt, lengths.output)[0]] = user, turn

    def record_answers(self, ended: list[Sequence], step: int) -> None:
        """Make the answers part of the users' histories."""
        for seq in ended:
            user, turn = self._asking.pop(seq)
            self._history[user] = list(seq.token_ids)
            if turn < self._num_turns:
                heapq.heappush(self._due, (step + 1 + self._pause(), user, turn + 1))

    def _pause(self) -> int:
        return round(self._rng.expovariate(1 / 20))


def chat(
    num_users: int, num_turns: int, system_tokens: int, block_size: int = 16, prefix_caching: bool = True
) -> ChatFigures:
    """Run `Chats` to their end in a pool that is large enough for all."""
    num_blocks = num_users * (system_tokens + num_turns * 200) // block_size
    engine = Engine(num_blocks, block_size, prefix_caching=prefix_caching)
    chats = Chats(engine, num_users, num_turns, system_tokens)
    num_steps = used = logical = peak = system_computed = 0
    for step in count():
        chats.ask(step)
        if chats.over:
            break
        if not engine.scheduler.has_work:
            continue
        plan = engine.plan()
        num_steps += 1
        used, logical, peak = used + engine.num_used, logical + engine.num_logical, max(peak, engine.num_used)
        system_computed += sum(engine.num_computed_below(sequence_step, system_tokens) for sequence_step in plan.steps)
        chats.record_answers(engine.finish(plan), step)
    return ChatFigures(
        used=used / num_steps,
        logical=logical / num_steps,
        peak_used=peak,
        prompt_tokens=chats.prompt_tokens,
        prompt_tokens_computed=engine.num_prompt_tokens_computed,
        prompt_tokens_needed=chats.prompt_tokens_needed,
        system_computed=system_computed / system_tokens,
        hit_rate=engine.blocks.num_prefix_hits / max(1, engine.blocks.num_prefix_queries),
    )
