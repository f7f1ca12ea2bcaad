"""Writes checkpoints of a tiny random model with the libraries that define the formats, and what they mean.

    .cache/format-libraries/bin/python benchmarks/formats/libraries.py FOLDER

Runs in an environment of its own (make formats-libraries): transformers with torchao and bitsandbytes,
compressed-tensors, AutoAWQ and AutoGPTQ. Each folder gets the checkpoint and meant.safetensors, the matrices as the
library dequantises them. benchmarks/formats/check_libraries.py loads them with pageserve.
"""

import copy
import importlib.util
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, TorchAoConfig

# A multiple of 64: the CPU kernel of bitsandbytes reads blocks that cross rows as if they did not.
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUP = 32


def plain_model(folder: Path) -> None:
    """A random LLaMA in fp32."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=97, max_position_embeddings=128))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.25)
    model.save_pretrained(folder)


def by_transformers(plain: Path, folder: Path, settings: Any) -> None:
    """Quantised by from_pretrained, written by save_pretrained."""
    model = AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=settings, dtype=torch.float32, device_map="cpu"
    )
    model.save_pretrained(folder)
    meant = {f"{name}.weight": dequantized(module) for name, module in model.named_modules() if is_quantized(module)}
    save_file(meant, folder / "meant.safetensors")


def is_quantized(module: nn.Module) -> bool:
    """Whether a linear layer has other than plain weights."""
    return isinstance(module, nn.Linear) and (type(module) is not nn.Linear or hasattr(module.weight, "qdata"))


def dequantized(module: Any) -> Tensor:
    """fp32 [out, in], by the library that made the module."""
    import bitsandbytes

    weight = module.weight
    if hasattr(weight, "qdata"):
        return weight.dequantize().float().contiguous()
    if hasattr(weight, "quant_state"):
        state = copy.copy(weight.quant_state)
        state.dtype = torch.float32
        return bitsandbytes.functional.dequantize_4bit(weight.data, state).contiguous()
    return bitsandbytes.functional.int8_vectorwise_dequant(weight.data, weight.SCB).float().contiguous()


Matrix = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]  # as benchmarks.formats.writers.Writer


def by_matrix(plain: Path, folder: Path, config: dict[str, Any], write: Matrix) -> None:
    """A checkpoint of matrices that a library packs one by one."""
    folder.mkdir(parents=True)
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if ".layers." not in name or tensor.dim() != 2:
            stored[name] = tensor
            continue
        tensors, value = write(tensor)
        meant[name] = value.float().contiguous()
        stored |= {f"{name.removesuffix('.weight')}.{key}": part.contiguous() for key, part in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, folder / "meant.safetensors")
    settings = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))


def compressed(plain: Path, folder: Path, layout: str, **weights: Any) -> None:
    """Packed by the compressor of compressed-tensors that is registered for the format."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    settings = QuantizationConfig(
        config_groups={"group_0": scheme}, format=layout, quantization_status="compressed", ignore=["lm_head"]
    )
    compressor = BaseCompressor.get_value_from_registry(layout)

    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        size = weights.get("group_size")
        parts = weight.unflatten(-1, (-1, size)) if size else weight.unsqueeze(1)
        low, high = parts.amin(-1), parts.amax(-1)
        if weights["strategy"] == "tensor":
            low, high = low.min().view(1), high.max().view(1)
        whole = generate_gparam(weight.min(), weight.max()) if layout.startswith("nvfp4") else None
        scale, zero = calculate_qparams(low, high, scheme.weights, global_scale=whole)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        state |= {} if whole is None else {"weight_global_scale": whole.view(1)}
        tensors = compressor.compress(state, scheme)
        if whole is None:
            return tensors, compressor.decompress(tensors, scheme)["weight"]
        values = unpack_fp4_from_uint8(tensors["weight_packed"], *weight.shape, dtype=torch.float32)
        scale = tensors["weight_scale"].float()  # decompress() would compute in bf16
        return tensors, dequantize(values, scale, args=scheme.weights, global_scale=whole, dtype=torch.float32)

    by_matrix(plain, folder, settings.model_dump(mode="json"), write)


