"""Steps with drafts give the tokens, logprobs and counts of steps without, on a CPU and as a GPU runs them."""

import pytest

from engine.sampling_params import SamplingParams
from tests.engine.worker.lazy_queue import LazyQueue
from tests.engine.worker.mini_driver import GREEDY, PROMPTS, remove_all
from tests.engine.worker.speculation.draft_driver import LENGTH, DraftDriver, texts

PARAMS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=0.9, top_p=0.9, min_p=0.01),
    "top_k, logprobs": SamplingParams(temperature=0.8, top_k=20, logprobs=3),
    "penalties": SamplingParams(temperature=0.7, frequency_penalty=1.0, repetition_penalty=1.3, logprobs=1),
    "greedy penalties": SamplingParams(temperature=0.0, presence_penalty=1.5),
    "words, min_tokens": SamplingParams(temperature=0.5, bad_words=((1, 2), (5, 6, 7), (3,)), min_tokens=4),
}


def check(runner, params, known):
    tokens = {seq_id: [sample[0] for sample in samples] for seq_id, samples in known.items()}

    def propose(seq_id, place):
        """Right tokens, as many as the place says, then a wrong one; at most 8 rows with those of sequence 2."""
        right = tokens[seq_id][place : place + (3 - place) % (4 if seq_id == 1 else 2)]
        wrong = [] if len(right) == 3 else [(tokens[seq_id][min(place + len(right), LENGTH - 1)] + 1) % 90]
        return [*right, *wrong]

    found, lengths = texts(runner, params, propose)
    assert max(lengths) > 3 and min(lengths) == 1
    for seq_id, samples in known.items():
        assert [sample[0] for sample in found[seq_id]] == tokens[seq_id]
        assert [sample[1] for sample in found[seq_id]] == pytest.approx([sample[1] for sample in samples], abs=1e-4)


@pytest.mark.parametrize("name", PARAMS)
def test_tokens_with_drafts_are_those_without(cpu_runner, name):
    known, _ = texts(cpu_runner, PARAMS[name], lambda seq_id, place: [])
    check(cpu_runner, PARAMS[name], known)


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("graphs", [True, False])
def test_tokens_with_drafts_on_a_gpu_are_those_of_the_cpu(make_runner, cpu_runner, name, graphs):
    known, _ = texts(cpu_runner, PARAMS[name], lambda seq_id, place: [])
    check(make_runner(LazyQueue(), graphs=graphs), PARAMS[name], known)


def test_a_draft_beside_a_prompt(cpu_runner, hf_greedy):
    """The step has a chunk, so that it is laid out by sequence; the draft is right."""
    remove_all(cpu_runner)
    driver = DraftDriver(cpu_runner)
    driver.add(1, PROMPTS[1])
    driver.step({1: 5})
    driver.add(2, PROMPTS[2])
    driver.drafts = {1: hf_greedy(PROMPTS[1], 4)[1:]}
    driver.step({1: 1, 2: 21})
    driver.step({1: 1, 2: 1})
    assert driver.lengths == [4]
    for seq_id in (1, 2):
        assert driver.output(seq_id) == hf_greedy(PROMPTS[seq_id], len(driver.output(seq_id)))
