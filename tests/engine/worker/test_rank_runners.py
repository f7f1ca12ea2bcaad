"""Runners of a tensor-parallel group, whose ranks are threads here: what only one rank measures changes no token."""

import re
import threading

import pytest
import torch

from engine.models.families import read_model_config
from engine.sampling_params import SamplingParams
from engine.structured_output import StructuredOutput, Vocabulary
from engine.worker.device.host import StepLimits
from engine.worker.model_runner import ModelRunner, RunnerParts
from engine.worker.sampling import grammar_ends, grammar_rows, step_sampler
from tests.checkpoints import byte_tokenizer
from tests.engine.models.parallel.thread_ranks import load_shards, together
from tests.engine.worker.mini_driver import CONFIG, PROMPTS, MiniDriver
from tests.engine.worker.runners import zeroed_kv_caches

EOS = 2
VOCABULARY = Vocabulary(byte_tokenizer().to_str(), 96, [EOS])
CODE = StructuredOutput("regex", "[A-Z]{3}-[0-9]{4}")
SCHEMA = StructuredOutput("json_schema", '{"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 2}')


class SlowRank:
    """`time` of a module: one rank's thread uses up every limit of processor time, the others use none."""

    def __init__(self, slow):
        self.slow, self.now, self.thread = slow, 0.0, threading.local()

    def thread_time(self):
        self.now += 100.0 * (self.thread.rank == self.slow)
        return self.now if self.thread.rank == self.slow else 0.0


def run_ranks(model_dir, clock, num_steps, **params):
    """(text, failures) on each of two ranks, of a sequence that every rank samples by itself."""

    def work(decoder):
        clock.thread.rank = decoder.operators.ranks.rank
        runner = ModelRunner(
            RunnerParts(
                decoder=decoder,
                kv_caches=zeroed_kv_caches(decoder.config),
                limits=StepLimits(8, 2048),
                max_model_len=128,
                block_size=CONFIG.block_size,
                eos_token_ids=[EOS],
                device=torch.device("cpu"),
            )
        )
        runner.sampler.handle_message(VOCABULARY, lambda answer: None)
        driver = MiniDriver(runner)
        driver.add(1, PROMPTS[1], SamplingParams(temperature=1.0, **params))
        failed = {}
        for count in (len(PROMPTS[1]), *[1] * num_steps):
            failed |= driver.step({1: count}).failed
            while runner.use_idle_time():
                pass
        return bytes(driver.output(1)), failed

    return together(work, load_shards(model_dir, read_model_config(model_dir), 2))


@pytest.mark.parametrize("slow", [0, 1])
def test_the_first_rank_alone_ends_a_grammar_that_takes_too_long(model_dir, monkeypatch, slow):
    clock = SlowRank(slow)
    monkeypatch.setattr(grammar_rows, "time", clock)
    first, second = run_ranks(model_dir, clock, 8, structured_output=CODE)
    assert second[1] == {}
    if slow == 0:
        assert "too long to match" in first[1][1]
        assert first[0] == second[0][1:], "the token of the step that failed is in no result"
    else:
        assert first == second and re.fullmatch(CODE.text, first[0][:8].decode()) and first[0][8] == EOS


@pytest.mark.parametrize("slow", [0, 1])
def test_ranks_lead_a_json_text_to_the_same_end(model_dir, monkeypatch, slow):
    """A rank that gives up its search for an end lets other tokens pass."""
    clock = SlowRank(slow)
    monkeypatch.setattr(grammar_ends, "time", clock)
    first, second = run_ranks(model_dir, clock, 11, structured_output=SCHEMA, max_tokens=12)
    assert first == second and first[1] == {}
    if slow == 1:
        assert re.fullmatch(r"\[\s*[123](\s*,\s*[123])+\s*\]\x02.*", first[0].decode(), re.DOTALL), first[0]


def test_a_rank_whose_sampling_raises_ends(model_dir, monkeypatch):
    """Tried again row by row, the rank would collect logits that no other rank sends."""
    clock, sample = SlowRank(None), step_sampler.sample

    def short_of_memory(*given):
        if clock.thread.rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return sample(*given)

    monkeypatch.setattr(step_sampler, "sample", short_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        run_ranks(model_dir, clock, 2)
