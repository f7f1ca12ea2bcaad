"""Masks from the matchers of a runner's rows: on a CPU, on a queue that is behind, after preemption, in failure."""

import re
import threading

import numpy as np
import pytest
import torch

import engine.grammars.compiler
from engine.executor.step import GrammarPrepared, PrepareGrammar
from engine.grammars.compiler import Compiler, GrammarError
from engine.sampling_params import SamplingParams
from engine.structured_output import NOT_MATCHED, StructuredOutput, Vocabulary
from engine.worker.batch.input_batch import SampleTargets
from engine.worker.sampling import grammar_rows
from engine.worker.sampling.grammar_cache import GrammarCache
from engine.worker.sampling.grammar_rows import GrammarRows
from tests.checkpoints import byte_tokenizer
from tests.engine.worker.lazy_queue import LazyQueue
from tests.engine.worker.mini_driver import PROMPTS, ColumnDriver, MiniDriver, remove_all

EOS = 2  # the model has 96 tokens, which are bytes; its tokenizer has 260
VOCABULARY = Vocabulary(byte_tokenizer().to_str(), 96, [EOS])
CODE = StructuredOutput("regex", "[A-Z]{3}-[0-9]{4}")
OTHER = StructuredOutput("regex", "[0-9]+(,[0-9]+)*")


def asking(output=CODE, **params):
    return SamplingParams(**({"temperature": 0.0, "structured_output": output} | params))


def text(token_ids):
    return bytes(token_ids).decode()


@pytest.fixture
def runner(cpu_runner):
    cpu_runner.sampler.grammars.cache.set_vocabulary(VOCABULARY)
    yield cpu_runner
    remove_all(cpu_runner)


def run(driver, num_steps, first=None):
    """All sequences of the driver, one token a step after their prompts."""
    driver.step(first or {seq_id: len(tokens) for seq_id, tokens in driver.tokens.items()})
    for _ in range(num_steps):
        driver.step(dict.fromkeys(driver.tokens, 1))


def test_a_row_keeps_to_its_form_and_its_neighbour_does_not(runner, hf_greedy):
    driver = MiniDriver(runner)
    driver.add(1, PROMPTS[1], asking())
    driver.add(2, PROMPTS[2])
    run(driver, 8)
    assert re.fullmatch(CODE.text, text(driver.output(1)[:8])) and driver.output(1)[8] == EOS
    assert driver.output(2) == hf_greedy(PROMPTS[2], 9)


def test_it_is_the_best_that_the_form_allows(runner, hf_model):
    driver = MiniDriver(runner)
    driver.add(1, PROMPTS[1], asking())
    run(driver, 7)
    assert len(driver.output(1)) == 8
    tokens = list(PROMPTS[1])
    for token in driver.output(1):
        place = len(tokens) - len(PROMPTS[1])
        allowed = list(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ" if place < 3 else b"-" if place == 3 else b"0123456789")
        logits = hf_model(torch.tensor([tokens])).logits[0, -1]
        assert token == allowed[int(logits[allowed].argmax())]
        tokens.append(token)


@pytest.mark.parametrize("more", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 3, "frequency_penalty": 1.0}])
def test_a_sequence_that_comes_back_goes_on_where_it_was(runner, more):
    """Its tokens come with it: after preemption, or to another Worker."""
    whole = MiniDriver(runner)
    whole.add(1, PROMPTS[1], asking(OTHER, **more))
    run(whole, 11)
    whole.remove(1)
    broken = MiniDriver(runner)
    broken.removed = [1]
    broken.add(1, PROMPTS[1], asking(OTHER, **more))
    run(broken, 4)
    broken.remove(1)
    broken.start(1)
    run(broken, 6, {1: len(PROMPTS[1]) + 5})
    assert broken.output(1) == whole.output(1)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("more", [{}, {"temperature": 1.0, "presence_penalty": 0.5}])
def test_a_queue_that_is_behind_gives_the_same(make_runner, runner, hf_greedy, ahead, more):
    """On a GPU the token before is still on its way when a step is launched: the masks wait for it and for no other."""
    here = MiniDriver(runner)
    gpu_runner = make_runner(LazyQueue())
    gpu_runner.sampler.grammars.cache.set_vocabulary(VOCABULARY)
    there = ColumnDriver(gpu_runner, ahead=ahead)
    for driver in (here, there):
        driver.add(1, PROMPTS[1], asking(**more))
        driver.add(2, PROMPTS[2])
        driver.add(3, PROMPTS[3], asking(OTHER, **more))
        run(driver, 8)
    there.take()
    assert re.fullmatch(CODE.text, text(there.output(1)[:8])) and there.output(1)[8] == EOS
    assert there.output(2) == hf_greedy(PROMPTS[2], 9)
    assert {i: there.output(i) for i in (1, 2, 3)} == {i: here.output(i) for i in (1, 2, 3)}


def test_steps_without_a_form_wait_for_nothing(make_runner):
    queue = LazyQueue()
    gpu_runner = make_runner(queue)
    driver = ColumnDriver(gpu_runner, ahead=1)
    driver.add(1, PROMPTS[1])
    run(driver, 2)
    done = queue.num_done
    gpu_runner.launch(driver.plan({1: 1}))
    assert queue.waiting and queue.num_done == done


