"""LLM against a real Driver and a real process whose device is FakeDevice."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError, EngineError, InvalidRequestError, ModelError
from engine.llm import LLM
from engine.outputs import FinishReason
from engine.sampling_params import BeamSearchParams, SamplingParams
from engine.structured_output import StructuredOutput
from tests.checkpoints import save_fake_checkpoint
from tests.engine.scheduling.beam_loop import expected_hypotheses

ROOT = Path(__file__).parents[2]


def open_llm(folder: Path, *worker_options: str, **settings) -> LLM:
    command = (sys.executable, "-m", "tests.fake_worker", *worker_options)
    config = EngineConfig(model=str(folder), load_format="dummy", **settings)
    return LLM.from_config(config, worker_command=command)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save_fake_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(checkpoint):
    with open_llm(checkpoint) as llm:
        yield llm


def greedy(max_tokens: int = 8, **more) -> SamplingParams:
    return SamplingParams(temperature=0, seed=1, max_tokens=max_tokens, **more)  # FakeDevice draws from the seed


def test_results_are_whole_and_in_the_order_of_the_prompts(llm):
    prompts = ["a", "bb" * 40, "c", "dd" * 10]
    params = [greedy(12), greedy(1), greedy(7), greedy(2)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [output.prompt_token_ids for output in outputs] == [llm.tokenizer.encode(prompt) for prompt in prompts]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [12, 1, 7, 2]
    for output in outputs:
        (sample,) = output.outputs
        assert output.finished and sample.finish_reason is FinishReason.LENGTH
        assert sample.text == llm.tokenizer.decode(sample.token_ids)
        assert output.num_generated_tokens == len(sample.token_ids)


def test_results_are_the_same_when_the_worker_dies_on_the_way(llm, checkpoint, tmp_path):
    prompts, params = ["a", "bb" * 40, "c", "dd" * 10], greedy(30)
    calm = llm.generate(prompts, params, use_tqdm=False)
    options = ["--die-at-step", "12", "--faults-in", "1,2", "--lives", str(tmp_path / "lives")]
    with open_llm(checkpoint, *options) as shaken:
        outputs = shaken.generate(prompts, params, use_tqdm=False)
    assert [output.outputs for output in outputs] == [output.outputs for output in calm]
    assert (tmp_path / "lives").stat().st_size == 3


def test_every_shape_of_prompt_is_the_same_request(llm):
    ids = llm.tokenizer.encode("hello")
    singles = ["hello", ids, tuple(ids), {"prompt": "hello"}, {"prompt_token_ids": ids}]
    results = [llm.generate(prompt, greedy(), use_tqdm=False) for prompt in singles]
    assert all(len(result) == 1 for result in results)
    assert len({result[0].outputs[0].token_ids for result in results}) == 1
    together = llm.generate(singles, greedy(), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in together] == [r[0].outputs[0].token_ids for r in results]
    assert [output.prompt for output in together] == ["hello", None, None, "hello", None]


def test_defaults_and_an_empty_list(llm):
    assert llm.generate([], use_tqdm=False) == []
    (output,) = llm.generate("x", use_tqdm=False)
    assert output.num_generated_tokens == SamplingParams().max_tokens


def test_more_prompts_than_may_be_in_flight(llm, monkeypatch):
    monkeypatch.setattr("engine.llm.MAX_IN_FLIGHT", 5)
    outputs = llm.generate([f"prompt {i}" for i in range(40)], greedy(3), use_tqdm=False)
    assert [output.prompt for output in outputs] == [f"prompt {i}" for i in range(40)]
    assert llm.driver.num_live_requests == 0


def test_several_samples_of_a_prompt(llm):
    (output,) = llm.generate("x", SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=9), use_tqdm=False)
    assert [sample.index for sample in output.outputs] == [0, 1, 2]
    assert [len(sample.token_ids) for sample in output.outputs] == [9, 9, 9]
    assert output.num_generated_tokens == 27


def test_logprobs_cover_every_token(llm):
    with_logprobs, without = llm.generate(["x", "x"], [greedy(4, logprobs=1), greedy(4)], use_tqdm=False)
    assert [entry.token_id for entry in with_logprobs.outputs[0].logprobs] == list(with_logprobs.outputs[0].token_ids)
    assert without.outputs[0].logprobs is None


def test_chat_uses_the_template(llm):
    conversation = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(conversation, greedy(), use_tqdm=False)
    assert one.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert one.prompt_token_ids == llm.tokenizer.encode(one.prompt, add_special_tokens=False)
    two = llm.chat([conversation, conversation], greedy(), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in two] == [one.outputs[0].token_ids] * 2
    (own,) = llm.chat(conversation, greedy(), use_tqdm=False, chat_template="{{ messages[0].content }}!")
    assert own.prompt == "hi!"


def test_the_progress_bar_counts_requests_and_tokens(llm, capsys):
    llm.generate(["a", "b"], greedy(4))
    bar = capsys.readouterr().err
    assert "2/2" in bar and "output tok/s" in bar
    llm.generate(["a", "b"], greedy(4), use_tqdm=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "prompts",
    [
        5,
        None,
        [None],
        [[]],
        [["a"]],
        {"text": "a"},
        {"prompt": "a", "multi_modal_data": {}},
        {"prompt": 3},
        [[1, True]],
    ],
)
def test_what_is_no_prompt_is_refused(llm, prompts):
    with pytest.raises(InvalidRequestError, match=r"^prompts") as caught:
        llm.generate(prompts, use_tqdm=False)
    assert caught.value.param == "prompts"


def test_an_impossible_prompt_is_named_and_nothing_stays_behind(llm):
    with pytest.raises(InvalidRequestError, match=r"^prompts\[1\]: .*maximum context length is 512"):
        llm.generate(["a", "b" * 600, "c"], greedy(), use_tqdm=False)
    with pytest.raises(InvalidRequestError, match=r"^prompts\[0\]: .*token id 99999"):
        llm.generate([[1, 99999]], greedy(), use_tqdm=False)
    assert llm.driver.num_live_requests == 0
    assert len(llm.generate("still works", greedy(), use_tqdm=False)) == 1


@pytest.mark.parametrize("params", [[], [SamplingParams()] * 3, [{}, {}], [SamplingParams(), None], 5, {}, "x"])
def test_sampling_params_must_match_the_prompts(llm, params):
    with pytest.raises(InvalidRequestError, match="one per prompt"):
        llm.generate(["a", "b"], params, use_tqdm=False)


@pytest.mark.parametrize("messages", ["Hello", 5, None, ["Hello"], [[]], {"role": "user", "content": "Hello"}, [[5]]])
def test_what_is_no_conversation_is_refused(llm, messages):
    with pytest.raises(InvalidRequestError, match=r"^messages must be a list of {") as caught:
        llm.chat(messages, greedy(), use_tqdm=False)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "wrong",
    [
        {"stop": 5},
        {"stop_token_ids": 5},
        {"bad_words": "word"},
        {"bad_words": [5]},
        {"allowed_token_ids": 5},
        {"logit_bias": [5]},
    ],
    ids=str,
)
def test_sampling_params_that_are_no_lists_are_named(wrong):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**wrong)
    assert caught.value.param == next(iter(wrong))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be an integer from 1 to 64"),
        ({"enable_prefix_cache": True}, "did you mean enable_prefix_caching?"),
        ({"trust_remote_code": True}, "code from a checkpoint is never run"),
    ],
)
def test_settings_are_checked_before_anything_starts(settings, message):
    with pytest.raises(ConfigError) as caught:
        LLM(model="anything", **settings)
    assert message in str(caught.value)


def test_accepted_settings_reach_the_engine(checkpoint):
    settings = {"enable_prefix_caching": False, "tensor_parallel_size": 1, "gpu_memory_utilization": 0.5}
    with open_llm(checkpoint, **settings, num_blocks=17) as llm:
        assert not llm.driver.scheduler.block_manager.enable_prefix_caching
        assert llm.driver.model.num_blocks == 17
        assert llm.config.gpu_memory_utilization == 0.5


def test_a_model_that_cannot_be_loaded_leaves_no_thread_and_no_process(checkpoint):
    before = set(threading.enumerate())
    with pytest.raises(ModelError, match="the shards are damaged"):
        open_llm(checkpoint, "--fail-loading", "the shards are damaged")
    assert set(threading.enumerate()) <= before
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    assert not [pid for pid in children if b"fake_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_after_close_it_says_so(checkpoint):
    llm = open_llm(checkpoint)
    pid = llm.driver.worker_pid
    llm.close()
    llm.close()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(EngineError, match="closed"):
        llm.generate("x")


def test_a_request_that_fails_alone_keeps_what_it_had(checkpoint):
    # FakeDevice cannot go on after this token, which only the second sequence generates.
    with open_llm(checkpoint) as llm:
        outputs = llm.generate(["P", "Q", "R"], greedy(20), use_tqdm=False)
        tokens = [set(output.outputs[0].token_ids) for output in outputs]
    bad_token = next(iter(tokens[1] - tokens[0] - tokens[2]))
    with open_llm(checkpoint, "--fail-on-token", str(bad_token)) as llm:
        again = llm.generate(["P", "Q", "R"], greedy(20), use_tqdm=False)
        assert [output.outputs[0].finish_reason for output in again] == ["length", "error", "length"]
        whole, part = outputs[1].outputs[0].token_ids, again[1].outputs[0].token_ids
        assert part == whole[: len(part)] and len(part) < len(whole)
        with pytest.raises(EngineError, match="every request failed"):
            llm.generate("Q", greedy(20), use_tqdm=False)


def test_ctrl_c_aborts_the_requests_and_leaves_the_engine_usable(checkpoint):
    with open_llm(checkpoint, "--step-seconds", "0.02") as llm:
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], greedy(400), use_tqdm=False)
        assert time.monotonic() - begin < 4
        assert llm.driver.num_live_requests == 0
        assert len(llm.generate("c", greedy(2), use_tqdm=False)) == 1


SCRIPT = """
from engine import LLM, SamplingParams
from engine.scheduling.beam_search import BeamSearchParams
from engine.config import EngineConfig
import sys
command = (sys.executable, "-m", "tests.fake_worker")
llm = LLM.from_config(EngineConfig(model={model!r}, load_format="dummy"), worker_command=command)
print(llm.generate("hello", SamplingParams(max_tokens=3), use_tqdm=False)[0].num_generated_tokens)
print(llm.driver.worker_pid)
{ending}
"""


@pytest.mark.parametrize("ending", ["", "raise SystemExit(0)", "import asyncio; asyncio.run(asyncio.sleep(0))"])
def test_a_script_without_main_guard_ends_by_itself_and_takes_the_worker_along(checkpoint, ending):
    script = textwrap.dedent(SCRIPT).format(model=str(checkpoint), ending=ending)
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    count, pid = done.stdout.split()
    assert count == "3"
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()


async def test_it_works_where_an_event_loop_runs_already(checkpoint):
    """As in a notebook cell."""
    with open_llm(checkpoint) as llm:
        assert llm.generate("x", greedy(2), use_tqdm=False)[0].finished


def test_beam_search_returns_the_best_first_and_their_scores(llm):
    params = BeamSearchParams(beam_width=3, max_tokens=7, length_penalty=0.5)
    outputs = llm.beam_search(["hello", {"prompt_token_ids": [104, 105]}], params, use_tqdm=False)
    for output, prompt in zip(outputs, (list(b"hello"), [104, 105]), strict=True):
        wanted = expected_hypotheses(prompt, params, 7)
        assert [sample.token_ids for sample in output.outputs] == [ids for ids, _ in wanted]
        scores = [sample.cumulative_logprob / len(sample.token_ids) ** 0.5 for sample in output.outputs]
        assert scores == pytest.approx([score for _, score in wanted])
        assert all(sample.finish_reason in ("stop", "length") for sample in output.outputs)
        assert output.num_generated_tokens == sum(len(ids) for ids, _ in wanted)


def test_beam_search_beside_generate_and_its_errors(checkpoint):
    with open_llm(checkpoint, num_blocks=6, max_num_seqs=8) as llm:
        params = BeamSearchParams(beam_width=8, max_tokens=64, ignore_eos=True)
        with pytest.raises(EngineError, match="every request failed"):
            llm.beam_search("hello", params, use_tqdm=False)
        with pytest.raises(InvalidRequestError, match=r"prompts\[0\]: n \(the beam width\) is 9"):
            llm.beam_search("hello", BeamSearchParams(beam_width=9), use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="BeamSearchParams"):
            llm.beam_search("hello", greedy(), use_tqdm=False)
        assert len(llm.generate("x", greedy(3), use_tqdm=False)) == 1
        blocks = llm.driver.scheduler.block_manager
        assert len(blocks.free_blocks) == blocks.num_blocks


def test_an_encoder_says_that_it_generates_nothing_whatever_form_is_asked_for(checkpoint):
    with open_llm(checkpoint, "--encoder") as llm:
        for form in (None, StructuredOutput("regex", "[a-z]+")):
            with pytest.raises(InvalidRequestError, match="embeds text"):
                llm.generate("hello", greedy(structured_output=form), use_tqdm=False)


def test_a_hypothesis_that_cannot_be_computed_ends_its_search(checkpoint):
    params = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
    with open_llm(checkpoint, "--fail-on-token", str(ord("q"))) as llm:
        outputs = llm.beam_search([f"prompt {i}" for i in range(12)], params, use_tqdm=False)
        failed = [output.outputs[0].finish_reason == "error" for output in outputs]
        assert any(failed) and not all(failed)
        for output, has_failed in zip(outputs, failed, strict=True):
            if not has_failed:
                wanted = expected_hypotheses(output.prompt_token_ids, params, 4)
                assert [sample.token_ids for sample in output.outputs] == [ids for ids, _ in wanted]
        blocks = llm.driver.scheduler.block_manager
        assert len(blocks.free_blocks) == blocks.num_blocks and not llm.driver.num_live_requests


@pytest.mark.parametrize(
    "wrong",
    [
        {"beam_width": 0},
        {"beam_width": 65},
        {"beam_width": 2.0},
        {"length_penalty": float("nan")},
        {"length_penalty": 10.5},
        {"early_stopping": "always"},
        {"early_stopping": 1},
        {"max_tokens": 0},
        {"min_tokens": 17},
    ],
    ids=str,
)
def test_wrong_beam_search_params_are_named(wrong):
    with pytest.raises(InvalidRequestError) as caught:
        BeamSearchParams(**{"beam_width": 2} | wrong)
    assert caught.value.param == next(iter(wrong))


def test_what_can_be_refused_is_refused_before_anything_runs(checkpoint):
    with open_llm(checkpoint) as llm:
        with pytest.raises(InvalidRequestError, match=r"prompts\[2000\]: This model's maximum context length"):
            llm.generate(["hi"] * 2000 + [[1] * 5000], greedy(2), use_tqdm=False)
        assert llm.driver.stats.generation_tokens.values[()] == 0
        with pytest.raises(InvalidRequestError, match=r"prompts\[1\] is not Unicode"):
            llm.generate(["hi", "\ud800"], greedy(2), use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="must be a StructuredOutput"):
        SamplingParams(structured_output={"regex": "a"})
