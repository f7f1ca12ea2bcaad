"""Beam searches in the simulation: what the model offers, the oracle, and what must be true of every group."""

from typing import TYPE_CHECKING

from engine.memory.sequence import SequenceStatus
from engine.outputs import FinishReason
from engine.sampling_params import BeamSearchParams
from engine.scheduling.beam_group import BeamGroup
from engine.scheduling.scheduler import Scheduler
from tests.sim.model import EOS_TOKEN_ID, FakeModel, Reference, chain_next, chain_start, mix
from tests.sim.violation import fail, require

if TYPE_CHECKING:
    from tests.sim.watched import WatchedScheduler

BEAM_SEED = 0xBEA3  # hypotheses change their rows, so failures must depend on content alone

Found = tuple[list[int], float, int]  # token ids, sum of logprobs, chain


def candidates(model: FakeModel, chain: int, position: int, count: int) -> list[tuple[int, float]]:
    """(token id, logprob), most likely first; ties are common, as are ends where the model has them."""
    drawn = mix(chain, position)
    token_ids = [97 + (drawn + rank) % 26 for rank in range(count)] if count <= 26 else list(range(count))
    if model.eos_every:
        token_ids.insert((drawn >> 8) % (2 + model.eos_every // 4), EOS_TOKEN_ID)
    logprobs = [-0.25]
    for rank in range(1, count):
        logprobs.append(logprobs[-1] - 0.25 * ((drawn >> 16 + rank % 24) % 4))
    return list(zip(token_ids[:count], logprobs, strict=True))


def beam_references(
    model: FakeModel, prompt: list[int], params: BeamSearchParams, salt: str, max_num_tokens: int
) -> tuple[Reference, ...]:
    """The oracle: one loop over whole hypotheses, nothing shared. All ERROR where the logits of a live one fail."""
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS_TOKEN_ID})
    width, limit, chain = params.beam_width, max_num_tokens - len(prompt), chain_start(salt)
    for position, token_id in enumerate(prompt):
        chain = chain_next(chain, token_id, position)
    running: list[Found] = [([], 0.0, chain)]
    finished: list[Found] = []
    for position in range(len(prompt), max_num_tokens):
        if any(model.fails(BEAM_SEED ^ chain, position) for _, _, chain in running):
            return (Reference([], FinishReason.ERROR, None, ""),) * width
        running = _step(model, params, ends, limit, position, running, finished)
        if not running or _hopeless(params, limit, running[0], finished):
            break
    return tuple(_as_reference(params, found) for found in finished)


def _step(
    model: FakeModel,
    params: BeamSearchParams,
    ends: set[int],
    limit: int,
    position: int,
    running: list[Found],
    finished: list[Found],
) -> list[Found]:
    """Who goes on; those that end are added to `finished`, which stays sorted and no longer than the width."""
    offers = [
        (-(total + logprob), number, token_id)
        for number, (token_ids, total, chain) in enumerate(running)
        for token_id, logprob in candidates(model, chain, position, params.beam_width + len(ends))
        if token_id not in ends or len(token_ids) >= params.min_tokens
    ]
    going_on: list[Found] = []
    for rank, (cost, number, token_id) in enumerate(sorted(offers)):
        token_ids, _, chain = running[number]
        found = [*token_ids, token_id], -cost, chain_next(chain, token_id, position)
        if token_id not in ends and len(found[0]) < limit:
            going_on.append(found)
        elif rank < params.beam_width:
            finished.append(found)
    finished.sort(key=lambda found: -_score(params, found[1], len(found[0])))
    del finished[params.beam_width :]
    return going_on[: params.beam_width]


def _score(params: BeamSearchParams, total: float, length: int) -> float:
    return total / float(length) ** params.length_penalty


def _hopeless(params: BeamSearchParams, limit: int, best: Found, finished: list[Found]) -> bool:
    if len(finished) < params.beam_width or params.early_stopping is True:
        return len(finished) == params.beam_width
    length = limit if params.early_stopping == "never" and params.length_penalty > 0 else len(best[0])
    return _score(params, best[1], length) <= _score(params, finished[-1][1], len(finished[-1][0]))


def _as_reference(params: BeamSearchParams, found: Found) -> Reference:
    token_ids, last = found[0], found[0][-1]
    by_id = last in params.stop_token_ids
    ended = by_id or (last == EOS_TOKEN_ID and not params.ignore_eos)
    shown = token_ids if not ended or params.include_stop_str_in_output else token_ids[:-1]
    text = "".join(chr(token_id) for token_id in shown if token_id != EOS_TOKEN_ID)
    reason = FinishReason.STOP if ended else FinishReason.LENGTH
    return Reference(token_ids, reason, last if by_id else None, text)


def check_groups(scheduler: Scheduler) -> None:
    """Rows are kept for all of a group, its hypotheses are those of the search, and empty slots hold nothing."""
    if scheduler.admission.num_rows > scheduler.max_num_seqs:
        fail(
            "budget", f"{scheduler.admission.num_rows} rows are in use or kept for a group, of {scheduler.max_num_seqs}"
        )
    for group in scheduler.admission.inseparable_groups:
        live = [slot for slot in group.slots if slot.status is not SequenceStatus.FINISHED]
        if set(map(id, live)) != set(map(id, group.beams)):
            fail("group", f"{len(live)} slots are live, {len(group.beams)} hypotheses go on")
        for beam, hypothesis in zip(group.beams, group.search.running, strict=True):
            if beam.token_ids[beam.num_prompt_tokens :] != [token_id for token_id, _ in hypothesis.tokens()]:
                fail("group", f"{beam} does not hold its hypothesis")
        if any(slot.block_table for slot in group.slots if slot not in live):
            fail("group", "a slot without a hypothesis holds blocks")


def check_too_large(scheduler: "WatchedScheduler", group: BeamGroup) -> None:
    """Only what runs alone may fail for want of blocks, and only where it could need more than there are."""
    others = [seq for seq in scheduler.running if seq.group is not group]
    require(not others, "group", f"a group is too large for the pool while {len(others)} others hold blocks")
    blocks = scheduler.block_manager
    longest = max(len(beam.token_ids) for beam in group.beams)
    most = len(group.slots) * blocks.num_blocks_for(longest)
    require(most > blocks.num_blocks, "group", f"{most} blocks would do, and the pool has {blocks.num_blocks}")
