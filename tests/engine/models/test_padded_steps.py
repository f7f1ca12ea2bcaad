"""Padded steps give the bits of the same steps run operator by operator, whatever their padding holds."""

import ctypes
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models import padded_steps
from engine.models.decoder import Decoder
from engine.models.padded_steps import PaddedSteps
from kernels.cpu import program
from tests.engine.models.paged import PagedRunner, Sequence
from tests.engine.models.recorded_models import COMPILED, RECORDED, load, save
from tests.engine.models.tiny_models import VOCAB

pytestmark = pytest.mark.skipif(not COMPILED, reason="needs pairs of bf16")
DENSE = [name for name in RECORDED if "expert" not in name]


class PoisonedWorkspace(program.Workspace):
    """Notes its blocks, so that a test can fill them."""

    def __init__(self) -> None:
        super().__init__()
        self.places: set[tuple[int, int]] = set()

    def empty(self, *args: Any) -> Tensor:
        result = super().empty(*args)
        self.places.add((result.data_ptr(), result.numel() * result.element_size()))
        return result

    def poison(self) -> None:
        """Every bf16 number of its blocks becomes NaN."""
        for address, size in self.places:
            ctypes.memset(address, 0xFF, size)


@pytest.fixture
def workspaces(monkeypatch: pytest.MonkeyPatch) -> list[PoisonedWorkspace]:
    """All that the test makes."""
    made: list[PoisonedWorkspace] = []

    def make() -> PoisonedWorkspace:
        made.append(PoisonedWorkspace())
        return made[-1]

    monkeypatch.setattr(program, "Workspace", make)
    return made


def padded_of(model: Decoder) -> PaddedSteps:
    assert model.recorded_steps is not None and model.recorded_steps.padded is not None
    return model.recorded_steps.padded


def runner_of(folder: Path, quantization: str | None = None, padded: bool = True, block_size: int = 16) -> PagedRunner:
    """A runner whose model pads its steps, or runs them operator by operator."""
    model = load(folder, quantization)
    runner = PagedRunner(model, dtype=torch.bfloat16, block_size=block_size)
    if padded:
        model.record_steps(runner.kv_caches, max_rows=200, max_blocks=16)
    return runner


def compare(
    folder: Path, workspaces: list[PoisonedWorkspace], rounds: int, quantization: str | None = None
) -> PaddedSteps:
    """Compute random steps of some decodes and one or two prompts with padding and without; compares logits and
    caches."""
    plain, padded = runner_of(folder, quantization, padded=False), runner_of(folder, quantization)
    rng, pairs = random.Random(0), []
    for _ in range(rounds):
        work = [(pair, 1) for pair in pairs if rng.random() < 0.8]
        for _ in range(rng.randrange(1, 3)):
            text = [rng.randrange(VOCAB) for _ in range(120)]
            pairs.append((Sequence(text), Sequence(list(text))))
            work.append((pairs[-1], rng.randrange(2, 60)))
        for workspace in workspaces:
            workspace.poison()
        expected = plain.step([(pair[0], n) for pair, n in work], last_only=True)
        found = padded.step([(pair[1], n) for pair, n in work], last_only=True)
        for left, right in zip(expected, found, strict=True):
            assert torch.equal(left, right)
        for caches, others in zip(plain.kv_caches, padded.kv_caches, strict=True):
            for cache, other in zip(caches, others, strict=True):  # as integers: most of them is NaN
                assert torch.equal(cache.view(torch.int16), other.view(torch.int16))
        if len(pairs) > 5:
            for runner, sequence in zip((plain, padded), pairs.pop(0), strict=True):
                runner.free = sequence.block_ids + runner.free
    assert any(workspace.places for workspace in workspaces)
    return padded_of(padded.model)


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_padding_changes_no_bits(
    name: str, quantization: str | None, tmp_path: Path, workspaces: list[PoisonedWorkspace]
) -> None:
    steps = compare(save(RECORDED[name], tmp_path), workspaces, 12, quantization)
    assert steps.works and steps.num_programs > 5


def test_the_size_that_was_not_needed_for_the_longest_time_goes(
    tmp_path: Path, workspaces: list[PoisonedWorkspace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(padded_steps, "MAX_PROGRAMS", 3)
    assert compare(save(RECORDED["llama"], tmp_path), workspaces, 30).num_programs == 3


def test_only_short_steps_of_sampled_rows_are_padded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padded_steps, "MAX_TOKENS", 40)
    runner = runner_of(save(RECORDED["llama"], tmp_path))
    text, steps = [7 * i % VOCAB for i in range(120)], padded_of(runner.model)
    runner.step([(Sequence(text), 41)], last_only=True)
    runner.step([(Sequence(text), 40)])
    assert not steps.num_programs
    runner.step([(Sequence(text), 40)], last_only=True)
    assert steps.num_programs == 2, "one, and the largest for its memory"


def test_experts_get_no_padding(tmp_path: Path) -> None:
    """Padding would be routed by whatever its rows hold."""
    model = runner_of(save(RECORDED["experts"], tmp_path)).model
    assert model.recorded_steps is not None and model.recorded_steps.padded is None


def test_a_step_whose_attention_reads_no_counts_is_recorded_for_itself(tmp_path: Path) -> None:
    """Tiles take blocks of sixteen tokens."""
    runner = runner_of(save(RECORDED["llama"], tmp_path), block_size=8)
    runner.step([(Sequence([5] * 60), 30)], last_only=True)
    steps = runner.model.recorded_steps
    assert not padded_of(runner.model).works
    assert steps is not None and steps.num_bytes and not steps.refused
