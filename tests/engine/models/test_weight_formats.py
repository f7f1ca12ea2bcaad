"""The loader's hook for quantised checkpoints, proven by a toy format: one int8 code and one scale per row."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import ModelError
from engine.models.config import ModelConfig
from engine.models.families import read_model_config
from engine.models.loading.dummy import dummy_weights
from engine.models.loading.load import load_model, weight_bytes
from engine.models.loading.loader import load_weights
from engine.models.weight_format import Matrix, Stored
from kernels.quantized.weight import QuantizedWeight
from tests.engine.models.paged import PagedRunner, Sequence
from tests.engine.models.tiny_models import save_model

CPU = torch.device("cpu")
PROMPT = [5, 17, 3, 88, 41, 9, 60, 2, 2, 31]
MATRICES = ("qkv", "attn_out", "mlp_in", "mlp_out", "experts_in", "experts_out")


@dataclass(frozen=True)
class ToyFormat:
    """Matrices of the layers, but those whose module ends with one of `plain`, and asymmetric for `asymmetric`."""

    name: str = "toy"
    reads_plain: bool = False
    plain: tuple[str, ...] = ()
    asymmetric: tuple[str, ...] = ()

    def tensors(self, matrix: Matrix) -> Mapping[str, Stored] | None:
        if matrix.parameter.split(".")[-2] not in MATRICES or matrix.module.endswith(self.plain or ("-",)):
            return None
        rows = matrix.shape[:-1]
        return {
            ".codes": Stored(matrix.shape, ("I8",)),
            ".scales": Stored(rows, ("F32",)),
            ".offsets": Stored(rows, ("F32",), optional=True),
        }

    def quantized(self, matrix: Matrix, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        stored = tensors if ".codes" in tensors else self.quantize(matrix.module, tensors[".weight"])
        offsets = stored.get(".offsets")
        codes, scales = stored[".codes"], stored[".scales"].unsqueeze(-1)
        return QuantizedWeight(codes, scales, matrix.shape[-1], None if offsets is None else offsets.unsqueeze(-1))

    def num_bytes(self, matrix: Matrix, dtype_bytes: int) -> int:
        *rows, columns = matrix.shape
        return torch.Size(rows).numel() * (columns + 4)

    def quantize(self, module: str, weight: Tensor) -> dict[str, Tensor]:
        weight = weight.float()
        offsets = weight.mean(-1) if module.endswith(self.asymmetric or ("-",)) else torch.zeros(len(weight))
        weight = weight - offsets[:, None]
        scales = weight.abs().amax(-1) / 127
        stored = {".codes": (weight / scales[:, None]).round().to(torch.int8), ".scales": scales}
        return stored | ({".offsets": offsets} if self.asymmetric else {})


def save(name: str, folder: Path, toy: ToyFormat, transposed: bool = False) -> ModelConfig:
    """Save a plain checkpoint under folder/plain with the values of the codes, and one in the toy format."""
    save_model(name, folder)
    config = read_model_config(folder)
    tensors = load_file(folder / "model.safetensors")
    quantised, rounded = {}, {}
    for key, tensor in tensors.items():
        module = key.removesuffix(".weight")
        inner = ".layers." in key or ".h." in key
        if not inner or tensor.dim() != 2 or "gate." in key or "norm" in key or module.endswith(toy.plain or ("-",)):
            quantised[key] = rounded[key] = tensor
            continue
        stored = toy.quantize(module, tensor.T.contiguous() if transposed else tensor)
        quantised |= {module + ending: part for ending, part in stored.items()}
        weight = stored[".codes"] * stored[".scales"][:, None]
        weight = weight + stored[".offsets"][:, None] if ".offsets" in stored else weight
        rounded[key] = weight.T.contiguous() if transposed else weight
    (folder / "plain").mkdir()
    (folder / "plain" / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(rounded, folder / "plain" / "model.safetensors")
    save_file(quantised, folder / "model.safetensors")
    return replace(config, quantization=toy)


def logits(folder: Path, config: ModelConfig) -> Tensor:
    model = load_model(folder, config, dtype=torch.float32, device=CPU, load_format="auto", seed=0)
    return PagedRunner(model).step([(Sequence(PROMPT), len(PROMPT))])[0]


@pytest.mark.parametrize(
    ("name", "toy"),
    [
        ("llama", ToyFormat()),
        ("llama", ToyFormat(plain=("k_proj", "gate_proj"))),  # a fused matrix of quantised and plain rows
        ("gpt2", ToyFormat()),  # stored [in, out] where it is plain
        ("gpt_neox", ToyFormat()),  # rows by head
        ("qwen3_moe", ToyFormat(asymmetric=("_proj",))),
    ],
)
def test_a_quantised_checkpoint_computes_what_its_codes_mean(tmp_path: Path, name: str, toy: ToyFormat) -> None:
    config = save(name, tmp_path, toy, transposed=name == "gpt2")
    expected = logits(tmp_path / "plain", replace(config, quantization=None))
    torch.testing.assert_close(logits(tmp_path, config), expected, atol=2e-5, rtol=2e-5)


def test_parts_of_one_kind_are_joined(tmp_path: Path) -> None:
    config = save("llama", tmp_path, ToyFormat(plain=("v_proj",)))
    weights = load_weights(tmp_path, config, torch.float32, CPU)
    first, second = weights["layers.0.qkv.weight"]
    assert isinstance(first, QuantizedWeight) and first.shape == (config.q_size + config.kv_size, 48)
    assert isinstance(second, Tensor) and second.shape == (config.kv_size, 48)
    assert isinstance(weights["layers.0.mlp_in.weight"], QuantizedWeight)
    held = sum(
        part.num_bytes if isinstance(part, QuantizedWeight) else part.numel() * 4
        for weight in weights.values()
        for part in (weight if isinstance(weight, tuple) else (weight,))
    )
    assert held == weight_bytes(config, 4) < config.weight_bytes(4)


def test_experts_are_stacked(tmp_path: Path) -> None:
    config = save("mixtral", tmp_path, ToyFormat())
    weight = load_weights(tmp_path, config, torch.float32, CPU)["layers.0.experts_in.weight"]
    assert (
        isinstance(weight, QuantizedWeight) and weight.shape == config.parameter_shapes()["layers.0.experts_in.weight"]
    )


def test_a_plain_matrix_where_config_says_quantised(tmp_path: Path) -> None:
    """Checkpoints leave modules plain that their config.json does not list."""
    config = save("llama", tmp_path, ToyFormat(plain=("q_proj",)))
    expected = logits(tmp_path, config)
    assert torch.equal(logits(tmp_path, replace(config, quantization=ToyFormat())), expected)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "mixtral"])
def test_quantised_on_load(tmp_path: Path, name: str) -> None:
    """The plain checkpoint is quantised as it is read, with the same result as reading the quantised one."""
    config = save(name, tmp_path, ToyFormat(), transposed=name == "gpt2")
    plain = replace(config, quantization=ToyFormat(reads_plain=True))
    again = logits(tmp_path / "plain", plain)  # codes of values that are codes already are the same codes
    torch.testing.assert_close(again, logits(tmp_path, config), atol=2e-5, rtol=2e-5)


REFUSED: list[tuple[Callable[[dict[str, Tensor]], object], str]] = [
    (lambda t: t.pop("model.layers.1.mlp.up_proj.scales"), r"lacks model\.layers\.1\.mlp\.up_proj\.scales\."),
    (
        lambda t: t.update({"model.layers.1.mlp.up_proj.scales": torch.ones(3)}),
        r"'model\.layers\.1\.mlp\.up_proj\.scales' has shape \[3\]; config\.json asks for \[\d+\]",
    ),
    (
        lambda t: t.update({"model.layers.1.self_attn.o_proj.codes": torch.ones(48, 48)}),
        r"'model\.layers\.1\.self_attn\.o_proj\.codes' is of type F32; expected one of I8\.",
    ),
    (
        lambda t: t.update({"model.layers.1.mlp.up_proj.zeros": torch.ones(3)}),
        r"holds model\.layers\.1\.mlp\.up_proj\.zeros, which config\.json gives no place to",
    ),
]


@pytest.mark.parametrize(("damage", "message"), REFUSED)
def test_refusals(tmp_path: Path, damage: Callable[[dict[str, Tensor]], object], message: str) -> None:
    config = save("llama", tmp_path, ToyFormat())
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load_weights(tmp_path, config, torch.float32, CPU)


def test_dummy_weights_are_plain(tmp_path: Path) -> None:
    config = save("llama", tmp_path, ToyFormat())
    with pytest.raises(ModelError, match=r"load_format dummy draws plain weights, config\.json says toy"):
        load_model(tmp_path, config, dtype=torch.float32, device=CPU, load_format="dummy", seed=0)


def test_dummy_weights_are_quantised_on_load(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    config = replace(read_model_config(tmp_path), quantization=ToyFormat(reads_plain=True))
    weights = dummy_weights(config, torch.float32, CPU, 0)
    held = sum(w.num_bytes if isinstance(w, QuantizedWeight) else w.numel() * 4 for w in weights.values())
    assert held == weight_bytes(config, 4) < config.weight_bytes(4)
    load_model(tmp_path, config, dtype=torch.float32, device=CPU, load_format="dummy", seed=0)
