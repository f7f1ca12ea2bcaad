"""Chat templates in processes of their own: limits of time and memory, and processes that somebody kills or stops."""

import asyncio
import os
import signal
import time

import jinja2
import pytest
from jinja2.ext import loopcontrols
from jinja2.meta import find_undeclared_variables

from engine.errors import EngineError, InvalidRequestError, UnavailableError
from engine.text.chat_template import ChatTemplate, TemplateLimitError, render, syntax_error
from engine.text.template_renderer import SHORT_BYTES, TemplateRenderer
from tests.server.tools.templates import STYLES

CPU_SECONDS = 0.3
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GIGABYTE = "{{ messages[0].content * 10**9 }}"
ECHO = "{{ messages[0].content }}{{ more | tojson }}"
LONG = "x" * SHORT_BYTES


@pytest.fixture
async def renderer():
    renderer = TemplateRenderer(CPU_SECONDS)
    yield renderer
    pids = renderer.helper_pids
    renderer.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def ask(renderer: TemplateRenderer, source: str, text: str = "hi", tenant: str = "a", more=None) -> str:
    def work(helper):
        return ChatTemplate(source, {}, helper).render([{"role": "user", "content": text}], True, {"more": more})

    return await renderer.run(tenant, work)


async def test_variables_reach_the_helper_unchanged(renderer):
    more = {"n": 10**400, "half": "\ud800", "x": [1.5, float("inf"), None, True, {"k": "é<|im_end|>\U0001f600"}]}
    expected = render(ECHO, {"messages": [{"content": "hi"}], "more": more})
    assert await ask(renderer, ECHO, more=more) == expected
    (pid,) = renderer.helper_pids
    assert await ask(renderer, ECHO, text="x" * 100_000) == "x" * 100_000 + "null"
    assert renderer.helper_pids == [pid], "one after the other needs one process"


@pytest.mark.parametrize(
    "source, words", [("{{ raise_exception('no ' * 1000) }}", "refused"), ("{{ x.y.z }}", "refused")]
)
async def test_a_refusal_is_the_requests_error_and_short(renderer, source, words):
    with pytest.raises(InvalidRequestError, match=words) as caught:
        await ask(renderer, source)
    assert caught.value.param == "messages" and len(str(caught.value)) <= 500


@pytest.mark.parametrize("source, words", [(ENDLESS, "processor time"), (GIGABYTE, "memory")])
async def test_a_template_beyond_its_limits_costs_its_own_request_only(renderer, source, words):
    attacks = [asyncio.create_task(ask(renderer, source, LONG)) for _ in range(4)]
    start, waits = time.monotonic(), []
    while not all(attack.done() for attack in attacks) and time.monotonic() - start < 20:
        begun = time.monotonic()
        assert await ask(renderer, ECHO, tenant="b") == "hinull"
        waits.append(time.monotonic() - begun)
        await asyncio.sleep(0.01)
    for error in await asyncio.gather(*attacks, return_exceptions=True):
        assert isinstance(error, TemplateLimitError) and words in str(error)
    assert sorted(waits)[len(waits) // 2] < 1, "another tenant has a process left"
    assert await ask(renderer, ECHO) == "hinull"


async def test_a_template_that_fails_on_next_to_nothing_is_the_servers_fault(renderer):
    with pytest.raises(EngineError, match="short conversation"):
        await ask(renderer, ENDLESS)
    assert await ask(renderer, ECHO) == "hinull"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**10 }}",
        "{% if 9 ** 9 ** 9 %}{% endif %}",
        "{% set x = 'a' * 10**10 %}",
        "{% autoescape 'a' * 10**10 %}{% endautoescape %}",
        "{{ ('a' * 10**10) | length }}",
        "{% for i in [1] * 10**10 %}{% endfor %}",
    ],
)
def test_looking_at_a_template_computes_nothing(source):
    start = time.process_time()
    assert syntax_error(source) is None
    assert ChatTemplate(source + "{{ tools }}", {}).variables >= {"tools"}
    assert time.process_time() - start < 0.5


def test_wrong_templates_are_told_from_right_ones():
    assert syntax_error("{% if %}") and "nothing" in syntax_error("{{ x | nothing }}")
    assert syntax_error("{{ x is nothing }}") and syntax_error("{{ x | tojson(indent=2) | trim }}") is None


def test_the_names_that_a_template_asks_for_are_those_that_jinja_finds():
    environment = jinja2.Environment(extensions=[loopcontrols])
    environment.globals["raise_exception"] = None  # ours
    for source in [*STYLES.values(), ECHO, ENDLESS, GIGABYTE]:
        assert ChatTemplate(source, {}).variables == find_undeclared_variables(environment.parse(source))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
async def test_a_process_killed_or_stopped_from_outside_is_replaced_and_asked_again(
    renderer, monkeypatch, number, busy
):
    monkeypatch.setattr("engine.text.template_renderer.IDLE_SECONDS", 0.0)
    await ask(renderer, ECHO)
    (pid,) = renderer.helper_pids
    slow = "{% for i in range(3000) %}{% for j in range(50) %}{% endfor %}{% endfor %}done"
    asked = asyncio.create_task(ask(renderer, slow)) if busy else None
    await asyncio.sleep(0.005)
    os.kill(pid, number)
    assert await (asked or ask(renderer, slow)) == "done"
    assert renderer.helper_pids != [pid]


async def test_memory_of_a_large_conversation_goes_with_its_process(renderer):
    await ask(renderer, ECHO)
    (pid,) = renderer.helper_pids
    assert len(await ask(renderer, ECHO, "x" * (5 << 20))) > 5 << 20
    assert len(renderer.helper_pids) == 1 and renderer.helper_pids != [pid]


async def test_closing_ends_a_running_rendering():
    renderer = TemplateRenderer(60.0)
    asked = asyncio.create_task(ask(renderer, ENDLESS))
    for _ in range(1000):
        await asyncio.sleep(0.005)
        if renderer.helper_pids:
            break
    renderer.close()
    with pytest.raises(UnavailableError, match="Send the request again"):  # 503, which a proxy sends elsewhere
        await asyncio.wait_for(asked, 5)
    assert renderer.helper_pids == []
    with pytest.raises(UnavailableError, match="Send the request again"):
        await ask(renderer, ECHO)
