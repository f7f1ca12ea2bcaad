"""Rare states: a long run in which one of them never occurred has not tested what it says ("sometimes" assertions)."""

from collections import Counter

CORE = (
    "preempted during chunked prefill",
    "preempted with a token on its way",
    "preempted more than twice",
    "preempted what this plan had scheduled",
    "allocation refused though blocks are free",
    "prefix hit on a freed block",
    "prefix hit on a block in use",
    "prefix hit on the return from preemption",
    "prefix hit cut short by an eviction",
    "prefix hit on a block that this plan fills",
    "cached block evicted",
    "equal content in two blocks, one cached",
    "abort while new",
    "abort during prefill",
    "abort during decode",
    "abort with a token on its way",
    "abort while preempted",
    "abort while preempted with a token on its way",
    "abort after the end",
    "token of a finished sequence thrown away",
    "failed sequence whose blocks were shared",
    "failed sequence whose blocks were cached",
    "failed sequence with another token on its way",
    "finished by end of sequence",
    "finished by stop token",
    "finished by length",
    "stop token before min_tokens",
    "admission waits for blocks",
    "admission waits for the watermark",
    "admission waits for a pending token",
    "max_num_seqs reached",
    "token budget used up",
    "no block free",
    "two plans in flight",
    "three plans in flight",
    "arrival goes before earlier ones by priority",
    "several tokens of one request in a result",
    "one sequence holds the whole pool",
    "block offloaded to the host tier",
    "block loaded from the host tier",
    "block loaded for the return from preemption",
    "prefix partly in the pool, partly in the host tier",
    "block offloaded and loaded by the same plan",
    "block loaded in place of one that is offloaded",
    "host tier gives up a block",
    "host tier pinned as a whole",
    "not worth loading",
    "failed sequence whose blocks lie in the host tier",
    "fork shares a partly filled block",
    "fork shares full blocks only",
    "fork finds no row free",
    "copy-on-write",
    "last holder of a forked block writes in place",
    "copy source given out again in the same plan",
    "planned copy undone by a preemption",
    "preempted with a shared block that is not full",
    "abort while waiting to fork",
    "first sample ended while others wait to fork",
)
DRIVER = (
    "Worker killed with plans under way",
    "idle Worker killed",
    "Worker killed amid generation",
    "Worker killed while samples wait to fork",
    "Worker killed by a deadly request",
    "nobody to kill: the Worker is being started again",
    "deadly request ended alone",
    "request held while another runs alone",
    "request sent while the Worker is started again",
    "refused: queue full",
    "refused: draining",
    "refused: id in use",
    "refused: longer than the context",
    "drain finished",
    "drain timed out",
    "client left with tokens to come",
    "client closed after the end",
    "slow reader got several tokens in one output",
    "equal greedy samples computed once",
    "finished by stop string",
    "stop string with a token on its way",
    "stop string held back text",
    "request failed after tokens were sent",
)


class Coverage:
    """Counts states by name; a name that is not declared above is a mistake."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(CORE + DRIVER, 0))

    def saw(self, state: str) -> None:
        if state not in self.counts:
            raise KeyError(f"{state!r} is not declared in tests/sim/coverage.py")
        self.counts[state] += 1

    def add(self, other: "Coverage") -> None:
        self.counts.update(other.counts)

    def missing(self, states: tuple[str, ...] = CORE + DRIVER) -> list[str]:
        return [state for state in states if not self.counts[state]]
