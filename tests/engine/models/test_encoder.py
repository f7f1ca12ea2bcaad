"""Encoders against transformers in fp32: hidden states of whole batches, pooled and normalised; a batch as alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

from engine.config import EngineConfig
from engine.errors import ConfigError, EngineError, ModelError
from engine.executor.step import NewSequence, Place, SequenceStep, StepPlan, StepResult
from engine.models import encoder
from engine.models.dense import load_dense
from engine.models.families import model_config, read_model_config
from engine.sampling_params import Pooling, SamplingParams
from engine.worker.device.host import StepLimits
from engine.worker.encoder_runner import EncoderRunner
from engine.worker.load import load_runner
from kernels.dispatch import cpu_kernels
from tests.engine.models.tiny_encoders import CASES, VOCAB, decoder_sizes, randomise, save_dense, save_encoder, sizes
from tests.engine.worker.lazy_queue import LazyQueue

LENGTHS = (1, 7, 2, 33, 7, 40, 5, 1, 38, 64)
TOLERANCE = {"atol": 1e-5, "rtol": 1e-4}


def load(folder: Path, **settings: Any) -> EncoderRunner:
    runner, ready = load_runner(EngineConfig(model=str(folder), **settings), folder, [], lambda phase: None)
    assert isinstance(runner, EncoderRunner) and ready.encoder
    assert ready.hidden_size in (48, 64)
    return runner


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp(request.param)
    oracle = save_encoder(request.param, folder)
    return oracle, load(folder)


def prompts(*lengths: int) -> list[list[int]]:
    """No padding tokens among them, which RoBERTa gives no position."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(4, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def plan(texts: list[list[int]], *poolings: Pooling) -> StepPlan:
    """A step with all texts; poolings in turn."""
    params = [SamplingParams(pooling=poolings[i % len(poolings)]) for i in range(len(texts))]
    new = [
        NewSequence(
            seq_id=i,
            token_ids=ids,
            num_prompt_tokens=len(ids),
            num_computed_tokens=0,
            block_ids=[],
            params=params[i],
            seed=0,
        )
        for i, ids in enumerate(texts)
    ]
    return StepPlan(1, [], new, [], [SequenceStep(i, len(ids), True, []) for i, ids in enumerate(texts)])


def run(runner: EncoderRunner, texts: list[list[int]], *poolings: Pooling) -> StepResult:
    return runner.result(runner.launch(plan(texts, *poolings)))


def vectors(result: StepResult) -> list[np.ndarray]:
    assert not result.failed and not result.seq_ids
    return [np.frombuffer(result.vectors[i], "<f4") for i in range(len(result.vectors))]


@torch.no_grad()
def oracle_vector(model: PreTrainedModel, ids: list[int], pooling: Pooling) -> np.ndarray:
    hidden = model(torch.tensor([ids])).last_hidden_state[0].double()
    vector = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling.kind][: pooling.dimensions]
    return (vector / vector.norm() if pooling.normalize else vector).numpy()


@pytest.mark.parametrize(
    "poolings",
    [
        [Pooling("mean")],
        [Pooling("cls", normalize=False)],
        [Pooling("last"), Pooling("mean", False), Pooling("cls", dimensions=7), Pooling("mean", dimensions=48)],
    ],
    ids=["mean", "cls", "mixed"],
)
def test_a_batch_gives_what_transformers_gives_alone(pair, poolings):
    oracle, runner = pair
    texts = prompts(*LENGTHS)
    for i, (ids, ours) in enumerate(zip(texts, vectors(run(runner, texts, *poolings)), strict=True)):
        pooling = poolings[i % len(poolings)]
        expected = oracle_vector(oracle, ids, pooling)
        assert ours.dtype == np.float32 and ours.shape == expected.shape
        np.testing.assert_allclose(ours, expected, **TOLERANCE)
        if pooling.normalize:
            assert abs(np.linalg.norm(ours) - 1) < 1e-6


