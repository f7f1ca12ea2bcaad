"""Requests that make the server take memory, and whether it gives it back."""

import asyncio
import json

from tests.attacks.frame import Target, attack

MB = 1 << 20


def big_tools(target: Target) -> bytes:
    """128 tools of 29.8 MB."""
    parameters = {"type": "object", "properties": {"a": {"type": "string", "description": "word " * 46_500}}}
    tools = [
        {"type": "function", "function": {"name": f"tool_{i}", "description": "", "parameters": parameters}}
        for i in range(128)
    ]
    messages = [{"role": "user", "content": "a"}]
    return json.dumps({"model": target.model, "messages": messages, "tools": tools, "max_tokens": 1}).encode()


@attack(17, seconds=20.0)
async def big_tools_once(target: Target) -> None:
    """One chat with 128 tools of 29.8 MB."""
    await target.post("/v1/chat/completions", big_tools(target))


@attack(17, seconds=30.0)
async def big_tools_four_times(target: Target) -> None:
    """Four such chats at once."""
    body = big_tools(target)
    await asyncio.gather(*(target.post("/v1/chat/completions", body) for _ in range(4)), return_exceptions=True)


@attack(17, seconds=10.0)
async def trickled_bodies(target: Target) -> None:
    """Sixty connections send 31 MB of a body each, and never its last bytes."""
    body = completion_of(target, 31 * MB)

    async def trickle() -> None:
        reader, writer = await target.connect()
        try:
            writer.write(target.head("/v1/completions", len(body)))
            for start in range(0, len(body) - 1000, 256 << 10):
                writer.write(body[start : min(start + (256 << 10), len(body) - 1000)])
                await writer.drain()
            await reader.read()
        finally:
            writer.transport.abort()

    await asyncio.gather(*(trickle() for _ in range(60)), return_exceptions=True)


@attack(17, seconds=10.0)
async def large_texts(target: Target) -> None:
    """Eight connections send prompts of 31 MB of text that no context holds, again and again."""
    body = completion_of(target, 31 * MB)

    async def send() -> None:
        while True:
            await target.post("/v1/completions", body)

    await asyncio.gather(*(send() for _ in range(8)), return_exceptions=True)


def completion_of(target: Target, num_bytes: int) -> bytes:
    return json.dumps({"model": target.model, "prompt": "a" * num_bytes, "max_tokens": 1}).encode()
