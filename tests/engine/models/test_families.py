"""Every family against transformers: logits in fp32 through the paged cache, and greedy text."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.models.decoder import Decoder
from engine.models.families import read_model_config
from engine.models.loading.load import load_model
from tests.engine.models.paged import PagedRunner, Sequence, greedy
from tests.engine.models.tiny_models import ALL_CASES, VOCAB, oracle_logits, save_model

PROMPT_LENGTHS = (1, 7, 33, 40)
TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}  # logits are of size 1 to 10


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    config = read_model_config(folder)
    return load_model(folder, config, dtype=dtype, device=torch.device("cpu"), load_format="auto", seed=0)


def make_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture(scope="module", params=ALL_CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Decoder]:
    """transformers' model and ours, loaded from what it saved."""
    folder = tmp_path_factory.mktemp(request.param)
    oracle = save_model(request.param, folder)
    return oracle, load(folder)


def test_logits_of_a_batch_of_prompts(pair: tuple[PreTrainedModel, Decoder]) -> None:
    oracle, model = pair
    prompts = make_prompts(*PROMPT_LENGTHS)
    sequences = [Sequence(prompt) for prompt in prompts]
    logits = PagedRunner(model).step([(s, len(s.token_ids)) for s in sequences])
    for prompt, ours in zip(prompts, logits, strict=True):
        assert ours.dtype == torch.float32 and ours.shape == (len(prompt), model.config.vocab_size)
        torch.testing.assert_close(ours, oracle_logits(oracle, prompt), **TOLERANCE)


def test_logits_of_chunks_mixed_with_decodes(pair: tuple[PreTrainedModel, Decoder]) -> None:
    """Three sequences go through in steps of different sizes, 1 being a decode; all logits are as in one pass."""
    oracle, model = pair
    sequences = [Sequence(prompt) for prompt in make_prompts(40, 33, 21)]
    runner = PagedRunner(model)
    collected: list[list[torch.Tensor]] = [[], [], []]
    plan = [(7, 1, 9), (1, 1, 9), (13, 16, 1), (1, 1, 1), (1, 14, 1), (17, 0, 0)]
    for sizes in plan:
        work = [(i, n) for i, n in enumerate(sizes) if n]
        for (i, _), logits in zip(work, runner.step([(sequences[i], n) for i, n in work]), strict=True):
            collected[i].append(logits)
    for sequence, parts in zip(sequences, collected, strict=True):
        assert sequence.num_computed == len(sequence.token_ids)
        torch.testing.assert_close(torch.cat(parts), oracle_logits(oracle, sequence.token_ids), **TOLERANCE)


def test_only_the_wanted_rows_of_the_last_layer_are_computed(pair: tuple[PreTrainedModel, Decoder]) -> None:
    """The same logits as with all rows, here and in the step after, which reads all keys and values."""
    _, model = pair
    prompts = [list(range(1, 14)), [5], [7, 3, 9]]
    whole, pruned = PagedRunner(model), PagedRunner(model)
    sequences = [[Sequence(list(p)) for p in prompts] for _ in range(2)]
    for counts in ([9, 1, 3], [4, 0, 0]):
        every, last = (
            runner.step([(s, n) for s, n in zip(own, counts, strict=True) if n], last_only=runner is pruned)
            for runner, own in zip((whole, pruned), sequences, strict=True)
        )
        for rows, row in zip(every, last, strict=True):
            torch.testing.assert_close(rows[-1:], row, rtol=1e-5, atol=1e-5)


def test_greedy_text_is_the_same(pair: tuple[PreTrainedModel, Decoder]) -> None:
    """The oracle, given our text, would have chosen every token of it: so its own greedy text is the same."""
    oracle, model = pair
    prompts = make_prompts(1, 5, 9, 16, 23)
    texts = greedy(PagedRunner(model), prompts, 64)
    for prompt, text in zip(prompts, texts, strict=True):
        choices = oracle_logits(oracle, prompt + text).argmax(-1).tolist()
        assert text == choices[len(prompt) - 1 : -1]
    assert len({token for text in texts for token in text}) >= 8, "an oracle that repeats itself proves little"


def test_longrope_past_the_trained_length(tmp_path: Path) -> None:
    """Where max_model_len asks for more than the trained length, all tokens are rotated with the long factors: as
    transformers does for a text of more than that length, 128 here."""
    oracle = save_model("phi3_longrope", tmp_path)
    config = read_model_config(tmp_path)
    assert config.max_position_embeddings == 128
    options = {"dtype": torch.float32, "device": torch.device("cpu"), "load_format": "auto", "seed": 0}
    long, short = (load_model(tmp_path, config, **options, max_model_len=n) for n in (300, 128))
    (prompt,) = make_prompts(200)
    expected = oracle_logits(oracle, prompt)
    for prompt_part in (prompt[:131], prompt):
        sequence = Sequence(prompt_part)
        (logits,) = PagedRunner(long).step([(sequence, len(prompt_part))])
        torch.testing.assert_close(logits, expected[: len(prompt_part)], **TOLERANCE)
    (unlike,) = PagedRunner(short).step([(Sequence(prompt[:128]), 128)])
    assert not torch.allclose(unlike, expected[:128], atol=1e-2)
    torch.testing.assert_close(unlike, oracle_logits(oracle, prompt[:128]), **TOLERANCE)
    assert long.positions.cos_sin is not None and len(long.positions.cos_sin) == 300


def test_num_parameters(pair: tuple[PreTrainedModel, Decoder]) -> None:
    oracle, model = pair
    count = sum(parameter.numel() for parameter in oracle.parameters())
    assert model.config.num_parameters() == count
    assert model.config.weight_bytes(2) == 2 * count
