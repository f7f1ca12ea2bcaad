"""The model of a step: its bytes and FLOPs against those of real models, and the command."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from benchmarks import gpu_model
from benchmarks.gpu_check.bounds import Bounds, Limits
from benchmarks.gpu_check.datasheets import DATASHEETS
from benchmarks.gpu_check.operators import Operator, Rows, floor_seconds, step_operators
from benchmarks.gpu_check.shapes import CONFIGS, LLAMA, QWEN, model_config
from engine.models.families import model_config as parse_config
from tests.engine.models.tiny_models import CASES

H200 = Limits(4.4e12, 790e12)


def of_kind(operators, *kinds):
    return [operator for operator in operators if operator.kind in kinds]


@pytest.fixture(scope="module", params=["llama_tied", "qwen3", "llama_multi_head", "gpt2", "opt_350m"])
def reference(request):
    """(a tiny transformers model, our config of it)"""
    config = CASES[request.param]()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    return model, parse_config({"architectures": [type(model).__name__], **config.to_dict()})


def counted_flops(model, batch, cached, new):
    """FLOPs of a forward pass of `new` tokens behind `cached` ones; products that attention masks are counted too."""
    ids = torch.zeros(batch, cached + new, dtype=torch.int64)
    with torch.no_grad():
        cache = model(ids[:, :cached], use_cache=True).past_key_values
        with FlopCounterMode(display=False) as counter:
            model(ids[:, cached:], past_key_values=cache)
    return counter.get_total_flops()


@pytest.mark.parametrize("batch, cached", [(1, 7), (3, 20)])
def test_flops_of_a_decode_step_are_those_that_torch_counts(reference, batch, cached):
    model, config = reference
    counted = sum(operator.flops for operator in step_operators(config, [Rows(batch, 1, cached + 1)]))
    assert counted == counted_flops(model, batch, cached, 1)


def test_flops_of_a_chunk_are_those_that_torch_counts_less_what_is_masked(reference):
    """transformers computes the logits of each token and the scores of all pairs."""
    model, config = reference
    cached, new = 6, 9
    operators = list(step_operators(config, [Rows(1, new, cached + new)]))
    counted = sum(operator.flops for operator in operators)
    masked = new * (new - 1) / 2 * 4 * config.q_size * config.num_layers
    head = sum(operator.flops for operator in operators if operator.name in ("head", "projection out"))
    assert counted + masked + (new - 1) * head == counted_flops(model, 1, cached, new)


def test_weights_are_the_matrices_of_the_model(reference):
    model, config = reference
    shapes = config.parameter_shapes()
    matrices = sum(rows * columns for name, (rows, *rest) in shapes.items() if rest for columns in rest)
    embeddings = sum(shapes[name][0] * shapes[name][1] for name in shapes if "embed" in name or "position" in name)
    head = config.vocab_size * config.embedding_size
    read = sum(operator.weight_bytes for operator in step_operators(config, [Rows(2, 1, 5)], dtype_bytes=4))
    assert read == 4 * (matrices - embeddings + (head if config.tie_embeddings else 0))
    assert model.num_parameters() == config.num_parameters()


@pytest.mark.parametrize("name", [LLAMA, QWEN])
def test_the_step_and_the_bounds_of_gpu_check_agree(name):
    """Two counts of the same: the shapes' formula, and the sum over operators (which leaves out norms and biases)."""
    model = parse_config(model_config(name, False))
    bounds = Bounds(model, H200)
    for batch in (1, 64, 256):
        step = [Rows(batch, 1, 1024)]
        assert bounds.step_seconds(step) == pytest.approx(bounds.decode_seconds(batch, batch * 1024), rel=1e-3)
        assert bounds.floor_seconds(step) >= bounds.step_seconds(step)
    chunk = sum(operator.flops for operator in step_operators(model, [Rows(1, 8192, 8192)]))
    assert chunk == pytest.approx(bounds.prefill_flops(8192), rel=1e-3)


