"""Requests that take all rows or all blocks of the batch."""

from tests.attacks.frame import Target, attack, forever


def samples(target: Target, n: int, **fields) -> dict:
    body = {"model": target.model, "prompt": "Once upon a time", "max_tokens": target.max_model_len - 100, "n": n}
    return {**body, "ignore_eos": True, "temperature": 1.0, **fields}


@attack(14, seconds=20.0)
async def samples_in_every_row(target: Target) -> None:
    """One request of 128 samples, as many as the batch has rows, each to the end of the context."""
    await target.post("/v1/completions", samples(target, 128))


@attack(14, seconds=20.0, options=("--max-concurrent-requests", "4"))
async def samples_at_the_limit_of_requests(target: Target) -> None:
    """The same four times at once, which is what the key is allowed."""

    async def send() -> None:
        await target.post("/v1/completions", samples(target, 128))

    await forever(*[send] * 4)


@attack(14, seconds=15.0)
async def samples_of_many_requests(target: Target) -> None:
    """Two hundred requests of one sample each, to the end of the context."""

    async def send() -> None:
        await target.post("/v1/completions", samples(target, 1))

    await forever(*[send] * 200)
