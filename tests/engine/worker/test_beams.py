"""Beam search on a real model, through the Scheduler and the ModelRunner, against transformers' generate()."""

import pytest
import torch

from engine.config import EngineConfig
from engine.memory.block_manager import BlockManager
from engine.memory.sequence import Sequence
from engine.sampling_params import BeamSearchParams, SamplingParams
from engine.scheduling.beam_group import begin_search
from engine.scheduling.scheduler import Scheduler
from engine.worker.load import load_runner

EOS = 2
STOPS = tuple(range(3, 96, 9))
PROMPTS = [[5, 6, 7, 8, 9], list(range(10, 31)), [91, 3] * 8]
CONFIG = EngineConfig(device="cpu", dtype="float32", block_size=8, num_blocks=96, max_num_seqs=24, cpu_threads=1)


@pytest.fixture(scope="module")
def runner(model_dir):
    return load_runner(CONFIG, model_dir, [EOS], lambda phase: None)[0]


def search(runner, prompts, params, num_blocks=96, **settings):
    """Run searches side by side; [(token_ids, score)] of each, best first."""
    settings = {"max_num_seqs": 24, "max_num_batched_tokens": 64} | settings
    scheduler = Scheduler(BlockManager(num_blocks, CONFIG.block_size), eos_token_ids=[EOS], **settings)
    groups = []
    for number, prompt in enumerate(prompts):
        limit = len(prompt) + params.max_tokens
        ids = range(number * params.beam_width, (number + 1) * params.beam_width)
        slots = [Sequence(i, prompt, SamplingParams(), seed=0, max_num_tokens=limit, arrival=i) for i in ids]
        groups.append(begin_search(params, slots, [EOS]))
        scheduler.add(slots[0])
    while (plan := scheduler.schedule()) is not None:
        result = runner.result(runner.launch(plan))
        assert not result.failed
        scheduler.update(result)
        scheduler.check_invariants()
    assert not scheduler.has_work
    for row in list(runner.batch.row_of):  # the next search begins with ids of its own
        runner.batch.remove(row)
    found = [
        [
            (slot.token_ids[slot.num_prompt_tokens :], result.score(params.length_penalty))
            for slot, result in zip(group.slots, group.results, strict=True)
        ]
        for group in groups
    ]
    return found, scheduler


@torch.inference_mode()
def transformers_search(model, prompt, params):
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens or None,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=None if params.ignore_eos else [EOS, *params.stop_token_ids],
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    ends = set() if params.ignore_eos else {EOS, *params.stop_token_ids}
    found = []
    for ids, score in zip(output.sequences[:, len(prompt) :].tolist(), output.sequences_scores.tolist(), strict=True):
        length = next((i + 1 for i, token_id in enumerate(ids) if token_id in ends), len(ids))
        found.append((ids[:length], score))
    return found


CASES = {
    "default": {},
    "early": {"early_stopping": True},
    "never": {"early_stopping": "never", "length_penalty": 1.5},
    "short": {"length_penalty": -0.5, "early_stopping": "never"},
    "sum": {"length_penalty": 0.0},
    "stop_tokens": {"stop_token_ids": STOPS, "length_penalty": 2.0},
    "min_tokens": {"stop_token_ids": STOPS, "min_tokens": 6},
    "ignore_eos": {"ignore_eos": True},
    "one_token": {"max_tokens": 1},
}


@pytest.mark.parametrize("width", [2, 4, 6])
@pytest.mark.parametrize("case", CASES)
def test_hypotheses_and_scores_are_those_of_transformers(runner, hf_model, width, case):
    params = BeamSearchParams(**({"beam_width": width, "max_tokens": 16} | CASES[case]))
    found, _ = search(runner, PROMPTS, params)
    for prompt, hypotheses in zip(PROMPTS, found, strict=True):
        wanted = transformers_search(hf_model, prompt, params)
        assert [ids for ids, _ in hypotheses] == [ids for ids, _ in wanted]
        assert [score for _, score in hypotheses] == pytest.approx([score for _, score in wanted], abs=1e-4)


def test_the_cases_end_in_every_way(runner):
    params = BeamSearchParams(beam_width=4, max_tokens=24, stop_token_ids=STOPS)
    found, _ = search(runner, PROMPTS, params)
    lengths = {len(ids) for hypotheses in found for ids, _ in hypotheses}
    assert min(lengths) < 24 and len(lengths) > 3


def test_preemption_changes_nothing(runner, hf_model):
    params = BeamSearchParams(beam_width=4, max_tokens=24, ignore_eos=True)
    found, scheduler = search(runner, PROMPTS, params, num_blocks=22, max_num_batched_tokens=24)
    assert scheduler.num_preemptions > 0
    for prompt, hypotheses in zip(PROMPTS, found, strict=True):
        assert [ids for ids, _ in hypotheses] == [ids for ids, _ in transformers_search(hf_model, prompt, params)]