def test_a_row_that_fails_fails_alone(runner, hf_greedy, monkeypatch):
    driver = MiniDriver(runner)
    driver.add(1, PROMPTS[1], asking())
    driver.add(2, PROMPTS[2], asking(OTHER))
    driver.step({1: len(PROMPTS[1]), 2: len(PROMPTS[2])})
    runner.batch.token_ids[runner.batch.row_of[1], len(PROMPTS[1])] = 1  # no letter
    result = driver.step({1: 1, 2: 1})
    assert list(result.failed) == [1] and result.failed[1].startswith(NOT_MATCHED)
    assert [sample.seq_id for sample in result.samples] == [2]


def test_masks_are_made_while_there_is_no_plan(runner, monkeypatch):
    """All but those of the first step; the Driver takes in a result and plans meanwhile."""
    busy = MiniDriver(runner)
    busy.add(1, PROMPTS[1], asking(temperature=1.0))
    busy.add(2, PROMPTS[2], asking(OTHER))
    run(busy, 6)
    runner.sampler.grammars.drop(runner.batch.remove(1))
    runner.sampler.grammars.drop(runner.batch.remove(2))
    launching, late = False, []
    fill, launch = GrammarRows._fill, runner.launch

    def watched_fill(self, state, token_ids, position, words):
        late.append(position) if launching else None
        fill(self, state, token_ids, position, words)

    def watched_launch(plan):
        nonlocal launching
        while runner.use_idle_time():
            pass
        launching = True
        step = launch(plan)
        launching = False
        return step

    monkeypatch.setattr(GrammarRows, "_fill", watched_fill)
    monkeypatch.setattr(runner, "launch", watched_launch)
    idle = MiniDriver(runner)
    idle.add(1, PROMPTS[1], asking(temperature=1.0))
    idle.add(2, PROMPTS[2], asking(OTHER))
    run(idle, 6)
    assert {i: idle.output(i) for i in (1, 2)} == {i: busy.output(i) for i in (1, 2)}
    assert sorted(late) == sorted(len(PROMPTS[i]) for i in (1, 2))


def test_a_mask_that_fails_while_there_is_no_plan_fails_its_row_alone(runner):
    driver = MiniDriver(runner)
    driver.add(1, PROMPTS[1], asking())
    driver.add(2, PROMPTS[2], asking(OTHER))
    driver.step({1: len(PROMPTS[1]), 2: len(PROMPTS[2])})
    runner.batch.token_ids[runner.batch.row_of[1], len(PROMPTS[1])] = 1  # no letter
    while runner.use_idle_time():
        pass
    result = driver.step({1: 1, 2: 1})
    assert list(result.failed) == [1] and "refuses a token" in result.failed[1]
    assert [sample.seq_id for sample in result.samples] == [2]


def test_what_does_not_compile_fails_its_own_sequence(runner):
    driver = MiniDriver(runner)
    driver.add(1, PROMPTS[1], asking(StructuredOutput("regex", "(")))
    driver.add(2, PROMPTS[2], asking())
    result = driver.step({1: len(PROMPTS[1]), 2: len(PROMPTS[2])})
    assert "invalid regex" in result.failed[1] and [sample.seq_id for sample in result.samples] == [2]


def test_rows_that_leave_are_forgotten(runner):
    driver = MiniDriver(runner)
    driver.add(1, PROMPTS[1], asking())
    run(driver, 1)
    driver.remove(1)
    driver.add(2, PROMPTS[2])
    driver.step({2: len(PROMPTS[2])})
    assert not runner.sampler.grammars._rows


@pytest.mark.parametrize("length", [8, 40])
def test_idle_time_makes_no_mask_for_the_row_of_a_sequence_that_has_left(runner, length):
    """The next sequence of that row computes its prompt in two steps, and idle time lies between them."""
    driver = MiniDriver(runner)
    driver.add(1, PROMPTS[1], asking())
    run(driver, 4)
    row = runner.batch.row_of[1]
    driver.remove(1)
    driver.add(2, list(range(length)), asking())
    driver.step({2: 4})
    assert runner.batch.row_of[2] == row
    while runner.use_idle_time():
        pass
    driver.step({2: length - 4})
    for _ in range(8):
        driver.step({2: 1})
    assert re.fullmatch(CODE.text, text(driver.output(2)[:8])) and driver.output(2)[8] == EOS


# The rows alone.


def rows_of(output, tokens="", num_prompt=2, **params):
    """GrammarRows with one row, and what masks() is called with once `tokens` are there."""
    cache = GrammarCache()
    cache.set_vocabulary(VOCABULARY)
    rows = GrammarRows(cache, [EOS])
    rows.add(0, asking(output, **params), num_prompt)
    token_ids = np.zeros((1, 4096), np.int32)
    return rows, token_ids


