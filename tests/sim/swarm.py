"""A configuration and the events that are played against it, drawn from a seed.

Swarm testing (Groce et al. 2012): each run switches features on and off and draws its own rates, so that rare states
are common in some run. Everything that depends on luck is fixed here, so that a list of events can be cut short and
means the same.
"""

import random
from dataclasses import dataclass, replace

import msgspec

from engine.executor.step import CacheCosts
from engine.sampling_params import BeamSearchParams, SamplingParams
from tests.sim.beams import beam_references
from tests.sim.model import EOS_TOKEN_ID, SEED_STEP, FakeModel, Reference, reference, root_of

AMBUSH_PRIORITY = -1
FOR_GOOD = 1e6  # seconds
LULL, LULL_RATE = 300.0, 0.05  # steps in which nobody comes, before a share of the requests
AGAIN = 0, 0, 2, 3  # with the first, as often as makes a request guilty of what is its fault
MAX_ADAPTERS = 5
BAD = "bad"
VERSIONS = "0", "1", "2", BAD  # of each adapter; the first is there from the start
ABORT_TARGETS = ("any", "new", "fork", "prefill", "decode", "pending", "preempted", "preempted+pending", "finished")


@dataclass(frozen=True)
class SimConfig:
    """Sizes are in blocks and tokens; rates are shares of requests; times are in steps."""

    seed: int
    model: FakeModel
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    watermark: float
    refuse_every: int  # one allocation in so many of a running sequence finds no block, whatever is free
    depth: int  # plans in flight: 1 to 3, a lookahead of 0 to 2
    prefix_caching: bool
    num_host_blocks: int
    cache_costs: CacheCosts | None  # None: whatever lies in the host tier is loaded
    slow_every: int  # one step in so many takes several times as long
    max_queued_requests: int
    num_requests: int
    gap: float  # mean time between arrivals
    burst: float  # share of requests that arrive with the one before
    num_stems: int
    num_salts: int
    num_priorities: int
    ambush_rate: float
    max_n: int
    abort_rate: float
    stop_rate: float
    min_tokens_rate: float
    drain_rate: float
    crash_rate: float
    deadly_rate: float
    # The Driver's level has all of what follows, the scheduler's the first three.
    admission: str = "plain"
    beam_rate: float = 0.0
    max_width: int = 1
    disk_blocks: int = 0  # quota of the disk tier; 0: there is none
    slow_disk_every: int = 0  # one access in so many takes longer than anybody waits
    disk_fault_every: int = 0  # one write in so many fails, or is cut short
    damage_rate: float = 0.0
    pause_rate: float = 0.0
    hang_share: float = 0.0  # of the deadly requests: the Worker does not die of them, it never answers
    resizes: bool = False  # a Worker that is started again may come with another pool
    reload_fault_every: int = 0  # one restart in so many fails, or never ends
    step_timeout: float = 30.0
    tenant_weights: tuple[float, ...] = (1.0,)
    step_seconds: float | None = None
    max_draft_tokens: int = 0  # of a sequence in a step
    itl_target: float | None = None
    num_adapters: int = 0  # names of LoRA adapters
    max_loras: int = 8
    adapter_rate: float = 0.0  # share of requests that name an adapter
    change_rate: float = 0.0  # and of those before which one is loaded, unloaded or replaced
    large_holders: str = ""  # what the requests of the first tenant are like: samples, beams, prompts, any of these

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True)
class Arrival:
    """A request.

    `references` has what each of its n samples must become (greedy ones are all the same). `leave_after` is a client
    that goes after so many tokens, `read_every` the time between two of its reads (0: at once). Whatever plan a
    `deadly` one is in, the Worker dies ("crash") or never answers ("hang"). These need the Driver. An `ambush` goes
    before all others and lies in wait until another request is about to fork. With `beam` it is a beam search.
    `adapter` is a name; `weights`, the folder behind the name, may be another one when the request comes.
    """

    at: float
    index: int
    prompt: list[int]
    params: SamplingParams
    max_num_tokens: int
    priority: int
    salt: str
    references: tuple[Reference, ...]
    leave_after: int | None
    read_every: float
    ambush: bool
    deadly: str
    beam: BeamSearchParams | None = None
    tenant: str = ""
    weight: float = 1.0
    adapter: str = ""
    weights: str = ""

    def references_at(self, config: SimConfig, max_num_tokens: int) -> tuple[Reference, ...]:
        """`references`, were that the most tokens it may have."""
        if max_num_tokens == self.max_num_tokens:
            return self.references
        root = root_of(self.salt, self.weights)
        return _references(config.model, self.prompt, self.params, self.beam, root, max_num_tokens)

    def with_adapter(self, config: SimConfig, name: str, weights: str) -> "Arrival":
        """The same request with an adapter, and what its samples become then."""
        root = root_of(self.salt, weights)
        references = _references(config.model, self.prompt, self.params, self.beam, root, self.max_num_tokens)
        return replace(self, adapter=name, weights=weights, references=references)

    def seed_of(self, sample: int) -> int:
        assert self.params.seed is not None
        return (self.params.seed + sample * SEED_STEP) % 2**64


