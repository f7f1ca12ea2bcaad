"""The whole engine with the bundled model in bf16: on a CUDA device, else on the CPU. `make gpu-check` runs it."""

import pytest
import torch

pytest.importorskip("msgspec", reason="msgspec is not installed: make gpu-wheels fetches it")

from engine.checkpoint.locate import BUNDLED_MODEL
from engine.llm import LLM
from engine.sampling_params import SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = ["Once upon a time", "The little fox", "What is the capital of France?", "One day, a big bear"]
NUM_TOKENS = 64
MAX_GAP = 0.25  # logits: bf16 may turn two choices around that fp32 finds this close


@pytest.fixture(scope="module")
def oracle():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32).eval()


def test_greedy_tokens_are_those_of_transformers_in_fp32(oracle):
    """The oracle, given our tokens, would have chosen each of them, or nearly: a longer text never has to be equal."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(device=DEVICE, dtype="bfloat16", num_blocks=128) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        again = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert again[0].outputs[0].token_ids[:8] == outputs[0].outputs[0].token_ids[:8], "greedy text is not stable"
    equal = 0
    for output in outputs:
        prompt, tokens = list(output.prompt_token_ids), torch.tensor(output.outputs[0].token_ids)
        assert len(tokens) == NUM_TOKENS
        with torch.no_grad():
            logits = oracle(torch.tensor([prompt + tokens.tolist()])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, tokens[:, None])[:, 0]
        assert (logits.amax(-1) - chosen).max() < MAX_GAP
        equal += int((logits.argmax(-1) == tokens).sum())
    assert equal >= 0.97 * NUM_TOKENS * len(PROMPTS)


def test_prompt_logprobs_are_those_of_transformers_in_fp32(oracle):
    """In chunks, and twice, since nothing of a prompt that is scored may come from the prefix cache."""
    text = "Once upon a time there was a small fox who lived in a hollow log by the stream. " * 12
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=3)
    with LLM(device=DEVICE, dtype="bfloat16", num_blocks=128, max_num_batched_tokens=64) as llm:
        first, again = (llm.generate(text, params, use_tqdm=False)[0] for _ in range(2))
    ids = first.prompt_token_ids
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    for output in (first, again):
        assert len(output.prompt_logprobs) == len(ids) > 3 * 64 and output.prompt_logprobs[0] is None
        found = torch.tensor([token.logprob for token in output.prompt_logprobs[1:]])
        difference = (found - expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]).abs()
        assert difference.mean() < 0.05 and difference.max() < 2 * MAX_GAP
        for token, row in zip(output.prompt_logprobs[1:], expected, strict=True):
            assert row.max() - row[token.top[0][0]] < MAX_GAP
            assert token.rank > 3 or dict(token.top).get(token.token_id, token.top[-1][1]) == token.logprob
