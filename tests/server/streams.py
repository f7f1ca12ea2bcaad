"""Streams that live through faults: what they ask, what came, how long they stood still; and what there is to hit."""

import asyncio
import json
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

WORKER, GRAMMARS = "engine.worker.worker", "engine.grammars.checker_process"
MAX_TOKENS = 400

OPENINGS = ("Once upon a time, a small fox", "The old clock on the wall", "A dragon and a mouse", "Hello")
KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 11},
    {"temperature": 1.0, "seed": 12, "presence_penalty": 0.6, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    {"temperature": 1.1, "seed": 13, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "logprobs": 1},
    {"temperature": 0.0, "repetition_penalty": 1.3, "stop": ["zebra crossing", "\n\n\n\n\n"]},
    {"temperature": 0.8, "seed": 14, "n": 2},
    {"temperature": 0.7, "seed": 15, "stop": [" ocean", " 7"], "ignore_eos": False},
    {"temperature": 1.0, "seed": 16, "logit_bias": {"300": 2.0}, "min_tokens": 50},
)


@dataclass
class Stream:
    """One client: what it asked and what came, by sample."""

    body: dict
    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[str]] = field(default_factory=dict)
    reasons: dict[int, tuple] = field(default_factory=dict)
    usage: dict = field(default_factory=dict)
    num_chunks: int = 0
    comments: int = 0
    last_data: float = 0.0
    longest_pause: float = 0.0
    done: bool = False

    async def read(self, client: httpx.AsyncClient) -> None:
        self.last_data = time.monotonic()
        route = "/v1/chat/completions" if "messages" in self.body else "/v1/completions"
        async with client.stream("POST", route, json=self.body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith(":"):
                    self.comments += 1
                elif line == "data: [DONE]":
                    self.done = True
                elif line:
                    self.take(json.loads(line.removeprefix("data: ")))

    def take(self, chunk: dict) -> None:
        assert "error" not in chunk, chunk
        now = time.monotonic()
        self.longest_pause = max(self.longest_pause, now - self.last_data)
        self.last_data = now
        self.num_chunks += 1
        self.usage = chunk["usage"] or self.usage
        for choice in chunk["choices"]:
            index = choice["index"]
            text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            self.texts[index] = self.texts.get(index, "") + text
            self.tokens.setdefault(index, []).extend((choice.get("logprobs") or {}).get("tokens", []))
            if choice["finish_reason"]:
                assert index not in self.reasons, "a sample ends once"
                self.reasons[index] = choice["finish_reason"], choice.get("stop_reason")

    def outcome(self) -> tuple:
        counts = {name: self.usage.get(name) for name in ("prompt_tokens", "completion_tokens")}
        return self.done, self.texts, self.tokens, self.reasons, counts


def body(i: int, model: str) -> dict:
    base = {"model": model, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    base |= {"prompt": f"{OPENINGS[i % len(OPENINGS)]} number {i}", "max_tokens": MAX_TOKENS}
    return base | KINDS[(i // len(OPENINGS) + i) % len(KINDS)]


def children_of(process: "subprocess.Popen[bytes]") -> dict[str, int]:
    """The pids of a server's processes, whichever of its threads started them, by the module that each runs; of several
    of a kind the oldest."""
    found: dict[str, int] = {}
    tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
    for pid in sorted((pid for task in tasks for pid in task.read_text().split()), key=int):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        if "-m" in command:
            found.setdefault(command[command.index("-m") + 1], int(pid))
    return found


async def wait_for(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < end, "it never came"
        await asyncio.sleep(0.01)