@dataclass(frozen=True)
class Abort:
    """Ends the `pick`-th of the requests that have a sample in the state `target`; that one alone if not `whole`."""

    at: float
    target: str
    pick: int
    whole: bool


@dataclass(frozen=True)
class Drain:
    at: float
    timeout: float


@dataclass(frozen=True)
class Crash:
    """The Worker is killed from outside; its blocks and the tokens on their way are lost.

    `again`: so are as many of those that come after it, each as soon as it is sent a plan.
    """

    at: float
    again: int = 0


@dataclass(frozen=True)
class Pause:
    """The Worker is stopped (SIGSTOP), for good or for some seconds; `again` as with a Crash.

    With `hangs` it stands still by itself, for good, if it has nothing to compute.
    """

    at: float
    seconds: float
    again: int = 0
    hangs: bool = False


@dataclass(frozen=True)
class Damage:
    """Something happens to the file of the disk tier; `pick` says where and what."""

    at: float
    pick: int


@dataclass(frozen=True)
class Sleep:
    """The model is put to sleep, and woken after some seconds unless a request wakes it before that."""

    at: float
    level: int
    seconds: float


@dataclass(frozen=True)
class ChangeAdapter:
    """The adapter of this name is unloaded, if there is one, then loaded from the folder `weights`, if that is given.
    A folder whose name ends in BAD holds an adapter that is not served."""

    at: float
    name: str
    weights: str


Event = Arrival | Abort | Drain | Crash | Pause | Damage | Sleep | ChangeAdapter


@dataclass(frozen=True)
class StopAt:
    """The server is stopped in the `turn`-th turn of the event loop since it began to start Worker `num_workers`.

    The first is Worker 1; 0 counts from the start of the server.
    """

    num_workers: int
    turn: int


def draw_stop(seed: int) -> StopAt | None:
    """For one in ten: at any time, while the first Worker loads, or while one is started again."""
    rng = random.Random(f"{seed} stop")
    if rng.random() < 0.9:
        return None
    return rng.choice(
        [StopAt(0, int(2 ** rng.uniform(0, 12))), StopAt(1, rng.randint(1, 8)), StopAt(2, rng.randint(1, 16))]
    )


