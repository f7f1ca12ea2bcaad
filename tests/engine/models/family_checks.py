"""The checks that every family passes, against its oracle in fp32. Each returns the largest error of a logit."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.models.decoder import Decoder
from engine.models.encoder import Encoder
from engine.models.families import model_config, read_model_config
from engine.models.loading.load import load_model
from tests.engine.models.paged import PagedRunner, Sequence, SharingRunner, greedy
from tests.engine.models.tiny_models import CASES, REFERENCES, VOCAB, oracle_logits

# Logits are of size 1 to 13; those of transformers differ by up to 3e-5 from the same model in fp64.
TOLERANCE = {"atol": 6e-5, "rtol": 6e-5}
Oracle = Any  # a transformers model, or a plain reference


def load(folder: Path) -> Decoder:
    model = load_any(folder)
    assert isinstance(model, Decoder)
    return model


def load_any(folder: Path) -> Decoder | Encoder:
    options: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "load_format": "auto", "seed": 0}
    return load_model(folder, read_model_config(folder), **options)


def make_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]


def family_of_case(name: str) -> str:
    """The model_type of a case's family."""
    raw = REFERENCES[name] if name in REFERENCES else {**CASES[name]().to_dict(), "architectures": None}
    return model_config(raw).family


def main_cases() -> dict[str, str]:
    """The first case of each family, by its model_type. The other cases are variants."""
    return {family_of_case(name): name for name in reversed([*CASES, *REFERENCES])}


def compare(ours: Tensor, expected: Tensor) -> float:
    """The largest difference; AssertionError if it is out of tolerance."""
    torch.testing.assert_close(ours, expected, **TOLERANCE)
    return (ours - expected).abs().max().item()


def check_logits(oracle: Oracle, model: Decoder) -> float:
    """A batch of whole prompts."""
    prompts = make_prompts(1, 7, 33, 40)
    logits = PagedRunner(model).step([(Sequence(prompt), len(prompt)) for prompt in prompts])
    for prompt, ours in zip(prompts, logits, strict=True):
        assert ours.dtype == torch.float32 and ours.shape == (len(prompt), model.config.vocab_size)
    return max(compare(ours, oracle_logits(oracle, p)) for p, ours in zip(prompts, logits, strict=True))


def check_chunks(oracle: Oracle, model: Decoder) -> float:
    """Three sequences go through in steps of different sizes, 1 being a decode; all logits are as in one pass."""
    sequences = [Sequence(prompt) for prompt in make_prompts(40, 33, 21)]
    runner = PagedRunner(model)
    collected: list[list[Tensor]] = [[], [], []]
    for sizes in [(7, 1, 9), (1, 1, 9), (13, 16, 1), (1, 1, 1), (1, 14, 1), (17, 0, 0)]:
        work = [(i, n) for i, n in enumerate(sizes) if n]
        for (i, _), logits in zip(work, runner.step([(sequences[i], n) for i, n in work]), strict=True):
            collected[i].append(logits)
    assert all(sequence.num_computed == len(sequence.token_ids) for sequence in sequences)
    expected = [oracle_logits(oracle, sequence.token_ids) for sequence in sequences]
    return max(compare(torch.cat(parts), logits) for parts, logits in zip(collected, expected, strict=True))


def check_greedy(oracle: Oracle, model: Decoder) -> float:
    """64 tokens: the oracle, given our text, chooses every token of it, so its own greedy text is the same."""
    prompts = make_prompts(1, 5, 9, 16, 23)
    texts = greedy(PagedRunner(model), prompts, 64)
    for prompt, text in zip(prompts, texts, strict=True):
        choices = oracle_logits(oracle, prompt + text).argmax(-1).tolist()
        assert text == choices[len(prompt) - 1 : -1]
    assert len({token for text in texts for token in text}) >= 8, "an oracle that repeats itself proves little"
    return 0.0


def check_prefix(oracle: Oracle, model: Decoder) -> float:
    """A sequence starts with two cached blocks of another one, and computes only what follows."""
    runner = SharingRunner(model)
    first, other = make_prompts(29, 17)
    runner.compute(runner.start(first))
    second = runner.start(first[:19] + other)
    assert second.num_computed == 16 == runner.manager.num_prefix_hits
    (logits,) = runner.compute(second)
    return compare(logits, oracle_logits(oracle, second.token_ids)[16:])


def check_fork(oracle: Oracle, model: Decoder) -> float:
    """Three continuations of one sequence share its blocks; all but one copy its half-full block to write to it."""
    runner = SharingRunner(model)
    prompt, *endings = make_prompts(21, 1, 9, 14)
    parent = runner.start(prompt)
    runner.compute(parent)
    children = [runner.fork(parent, ending) for ending in endings[1:]]
    parent.token_ids += endings[0]
    family = [parent, *children]
    logits = runner.compute(*family)
    assert runner.num_copies == 2 and len({s.block_ids[2] for s in family}) == 3
    assert len({tuple(s.block_ids[:2]) for s in family}) == 1
    expected = [oracle_logits(oracle, s.token_ids)[21:] for s in family]
    return max(compare(ours, theirs) for ours, theirs in zip(logits, expected, strict=True))


CHECKS = {
    "logits": check_logits,
    "greedy": check_greedy,
    "chunked": check_chunks,
    "prefix": check_prefix,
    "fork": check_fork,
}
