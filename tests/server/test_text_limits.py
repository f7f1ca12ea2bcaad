"""Texts and conversations whose cost is bounded before it arises, and templates that reach a limit, over HTTP."""

import contextlib
import threading
import time

import pytest

from tests.checkpoints import save_fake_checkpoint
from tests.server.live import MODEL, LiveServer, assert_error, chat_body, completion_body

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ENDLESS_ON_Z = (
    "{% for m in messages %}{% if 'z' in m.content %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}{{ m.content }}{% endfor %}"
)


def test_a_conversation_that_is_cut_may_name_large_tools(client):
    tool = {"type": "function", "function": {"name": "get", "description": "a" * (1 << 16)}}
    answer = client.post(CHAT, json=chat_body(tools=[tool], truncate_prompt_tokens=5)).json()
    assert answer["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize(
    "last, withdrawn", [("x" * 600, 2), ([], 0), (1, 0), ("a" * (1 << 22), 0)], ids=["long", "empty", "wrong", "huge"]
)
def test_prompts_that_were_admitted_before_a_bad_one_are_withdrawn(server, client, last, withdrawn):
    server.wait_idle()
    aborts = server.aborts()
    response = client.post(COMPLETIONS, json=completion_body(prompt=["a", "b", last], max_tokens=400))
    assert_error(response, 400, "prompt[2]")
    assert server.aborts() == aborts + withdrawn and not any(server.usage().values())


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_long_text_is_cut_before_it_is_encoded(client, path, side):
    """The tokens are those of the whole; how many were cut is told as well as it is known."""
    text = "".join(chr(ord("a") + i * i % 26) for i in range(1 << 20))
    own = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    body = (completion_body if path == COMPLETIONS else chat_body)(**own)
    body |= {"truncate_prompt_tokens": 40, "truncation_side": side, "return_token_ids": True}
    answer = client.post(path, json=body).json()
    ids = answer["choices"][0].get("prompt_token_ids") or answer["prompt_token_ids"]
    whole = (
        text.encode() if path == COMPLETIONS else [256, *f"user\n{text}".encode(), 257, *b"\n", 256, *b"assistant\n"]
    )
    assert ids == list(whole[-40:] if side == "left" else whole[:40])
    assert 10_000 < answer["usage"]["prompt_tokens_details"]["truncated_tokens"] < len(whole)


def test_a_text_to_be_cut_has_a_limit_that_is_named(client):
    body = completion_body(prompt="a" * ((1 << 22) + 1), truncate_prompt_tokens=5)
    assert "4194304" in assert_error(client.post(COMPLETIONS, json=body), 400, "prompt", "context_length_exceeded")


def test_a_conversation_of_too_many_messages_is_refused_before_it_is_rendered(client, monkeypatch):
    """Each message takes a token at least, also a tool's result without text."""
    monkeypatch.setattr("server.intake.prompts.render_chat", None)
    results = [{"role": "tool", "tool_call_id": "x"}] * 10_000
    body = chat_body(messages=[*chat_body()["messages"], *results])
    message = assert_error(client.post(CHAT, json=body), 400, "messages", "context_length_exceeded")
    assert "10001 messages" in message and "512 tokens" in message
    given = [{"type": "tool_result", "tool_use_id": "x"}] * 10_000
    asked = {"model": MODEL, "messages": [{"role": "user", "content": given}], "max_tokens": 1}
    response = client.post("/v1/messages", json=asked)
    assert response.status_code == 400 and "prompt is too long" in response.json()["error"]["message"]


def test_more_messages_than_the_context_has_tokens_can_be_cut(client):
    asked = [{"role": ("user", "assistant")[i % 2], "content": "a"} for i in range(601)]
    answer = client.post(CHAT, json=chat_body(messages=asked, truncate_prompt_tokens=5)).json()
    assert answer["usage"]["prompt_tokens"] == 5


def test_a_template_that_does_not_end_costs_its_own_requests_only(tmp_path):
    folder = save_fake_checkpoint(tmp_path / "model", ENDLESS_ON_Z)
    keys = ("sk-attacker", "sk-other")
    limit = {"chat_template_timeout": 0.4}
    with LiveServer(folder, api_key=keys, engine=limit) as live, contextlib.ExitStack() as clients:
        attacker, other = (
            clients.enter_context(live.client(headers={"authorization": f"Bearer {key}"})) for key in keys
        )
        found: list = []

        def attack(content: str) -> None:
            found.append(attacker.post(CHAT, json=chat_body(messages=[{"role": "user", "content": content}])))

        attacks = [threading.Thread(target=attack, args=("z" * (400 + 400 * i),)) for i in range(4)]
        for one in attacks:
            one.start()
        waits = []
        while any(one.is_alive() for one in attacks):
            start = time.monotonic()
            assert other.post(CHAT, json=chat_body()).status_code == 200
            assert other.post(COMPLETIONS, json=completion_body()).status_code == 200
            waits.append(time.monotonic() - start)
        for response in found:
            assert_error(response, 500, None, "engine_error")
        assert sorted(waits)[len(waits) // 2] < 0.3
        assert attacker.post(CHAT, json=chat_body()).status_code == 200
        live.wait_idle()