def test_attention_does_not_hide_in_products():
    """At 256 sequences the products of an 8B wait for arithmetic and attention for memory."""
    bounds = Bounds(parse_config(model_config(LLAMA, False)), H200)
    step = [Rows(256, 1, 1024)]
    assert 0.85 < bounds.step_seconds(step) / bounds.floor_seconds(step) < 0.92
    operators = [Operator("a", "gemm", 1, 10.0, 1.0), Operator("b", "attention", 1, 1.0, 10.0)]
    assert floor_seconds([*operators, Operator("c", "row", 1, 100.0)], 1.0, 1.0) == 20.0


def test_experts_that_no_token_reaches_are_not_read():
    config = parse_config(model_config(LLAMA, False) | {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8,
        "num_experts_per_tok": 2})  # fmt: skip
    bounds = Bounds(config, H200)
    for tokens in (1, 16, 64):
        assert bounds.step_seconds([Rows(tokens, 1, 8)]) == pytest.approx(bounds.decode_seconds(tokens, 8 * tokens),
                                                                           rel=1e-2)  # fmt: skip


def test_scores_of_a_chunk():
    seen = sum(10 - 4 + i for i in range(1, 5))  # 4 new tokens, 10 in all
    assert Rows(2, 4, 10).scores == 2 * seen and Rows(3, 1, 7).scores == 21


# The command.


@pytest.mark.parametrize("card", DATASHEETS)
def test_the_command_prints_each_card(card, capsys, tmp_path):
    path = tmp_path / "model.json"
    assert gpu_model.main(["--card", card, "--batch", "1,64", "--json", str(path)]) == 0
    printed, document = capsys.readouterr().out, json.loads(path.read_text())
    assert f"Llama-3-8B: decode 64 x 1024 on {card}" in printed and "not measured" in printed
    for step in document["steps"]:
        assert 0.5 < step["share_of_bound"] < 1 and step["bound"] <= step["floor"] < step["device"]
        assert step["launches"] == sum(operator["launches"] for operator in step["operators"])
    assert document["card"]["bandwidth"] == DATASHEETS[card].bandwidth


def test_launches_cost_more_where_they_are_slower():
    model = parse_config(model_config(QWEN, False))
    step = [Rows(100, 1, 1024), Rows(1, 200, 200)]
    plain, pdl, eager = (gpu_model.predict("step", model, step, DATASHEETS["H100"], assumed)
                         for assumed in (gpu_model.Assumed(), gpu_model.Assumed(pdl=True),
                                         gpu_model.Assumed(eager=True)))  # fmt: skip
    assert pdl.device < plain.device == eager.device
    assert eager.host > plain.host + 200 * gpu_model.EAGER_MICROSECONDS * 1e-6
    assert plain.seconds == max(plain.device, plain.host)


def test_measured_steps_stand_beside_the_predicted(tmp_path, capsys):
    figures = [{"kind": "figure", "name": "Llama-3-8B: decode 1 x 1024", "value": 9.0},
               {"kind": "figure", "name": "Llama-3-8B: GEMM, decode 1", "value": 4321.0}]  # fmt: skip
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"card": {"name": "NVIDIA H200"}, "parts": {"decode": figures}}))
    assert gpu_model.main(["--card", "H200", "--batch", "1,64", "--compare", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if "decode 1 x 1024" in line and "9.00" in line)
    predicted, measured, ratio = (float(word) for word in row.split()[-3:])
    assert measured == 9.0 and ratio == pytest.approx(9.0 / predicted, abs=0.01)
    assert any("4,321 us measured" in line for line in lines)
    assert any("decode 64 x 1024" in line and "not there" in line for line in lines)
    path.write_text("{}")
    assert gpu_model.main(["--card", "H200", "--compare", str(path)]) == 2


@pytest.mark.parametrize("arguments", [["--card", "V100"], ["--card", "L4", "--batch", "0"], []])
def test_wrong_arguments_are_refused(arguments):
    with pytest.raises(SystemExit):
        gpu_model.main(arguments)
    assert set(gpu_model.MODELS) == {name.lower() for name in CONFIGS}
