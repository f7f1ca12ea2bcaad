"""Steps recorded as programs give the bits of the same steps run operator by operator."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, LlamaConfig, PreTrainedConfig

from benchmarks.formats.layouts import layouts
from benchmarks.formats.writers import write_checkpoint
from engine.models.decoder import Decoder
from engine.models.layers.attention import BatchMetadata
from kernels.cpu import parallel
from tests.engine.models.paged import BLOCK_SIZE, PagedRunner, Sequence
from tests.engine.models.recorded_models import COMPILED, RECORDED, SIZES, load, save
from tests.engine.models.tiny_models import VOCAB

pytestmark = pytest.mark.skipif(not COMPILED, reason="needs pairs of bf16")
# Rows of one decode step after the other; three sequences, whose lengths pass the ends of blocks.
STEPS = [(0,), (0, 1), (0, 1, 2), (2,), (1, 2), (0, 1, 2), (1,), (0, 2), (0, 1, 2), (0,)] * 2


def logits_of(model: Decoder, recorded: bool) -> tuple[list[Tensor], Decoder]:
    """Logits of three prompts, then of STEPS; between the steps one sequence computes a chunk, beside a decode."""
    runner = PagedRunner(model, dtype=torch.bfloat16)
    if recorded:
        model.record_steps(runner.kv_caches, max_rows=4, max_blocks=16)
    text = [(7 * position + 5) % VOCAB for position in range(120)]
    sequences = [Sequence(text[start:]) for start in (0, 3, 9)]
    found = runner.step([(sequence, n) for sequence, n in zip(sequences, (5, BLOCK_SIZE, 20), strict=True)])
    found += runner.step([(sequence, 3) for sequence in sequences], last_only=True)
    for i, rows in enumerate(STEPS):
        found += runner.step([(sequences[row], 1) for row in rows])
        if i % 5 == 4:
            found += runner.step([(sequences[0], 3), (sequences[1], 1)], last_only=i % 10 == 9)
    return [part.clone() for part in found], model


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_recorded_steps_have_the_same_bits(name: str, quantization: str | None, tmp_path: Path) -> None:
    folder = save(RECORDED[name], tmp_path)
    expected, _ = logits_of(load(folder, quantization), recorded=False)
    found, model = logits_of(load(folder, quantization), recorded=True)
    for left, right in zip(expected, found, strict=True):
        assert torch.equal(left, right)
    assert model.recorded is not None and model.recorded.recorded_rows == [1, 2, 3]
    assert model.recorded_steps is not None and not model.recorded_steps.refused


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("quantization", [None, "w8a8"])
@pytest.mark.parametrize("recorded", [False, True])
def test_gaps_behind_rows_change_no_bits(
    name: str, quantization: str | None, recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a processor with AMX, where rows of 1 KiB and its multiples have gaps: here all of them do, or none."""
    folder = save(RECORDED[name], tmp_path)
    monkeypatch.setattr(parallel, "HAS_BF16_TILES", False)
    expected, _ = logits_of(load(folder, quantization), recorded)
    monkeypatch.setattr(parallel, "HAS_BF16_TILES", True)
    monkeypatch.setattr(parallel, "CONFLICTING_BYTES", 2)
    found, model = logits_of(load(folder, quantization), recorded)
    for left, right in zip(expected, found, strict=True):
        assert torch.equal(left, right)
    if recorded:
        assert model.recorded_steps is not None and not model.recorded_steps.refused


def test_steps_with_prompts_keep_the_memory_of_the_largest(tmp_path: Path) -> None:
    model = load(save(RECORDED["llama"], tmp_path))
    runner = PagedRunner(model, dtype=torch.bfloat16)
    model.record_steps(runner.kv_caches, max_rows=4, max_blocks=16)
    assert model.recorded_steps is not None
    sizes = []
    for length in (100, 40, 99, 7, 101, *range(2, 100)):
        runner.step([(sequence := Sequence([5] * 120), length)], last_only=True)
        runner.free += sequence.block_ids
        sizes.append(model.recorded_steps.num_bytes)
    assert sizes[0] == sizes[3] and sizes[4] == sizes[-1] <= 1.02 * sizes[0]


@pytest.mark.parametrize("config", [LlamaConfig, Gemma2Config])
def test_recorded_greedy_steps_find_the_largest_logits(config: type[PreTrainedConfig], tmp_path: Path) -> None:
    """Gemma 2 has a soft cap on its logits."""
    model = load(save(config(**SIZES | {"vocab_size": 128}), tmp_path))
    runner = PagedRunner(model, dtype=torch.bfloat16)
    model.record_steps(runner.kv_caches, max_rows=4, max_blocks=16)
    found: list[Tensor | None] = []
    compute = model.forward

    def decode_first(input_ids: Tensor, metadata: BatchMetadata, kv_caches: Any) -> Tensor:
        tokens = model.decode_tokens(input_ids, metadata, kv_caches)
        found.append(None if tokens is None else torch.from_numpy(tokens.token_ids.copy()))
        return compute(input_ids, metadata, kv_caches)

    model.forward = decode_first  # type: ignore[method-assign]
    text = [(7 * position + 5) % VOCAB for position in range(120)]
    sequences = [Sequence(text[start:]) for start in (0, 3, 9)]
    runner.step([(sequence, 9) for sequence in sequences])
    for rows in STEPS:
        logits = torch.stack(runner.step([(sequences[row], 1) for row in rows]))
        tokens = found[-1]
        assert tokens is not None and tokens.tolist() == logits.float().reshape(len(rows), -1).argmax(-1).tolist()
    assert found[0] is None, "a step with prompts is no step of decodes"


@pytest.mark.parametrize("layout", ["gptq 4 bits act-order", "awq", "compressed-tensors int8 asymmetric"])
def test_parted_layers_and_offsets_are_recorded(layout: str, tmp_path: Path) -> None:
    """act-order: q, k and v have a permutation each, so that qkv has three parts. awq: codes have offsets."""
    write_checkpoint(save(RECORDED["llama"], tmp_path / "plain"), tmp_path / "quantised", layouts(64, 32)[layout])
    expected, _ = logits_of(load(tmp_path / "quantised"), recorded=False)
    found, model = logits_of(load(tmp_path / "quantised"), recorded=True)
    for left, right in zip(expected, found, strict=True):
        assert torch.equal(left, right)
    assert model.recorded is not None and model.recorded.recorded_rows == [1, 2, 3]


def test_steps_with_operators_of_torch_are_not_recorded(tmp_path: Path) -> None:
    """Attention with heads of 20 numbers has no compiled kernel."""
    folder = save(LlamaConfig(**SIZES | {"head_dim": 20}), tmp_path)
    expected, _ = logits_of(load(folder), recorded=False)
    found, model = logits_of(load(folder), recorded=True)
    for left, right in zip(expected, found, strict=True):
        assert torch.equal(left, right)
    assert model.recorded is not None and not model.recorded.recorded_rows
    assert model.recorded_steps is not None and model.recorded_steps.refused
