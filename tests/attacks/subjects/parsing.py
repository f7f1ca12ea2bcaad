"""Bodies that are small in bytes and large in what they are parsed into."""

import asyncio
import json

from tests.attacks.frame import Target, attack, forever

DEEP = 600  # levels, below what json.loads refuses by itself
PARTS = 60_000
PARSE_SECONDS = 5.0  # for a body of 40 KB, which waits for one of 4 MB


def brackets(num_bytes: int) -> str:
    """Lists in lists, DEEP levels, one tower beside the other."""
    tower = "[" * DEEP + "]" * DEEP
    return "[" + ",".join([tower] * (num_bytes // (len(tower) + 1))) + "]"


def completion(target: Target, prompt: str) -> bytes:
    """`prompt` is JSON."""
    return f'{{"model":"{target.model}","max_tokens":1,"prompt":{prompt}}}'.encode()


@attack(15)
async def brackets_in_a_prompt(target: Target) -> str | None:
    """A prompt of 31 MB of lists within lists, 600 levels deep: 16 million lists."""
    answer = await target.post("/v1/completions", completion(target, brackets(31 << 20)))
    return None if answer.status in (400, 429, 503) else f"it was answered with {answer.status}"


@attack(15)
async def brackets_in_arguments(target: Target) -> str | None:
    """The arguments of an earlier call are a string that holds 14 MB of brackets."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a":' + brackets(14 << 20) + "}"}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "b"},
    ]
    answer = await target.post("/v1/chat/completions", {"model": target.model, "messages": messages, "max_tokens": 1})
    return None if answer.status in (400, 429, 503) else f"it was answered with {answer.status}"


@attack(15, seconds=6.0)
async def middling_bodies(target: Target) -> None:
    """Eight connections that each send a body of 250 KB of brackets again and again: under what counts as large."""
    body = completion(target, brackets(250_000))

    async def send() -> None:
        await target.post("/v1/completions", body)

    await forever(*[send] * 8)


@attack(15, seconds=6.0)
async def a_million_numbers(target: Target) -> None:
    """Four connections that send a prompt of a million token ids each, which is as many commas as are taken."""
    body = completion(target, json.dumps([7] * 1_000_000, separators=(",", ":")))

    async def send() -> None:
        await target.post("/v1/completions", body)

    await forever(*[send] * 4)


@attack(15, seconds=6.0)
async def many_keys(target: Target) -> None:
    """Four connections that send an object with 200,000 fields that no API knows."""
    fields = ",".join(f'"f{i}":0' for i in range(200_000))
    body = f'{{"model":"{target.model}",{fields}}}'.encode()

    async def send() -> None:
        await target.post("/v1/completions", body)

    await forever(*[send] * 4)


def turns_of_parts(target: Target) -> list[tuple[str, bytes]]:
    """(path, body) of requests that each hold one turn of many parts, 3 to 4 MB."""
    part, asked = "a" * 33, {"role": "user", "content": "a"}
    messages = {
        "user": [{"role": "user", "content": part}] * PARTS,
        "text": [asked, {"role": "assistant", "content": [{"type": "text", "text": part}] * PARTS}],
        "thinking": [asked, {"role": "assistant", "content": [{"type": "thinking", "thinking": part}] * PARTS}],
    }
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": part}]}
    items = [[call, *[{"role": "assistant", "content": part}] * PARTS], [call, *[thought] * (PARTS // 2)]]
    bodies = [("/v1/messages", {"messages": turns, "max_tokens": 1}) for turns in messages.values()]
    bodies += [("/v1/responses", {"input": some, "max_output_tokens": 1}) for some in items]
    return [(path, json.dumps({"model": target.model, **body}).encode()) for path, body in bodies]


@attack(15, seconds=30.0)
async def turns_of_many_parts(target: Target) -> str | None:
    """Turns of 60,000 parts, one body after the other, which are joined into one text each.

    Beside each, a chat of 40 KB is to be refused soon.
    """
    long = {"model": target.model, "messages": [{"role": "user", "content": "a" * 40_000}]}
    for path, body in turns_of_parts(target):
        sent = asyncio.create_task(target.post(path, body))
        await asyncio.sleep(0.5)
        try:
            await asyncio.wait_for(target.post("/v1/chat/completions", long), PARSE_SECONDS)
        except asyncio.TimeoutError:
            return f"a body of 40 KB had no answer within {PARSE_SECONDS:g} s beside one to {path}"
        if (status := (await sent).status) not in (200, 400, 429, 503):  # 200: the template leaves out thoughts
            return f"{path} was answered with {status}"
    return None
