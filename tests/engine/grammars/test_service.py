"""The grammars that the Driver counts as compiled, against those that the Worker has."""

import asyncio
import random
from collections import OrderedDict

import pytest

from engine.errors import EngineError
from engine.executor.step import GrammarPrepared, PrepareGrammar
from engine.grammars.service import MAX_SENT, GrammarService
from engine.structured_output import MAX_IN_WORKER, StructuredOutput

CODE = StructuredOutput("regex", "[A-Z]{3}-[0-9]{4}")


@pytest.fixture
def service(monkeypatch):
    async def known_to_be_good(output, tenant):
        pass

    def vocabulary():
        raise AssertionError("nobody checks anything")

    service = GrammarService(vocabulary, 20.0)
    monkeypatch.setattr(service.checker, "check", known_to_be_good)
    return service


async def turns_of_the_loop():
    for _ in range(8):
        await asyncio.sleep(0)


async def test_a_grammar_that_the_worker_failed_to_compile_is_sent_again(service):
    sent: list[PrepareGrammar] = []
    service.attach(sent.append)
    for number, error in enumerate(("no memory", ""), start=1):
        preparing = asyncio.create_task(service.prepare(CODE))
        await turns_of_the_loop()
        assert len(sent) == number
        service.prepared(GrammarPrepared(CODE.digest(), error))
        if error:
            with pytest.raises(EngineError, match="could not compile a grammar that was checked before: no memory"):
                await preparing
    await preparing
    await service.prepare(CODE)
    assert len(sent) == 2, "the Worker has it"
    await service.close()


async def test_grammars_that_count_as_compiled_are_in_the_worker(service):
    """Else it would be compiled within a step, while all streams wait."""
    kept: OrderedDict[StructuredOutput, None] = OrderedDict()  # as engine/worker/sampling/grammar_cache.py does it

    def use(output):
        kept[output] = kept.pop(output, None)
        if len(kept) > MAX_IN_WORKER:
            kept.popitem(last=False)

    def compile(message):
        use(message.output)
        asyncio.get_running_loop().call_soon(service.prepared, GrammarPrepared(message.output.digest(), ""))

    service.attach(compile)
    outputs = [StructuredOutput("regex", "a" * n) for n in range(1, 2 * MAX_IN_WORKER)]
    choices = random.Random(3)
    waiting: list[StructuredOutput] = []  # prepared, and used by the Worker when they are admitted, in another order
    for number in range(2000):
        output = outputs[0] if number % 2 else choices.choice(outputs)  # one all the time, the others come and go
        await service.prepare(output)
        assert output in kept
        waiting.append(output)
        if len(waiting) > 8:
            use(waiting.pop(choices.randrange(8)))
    await service.close()


async def test_a_tenant_waits_for_one_grammar_of_another_and_not_for_all(service):
    sent: list[StructuredOutput] = []
    service.attach(lambda message: sent.append(message.output))
    many = [StructuredOutput("regex", "a" * n) for n in range(1, 40)]
    preparing = [asyncio.create_task(service.prepare(output, "greedy")) for output in many]
    await turns_of_the_loop()
    assert len(sent) == MAX_SENT, "the Worker takes them in order: the rest must wait here"
    preparing.append(asyncio.create_task(service.prepare(CODE, "modest")))
    preparing.append(asyncio.create_task(service.prepare(many[-1], "modest")))
    for leaving in preparing[:2]:  # the Worker still has them to compile
        leaving.cancel()
    await turns_of_the_loop()
    assert len(sent) == MAX_SENT
    num_answered = 0
    while not all(task.done() for task in preparing):
        service.prepared(GrammarPrepared(sent[num_answered].digest(), ""))
        num_answered += 1
        await turns_of_the_loop()
    assert sent.index(CODE) <= MAX_SENT + 1 and sent.index(many[-1]) <= MAX_SENT + 3
    assert len(sent) == len(set(sent)) == len(many) + 1, "each is compiled once"
    await service.close()
