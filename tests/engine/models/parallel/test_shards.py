"""Tensor parallelism, its ranks as threads: every mechanism against the oracle, and refusals that name the field."""

from math import prod

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.errors import ModelError
from engine.models.families import read_model_config
from engine.models.layers.operators import FastOperators
from engine.models.parallel.shard import shard_model
from tests.engine.models.family_checks import load, make_prompts
from tests.engine.models.paged import PagedRunner, Sequence, greedy
from tests.engine.models.parallel.thread_ranks import load_shards, together
from tests.engine.models.tiny_models import VOCAB, oracle_logits, randomize, save_model

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}  # a sum over ranks is rounded in another order
# Fused q|k|v and gate|up, [in, out] weights, KV heads by group and by rank, ALiBi, head norms, experts, a parallel
# residual, soft caps, sinks and biases of experts.
CASES = {
    "llama": 2,
    "gpt2": 4,
    "phi3": 2,
    "falcon": 2,
    "bloom": 2,
    "stablelm_12b": 2,
    "gemma2": 2,
    "qwen3_moe": 2,
    "gpt_oss": 2,
}
FAMILIES_BY_GREEDY = ("llama", "gpt2", "falcon", "gemma2", "qwen3_moe", "gpt_oss")


@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_the_logits_of_the_whole_model(name, tmp_path):
    oracle, size = save_model(name, tmp_path), CASES[name]
    decoders = load_shards(tmp_path, read_model_config(tmp_path), size)
    prompts = make_prompts(1, 7, 33)
    logits = together(lambda decoder: _logits(decoder, prompts), decoders)
    for of_rank in logits:
        assert all(torch.equal(a, b) for a, b in zip(of_rank, logits[0], strict=True)), "a rank would draw otherwise"
    for prompt, ours in zip(prompts, logits[0], strict=True):
        torch.testing.assert_close(ours, oracle_logits(oracle, prompt), **TOLERANCE)
    if name in FAMILIES_BY_GREEDY:
        whole = greedy(PagedRunner(load(tmp_path)), prompts, 12)
        assert together(lambda decoder: greedy(PagedRunner(decoder), prompts, 12), decoders) == [whole] * size


def _logits(decoder, prompts):
    return PagedRunner(decoder).step([(Sequence(prompt), len(prompt)) for prompt in prompts])


@pytest.mark.parametrize("method", ["int8", "int4", "fp8"])
def test_quantised_matrices_are_divided_in_their_codes(method, tmp_path):
    llama(tmp_path, hidden_size=64, intermediate_size=128, num_attention_heads=4)
    config, prompts = read_model_config(tmp_path, method), make_prompts(1, 33)
    (whole,) = together(lambda decoder: _logits(decoder, prompts), load_shards(tmp_path, config, 1))
    for of_rank in together(lambda decoder: _logits(decoder, prompts), load_shards(tmp_path, config, 2)):
        for ours, expected in zip(of_rank, whole, strict=True):
            torch.testing.assert_close(ours, expected, **TOLERANCE)


def llama(folder, **changes):
    sizes = {"num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **changes))
    randomize(model)
    model.save_pretrained(folder)


def test_groups_that_ranks_would_cut_are_named(tmp_path):
    llama(tmp_path, hidden_size=48, intermediate_size=80, num_attention_heads=6)
    config = read_model_config(tmp_path, "int4")  # groups of 16 columns, but 40 columns of down_proj a rank
    with pytest.raises(ModelError) as caught:
        load_shards(tmp_path, config, 2)
    assert "the 80 columns of model.layers.0.mlp.down_proj, which has groups of 16;" in str(caught.value)
    assert "use --tensor-parallel-size with 1, 5." in str(caught.value)


@pytest.mark.parametrize(
    "name, size, message",
    [
        ("llama", 4, "4 ranks cannot share num_attention_heads 6 evenly; use --tensor-parallel-size with 1, 2, 3, 6."),
        ("falcon_grouped_one_norm", 2, "num_key_value_heads 3 evenly; use --tensor-parallel-size with 1, 3, 6."),
        ("olmo2", 2, "normalises q and k over all heads at once"),
    ],
)
def test_a_field_that_cannot_be_divided_is_named(name, size, message, tmp_path):
    save_model(name, tmp_path)
    with pytest.raises(ModelError, match=message):
        shard_model(read_model_config(tmp_path), 0, size)


def test_every_parameter_is_divided_or_repeated(tmp_path):
    """The ranks' parameters hold each number of the model once, apart from what every rank has."""
    llama(tmp_path, hidden_size=48, intermediate_size=80, num_attention_heads=6)
    config = read_model_config(tmp_path)
    shapes = [shard_model(config, rank, 2).parameter_shapes() for rank in range(2)]
    for name, shape in config.parameter_shapes().items():
        count = sum(prod(of_rank[name]) for of_rank in shapes)
        assert count == prod(shape) * (2 if "norm" in name else 1), name


def test_the_minimum_of_calls(tmp_path):
    """A sum after the embedding, two a layer (one with a parallel residual), and the logits."""
    for name, per_layer in (("llama", 2), ("falcon", 1)):
        save_model(name, tmp_path / name)
        decoders = load_shards(tmp_path / name, read_model_config(tmp_path / name), 2)
        together(lambda decoder: _logits(decoder, [[1, 2, 3]]), decoders)
        assert decoders[0].operators.ranks.num_calls == 2 + per_layer * decoders[0].config.num_layers


def test_no_rank_times_kernels_for_a_router_that_every_rank_computes(tmp_path, monkeypatch):
    """FastOperators.linear of a GPU uses the product that this rank found the fastest: ranks may find others."""
    save_model("qwen3_moe", tmp_path)
    config, make, shapes = read_model_config(tmp_path), FastOperators.linear, []

    def noted(operators, weight, bias):
        shapes.append(tuple(weight.shape))
        return make(operators, weight, bias)

    monkeypatch.setattr(FastOperators, "linear", noted)
    router = (config.moe.num_experts, config.hidden_size)
    load_shards(tmp_path, config, 1)
    assert router in shapes
    shapes.clear()
    load_shards(tmp_path, config, 2)
    assert shapes and router not in shapes
