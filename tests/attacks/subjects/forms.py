"""Patterns and grammars that take for ever to match, those of a client and those that its names meet."""

import json
from itertools import count

from tests.attacks.frame import Target, attack, forever

# Each would take a backtracking matcher exponential time, or an automaton exponential space.
COSTLY = (
    "(x+x+)+y",
    "(a|a)*b",
    "(a|aa)+$",
    "(.*a){25}",
    "[ab]*a[ab]{18}",
    "((a{1,40}){1,40}){1,40}",
    "(?:a?){60}a{60}",
)

# An Earley parser keeps more states of it with each token: the mask of the two hundredth takes a tenth of a second.
AMBIGUOUS = 'start: s\ns: "a" | "a" s "a" | s s s | s s\n'


@attack(22, seconds=10.0)
async def costly_patterns(target: Target) -> str | None:
    """Regular expressions that explode, always new ones, on eight connections."""
    numbers, statuses = count(), set[int]()

    async def send() -> None:
        number = next(numbers)
        pattern = f"{COSTLY[number % len(COSTLY)]}{number}"
        body = {"model": target.model, "prompt": "a", "max_tokens": 32, "structured_outputs": {"regex": pattern}}
        statuses.add((await target.post("/v1/completions", body)).status)
        if 500 in statuses:
            raise RuntimeError("a pattern got status 500")

    await forever(*[send] * 8)
    return None


@attack(22, seconds=15.0)
async def grammars_that_are_slow_to_match(target: Target) -> str | None:
    """Ambiguous grammars, whose masks take longer with each token, in 32 requests at once."""
    numbers, statuses = count(), set[int]()

    async def send() -> None:
        body = {"model": target.model, "prompt": "a", "max_tokens": 400, "min_tokens": 390, "seed": next(numbers)}
        answer = await target.post("/v1/completions", {**body, "structured_outputs": {"grammar": AMBIGUOUS}})
        statuses.add(answer.status)
        if not statuses <= {200, 400, 429}:
            raise RuntimeError(f"a grammar got the statuses {statuses}")

    await forever(*[send] * 32)
    return None


@attack(22, seconds=10.0)
async def names_that_explode(target: Target) -> None:
    """Names, paths and stop strings made for patterns with nested repetition, a megabyte each."""
    long = "a" * 1_000_000
    bodies = [
        {"model": long, "prompt": "a"},
        {"model": target.model, "prompt": "a", "stop": [long[:1000]] * 4},
        {"model": target.model, "prompt": "a", "logit_bias": {long + "!": 1}},
        {
            "model": target.model,
            "prompt": "a",
            "response_format": {"type": "json_schema", "json_schema": {"name": long}},
        },
        {"model": target.model, "prompt": "a", long: 1},
    ]
    raws = [json.dumps(body).encode() for body in bodies]

    async def send() -> None:
        for raw in raws:
            await target.post("/v1/completions", raw)

    await forever(*[send] * 4)