def draw_config(seed: int, rng: random.Random, for_driver: bool) -> SimConfig:
    block_size = rng.choice([8, 16, 32]) if for_driver else rng.choice([1, 2, 2, 3, 4, 4, 8, 16, 32])
    longest = rng.choice([12, 30, 30, 60, 60, 120, 300])
    chunk = rng.choice([1, 3, 8, 8, 16, 16, 40, 64, 512, 4096])
    max_num_seqs = rng.choice([1, 2, 4, 4, 8, 8, 12, 24])
    squeeze = rng.choice([1, 1, 1.3, 1.7, 2.5, 4])  # the pool, in longest sequences
    thrash = ambush = False
    if thrash := rng.random() < 0.4:  # long prompts in small chunks beside decodes, and too few blocks for both
        longest, chunk = rng.choice([30, 60, 120]), rng.choice([4, 8, 12, 16])
        block_size = 8 if for_driver else rng.choice([1, 1, 2, 4])
        max_num_seqs, squeeze = rng.choice([3, 4, 6, 10]), rng.choice([1, 1.2, 1.5, 2, 4])
    elif ambush := rng.random() < 0.25:  # room for all, but chunks of urgent prompts between a fork and its copies
        longest, chunk, block_size = 60, rng.choice([12, 20, 30]), rng.choice([8] if for_driver else [2, 3, 4, 8])
        max_num_seqs, squeeze = 12, 6
    num_blocks = int(-(-longest // block_size) * squeeze) + rng.randrange(3)
    if not (thrash or ambush) and rng.random() < 0.3:
        num_blocks = int(2 ** rng.uniform(1, 9))
    num_blocks = min(500, max(2, num_blocks))
    config = SimConfig(
        seed=seed,
        model=FakeModel(
            alphabet=rng.choice([1, 2, 2, 5, 26]),
            eos_every=rng.choice([0, 8, 40]),
            fail_every=rng.choice([0, 0, 150, 1000]),
        ),
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=min(longest, num_blocks * block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=chunk,
        watermark=0.0 if thrash else rng.choice([0.0, 0.01, 0.01, 0.1, 0.3]),
        refuse_every=4 if ambush else rng.choice([0, 0, 4, 12, 60]),
        depth=rng.choice([1, 2] if for_driver else [1, 2, 2, 3]),
        prefix_caching=rng.random() < 0.85,
        num_host_blocks=rng.choice([0, 0, 1, 3, 10, 60]),
        cache_costs=rng.choice([None, None, CacheCosts(1.0, 0.01, 10.0, 0.5)]),
        slow_every=rng.choice([0, 3, 10]),
        max_queued_requests=rng.choice([2, 8, 1024]),
        num_requests=rng.randrange(10, 90),
        gap=rng.choice([0.5, 2, 6, 15]),
        burst=rng.choice([0.1, 0.5, 0.9]),
        num_stems=rng.choice([0, 1, 2, 4]),
        num_salts=rng.choice([1, 1, 2, 3]),
        num_priorities=rng.choice([1, 3] if thrash else [1, 1, 3]),
        ambush_rate=0.5 if ambush else rng.choice([0, 0.2]),
        max_n=4 if ambush else rng.choice([1, 1, 2, 4, 6]),
        abort_rate=rng.choice([0.0, 0.1, 0.5]),
        stop_rate=rng.choice([0.0, 0.5]),
        min_tokens_rate=rng.choice([0.0, 0.5]),
        drain_rate=0.3,
        crash_rate=rng.choice([0, 0, 0.05, 0.3]),
        deadly_rate=rng.choice([0, 0, 0, 0.05]),
    )
    config = _with_more(config, random.Random(f"{seed} more"), for_driver)
    tenants = random.Random(f"{seed} tenants")
    config = replace(config, tenant_weights=tenants.choice([(1.0,), (1.0,), (1.0, 1.0), (1.0, 1.0, 4.0), (1.0,) * 6]))
    config = replace(config, step_seconds=random.Random(f"{seed} step seconds").choice([1e-3, 1e-3, 3e-3, None]))
    config = replace(config, max_draft_tokens=random.Random(f"{seed} drafts").choice([0, 0, 1, 3, 8]))
    config = replace(config, itl_target=random.Random(f"{seed} itl target").choice([1e-3, 1e-2, None, None]))
    config = _with_adapters(config, random.Random(f"{seed} adapters"), for_driver)
    if not for_driver and tenants.random() < 0.2:
        return _for_newcomers(config, tenants)
    holders = random.Random(f"{seed} holders")
    return _for_large_holders(config, holders, for_driver) if holders.random() < 0.15 else config


def _with_more(config: SimConfig, rng: random.Random, for_driver: bool) -> SimConfig:
    """Features with draws of their own, so that one more of them does not change what all seeds draw."""
    widest = min(config.max_num_seqs, config.max_num_batched_tokens, 6)
    config = replace(
        config,
        admission=rng.choice(["plain", "plain", "predict"]),
        beam_rate=rng.choice([0, 0, 0.2, 0.7]),
        max_width=rng.choice([widest, min(2, widest)]),
    )
    if not for_driver:
        return _for_samples_that_outgrow(config, rng) if rng.random() < 0.1 else config
    config = replace(
        config,
        pause_rate=rng.choice([0, 0, 0.05, 0.2]),
        hang_share=rng.choice([0, 0.5, 1]),
        deadly_rate=rng.choice([config.deadly_rate, config.deadly_rate, 0.05]),
        resizes=rng.random() < 0.4,
        reload_fault_every=rng.choice([0, 0, 4]),
        step_timeout=rng.choice([20, 30, 90]),
    )
    if rng.random() < 0.5:
        config = _with_disk(config, rng)
    return _for_suspect_searches(config, rng) if rng.random() < 0.1 else config


def _with_adapters(config: SimConfig, rng: random.Random, for_driver: bool) -> SimConfig:
    """A server with adapters makes no drafts."""
    if rng.random() < 0.7:
        return config
    return replace(
        config,
        num_adapters=rng.choice([1, 2, MAX_ADAPTERS]),
        max_loras=rng.choice([1, 2, 8]),
        adapter_rate=rng.choice([0.3, 0.8]),
        change_rate=rng.choice([0, 0.05, 0.3]) if for_driver else 0,
        max_draft_tokens=0,
    )


def _with_disk(config: SimConfig, rng: random.Random) -> SimConfig:
    return replace(
        config,
        prefix_caching=True,
        num_host_blocks=rng.choice([2, 2, 3, 4, 12, 60]),
        cache_costs=rng.choice([None, None, config.cache_costs]),
        disk_blocks=rng.choice([1, 6, 40, 1000, 1000]),
        slow_disk_every=rng.choice([0, 0, 4, 20]),
        disk_fault_every=rng.choice([0, 0, 5, 50]),
        damage_rate=rng.choice([0, 0.05, 0.3]),
    )


def _for_suspect_searches(config: SimConfig, rng: random.Random) -> SimConfig:
    """Wide beam searches beside deadly requests, and a pool that may come back too small for a search alone."""
    return replace(
        config,
        max_num_seqs=8,
        max_num_batched_tokens=max(config.max_num_batched_tokens, 8),
        num_blocks=max(config.num_blocks, 2 * config.max_blocks_per_seq),
        beam_rate=0.6,
        max_width=6,
        deadly_rate=rng.choice([0.1, 0.3]),
        hang_share=0.0,
        resizes=True,
        reload_fault_every=0,
    )


def _for_newcomers(config: SimConfig, rng: random.Random) -> SimConfig:
    """Few rows, which one tenant holds for long, and prompts of others that take several steps.

    So places are given up to newcomers while another first token is awaited, and what is left of the plan may make way.
    """
    return replace(
        config,
        model=replace(config.model, eos_every=0),
        tenant_weights=(1.0, 1.0),
        block_size=2,
        max_model_len=60,
        num_blocks=rng.choice([90, 120]),
        max_num_seqs=4,
        max_num_batched_tokens=rng.choice([6, 10, 16]),
        watermark=0.0,
        refuse_every=60,
        depth=1,
        gap=6,
        burst=0.5,
        num_priorities=1,
        max_n=1,
        abort_rate=0.1,
        stop_rate=0.0,
        beam_rate=0.0,
    )


def _for_large_holders(config: SimConfig, rng: random.Random, for_driver: bool) -> SimConfig:
    """Requests that take up all rows or all blocks, of one tenant, while another one comes with small ones."""
    max_num_seqs, block_size = rng.choice([4, 6, 8]), 8 if for_driver else rng.choice([2, 4])
    holders = rng.choice(["samples", "beams", "prompts", "any"])
    return replace(
        config,
        tenant_weights=(1.0, 1.0),
        large_holders=holders,
        block_size=block_size,
        max_model_len=60,
        num_blocks=-(-60 // block_size) + (rng.randint(1, 3) if holders == "prompts" else rng.choice([10, 100])),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.choice([8, 16, 64]),
        prefix_caching=config.disk_blocks > 0 or rng.random() < 0.5,
        max_width=max_num_seqs,
        watermark=rng.choice([0.0, 0.01]),
        refuse_every=0,
        gap=rng.choice([2, 6]),
        burst=0.3,
        num_priorities=rng.choice([1, 1, 2]),
        ambush_rate=0.0,
    )


def _for_samples_that_outgrow(config: SimConfig, rng: random.Random) -> SimConfig:
    """Many samples each, and hardly more blocks than the longest sequence needs."""
    return replace(
        config,
        num_blocks=config.max_blocks_per_seq + rng.randrange(1, 5),
        max_num_seqs=8,
        max_num_batched_tokens=max(config.max_num_batched_tokens, 8),
        max_n=6,
        refuse_every=0,
        beam_rate=0.0,
    )


def draw_events(config: SimConfig, rng: random.Random, for_driver: bool) -> list[Event]:
    """Sorted by time."""
    prompts, more = _Prompts(config, rng), random.Random(f"{config.seed} more events")
    sieges = random.Random(f"{config.seed} sieges")  # and what comes with them
    sleeps = random.Random(f"{config.seed} sleeps")
    adapters = random.Random(f"{config.seed} requests with adapters")
    sleep_rate = sleeps.choice([0, 0, 0.05, 0.3])
    events: list[Event] = []
    now = 0.0
    for index in range(config.num_requests):
        ambush = events and rng.random() < config.ambush_rate  # it goes before the one that just began its prompt
        if ambush:
            now += rng.uniform(0, 6)
        elif rng.random() >= config.burst:
            now += rng.expovariate(1 / config.gap)
        if for_driver and config.pause_rate and sieges.random() < LULL_RATE:
            now += LULL
            events.append(_draw_pause(sieges, now - sieges.uniform(0, LULL / 2)))
        priority = rng.randrange(config.num_priorities)
        arrival = _draw_arrival(config, rng, prompts, now, index, AMBUSH_PRIORITY if ambush else priority, for_driver)
        arrival = _with_tenant(config, _with_more_of(config, more, arrival))
        if config.large_holders:
            arrival = _large_or_small(config, arrival)
        if adapters.random() < config.adapter_rate:
            name = f"a{adapters.randrange(config.num_adapters)}"
            arrival = arrival.with_adapter(config, name, f"{name}-{VERSIONS[0]}")
        prompts.made.append((arrival.prompt + arrival.references[0].token_ids, arrival.salt))
        events.append(arrival)
        if rng.random() < config.abort_rate:
            at = now + rng.choice([0, rng.uniform(0, 5), rng.uniform(0, 40)])
            events.append(Abort(at, rng.choice(ABORT_TARGETS), rng.randrange(1000), rng.random() < 0.7))
        if for_driver and rng.random() < config.crash_rate:
            at = now + rng.choice([0, rng.uniform(0, 5), rng.uniform(0, 40)])
            events.append(Crash(at, sieges.choice(AGAIN)))
        if for_driver and more.random() < config.pause_rate:
            events.append(_draw_pause(more, now + more.uniform(0, 30)))
        if for_driver and sleeps.random() < sleep_rate:
            at = now + sleeps.choice([0, sleeps.uniform(0, 5), sleeps.uniform(0, 40)])
            events.append(Sleep(at, sleeps.choice((1, 2)), sleeps.choice((0, 3, 60))))
            if config.change_rate:  # some amid the way to sleep
                events.append(_draw_change(config, adapters, at + adapters.uniform(0, 6)))
        if adapters.random() < config.change_rate:
            at = now + adapters.choice([0, adapters.uniform(0, 5), adapters.uniform(0, 40)])
            events.append(_draw_change(config, adapters, at))
        if for_driver and config.disk_blocks and more.random() < config.damage_rate:
            events.append(Damage(now + more.uniform(0, 30), more.getrandbits(40)))
    if for_driver and rng.random() < config.drain_rate:
        events.append(Drain(rng.uniform(0, now + 10), rng.choice([0, 5, 50, 1e5])))
    return sorted(events, key=lambda event: event.at)


def _draw_pause(rng: random.Random, at: float) -> Pause:
    seconds = rng.choice([2, 7, FOR_GOOD])
    return Pause(at, seconds, rng.choice(AGAIN) if seconds == FOR_GOOD else 0, hangs=rng.random() < 0.3)


def _draw_change(config: SimConfig, rng: random.Random, at: float) -> ChangeAdapter:
    name, version = f"a{rng.randrange(config.num_adapters)}", rng.choice(("", *VERSIONS))
    return ChangeAdapter(at, name, version and f"{name}-{version}")


class _Prompts:
    """A tree of shared prefixes: common stems, whole earlier prompts, and earlier prompts with their answers."""

    def __init__(self, config: SimConfig, rng: random.Random) -> None:
        self.config, self.rng = config, rng
        self.stems = [self._letters(config.max_model_len) for _ in range(config.num_stems)]
        self.made: list[tuple[list[int], str]] = []

    def draw(self) -> tuple[list[int], str]:
        """(token ids, salt); shorter than max_model_len, so that at least one token can follow."""
        rng, limit = self.rng, self.config.max_model_len - 1
        salt = f"tenant-{rng.randrange(self.config.num_salts)}" if self.config.num_salts > 1 else ""
        length = rng.randint(1, max(1, rng.choice([limit // 4, limit // 2, limit])))
        kind = rng.random()
        if self.made and kind < 0.25:
            earlier, earlier_salt = rng.choice(self.made[-20:])
            salt = earlier_salt if rng.random() < 0.8 else salt
            start = earlier[: rng.choice([len(earlier), self._cut(len(earlier))])]
            return (start + self._letters(rng.randrange(6)))[:limit] or [97], salt
        if self.stems and kind < 0.8:
            start = rng.choice(self.stems)[: self._cut(limit)]
            return (start + self._letters(length))[: max(length, min(limit, len(start)))], salt
        return self._letters(length), salt

    def _cut(self, limit: int) -> int:
        """A length up to `limit`, often at the end of a block."""
        length = self.rng.randint(0, limit)
        return length // self.config.block_size * self.config.block_size if self.rng.random() < 0.5 else length

    def _letters(self, length: int) -> list[int]:
        return [97 + self.rng.randrange(self.config.model.alphabet) for _ in range(length)]


def _draw_arrival(
    config: SimConfig, rng: random.Random, prompts: _Prompts, at: float, index: int, priority: int, for_driver: bool
) -> Arrival:
    prompt, salt = prompts.draw()
    room = config.max_model_len - len(prompt)
    max_tokens = rng.choice([1, rng.randint(1, room), rng.randint(1, room), None])
    params = _draw_params(config, rng, room if max_tokens is None else min(max_tokens, room), max_tokens, for_driver)
    max_num_tokens = len(prompt) + (room if max_tokens is None else min(max_tokens, room))
    leaves = for_driver and rng.random() < config.abort_rate / 3
    return Arrival(
        at=at,
        index=index,
        prompt=prompt,
        params=params,
        max_num_tokens=max_num_tokens,
        priority=priority,
        ambush=priority == AMBUSH_PRIORITY,
        deadly="crash" if for_driver and rng.random() < config.deadly_rate else "",
        salt=salt,
        references=_references(config.model, prompt, params, None, salt, max_num_tokens),
        leave_after=rng.randint(0, 6) if leaves else None,
        read_every=rng.choice([0, 0, 0, 3, 30]) if for_driver else 0,
    )


def _references(
    model: FakeModel,
    prompt: list[int],
    params: SamplingParams,
    beam: BeamSearchParams | None,
    salt: str,
    max_num_tokens: int,
) -> tuple[Reference, ...]:
    if beam is not None:
        return beam_references(model, prompt, beam, salt, max_num_tokens)
    seed = params.seed or 0
    found = tuple(
        reference(model, prompt, params, (seed + i * SEED_STEP) % 2**64, salt, max_num_tokens)
        for i in range(1 if params.greedy else params.n)
    )
    return found * (params.n // len(found))


def _with_more_of(config: SimConfig, rng: random.Random, arrival: Arrival) -> Arrival:
    """Now and then a request that hangs, or a beam search in place of samples."""
    hangs, searches = rng.random() < config.hang_share, rng.random() < config.beam_rate
    if arrival.deadly and hangs:
        arrival = replace(arrival, deadly="hang")
    room = config.max_model_len - len(arrival.prompt)
    if not searches or arrival.ambush:
        return arrival
    max_tokens = rng.randint(1, min(room, 40)) if room > 40 or rng.random() < 0.7 else None
    limit = room if max_tokens is None else max_tokens
    beam = BeamSearchParams(
        beam_width=rng.randint(1, config.max_width),
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, rng.randint(0, limit)]),
        ignore_eos=rng.random() < 0.2,
        stop_token_ids=tuple(rng.sample(range(97, 123), rng.choice([0, 0, 1]))),
        length_penalty=rng.choice([1.0, 0.0, -1.0, 2.0]),
        early_stopping=rng.choice([True, False, "never"]),
        include_stop_str_in_output=rng.random() < 0.3,
    )
    params = msgspec.structs.replace(beam.sampling_params(), seed=arrival.params.seed)
    max_num_tokens = len(arrival.prompt) + limit
    references = _references(config.model, arrival.prompt, params, beam, arrival.salt, max_num_tokens)
    return replace(arrival, beam=beam, params=params, max_num_tokens=max_num_tokens, references=references)


def _with_tenant(config: SimConfig, arrival: Arrival) -> Arrival:
    """Half of all requests are those of the first tenant, who floods."""
    pick = random.Random(f"{config.seed} tenant of {arrival.index}").randrange(2 * len(config.tenant_weights))
    number = pick // 2 if pick % 2 else 0
    return replace(arrival, tenant=f"tenant-{number}", weight=config.tenant_weights[number])


def _large_or_small(config: SimConfig, arrival: Arrival) -> Arrival:
    """Requests of the first tenant take up all rows or most blocks, those of others a row for some tokens."""
    rng = random.Random(f"{config.seed} size of {arrival.index}")
    kind = config.large_holders if config.large_holders != "any" else rng.choice(["samples", "beams", "prompts"])
    limit, prompt, beam, n = config.max_model_len, arrival.prompt, None, 1
    if arrival.tenant != "tenant-0":
        prompt, max_tokens = prompt[:8], rng.randint(1, 4)
    elif kind == "prompts":
        prompt = (prompt * limit)[: limit - rng.randint(10, 20)]
        max_tokens = limit - len(prompt)
    else:
        prompt = prompt[: limit // 3]
        max_tokens = rng.randint(10, 30)
        if kind == "samples":
            n = config.max_num_seqs
        else:
            beam = BeamSearchParams(beam_width=config.max_num_seqs, max_tokens=max_tokens, ignore_eos=True)
    params = SamplingParams(n=n, seed=arrival.params.seed, max_tokens=max_tokens, ignore_eos=True)
    if beam is not None:
        params = msgspec.structs.replace(beam.sampling_params(), seed=arrival.params.seed)
    most = len(prompt) + max_tokens
    references = _references(config.model, prompt, params, beam, arrival.salt, most)
    more = {"max_num_tokens": most, "references": references, "deadly": ""}
    return replace(arrival, prompt=prompt, params=params, beam=beam, **more)


def _draw_params(
    config: SimConfig, rng: random.Random, room: int, max_tokens: int | None, for_driver: bool
) -> SamplingParams:
    letters = range(97, 97 + config.model.alphabet)
    stop_token_ids: list[int] = []
    stop: list[str] = []
    if rng.random() < config.stop_rate:
        stop_token_ids = rng.sample([*letters, EOS_TOKEN_ID], 1)
    if for_driver and rng.random() < config.stop_rate:
        stop = ["".join(chr(rng.choice(letters)) for _ in range(rng.randint(1, 5))) for _ in range(rng.randint(1, 2))]
    has_min = not stop and rng.random() < config.min_tokens_rate
    return SamplingParams(
        n=rng.randint(1, config.max_n),
        temperature=0.0 if for_driver and rng.random() < 0.1 else 1.0,  # one sample computed for all n
        seed=rng.getrandbits(63),
        max_tokens=max_tokens,
        min_tokens=rng.randint(1, room) if has_min else 0,
        ignore_eos=rng.random() < 0.2,
        stop_token_ids=tuple(stop_token_ids),
        stop=tuple(stop),
        include_stop_str_in_output=rng.random() < 0.3,
    )
