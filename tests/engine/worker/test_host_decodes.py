"""Decode steps whose inputs a compiled kernel makes, beside the same steps with inputs made in numpy."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.sampling_params import SamplingParams
from engine.worker.batch.host_decodes import HostDecodes
from engine.worker.load import load_runner
from kernels.dispatch import cpu_kernels
from tests.engine.worker.mini_driver import CONFIG, GREEDY, PROMPTS, ColumnDriver
from tests.engine.worker.speculation.draft_driver import LENGTH, texts

COMPILED = cpu_kernels() is not None and cpu_kernels().features.MULTIPLIES_PAIRS
pytestmark = pytest.mark.skipif(not COMPILED, reason="needs pairs of bf16")
SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3}
DRAWN = SamplingParams(temperature=1.0)
PLAIN = SamplingParams(temperature=0.8, top_p=0.9, min_p=0.01)
FILTERED = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.1, frequency_penalty=0.2)
OTHER = SamplingParams(temperature=0.8, logit_bias={7: 0.5})
STEPS = [(1, 2, 3), (1, 2, 3), (2,), (3, 1), (1, 2, 3), (1, 3), (2, 1), *[(1, 2, 3)] * 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("recordable")
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


def loaded(folder, monkeypatch, by_kernel):
    """(a runner, whose steps are prepared by the kernel or in numpy; the number of rows of each step of decodes that
    the kernel prepared, 0 for others)."""
    built, build = [], HostDecodes.build

    def count(self, rows, drafts):
        inputs = build(self, rows, drafts) if by_kernel else None
        built.append(0 if inputs is None else len(inputs.rows))
        return inputs

    monkeypatch.setattr(HostDecodes, "build", count)
    runner = load_runner(replace(CONFIG, dtype="bfloat16"), folder, [2], lambda phase: None)[0]
    built.clear()
    return runner, built


def outputs(folder, params, monkeypatch, by_kernel):
    """(the tokens of three sequences, of which one leaves and comes back; how many steps the kernel prepared)."""
    runner, built = loaded(folder, monkeypatch, by_kernel)
    driver = ColumnDriver(runner, ahead=0)
    for seq_id in (1, 2, 3):
        driver.add(seq_id, PROMPTS[seq_id], params[seq_id])
    driver.step({seq_id: len(PROMPTS[seq_id]) for seq_id in (1, 2, 3)})
    for number, seq_ids in enumerate(STEPS):
        if number == 8:
            driver.remove(2)
            driver.start(2)
            driver.step({2: len(driver.tokens[2])})
        driver.step(dict.fromkeys(seq_ids, 1))
    monkeypatch.undo()
    return [driver.output(seq_id) for seq_id in (1, 2, 3)], sum(map(bool, built))


@pytest.mark.parametrize(
    "params",
    [
        dict.fromkeys((1, 2, 3), GREEDY),
        {1: GREEDY, 2: DRAWN, 3: PLAIN},
        {1: DRAWN, 2: FILTERED, 3: SamplingParams(temperature=0.0, presence_penalty=1.5)},
        {1: DRAWN, 2: FILTERED, 3: OTHER},
    ],
    ids=["greedy", "plain", "filtered", "others"],
)
def test_the_kernel_prepares_every_step_and_changes_no_token(folder, monkeypatch, params):
    expected, none = outputs(folder, params, monkeypatch, False)
    found, prepared = outputs(folder, params, monkeypatch, True)
    assert found == expected and len(set(expected[0])) > 4
    assert none == 0 and prepared == len(STEPS)


@pytest.mark.parametrize("params", [GREEDY, PLAIN, FILTERED, OTHER], ids=["greedy", "plain", "filtered", "others"])
def test_the_kernel_prepares_steps_with_drafts_and_changes_no_token(folder, monkeypatch, params):
    runner, built = loaded(folder, monkeypatch, False)
    expected, none = texts(runner, params, lambda seq_id, place: [])
    assert set(none) <= {1} and not any(built) and len({token for token, *_ in expected[1]}) > 3
    monkeypatch.undo()

    def propose(seq_id, place):
        """Some right tokens, then a wrong one."""
        right = [token for token, *_ in expected[seq_id][place : place + (seq_id + place) % 4]]
        return [*right, (expected[seq_id][min(place + len(right), LENGTH - 1)][0] + 1) % SIZES["vocab_size"]]

    runner, built = loaded(folder, monkeypatch, True)
    alone = []
    decode = runner._decode_tokens
    monkeypatch.setattr(runner, "_decode_tokens", lambda *args: alone.append(decode(*args)) or alone[-1])
    found, lengths = texts(runner, params, propose)
    assert found == expected and max(lengths) == 4
    assert min(built) > 2, "two decodes and at least a token of a draft"
    assert {tokens is None for tokens in alone} == {params is OTHER}, "one program computed the tokens"