def allowed(rows, token_ids, tokens, num_prompt=2):
    position = num_prompt + len(tokens)
    token_ids[0, num_prompt:position] = list(tokens)
    at = SampleTargets(np.array([7]), np.array([0]), np.array([position]))
    words, failed = rows.masks(at, np.array([0]), token_ids)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist()), failed


def test_ends_are_kept_out_while_there_is_something_else():
    rows, token_ids = rows_of(StructuredOutput("regex", "A*B?"), ignore_eos=True)
    assert allowed(rows, token_ids, b"AA") == ({*b"AB"}, {})
    assert allowed(rows, token_ids, b"AAB") == ({EOS}, {})
    rows, token_ids = rows_of(StructuredOutput("regex", "A*"), min_tokens=2, stop_token_ids=(5,))
    assert [allowed(rows, token_ids, b"A" * n)[0] for n in range(4)] == [{*b"A"}, {*b"A"}, {*b"A", EOS}, {*b"A", EOS}]


def test_after_the_end_anything_may_come():
    """A step that was sent before the end was known: its token is thrown away, and is no failure."""
    rows, token_ids = rows_of(StructuredOutput("regex", "A"))
    assert allowed(rows, token_ids, b"A") == ({EOS}, {})
    assert allowed(rows, token_ids, bytes([ord("A"), EOS]))[1] == {}
    assert allowed(rows, token_ids, bytes([ord("A"), EOS, 5]))[1] == {}


def test_states_that_run_out_are_renewed(monkeypatch):
    """The copies of a matcher share the states that they found, so a server's whole life would have one limit."""
    monkeypatch.setitem(engine.grammars.compiler.LIMITS, "max_lexer_states", 1500)
    output = StructuredOutput("regex", "(A|B)*A(A|B){12}")
    rows, token_ids = rows_of(output)
    renew, renewals = GrammarCache.renew, []
    monkeypatch.setattr(GrammarCache, "renew", lambda cache, output: renewals.append(output) or renew(cache, output))
    for sequence in range(4):
        tokens = np.random.default_rng(sequence).choice(list(b"AB"), 600).astype(np.uint8).tobytes()
        for n in range(0, 600, 20):
            options, failed = allowed(rows, token_ids, tokens[:n])
            assert not failed and options >= {*b"AB"}
        rows.drop(0)
        rows.add(0, asking(output), 2)
    assert renewals


def test_states_that_one_text_uses_up_end_it(monkeypatch):
    monkeypatch.setitem(engine.grammars.compiler.LIMITS, "max_lexer_states", 300)
    rows, token_ids = rows_of(StructuredOutput("regex", "(A|B)*A(A|B){12}"))
    tokens = np.random.default_rng(0).choice(list(b"AB"), 2000).astype(np.uint8).tobytes()
    options, failed = allowed(rows, token_ids, tokens)
    assert "too many states" in failed[7] and len(options) > 90


def test_what_matches_too_slowly_ends(monkeypatch):
    monkeypatch.setattr(grammar_rows, "FIRST_SECONDS", -1.0)
    rows, token_ids = rows_of(CODE)
    options, failed = allowed(rows, token_ids, b"")
    assert "too long to match" in failed[7] and len(options) > 90, "nobody sees its token"
    assert allowed(rows, token_ids, b"A")[1] == {}, "said once"


@pytest.fixture
def compiled(monkeypatch):
    """The outputs that were compiled, in turn."""
    original, found = Compiler.compile, []
    monkeypatch.setattr(Compiler, "compile", lambda self, output: found.append(output) or original(self, output))
    return found


def test_a_grammar_is_compiled_in_a_thread_and_kept(compiled):
    cache = GrammarCache()
    cache.set_vocabulary(VOCABULARY)
    answers, threads, done = [], [], threading.Event()

    def reply(message):
        answers.append(message)
        threads.append(threading.current_thread().name)
        if len(answers) == 2:
            done.set()

    cache.prepare(PrepareGrammar(CODE), reply)
    bad = StructuredOutput("regex", "(")
    cache.prepare(PrepareGrammar(bad), reply)
    assert done.wait(20) and threads[0].startswith("grammar")
    assert answers[0] == GrammarPrepared(CODE.digest(), "") and "invalid regex" in answers[1].error
    cache.start(CODE)
    assert compiled == [CODE, bad]
    with pytest.raises(GrammarError):
        cache.start(bad)
    assert compiled == [CODE, bad, bad]


def test_no_more_than_so_many_are_kept(monkeypatch, compiled):
    monkeypatch.setattr("engine.worker.sampling.grammar_cache.MAX_IN_WORKER", 2)
    cache = GrammarCache()
    cache.set_vocabulary(VOCABULARY)
    outputs = [StructuredOutput("regex", "A" * n) for n in (1, 2, 3)]
    for output in (*outputs, *outputs[1:]):
        cache.start(output)
    assert compiled == outputs
    cache.start(outputs[0])
    assert compiled == [*outputs, outputs[0]]


def test_a_tokenizer_larger_than_the_model():
    assert Compiler(VOCABULARY).num_words == -(-260 // 32)
    assert Compiler(Vocabulary(VOCABULARY.tokenizer_json, 1000, [EOS])).num_words == -(-1000 // 32)
