"""Five workloads. Prompts are token ids drawn from a seed, so every server gets exactly the same work.

    uniform   n requests of 128 prompt + 64 output tokens, all at once: throughput
    mixed     n requests with log-normal lengths at Poisson arrivals: latency under a usual load
    chatbot   n / 4 users of four turns each; all share a system prompt and send their whole history: prefix reuse
    parallel  n / 4 requests of four samples each: prompts shared between samples
    single    one request after another: latency on an idle server

Lengths and arrival times never change, so figures of different days are comparable; the seed only draws token ids. Two
runs against one server need two seeds: otherwise the second run finds its prompts in the server's prefix cache.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

WORKLOADS = ("uniform", "mixed", "chatbot", "parallel", "single")
FIRST_TOKEN_ID = 300  # above the byte alphabet and the special tokens of every common tokenizer


@dataclass(frozen=True)
class Call:
    """One completion request: `n` samples of exactly `max_tokens` tokens each (the load sets ignore_eos).

    return_token_ids: tokens without text (end tokens, parts of characters) come in chunks, too. It is a field of vLLM's
    API.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    temperature: float = 0.0
    return_token_ids: bool = False


@dataclass(frozen=True)
class Client:
    """Calls that follow one another on one connection; the first is sent `start_at` seconds into the run."""

    calls: tuple[Call, ...]
    start_at: float = 0.0


@dataclass(frozen=True)
class Shape:
    """The size of a workload: `n` requests (some workloads send a fraction), within the limits of the model.

    Token ids are in FIRST_TOKEN_ID .. max_token_id. No request is longer than `max_model_len` tokens. `rate`: arrivals
    of "mixed" in requests per second.
    """

    n: int = 64
    rate: float = 4.0
    max_token_id: int = 7999
    max_model_len: int | None = None


def build_workload(name: str, shape: Shape, seed: int) -> tuple[Client, ...]:
    """The clients of one run. ValueError if the name is unknown or the model's context is too short."""
    if name not in _BUILDERS:
        raise ValueError(f"unknown workload {name!r}; there are {', '.join(WORKLOADS)}")
    clients = _BUILDERS[name](random.Random(f"{name} {seed}"), shape)
    longest = max(len(call.prompt) + call.max_tokens for client in clients for call in client.calls)
    if shape.max_model_len is not None and longest > shape.max_model_len:
        raise ValueError(f"{name} needs a context of {longest} tokens, the model's is {shape.max_model_len}")
    return clients


def _uniform(rng: random.Random, shape: Shape) -> tuple[Client, ...]:
    return tuple(Client((Call(_ids(rng, 128, shape), 64),)) for _ in range(shape.n))


def _mixed(rng: random.Random, shape: Shape) -> tuple[Client, ...]:
    shape_rng = random.Random("lengths and arrivals")
    room = shape.max_model_len or 4096
    clients, clock = [], 0.0
    for _ in range(shape.n):
        clock += shape_rng.expovariate(shape.rate)
        prompt = _log_normal(shape_rng, median=96, sigma=0.8, low=8, high=min(900, room - room // 4))
        output = _log_normal(shape_rng, median=48, sigma=0.6, low=4, high=min(256, room // 4))
        clients.append(Client((Call(_ids(rng, prompt, shape), output),), start_at=clock))
    return tuple(clients)


def _chatbot(rng: random.Random, shape: Shape) -> tuple[Client, ...]:
    system = _ids(rng, 384, shape)
    return tuple(Client(_conversation(rng, system, shape)) for _ in range(max(1, shape.n // 4)))


def _conversation(rng: random.Random, history: tuple[int, ...], shape: Shape) -> tuple[Call, ...]:
    """Four turns. Replies in the history are drawn, too: real replies would differ between servers."""
    calls = []
    for _ in range(4):
        history += _ids(rng, 24, shape)
        calls.append(Call(history, 32))
        history += _ids(rng, 32, shape)
    return tuple(calls)


def _parallel(rng: random.Random, shape: Shape) -> tuple[Client, ...]:
    count = max(1, shape.n // 4)
    return tuple(Client((Call(_ids(rng, 256, shape), 48, n=4, temperature=1.0),)) for _ in range(count))


def _single(rng: random.Random, shape: Shape) -> tuple[Client, ...]:
    count = max(4, shape.n // 16)
    return (Client(tuple(Call(_ids(rng, 128, shape), 64) for _ in range(count))),)


def _ids(rng: random.Random, count: int, shape: Shape) -> tuple[int, ...]:
    low = min(FIRST_TOKEN_ID, shape.max_token_id // 2)  # a small vocabulary uses its upper half
    return tuple(rng.randint(low, shape.max_token_id) for _ in range(count))


def _log_normal(rng: random.Random, *, median: float, sigma: float, low: int, high: int) -> int:
    return max(low, min(high, int(median * math.exp(rng.gauss(0.0, sigma)))))


_BUILDERS: dict[str, Callable[[random.Random, Shape], tuple[Client, ...]]] = {
    "uniform": _uniform,
    "mixed": _mixed,
    "chatbot": _chatbot,
    "parallel": _parallel,
    "single": _single,
}
