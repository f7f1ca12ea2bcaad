"""`--quantization`: a plain checkpoint is quantised as it is loaded; the oracle has the dequantised weights."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.errors import ModelError
from engine.models.decoder import Decoder
from engine.models.families import read_model_config
from engine.models.formats.on_load import OnLoadFormat, quantize_int4
from engine.models.loading.dummy import dummy_weights
from engine.models.loading.load import load_model, weight_bytes
from engine.models.loading.loader import load_weights
from engine.models.weight_format import Matrix
from kernels.quantized.weight import QuantizedWeight
from tests.engine.models.paged import PagedRunner, Sequence
from tests.engine.models.tiny_models import save_model

CPU = torch.device("cpu")
PROMPT = [5, 9, 1, 30, 2, 71, 44, 3, 8, 60]


def logits(model: Decoder, prompt: list[int] = PROMPT) -> Tensor:
    (found,) = PagedRunner(model).step([(Sequence(list(prompt)), len(prompt))])
    return found


@pytest.mark.parametrize("method", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "qwen3_moe"])
def test_logits_equal_those_of_the_dequantised_weights(name: str, method: str, tmp_path: Path) -> None:
    save_model(name, tmp_path)
    plain, config = read_model_config(tmp_path), read_model_config(tmp_path, method)
    weights = load_weights(tmp_path, config, torch.float32, CPU)
    assert any(isinstance(weight, QuantizedWeight) for weight in weights.values())
    exact = {n: w.dequantize() if isinstance(w, QuantizedWeight) else w for n, w in weights.items()}
    original = load_weights(tmp_path, plain, torch.float32, CPU)
    for parameter, weight in exact.items():
        assert isinstance(weight, Tensor) and isinstance(original[parameter], Tensor)
        error = (weight - original[parameter]).norm() / original[parameter].norm()
        assert error < {"int8": 0.01, "fp8": 0.04, "int4": 0.12}[method], parameter
    options = {"dtype": torch.float32, "device": CPU, "load_format": "auto", "seed": 0}
    found = logits(load_model(tmp_path, config, **options))
    torch.testing.assert_close(found, logits(Decoder(plain, dict(exact), CPU)), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found, logits(load_model(tmp_path, plain, **options)), atol=1e-4)


@pytest.mark.parametrize("method", ["int8", "int4", "fp8", "w8a8"])
def test_bytes_are_those_of_the_weights(method: str, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    config = read_model_config(tmp_path, method)
    for weights in (load_weights(tmp_path, config, torch.bfloat16, CPU), dummy_weights(config, torch.bfloat16, CPU, 0)):
        sizes = (w.num_bytes if isinstance(w, QuantizedWeight) else w.numel() * 2 for w in weights.values())
        assert sum(sizes) == weight_bytes(config, 2)


def test_int4_takes_the_scale_with_the_least_error() -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    found = (quantize_int4(weight, 32).dequantize() - weight).norm()
    groups = weight.view(64, 3, 32)
    scale = groups.abs().amax(-1, keepdim=True) / 7
    nearest = ((groups / scale).round() * scale - groups).norm()
    assert found < 0.95 * nearest


def test_w8a8_has_the_codes_of_int8_and_int8_inputs() -> None:
    matrix, weight = Matrix("m", "layers.0.mlp_in.weight", (8, 64)), torch.randn(8, 64)
    int8, w8a8 = (OnLoadFormat(method).quantized(matrix, {".weight": weight}) for method in ("int8", "w8a8"))
    assert torch.equal(int8.codes, w8a8.codes) and torch.equal(int8.scales, w8a8.scales)
    assert w8a8.int8_inputs and not int8.int8_inputs


def test_groups_of_zeros_and_many_experts() -> None:
    experts = torch.randn(3, 4, 64)
    experts[1] = 0
    for method in ("int8", "int4", "fp8", "w8a8"):
        made = OnLoadFormat(method).quantized(Matrix("m", "experts_in.weight", (3, 4, 64)), {".weight": experts})
        assert made.expert(2).int8_inputs == (method == "w8a8")
        assert made.shape == (3, 4, 64) and (made.dequantize()[1] == 0).all()
        assert torch.equal(made.expert(2).dequantize(), made.dequantize()[2])


def test_columns_that_are_no_multiple_of_a_group() -> None:
    weight = torch.randn(8, 24)
    made = OnLoadFormat("int4").quantized(Matrix("m", "layers.0.mlp_in.weight", (8, 24)), {".weight": weight})
    assert made.group_size == 8 and (made.dequantize() - weight).norm() < 0.12 * weight.norm()
    assert OnLoadFormat("int4").tensors(Matrix("m", "layers.0.mlp_in.weight", (8, 25))) is None


def test_what_cannot_be_quantised_is_refused(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=r"quantization='int8': the checkpoint is quantised already \(fp8\)"):
        read_model_config(tmp_path, "int8")
    settings = {"architectures": ["BertModel"], "model_type": "bert", "vocab_size": 97, "hidden_size": 32}
    settings |= {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 64}))
    with pytest.raises(ModelError, match="is not served for an encoder"):
        read_model_config(tmp_path, "int8")