def test_a_text_is_the_same_alone_and_in_any_batch(pair):
    _, runner = pair
    texts = prompts(*LENGTHS)
    together = vectors(run(runner, texts, Pooling("mean")))
    for ids, ours in zip(texts, together, strict=True):
        np.testing.assert_allclose(vectors(run(runner, [ids], Pooling("mean")))[0], ours, **TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_heads_of_32_numbers_attend_in_blocks(name, tmp_path, monkeypatch):
    save_encoder(name, tmp_path)
    attended = []
    monkeypatch.setattr(encoder, "whole_attention", lambda q, *args, **kwargs: attended.append(q.dtype) or q)
    for dtype in ("float32", "bfloat16"):
        run(load(tmp_path, dtype=dtype), prompts(5), Pooling("mean"))
    in_blocks = cpu_kernels().features.MULTIPLIES_PAIRS and name.endswith("_blocks")
    assert {*attended} == ({torch.float32, torch.bfloat16} if in_blocks else set())


@pytest.mark.parametrize("name", ["bert", "gemma3_both_ways"])
def test_a_step_is_launched_while_a_gpu_computes_another(name, tmp_path):
    """A queue that copies late: the arrays of a step must stay until they are copied, and its results until read."""
    save_encoder(name, tmp_path)
    on_cpu, decoy = load(tmp_path), [[7] * 20, [8] * 3]
    on_gpu = EncoderRunner(on_cpu._encoder, torch.device("cpu"), StepLimits(8, 128), queue=LazyQueue())
    plans = [plan(prompts(*lengths), Pooling("mean"), Pooling("cls")) for lengths in ((9, 4, 4), (5,), (30, 2, 7, 1))]
    assert (on_cpu.max_in_flight, on_gpu.max_in_flight) == (1, 2)
    in_flight, results = [on_gpu.launch(plan(decoy, Pooling("last")))], []
    for step in [*plans, plan(decoy, Pooling("mean"))]:
        in_flight.append(on_gpu.launch(step))
        results.append(on_gpu.result(in_flight.pop(0)).vectors)
    assert results[1:] == [on_cpu.result(on_cpu.launch(step)).vectors for step in plans]


@pytest.mark.parametrize("name", ["qwen2_both_ways", "mistral_both_ways", "gemma3_both_ways"])
def test_keys_repeated_for_each_head_give_the_same(name, tmp_path, monkeypatch):
    """As on a GPU with a mask."""
    save_encoder(name, tmp_path)
    runner, texts, asked = load(tmp_path), prompts(*LENGTHS), []
    grouped = vectors(run(runner, texts, Pooling("mean")))
    monkeypatch.setattr(encoder, "takes_groups", lambda q, mask: asked.append(q))
    np.testing.assert_allclose(vectors(run(runner, texts, Pooling("mean"))), grouped, atol=1e-6)
    assert asked


@pytest.mark.parametrize("name", CASES)
def test_num_parameters(name, tmp_path):
    oracle = save_encoder(name, tmp_path)
    counted = sum(p.numel() for name, p in oracle.named_parameters() if not name.startswith("pooler"))
    assert read_model_config(tmp_path).num_parameters() == counted


@pytest.mark.parametrize("name", ["bert", "gemma3_both_ways", "bert_blocks", "gemma3_blocks"])
def test_batch_invariance_is_to_the_bit(name, tmp_path):
    save_encoder(name, tmp_path)
    runner = load(tmp_path, batch_invariant=True)
    texts = prompts(*LENGTHS)
    together = run(runner, texts, Pooling("mean")).vectors
    assert [run(runner, [ids], Pooling("mean")).vectors[0] for ids in texts] == [*map(together.get, range(len(texts)))]


@pytest.mark.parametrize("name", ["bert", "qwen3_both_ways", "gemma3_both_ways", "bert_blocks", "mistral_blocks"])
def test_bfloat16_is_near(name, tmp_path):
    oracle = save_encoder(name, tmp_path)
    texts = prompts(*LENGTHS)
    for ids, ours in zip(texts, vectors(run(load(tmp_path, dtype="bfloat16"), texts, Pooling("mean"))), strict=True):
        assert ours @ oracle_vector(oracle, ids, Pooling("mean")) > 0.999


@pytest.mark.parametrize(
    "kind, config", [(BertForMaskedLM, BertConfig(**sizes())), (RobertaForMaskedLM, RobertaConfig(**sizes()))]
)
def test_a_masked_language_model_is_served_without_its_head(tmp_path, kind, config):
    oracle = randomise(kind(config))
    oracle.save_pretrained(tmp_path)
    texts = prompts(5, 9)
    for ids, ours in zip(texts, vectors(run(load(tmp_path), texts, Pooling("mean"))), strict=True):
        np.testing.assert_allclose(ours, oracle_vector(oracle.base_model, ids, Pooling("mean")), **TOLERANCE)


def test_a_wrong_token_fails_alone(pair):
    _, runner = pair
    result = run(runner, [[5, 6], [5, VOCAB], [7]], Pooling("mean"))
    assert result.vectors.keys() == {0, 2} and str(VOCAB) in result.failed[1]


def test_nan_fails_alone_and_plans_that_disagree_end_the_worker(tmp_path):
    save_encoder("bert", tmp_path)
    runner = load(tmp_path)
    runner._encoder.decoder.embedding.weight[50] = float("nan")
    result = run(runner, [[5, 6], [50, 6], [9, 9]], Pooling("mean"))
    assert result.vectors.keys() == {0, 2} and "NaN" in result.failed[1]
    part = NewSequence(
        seq_id=0,
        token_ids=[5, 6, 7],
        num_prompt_tokens=3,
        num_computed_tokens=0,
        block_ids=[],
        params=SamplingParams(pooling=Pooling("mean")),
        seed=0,
    )
    with pytest.raises(EngineError, match="whole sequences"):
        runner.launch(StepPlan(1, [], [part], [], [SequenceStep(0, 2, False, [])]))


def test_longest_text(tmp_path):
    save_encoder("roberta", tmp_path)
    assert read_model_config(tmp_path).max_position_embeddings == 80 - 2

    def longest(**settings):
        return load_runner(EngineConfig(model=str(tmp_path), **settings), tmp_path, [], lambda phase: None)[1]

    assert longest().max_model_len == 78
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 64, "do_lower_case": False}))
    assert longest().max_model_len == 64
    assert longest(max_model_len=70).max_model_len == 70
    ready = longest(max_num_batched_tokens=64, block_size=8)
    assert ready.num_blocks * 8 >= 2 * 64 and ready.memory["kv_cache"] == 0
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens.*64"):
        longest(max_num_batched_tokens=63)
    with pytest.raises(ConfigError, match="max_model_len"):
        longest(max_model_len=79)
    with pytest.raises(ConfigError, match=r"swap_space.*encoder"):
        longest(swap_space=1.0)
    with pytest.raises(ConfigError, match=r"attention_backend.*encoder"):
        longest(attention_backend="flashinfer")
    with pytest.raises(ConfigError, match=r"kv_cache_dtype.*encoder"):
        longest(kv_cache_dtype="int8")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"hidden_size": 50}, "evenly"),
        ({"architectures": ["BertForSequenceClassification"]}, "not served"),
    ],
)
def test_what_is_not_served_is_named(changes, words):
    raw = BertConfig(**sizes(), architectures=["BertModel"]).to_dict() | changes
    with pytest.raises(ModelError, match=words):
        model_config(raw)