def without_init(package: str) -> None:
    """Make the modules of a package importable without its __init__, which wants other versions of other packages."""
    if package in sys.modules:
        return
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None
    module = types.ModuleType(package)
    module.__path__ = list(spec.submodule_search_locations)
    sys.modules[package] = module


def groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The weights rounded to 4 bits, their fp16 scales and their zeros [out, groups], asymmetric."""
    parts = weight.unflatten(-1, (-1, GROUP))
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).half().float()
    zeros = (-low / scales).round().clamp(1, 15)
    codes = ((parts / scales.unsqueeze(-1)).round() + zeros.unsqueeze(-1)).clamp(0, 15)
    return ((codes - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)).flatten(-2), scales, zeros


def linear(weight: Tensor) -> nn.Linear:
    """A linear layer without bias."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight.clone()
    return layer


def awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Packed and dequantised by AutoAWQ."""
    without_init("awq")
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    rounded, scales, zeros = groups(weight)
    layer = WQLinear_GEMM.from_linear(
        linear(rounded), 4, GROUP, scales=scales.T.contiguous(), zeros=zeros.T.contiguous()
    )
    meant = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, GROUP)
    return {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales}, meant.T


def gptq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Packed by AutoGPTQ; its layer multiplies the unit matrix to show what it holds."""
    without_init("auto_gptq")
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear

    rounded, scales, zeros = groups(weight)
    layer = QuantLinear(4, GROUP, weight.shape[1], weight.shape[0], False)
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))
    g_idx = torch.empty(weight.shape[1], dtype=torch.int32)
    g_idx[order] = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    shuffled = torch.empty_like(rounded)
    shuffled[:, order] = rounded
    layer.pack(linear(shuffled), scales, zeros, g_idx)
    meant = layer(torch.eye(weight.shape[1])).T
    return {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales", "g_idx")}, meant


def checkpoints() -> dict[str, Callable[[Path, Path], None]]:
    """Name -> writer of (plain checkpoint, new folder)."""
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    int4 = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
    fp4 = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "scale_dtype": "torch.float8_e4m3fn",
    }
    settings: dict[str, Any] = {
        "torchao-int8": TorchAoConfig(Int8WeightOnlyConfig(version=2)),
        "torchao-int8-group": TorchAoConfig(Int8WeightOnlyConfig(version=2, granularity=PerGroup(GROUP))),
        "torchao-int4-bytes": TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP))),
        "torchao-float8": TorchAoConfig(Float8WeightOnlyConfig()),
        "bitsandbytes-nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        "bitsandbytes-nf4-double": BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        ),
        "bitsandbytes-fp4": BitsAndBytesConfig(load_in_4bit=True),
        "bitsandbytes-int8": BitsAndBytesConfig(load_in_8bit=True),
    }
    packed: dict[str, dict[str, Any]] = {
        "int4": {"layout": "pack-quantized", **int4},
        "int4-asymmetric": {"layout": "pack-quantized", **int4, "symmetric": False},
        "int8": {"layout": "int-quantized", "num_bits": 8, "strategy": "channel"},
        "int8-packed": {"layout": "pack-quantized", "num_bits": 8, "strategy": "group", "group_size": GROUP},
        "fp8": {"layout": "float-quantized", "num_bits": 8, "type": "float", "strategy": "channel"},
        "fp8-tensor": {"layout": "float-quantized", "num_bits": 8, "type": "float", "strategy": "tensor"},
        "nvfp4": {"layout": "nvfp4-pack-quantized", **fp4},
    }
    group = {"bits": 4, "group_size": GROUP}
    return {
        **{name: lambda p, f, s=value: by_transformers(p, f, s) for name, value in settings.items()},
        **{f"compressed-{name}": lambda p, f, s=value: compressed(p, f, **s) for name, value in packed.items()},
        "awq": lambda p, f: by_matrix(p, f, {"quant_method": "awq", "version": "gemm", **group}, awq),
        "gptq": lambda p, f: by_matrix(p, f, {"quant_method": "gptq", "sym": False, "desc_act": True, **group}, gptq),
    }


def main() -> None:
    folder = Path(sys.argv[1])
    plain_model(folder / "plain")
    for name, write in checkpoints().items():
        write(folder / "plain", folder / name)
        print("wrote", name, flush=True)


if __name__ == "__main__":
    main()
