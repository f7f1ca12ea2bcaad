"""Structured outputs: what is refused and how, the process that finds out, and texts of a real model that obey."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time

import jsonschema
import pytest

import engine.executor.process_state
import engine.executor.recovery
import engine.grammars.checker
from engine.checkpoint.locate import read_eos_token_ids, resolve_model
from engine.config import EngineConfig
from engine.driver import Driver
from engine.errors import EngineError, InvalidRequestError, QueueFullError, UnavailableError
from engine.grammars.checker import TOO_COSTLY, GrammarChecker, GrammarHelper
from engine.grammars.checker_process import find_fault
from engine.grammars.compiler import MAX_MESSAGE, Compiler
from engine.llm import LLM
from engine.outputs import FinishReason
from engine.sampling_params import SamplingParams
from engine.structured_output import MAX_TEXT_BYTES, StructuredOutput, Vocabulary
from engine.text.tokenizer import Tokenizer
from tests.engine.driving import collect, request, until

FOX = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "colour": {"enum": ["red", "white"]},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
    },
    "required": ["name", "age", "colour", "friends"],
    "additionalProperties": False,
}
FOX_FORM = StructuredOutput.json_schema(FOX)
CODE = StructuredOutput("regex", "[A-Z]{2}-[0-9]{4}")


def nested(levels, schema=None):
    schema = schema or {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.fixture(scope="module")
def vocabulary():
    folder = resolve_model(EngineConfig())
    tokenizer = Tokenizer(folder)
    yield Vocabulary(tokenizer.to_json(), tokenizer.vocab_size, read_eos_token_ids(folder))
    tokenizer.close()


@pytest.fixture(scope="module")
def compiler(vocabulary):
    return Compiler(vocabulary)


# The value.


@pytest.mark.parametrize(
    "kind, text", [("xml", "a"), ("regex", ""), ("json_object", "{}"), ("grammar", "x" * (MAX_TEXT_BYTES + 1))]
)
def test_values_that_are_no_structured_output(kind, text):
    with pytest.raises(InvalidRequestError, match=r"structured_output|at most"):
        StructuredOutput(kind, text)


def test_equal_ones_have_one_digest():
    assert StructuredOutput.choice(["a"]).digest() == StructuredOutput("choice", '["a"]').digest()
    assert StructuredOutput.json_schema({}).digest() != StructuredOutput.json_schema({}, lenient=True).digest()


# Outputs that compile, and the errors of those that do not.

MANY_PROPERTIES = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}
SERVED = {
    "any JSON": StructuredOutput.json_schema({}),
    "true": StructuredOutput.json_schema(True),
    "deep": StructuredOutput.json_schema(nested(29)),
    "a large enum": StructuredOutput.json_schema({"enum": [f"value {i}" for i in range(15_000)]}),
    "many properties": StructuredOutput.json_schema(MANY_PROPERTIES),
    "recursive": StructuredOutput.json_schema(
        {"type": "object", "properties": {"child": {"$ref": "#"}}, "additionalProperties": False}
    ),
    "exponential regex": StructuredOutput("regex", "(a|b)*a(a|b){20}"),
    "nested repetition": StructuredOutput("regex", "(x+x+)+y"),
    "choice": StructuredOutput.choice(["a/b", "(c)", "d\ne", "é\U0001f98a", '"q"']),
    "empty choice": StructuredOutput.choice(["", "a"]),
    "special token": StructuredOutput("grammar", 'start: "a" <|im_end|>'),
    "JSON in a grammar": StructuredOutput("grammar", 'start: "x: " data\ndata: %json {"type": "integer"}'),
    "GBNF": StructuredOutput("grammar", 'root ::= "yes" | "no"'),
    "lenient": StructuredOutput.json_schema({"type": "array", "uniqueItems": True}, lenient=True),
}
REFUSED = {
    "no JSON": (StructuredOutput("json_schema", "{"), "not JSON"),
    "no schema": (StructuredOutput("json_schema", "[1]"), "must be an object"),
    "false": (StructuredOutput.json_schema(False), "no text matches"),
    "too deep": (StructuredOutput.json_schema(nested(70)), "nested deeper than 64"),
    "deeper than a stack": (StructuredOutput("json_schema", "[" * 100_000), "nested deeper than 64"),
    "endless reference": (StructuredOutput.json_schema({"$ref": "#"}), "no text matches"),
    "reference elsewhere": (StructuredOutput.json_schema({"$ref": "http://127.0.0.1:9/x"}), "127.0.0.1:9"),
    "keyword": (StructuredOutput.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    "wrong keyword": (StructuredOutput.json_schema({"type": "object", "title": 5}), "title"),
    "wrong type": (StructuredOutput.json_schema({"type": "strin"}), "strin"),
    "exponential allOf": (
        StructuredOutput.json_schema(
            {
                "allOf": [
                    {"anyOf": [{"type": "object", "properties": {f"a{i}_{j}": {}}} for j in range(8)]}
                    for i in range(6)
                ]
            }
        ),
        "too large",
    ),
    "regex": (StructuredOutput("regex", "("), 'invalid regex "("'),
    "look-around": (StructuredOutput("regex", "a(?=b)"), "look-around"),
    "grammar": (StructuredOutput("grammar", 'start: "a" foo\n'), 'unknown name: "foo"'),
    "line of a grammar": (StructuredOutput("grammar", 'start: a\na: "b\n'), "2("),
    "no such special token": (StructuredOutput("grammar", "start: <|nosuch|>"), "unknown special token"),
    "endless grammar": (StructuredOutput("grammar", "start: start"), "no text matches"),
    "too many rules": (
        StructuredOutput("grammar", "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(5000))])),
        "more than 5000 rules",
    ),
    "no choice": (StructuredOutput.choice([]), "choices"),
    "choices that are no strings": (StructuredOutput("choice", "[1]"), "strings"),
}  # fmt: skip


@pytest.mark.parametrize("output", SERVED.values(), ids=SERVED.keys())
def test_served(compiler, output):
    assert find_fault(compiler, output) == ""


@pytest.mark.parametrize("output, says", REFUSED.values(), ids=REFUSED.keys())
def test_refused_with_the_fault(compiler, output, says):
    started = time.process_time()
    fault = find_fault(compiler, output)
    assert fault and says in fault and len(fault) <= MAX_MESSAGE
    assert "state>" not in fault and "start: /" not in fault
    assert time.process_time() - started < 5, "refused in good time"


def test_ambiguity_is_bounded(compiler):
    """Refused as too slow or served: never anything in between that would hold up the steps of others."""
    ambiguous = StructuredOutput("grammar", 'start: s\ns: s s | "a" | "b" | s s s |')
    started = time.process_time()
    fault = find_fault(compiler, ambiguous)
    assert fault == "" or "ambiguous" in fault
    assert time.process_time() - started < 10


def test_whitespace_has_an_end(compiler):
    matcher = compiler.compile(StructuredOutput.json_object())
    assert matcher.consume_tokens(compiler.tokens_of("{\n" + " " * 24))
    assert not matcher.consume_tokens(compiler.tokens_of(" "))
    matcher = compiler.compile(StructuredOutput.json_object())
    assert matcher.consume_tokens(compiler.tokens_of('{ "a" '))
    assert not matcher.consume_tokens(compiler.tokens_of(" ")), "no more than one space in a line"
    pretty = json.dumps(json.loads('{"a": [1, {"b": null}], "c": {}}'), indent=8)
    matcher = compiler.compile(StructuredOutput.json_object())
    assert matcher.consume_tokens(compiler.tokens_of(pretty)) and matcher.is_accepting()


# The process that checks.


@pytest.fixture
async def make_checker(vocabulary):
    made = []

    async def get_vocabulary():
        return vocabulary

    def make(seconds=20.0, **options):
        made.append(GrammarChecker(get_vocabulary, seconds, **options))
        return made[-1]

    yield make
    for checker in made:
        await checker.close()
        assert checker.helper_pids == []


def test_the_process_has_no_torch():
    script = "import engine.grammars.checker_process, sys; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


async def test_a_verdict_is_found_once_and_kept(make_checker):
    checker = make_checker()
    assert checker.verdict(CODE) is None
    await asyncio.gather(*[checker.check(CODE) for _ in range(20)])
    assert checker.verdict(CODE) == "" and len(checker.helper_pids) == 1
    bad = StructuredOutput("regex", "(")
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="the regex cannot be used: invalid regex"):
            await checker.check(bad)
    [pid] = checker.helper_pids
    os.kill(pid, signal.SIGSTOP)  # a cached verdict needs no helper
    try:
        await checker.check(CODE)
        with pytest.raises(InvalidRequestError):
            await checker.check(bad)
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_one_that_takes_too_long_is_ended_and_the_next_is_served(make_checker):
    checker = make_checker(seconds=0.02)
    with pytest.raises(InvalidRequestError, match=TOO_COSTLY[:30]):
        await checker.check(StructuredOutput.json_schema(MANY_PROPERTIES))
    assert checker.helper_pids == [], "it was ended where it was"
    roomy = make_checker()
    await roomy.check(StructuredOutput.json_schema(MANY_PROPERTIES))


async def test_a_process_that_is_killed_from_outside_is_replaced(make_checker):
    checker = make_checker()
    await checker.check(CODE)
    [pid] = checker.helper_pids
    os.kill(pid, signal.SIGKILL)
    await checker.check(FOX_FORM)
    assert checker.helper_pids != [pid] and len(checker.helper_pids) == 1


async def test_one_that_is_stopped_is_replaced_in_no_time(make_checker):
    checker = make_checker()
    await checker.check(CODE)
    [pid] = checker.helper_pids
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    await checker.check(FOX_FORM)
    assert time.monotonic() - started < 10, "not the 60 s and more that a check may take"
    [other] = checker.helper_pids
    assert other != pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_no_grammar_is_blamed_for_helpers_that_are_hit_from_outside(make_checker, monkeypatch, number):
    monkeypatch.setattr(engine.executor.process_state, "LOOK_SECONDS", 0.05)
    checker = make_checker()
    await checker.check(CODE)
    asked, hits = GrammarHelper.ask, []

    async def hit(helper, message, seconds):
        """The first one is hit when it is asked to check, the second while it loads, the third when it is asked."""
        if len(hits) < 3 and (isinstance(message, StructuredOutput) or len(hits) == 1):
            hits.append(helper.pid)
            os.kill(helper.pid, number)
        return await asked(helper, message, seconds)

    monkeypatch.setattr(GrammarHelper, "ask", hit)
    await checker.check(FOX_FORM)
    assert len(set(hits)) == 3 and checker.verdict(FOX_FORM) == ""
    assert len(checker.helper_pids) == 1 and not set(hits) & set(checker.helper_pids)


async def test_helpers_that_are_always_killed_from_outside_are_no_fault_of_a_grammar(make_checker, monkeypatch):
    monkeypatch.setattr(engine.executor.process_state, "LOOK_SECONDS", 0.05)
    checker, asked = make_checker(), GrammarHelper.ask

    async def hit(helper, message, seconds):
        os.kill(helper.pid, signal.SIGSTOP)
        return await asked(helper, message, seconds)

    monkeypatch.setattr(GrammarHelper, "ask", hit)
    with pytest.raises(EngineError, match="again and again from outside"):
        await checker.check(FOX_FORM)
    assert checker.verdict(FOX_FORM) is None and checker.helper_pids == []


async def test_one_that_hangs_is_killed_and_another_takes_its_place(make_checker, monkeypatch):
    checker = make_checker()
    await checker.check(CODE)
    [pid] = checker.helper_pids
    os.kill(pid, signal.SIGSTOP)  # which the kernel does not tell here
    monkeypatch.setattr(engine.executor.process_state, "stopped_at", lambda pid: None)
    monkeypatch.setattr(engine.grammars.checker, "stopped_at", lambda pid: None)
    monkeypatch.setattr(engine.grammars.checker, "WALL_CLOCK_FACTOR", 0.15)  # 3 s with a limit of 20 s
    await checker.check(FOX_FORM)
    [other] = checker.helper_pids
    assert other != pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_cancelled_caller_does_not_disturb_others(make_checker):
    checker = make_checker()
    leaving = asyncio.create_task(checker.check(FOX_FORM))
    staying = asyncio.create_task(checker.check(FOX_FORM))
    await asyncio.sleep(0)
    leaving.cancel()
    await staying
    await checker.check(CODE)
    assert checker.verdict(FOX_FORM) == ""


async def test_only_so_many_wait(make_checker, monkeypatch):
    monkeypatch.setattr(engine.grammars.checker, "MAX_WAITING", 2)
    checker = make_checker()
    tasks = [asyncio.create_task(checker.check(StructuredOutput("regex", "a" * n))) for n in (1, 2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError):
        await checker.check(CODE)
    await asyncio.gather(*tasks)


async def test_tenants_take_turns(make_checker, monkeypatch):
    """One who has many checked neither takes all places nor has others wait for all of them."""
    monkeypatch.setattr(engine.grammars.checker, "MAX_WAITING", 8)
    checker = make_checker(num_helpers=1)
    asked: list[StructuredOutput] = []
    can_go_on = asyncio.Semaphore(0)

    async def note(output):
        asked.append(output)
        await can_go_on.acquire()
        return ""

    monkeypatch.setattr(checker, "_ask", note)
    many = [StructuredOutput("regex", "a" * n) for n in range(1, 9)]
    tasks = [asyncio.create_task(checker.check(output, "greedy")) for output in many]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError):
        await checker.check(StructuredOutput("regex", "b"), "greedy")
    tasks += [asyncio.create_task(checker.check(output, "modest")) for output in (CODE, many[-1])]
    await asyncio.sleep(0.01)
    for _ in range(12):
        can_go_on.release()
        await asyncio.sleep(0.001)
    await asyncio.gather(*tasks)
    assert asked.index(CODE) <= 2 and asked.index(many[-1]) <= 4
    assert len(asked) == 9, "an output of both tenants is checked once"


async def test_verdicts_are_bounded(make_checker, monkeypatch):
    monkeypatch.setattr(engine.grammars.checker, "MAX_VERDICTS", 2)
    checker = make_checker()
    outputs = [StructuredOutput("regex", "a" * n) for n in (1, 2, 3)]
    for output in outputs:
        await checker.check(output)
    assert [checker.verdict(output) for output in outputs] == [None, "", ""]


async def test_a_model_that_cannot_end_a_text_is_told_so(vocabulary):
    async def get_vocabulary():
        return Vocabulary(vocabulary.tokenizer_json, vocabulary.size, [])

    checker = GrammarChecker(get_vocabulary, 5.0)
    with pytest.raises(InvalidRequestError, match="no end-of-sequence token"):
        await checker.check(CODE)
    await checker.close()


async def test_a_process_that_does_not_start_is_our_fault(vocabulary):
    async def get_vocabulary():
        return vocabulary

    checker = GrammarChecker(get_vocabulary, 5.0, command=(sys.executable, "-c", "raise SystemExit(1)"))
    with pytest.raises(EngineError, match="does not start"):
        await checker.check(CODE)
    await checker.close()


async def test_a_check_that_the_end_of_the_server_cuts_is_refused_and_not_cancelled(vocabulary):
    async def get_vocabulary():
        return vocabulary

    sleeps = (sys.executable, "-c", "import time; time.sleep(60)")
    checker = GrammarChecker(get_vocabulary, 5.0, command=sleeps)
    checking = [asyncio.create_task(checker.check(CODE)) for _ in range(2)]  # both wait for one verdict
    await asyncio.sleep(0.1)
    leaving = asyncio.create_task(checker.check(CODE))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    assert leaving.cancelled()
    await checker.close()
    for check in checking:
        with pytest.raises(UnavailableError, match="Send the request again"):
            await check


# Texts of the bundled model.


@pytest.fixture(scope="module")
def llm():
    with LLM(dtype="float32", device="cpu", num_blocks=64, max_model_len=512) as llm:
        yield llm


def generate(llm, output, prompts="A fox", **params):
    params = SamplingParams(**({"max_tokens": 200, "seed": 3, "structured_output": output} | params))
    return llm.generate(prompts, params, use_tqdm=False)


def test_json_that_a_schema_allows(llm):
    [result] = generate(llm, FOX_FORM, n=4)
    texts = [sample.text for sample in result.outputs]
    assert len(set(texts)) > 1
    for sample in result.outputs:
        jsonschema.validate(json.loads(sample.text), FOX)
        assert sample.finish_reason is FinishReason.STOP and sample.stop_reason is None


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize(
    "output, expected",
    [
        (CODE, "[A-Z]{2}-[0-9]{4}"),
        (StructuredOutput.choice(["red fox", "blue whale", "é/\n"]), "red fox|blue whale|é/\n"),
        (StructuredOutput("grammar", 'start: word " " word\nword: /[b-d]{2,5}/'), "[b-d]{2,5} [b-d]{2,5}"),
    ],
    ids=["regex", "choice", "grammar"],
)
def test_other_forms(llm, output, expected, temperature):
    results = generate(llm, output, ["A fox", "Hello"], temperature=temperature)
    assert len(results) == 2
    for result in results:
        assert re.fullmatch(expected, result.outputs[0].text)
        assert result.outputs[0].finish_reason is FinishReason.STOP


def test_a_text_that_is_cut_says_so(llm):
    [result] = generate(llm, FOX_FORM, max_tokens=5)
    assert result.outputs[0].finish_reason is FinishReason.LENGTH
    with pytest.raises(ValueError):
        json.loads(result.outputs[0].text)


def test_neighbours_are_not_touched(llm):
    plain = SamplingParams(temperature=0.0, max_tokens=40)
    [alone] = llm.generate("Once upon a time", plain, use_tqdm=False)
    params = [SamplingParams(seed=3, max_tokens=60, structured_output=FOX_FORM), plain]
    [formed, beside] = llm.generate(["A fox", "Once upon a time"], params, use_tqdm=False)
    assert beside.outputs[0].text == alone.outputs[0].text
    assert formed.outputs[0].text.startswith("{")


@pytest.mark.parametrize("more", [{"ignore_eos": True}, {"min_tokens": 12}, {"min_tokens": 60}])
def test_a_form_wins_over_options_that_make_a_text_longer(llm, more):
    [result] = generate(llm, CODE, **more)
    assert re.fullmatch("[A-Z]{2}-[0-9]{4}", result.outputs[0].text)
    assert result.outputs[0].finish_reason is FinishReason.STOP
    assert len(result.outputs[0].token_ids) <= 8, "no token follows the first end token"


@pytest.mark.parametrize("more", [{"ignore_eos": True}, {"min_tokens": 15}])
def test_a_text_that_may_go_on_does(llm, more):
    [result] = generate(llm, StructuredOutput("regex", "[a-z]*"), max_tokens=15, **more)
    assert len(result.outputs[0].token_ids) == 15 and result.outputs[0].finish_reason is FinishReason.LENGTH
    assert re.fullmatch("[a-z]+", result.outputs[0].text)


def test_min_tokens_cannot_forbid_what_the_form_wants(llm):
    """The form allows nothing but a token that stop_token_ids keep out until min_tokens are there."""
    [letter] = llm.tokenizer.encode("x", add_special_tokens=False)
    [result] = generate(llm, StructuredOutput("regex", "x{3}"), stop_token_ids=(letter,), min_tokens=2)
    assert result.outputs[0].finish_reason is FinishReason.STOP


def test_a_stop_string_cuts_the_text(llm):
    [result] = generate(llm, FOX_FORM, stop=('"age',))
    sample = result.outputs[0]
    assert sample.finish_reason is FinishReason.STOP and sample.stop_reason == '"age'
    assert sample.text.startswith("{") and '"age' not in sample.text


def test_logprobs_are_the_models_own(llm):
    [free] = llm.generate("A fox", SamplingParams(temperature=0.0, max_tokens=1, logprobs=3), use_tqdm=False)
    [formed] = generate(llm, CODE, temperature=0.0, logprobs=3)
    first, plain = formed.outputs[0].logprobs[0], free.outputs[0].logprobs[0]
    assert [token_id for token_id, _ in first.top] == [token_id for token_id, _ in plain.top], "before the mask"
    # The second prompt goes on in the first one's blocks, so that its last rows were computed in other shapes.
    assert dict(first.top) == pytest.approx(dict(plain.top), abs=1e-4)
    assert first.token_id not in dict(first.top) and first.logprob < min(dict(first.top).values())


def test_biases_and_penalties_act_within_the_form(llm):
    digit = llm.tokenizer.encode("7", add_special_tokens=False)[0]
    output = StructuredOutput("regex", "[0-9]{6}")
    [result] = generate(llm, output, temperature=0.0, logit_bias={digit: 100.0})
    assert "7" in result.outputs[0].text and len(result.outputs[0].text) == 6
    [result] = generate(llm, output, temperature=0.0, repetition_penalty=50.0, max_tokens=12)
    assert re.fullmatch("[0-9]{6}", result.outputs[0].text)


def test_preempted_sequences_go_on_where_they_were(llm):
    """64 blocks of 16 tokens for 24 texts of up to 150 tokens: most are preempted on the way."""
    output = StructuredOutput("regex", "[a-z ]{300,320}\\.")
    params = [SamplingParams(seed=i, max_tokens=150, structured_output=output, ignore_eos=True) for i in range(24)]
    before = llm.driver.scheduler.num_preemptions
    together = llm.generate(["A fox"] * 24, params, use_tqdm=False)
    assert llm.driver.scheduler.num_preemptions > before
    for result in together:
        assert re.fullmatch(r"[a-z ]{0,320}\.?", result.outputs[0].text)
    [alone] = llm.generate(["A fox"], params[5:6], use_tqdm=False)
    assert alone.outputs[0].token_ids == together[5].outputs[0].token_ids


def test_a_bad_one_is_refused_before_anything_runs(llm):
    with pytest.raises(InvalidRequestError, match="invalid regex"):
        generate(llm, StructuredOutput("regex", "("))


async def test_the_death_of_a_worker_loses_no_form(monkeypatch):
    monkeypatch.setattr(engine.executor.recovery, "FIRST_BACKOFF", 0.02)
    driver = Driver(EngineConfig(dtype="float32", device="cpu", num_blocks=512, max_model_len=512))
    await driver.start()
    try:
        await asyncio.wait_for(driver.wait_ready(), 120)
        unprepared = request("no", [5, 6], structured_output=CODE)
        with pytest.raises(InvalidRequestError, match="prepare"):
            driver.generate(unprepared)
        output = StructuredOutput("regex", "[a-z ]{200,220}\\.")
        await driver.grammars.prepare(output)
        expected = await ask(driver, output, "quiet")
        assert all(re.fullmatch("[a-z ]{200,220}\\.", text) for [(text, *_)] in expected)
        task = asyncio.create_task(ask(driver, output, "disturbed"))
        killed = {None}
        for _ in range(2):
            await until(lambda: driver.phase == "ready" and driver.worker_pid not in killed and progressed(driver))
            killed.add(driver.worker_pid)
            os.kill(driver.worker_pid, signal.SIGKILL)
        assert await task == expected
        assert driver.stats.worker_restarts.values[()] == 2
    finally:
        await driver.stop()


async def ask(driver, output, name):
    params = {"max_tokens": 250, "structured_output": output, "temperature": 0.8}
    return await asyncio.gather(
        *[collect(driver.generate(request(f"{name}-{i}", [30 + i, 40], seed=i, **params))) for i in range(4)]
    )


def progressed(driver):
    """Every sequence has new tokens since it last waited, and none is near its end."""
    running = driver.scheduler.running
    return len(running) == 4 and all(seq.has_progressed and seq.num_generated_tokens > 5 for seq in running)