def test_a_decoder_with_its_head_that_attends_to_later_tokens(tmp_path):
    """As gte-Qwen2: the file has an lm_head, which nothing reads."""
    oracle = randomise(Qwen2ForCausalLM(Qwen2Config(**decoder_sizes())))
    oracle.save_pretrained(tmp_path)
    texts = prompts(*LENGTHS)
    for ids, ours in zip(texts, vectors(run(load(tmp_path), texts, Pooling("last"))), strict=True):
        np.testing.assert_allclose(ours, oracle_vector(oracle.model, ids, Pooling("last")), **TOLERANCE)


def test_each_replica_takes_a_gpu_of_its_own(tmp_path, monkeypatch):
    save_encoder("bert", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config, second = EngineConfig(model=str(tmp_path)), Place(first_gpu=1)
    with pytest.raises(ConfigError, match="every replica needs a GPU of its own, torch finds 1"):
        load_runner(config, tmp_path, [], lambda phase: None, place=second)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"activation_function": "a.Softsign"}, r"2_Dense/config\.json: activation_function 'a\.Softsign' is not"),
        ({"in_features": 47}, r"in_features is 47, but the module before it gives 48 numbers"),
        ({"out_features": 5}, r"linear\.weight must be \[5, 48\]"),
    ],
)
def test_a_wrong_linear_layer_is_named(tmp_path, changes, words):
    save_dense(tmp_path, 2, 48, 16, **changes)
    with pytest.raises(ModelError, match=words):
        load_dense(tmp_path, ["2_Dense"], 48)


def test_the_file_of_a_linear_layer(tmp_path):
    layer = save_dense(tmp_path, 2, 48, 16, bias=True)
    file = tmp_path / "2_Dense" / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:100])
    with pytest.raises(ModelError, match=r"2_Dense/model\.safetensors is damaged"):
        load_dense(tmp_path, ["2_Dense"], 48)
    file.unlink()
    with pytest.raises(ModelError, match=r"lacks 2_Dense/model\.safetensors"):
        load_dense(tmp_path, ["2_Dense"], 48)
    pickle = file.with_name("pytorch_model.bin")
    pickle.write_bytes(b"no pickle")
    with pytest.raises(ModelError, match=r"2_Dense/pytorch_model\.bin cannot be read"):
        load_dense(tmp_path, ["2_Dense"], 48)
    torch.save({f"linear.{name}": tensor for name, tensor in layer.state_dict().items()}, pickle)
    (found,) = load_dense(tmp_path, ["2_Dense"], 48)
    assert torch.equal(found.weight, layer.weight) and torch.equal(found.bias, layer.bias)
