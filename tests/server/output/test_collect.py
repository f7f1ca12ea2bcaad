"""Whole answers are collected in parts that neither hold up other streams nor leave memory behind."""

import asyncio

import pytest

from engine.outputs import CompletionOutput, FinishReason, RequestOutput
from server.output.collect import PART_SIZE, Choice, collect


class FakeGeneration:
    """Gives one output, and keeps what it was told of the size of parts."""

    n = 2
    group_size: int | None = None
    closed = False

    def group(self, num_tokens: int) -> None:
        self.group_size = num_tokens

    async def read(self, on_output, on_prompt_logprobs) -> None:
        assert self.group_size is not None, "the size of parts is known before the first output"
        samples = [CompletionOutput(i, f"text {i}", (i,), None, FinishReason.LENGTH) for i in range(self.n)]
        await on_output(0, RequestOutput("id", samples, True, 3, 2))

    def close(self) -> None:
        self.closed = True


async def connected() -> dict:
    return await asyncio.Future()


@pytest.mark.parametrize("num_logprobs, tokens", [(0, PART_SIZE), (1, PART_SIZE // 2), (20, 12), (PART_SIZE, 1)])
async def test_a_part_has_fewer_tokens_the_more_logprobs_each_has(num_logprobs, tokens):
    generation, choices = FakeGeneration(), [Choice("", None), Choice("", None)]
    await collect(generation, connected, choices, num_logprobs=num_logprobs)
    assert generation.group_size == tokens and generation.closed
    assert [(choice.text, choice.token_ids) for choice in choices] == [("text 0", [0]), ("text 1", [1])]


@pytest.mark.parametrize("route, fields", [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 5}),
    ("/v1/completions", {"prompt": "a", "logprobs": 5}),
    ("/v1/responses", {"input": "a", "top_logprobs": 5}),
])  # fmt: skip
def test_routes_say_how_many_logprobs_a_token_has(client, monkeypatch, route, fields):
    sizes = []
    monkeypatch.setattr("server.intake.generation.Generation.group", lambda self, size: sizes.append(size))
    response = client.post(route, json={"model": "org/fake-model", **fields})
    assert response.status_code == 200 and sizes == [PART_SIZE // 6]
