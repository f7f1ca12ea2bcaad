"""Rare states: a long run in which one of them never occurred has not tested what it says ("sometimes" assertions)."""

from collections import Counter

CORE = (
    "preempted during chunked prefill",
    "preempted with a token on its way",
    "preempted more than twice",
    "preempted what this plan had scheduled",
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
)
DRIVER = (
    "refused: queue full",
    "refused: draining",
    "refused: id in use",
    "refused: longer than the context",
    "drain finished",
    "drain timed out",
    "client left with tokens to come",
    "client closed after the end",
    "slow reader got several tokens in one output",
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
