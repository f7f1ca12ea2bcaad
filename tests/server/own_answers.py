"""Own answers fed back: what the server generated, forced, free and cut, must be taken when it comes back as history.

    python -m tests.server.own_answers [--answers 1000]

For every format of tool calls a server with the bundled model and a chat template of that style; on each of its three
APIs answers with calls at high temperature, of random lengths, so that many are cut anywhere. Each is sent back as a
client would, with an answer of a tool to each call. Prints how many were fed back and how many were refused: exit
status 1 where any was. No test: `make own-answers`.
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.server.serving import serving_process
from tests.server.tools.templates import STYLES

MODEL = "pageserve"
AT_ONCE = 8
# What a schema may ask of a value, as open as can be: numbers, texts and any JSON.
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "number"}, "about": {}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "days"],
}
EMPTY = {"type": "object", "properties": {}}
QUESTION = "What is the weather in Paris?"

Json = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.server.own_answers", description=__doc__.split("\n")[0])
    parser.add_argument("--answers", type=int, default=1000, help="in all formats and APIs together")
    options = parser.parse_args()
    each = -(-options.answers // (len(STYLES) * len(APIS)))
    refused: list[str] = []
    print(f"{'format':14}{'API':12}{'fed back':>10}{'forced':>8}{'cut':>6}{'refused':>9}", flush=True)
    total = 0
    for style, template in STYLES.items():
        form = () if style == "no tools" else ("--tool-call-format", style)
        with serving_process("--chat-template", template, *form) as (url, _):
            for name, api in APIS.items():
                counts, errors = feed_back(url, api, each)
                refused += [f"{style}, {name}: {error}" for error in errors]
                total += counts["fed back"]
                row = [counts["fed back"], counts["forced"], counts["cut"], len(errors)]
                print(f"{style:14}{name:12}{row[0]:10}{row[1]:8}{row[2]:6}{row[3]:9}", flush=True)
    print(f"{total} answers fed back, {len(refused)} refused")
    print("\n".join(sorted(set(refused))[:20]))
    return bool(refused)


def feed_back(url: str, api: "Api", number: int) -> tuple[Counter[str], list[str]]:
    counts: Counter[str] = Counter()
    errors: list[str] = []
    with httpx.Client(base_url=url, timeout=120) as client, ThreadPoolExecutor(AT_ONCE) as pool:
        for forced, cut, error in pool.map(lambda seed: one(client, api, seed), range(number)):
            counts += Counter({"fed back": 1, "forced": forced, "cut": cut})
            errors += [error] * bool(error)
    return counts, errors


def one(client: httpx.Client, api: "Api", seed: int) -> tuple[bool, bool, str]:
    """(whether calls were forced, whether it was cut, why its history was refused or "")."""
    path, ask, follow = api
    rng = random.Random(seed)
    forced = rng.random() < 0.8
    length = rng.choice((*range(1, 24), 60, 120, 200))
    body = ask(forced, length) | {"temperature": rng.choice((1.0, 2.0)) if path != "/v1/messages" else 1.0}
    if path == "/v1/chat/completions":
        body["seed"] = seed
    answer = client.post(path, json=body)
    answer.raise_for_status()
    second, cut = follow(body, answer.json())
    response = client.post(path, json=second)
    return forced, cut, "" if response.status_code == 200 else response.text[:300]


def _ask_chat(forced: bool, length: int) -> Json:
    tools = [
        {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
        {"type": "function", "function": {"name": "now", "parameters": EMPTY}},
    ]
    messages = [{"role": "user", "content": QUESTION}]
    choice = {"tool_choice": "required" if forced else "auto"}
    return {"model": MODEL, "messages": messages, "tools": tools, "max_tokens": length, **choice}


def _follow_chat(body: Json, answer: Json) -> tuple[Json, bool]:
    (choice,) = answer["choices"]
    message = choice["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in message.get("tool_calls") or []
    ]
    last = {"role": "user", "content": "And tomorrow?"}
    history = [*body["messages"], message, *results, last]
    return body | {"messages": history, "max_tokens": 1}, choice["finish_reason"] == "length"


def _ask_responses(forced: bool, length: int) -> Json:
    tools = [
        {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": False},
        {"type": "function", "name": "now", "parameters": EMPTY, "strict": False},
    ]
    choice = {"tool_choice": "required" if forced else "auto"}
    return {"model": MODEL, "input": QUESTION, "tools": tools, "max_output_tokens": max(length, 1), **choice}


def _follow_responses(body: Json, answer: Json) -> tuple[Json, bool]:
    items = answer["output"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "sunny"}
        for item in items
        if item["type"] == "function_call"
    ]
    history = [{"role": "user", "content": QUESTION}, *items, *results, {"role": "user", "content": "And tomorrow?"}]
    return body | {"input": history, "max_output_tokens": 1}, answer["status"] == "incomplete"


def _ask_messages(forced: bool, length: int) -> Json:
    tools = [{"name": "get_weather", "input_schema": PARAMETERS}, {"name": "now", "input_schema": EMPTY}]
    messages = [{"role": "user", "content": QUESTION}]
    choice = {"tool_choice": {"type": "any" if forced else "auto"}}
    return {"model": MODEL, "messages": messages, "tools": tools, "max_tokens": length, **choice}


def _follow_messages(body: Json, answer: Json) -> tuple[Json, bool]:
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "sunny"}
        for block in answer["content"]
        if block["type"] == "tool_use"
    ]
    said = {"role": "assistant", "content": answer["content"]}
    last = {"role": "user", "content": [*results, {"type": "text", "text": "And tomorrow?"}]}
    return body | {"messages": [*body["messages"], said, last], "max_tokens": 1}, answer["stop_reason"] == "max_tokens"


Api = tuple[str, Callable[[bool, int], Json], Callable[[Json, Json], tuple[Json, bool]]]
APIS: dict[str, Api] = {
    "chat": ("/v1/chat/completions", _ask_chat, _follow_chat),
    "responses": ("/v1/responses", _ask_responses, _follow_responses),
    "messages": ("/v1/messages", _ask_messages, _follow_messages),
}


if __name__ == "__main__":
    sys.exit(main())
