"""Texts that take long to encode, and chat templates that never end or fill the memory."""

import asyncio
import json
import random
import string
from pathlib import Path

from tests.attacks.frame import Target, attack, forever
from tests.attacks.subjects.memory import big_tools

CHARS = 1 << 22  # as many as a prompt that is to be cut may have
NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
RENDER_SECONDS = 10.0  # for three conversations of 40,000 messages at once
REFUSED = (400, 413, 429, 500, 503)


async def truncated(target: Target, text: str, connections: int) -> None:
    body = json.dumps({"model": target.model, "prompt": text, "max_tokens": 1, "truncate_prompt_tokens": 100}).encode()
    await asyncio.gather(*(forever(lambda: target.post("/v1/completions", body)) for _ in range(connections)))


@attack(16, seconds=20.0)
async def twenty_prompts_to_be_cut(target: Target) -> None:
    """Twenty prompts of 4 MB of words at a time, to be cut to 100 tokens."""
    await truncated(target, ("once upon a time " * (CHARS // 17)), 20)


@attack(16, seconds=20.0)
async def random_letters(target: Target) -> None:
    """Twenty prompts of 4 MB of random letters without a space at a time, to be cut to 100 tokens."""
    await truncated(target, "".join(random.Random(0).choices(string.ascii_letters, k=CHARS)), 20)


@attack(16, seconds=20.0)
async def chats_to_be_cut(target: Target) -> None:
    """Twenty chats of 4 MB at a time, half of it pieces of control tokens, to be cut to 100 tokens."""
    text = ("<|im_" * 10 + "a lot of words and some more " * 2) * (CHARS // 120)
    messages = [{"role": "user", "content": text}]
    body = json.dumps({"model": target.model, "messages": messages, "max_tokens": 1, "truncate_prompt_tokens": 100})
    await asyncio.gather(*(forever(lambda: target.post("/v1/chat/completions", body.encode())) for _ in range(20)))


@attack(16, seconds=20.0)
async def tools_that_cannot_fit(target: Target) -> str | None:
    """Chats with 128 tools of 29.8 MB, one after the other."""
    body = big_tools(target)
    while True:
        answer = await target.post("/v1/chat/completions", body)
        if answer.status not in REFUSED:
            return f"status {answer.status}"


@attack(16, seconds=15.0)
async def many_texts_to_count(target: Target) -> None:
    """Texts just below the length that is refused unread, to /tokenize, thirty-two at a time."""
    text = "".join(random.Random(0).choices(string.ascii_letters, k=15 * target.max_model_len - 100))
    body = json.dumps({"prompt": text}).encode()
    await asyncio.gather(*(forever(lambda: target.post("/tokenize", body)) for _ in range(32)))


@attack(16, seconds=20.0)
async def many_results_of_tools(target: Target) -> str | None:
    """Chats with 40,000 empty results of tools, three at a time; one of them is to be cut to 100 tokens."""
    results = [{"role": "tool", "tool_call_id": "x"}] * 40_000
    body = {"model": target.model, "messages": [{"role": "user", "content": "a"}, *results], "max_tokens": 1}
    raws = [json.dumps(body | cut).encode() for cut in ({}, {}, {"truncate_prompt_tokens": 100})]

    async def ask() -> None:
        await asyncio.gather(*(target.post("/v1/chat/completions", raw) for raw in raws))

    while True:
        try:
            await asyncio.wait_for(ask(), RENDER_SECONDS)
        except asyncio.TimeoutError:
            return f"three of them had no answer within {RENDER_SECONDS:g} s"


def template(source: str):
    def prepare(folder: Path) -> list[str]:
        (folder / "template.jinja").write_text(source)
        return ["--chat-template", str(folder / "template.jinja")]

    return prepare


async def chats(target: Target) -> str | None:
    """Four at a time; none may be answered as if nothing had been wrong."""
    body = json.dumps({"model": target.model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}).encode()

    async def ask() -> str | None:
        while True:
            answer = await target.post("/v1/chat/completions", body)
            if answer.status not in REFUSED:
                return f"status {answer.status}"

    return next(filter(None, await asyncio.gather(*(ask() for _ in range(4)))), None)


@attack(20, seconds=15.0, prepare=template(NESTED))
async def template_that_never_ends(target: Target) -> str | None:
    """Chats through a template with two nested ranges of 99,999, four at a time."""
    return await chats(target)


@attack(20, seconds=15.0, prepare=template("{{ 'a' * 10**9 }}"))
async def template_of_a_gigabyte(target: Target) -> str | None:
    """Chats through a template that writes a gigabyte, four at a time."""
    return await chats(target)


@attack(20, seconds=15.0, prepare=template("{{ messages[0].content * 10**9 }}"))
async def template_that_repeats_a_message(target: Target) -> str | None:
    """Chats through a template that repeats a message a thousand million times, four at a time."""
    return await chats(target)
