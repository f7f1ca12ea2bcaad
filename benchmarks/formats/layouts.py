"""LAYOUTS: the rows of `make formats`. A new kind of checkpoint is a new row here."""

from typing import Any

import torch

from benchmarks.formats.writers import (
    Layout,
    awq,
    bnb_4bit,
    bnb_int8,
    fp8_block,
    fp8_channel,
    fp8_tensor,
    gptq,
    int8,
    mxfp4,
    nvfp4,
    packed,
    torchao_float8,
    torchao_int4,
)

COMPRESSED_INT8 = (".weight", ".weight_scale", ".weight_zero_point")
TORCHAO_INT8 = ("._weight_qdata", "._weight_scale", "._weight_zero_point")
DYNAMIC_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
COMPRESSED_NVFP4 = (".weight_packed", ".weight_scale", ".weight_global_scale")
MODELOPT_NVFP4 = (".weight", ".weight_scale", ".weight_scale_2")


def gptq_config(bits: int, group_size: int, sym: bool, **more: Any) -> dict[str, Any]:
    """The fields that GPTQModel writes."""
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": sym, "desc_act": False} | more


def compressed(layout: str, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    """The fields that llm-compressor writes for one group of all linear layers. inputs: those of activations."""
    default = {"dynamic": False, "symmetric": True, "type": "int", "num_bits": 8, "group_size": None}
    group = {
        "targets": ["Linear"],
        "weights": default | weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def torchao(kind: str, **data: Any) -> dict[str, Any]:
    """The fields that transformers 5 writes for a configuration of torchao."""
    return {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": kind, "_version": 2, "_data": data}},
        "include_input_output_embeddings": False,
        "modules_to_not_convert": None,
    }


def bnb(four: bool, **more: Any) -> dict[str, Any]:
    """The fields that transformers writes for bitsandbytes."""
    return {"quant_method": "bitsandbytes", "load_in_4bit": four, "load_in_8bit": not four} | more


def layouts(group: int = 128, block: int = 128) -> dict[str, Layout]:
    """Every layout, with groups of at most `group` columns and FP8 blocks of `block` rows and columns."""
    return {
        **_fp8(block),
        **_compressed_8_bit(group, block),
        **_compressed_int4(group),
        **_fp4(),
        **_gptq_and_awq(group),
        **_bitsandbytes(),
        **_torchao(group),
    }


def _fp8(block: int) -> dict[str, Layout]:
    """FP8 of transformers, vLLM, fbgemm and ModelOpt."""
    return {
        "fp8 block": Layout(
            {"quant_method": "fp8", "weight_block_size": [block, block], "activation_scheme": "dynamic"},
            fp8_block(block, block),
        ),
        "fp8 tensor, static activations": Layout(
            {"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor(".weight_scale", (), (".input_scale",))
        ),
        "fbgemm_fp8": Layout({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8_channel),
        "modelopt fp8": Layout(
            {"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_tensor(".weight_scale", (), (".input_scale",))
        ),
    }


def _compressed_8_bit(group: int, block: int) -> dict[str, Layout]:
    """FP8 and int8 of compressed-tensors."""
    return {
        "compressed-tensors fp8 tensor": Layout(
            compressed("float-quantized", type="float", strategy="tensor"),
            fp8_tensor(".weight_scale", (1,), (".input_scale",)),
        ),
        "compressed-tensors fp8 channel": Layout(
            compressed("float-quantized", type="float", strategy="channel"), fp8_channel
        ),
        "compressed-tensors fp8 block": Layout(
            compressed("float-quantized", type="float", strategy="block", block_structure=[block, block]),
            fp8_block(block, block, ".weight_scale", torch.bfloat16),
        ),
        "compressed-tensors int8": Layout(
            compressed("int-quantized", strategy="channel"), int8(-1, True, COMPRESSED_INT8, torch.bfloat16)
        ),
        "compressed-tensors w8a8": Layout(
            compressed("int-quantized", DYNAMIC_INT8, strategy="channel"),
            int8(-1, True, COMPRESSED_INT8[:2], torch.bfloat16),
        ),
        "compressed-tensors int8 asymmetric": Layout(
            compressed("int-quantized", strategy="group", group_size=group, symmetric=False),
            int8(group, False, COMPRESSED_INT8, torch.float32),
        ),
        "compressed-tensors int8 packed": Layout(
            compressed("pack-quantized", strategy="group", group_size=group), packed(8, group)
        ),
    }


def _compressed_int4(group: int) -> dict[str, Layout]:
    """int4 of compressed-tensors."""
    return {
        "compressed-tensors int4 channel": Layout(
            compressed("pack-quantized", num_bits=4, strategy="channel"), packed(4, -1)
        ),
        "compressed-tensors int4 group": Layout(
            compressed("pack-quantized", num_bits=4, strategy="group", group_size=group), packed(4, group)
        ),
        "compressed-tensors int4 asymmetric": Layout(
            compressed("pack-quantized", num_bits=4, strategy="group", group_size=group, symmetric=False),
            packed(4, group, symmetric=False),
        ),
        "compressed-tensors int4 act-order": Layout(
            compressed("pack-quantized", num_bits=4, strategy="group", group_size=group, actorder="group"),
            packed(4, group, act_order=True),
        ),
    }


def _fp4() -> dict[str, Layout]:
    """NVFP4 and MXFP4."""
    return {
        "compressed-tensors nvfp4": Layout(
            compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
            nvfp4(COMPRESSED_NVFP4, inverse=True),
        ),
        "compressed-tensors mxfp4": Layout(
            compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32), mxfp4
        ),
        "modelopt nvfp4": Layout(
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, nvfp4(MODELOPT_NVFP4, False)
        ),
    }


def _gptq_and_awq(group: int) -> dict[str, Layout]:
    """GPTQ and AWQ."""
    half = max(group // 2, 16)
    return {
        "gptq 4 bits": Layout(gptq_config(4, group, True), gptq(4, group, True)),
        "gptq 4 bits asymmetric": Layout(gptq_config(4, half, False), gptq(4, half, False)),
        "gptq 4 bits act-order": Layout(
            gptq_config(4, group, True) | {"desc_act": True}, gptq(4, group, True, act_order=True)
        ),
        "gptq_v2 4 bits rows": Layout(
            gptq_config(4, -1, False, checkpoint_format="gptq_v2"), gptq(4, -1, False, v2=True)
        ),
        "gptq 8 bits": Layout(gptq_config(8, group, False), gptq(8, group, False)),
        "awq": Layout(
            {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}, awq(group)
        ),
    }


def _bitsandbytes() -> dict[str, Layout]:
    """bitsandbytes."""
    return {
        "bitsandbytes nf4": Layout(bnb(True, bnb_4bit_quant_type="nf4"), bnb_4bit("nf4")),
        "bitsandbytes nf4 double": Layout(
            bnb(True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True), bnb_4bit("nf4", double=True)
        ),
        "bitsandbytes fp4": Layout(bnb(True, bnb_4bit_quant_type="fp4"), bnb_4bit("fp4")),
        "bitsandbytes int8": Layout(bnb(False), bnb_int8),
    }


def _torchao(group: int) -> dict[str, Layout]:
    """torchao."""
    per_group = {"_type": "PerGroup", "_version": 1, "_data": {"group_size": group}}
    return {
        "torchao int8": Layout(torchao("Int8WeightOnlyConfig"), int8(-1, True, TORCHAO_INT8, torch.float32)),
        "torchao int8 group": Layout(
            torchao("Int8WeightOnlyConfig", granularity=per_group), int8(group, False, TORCHAO_INT8, torch.float32)
        ),
        "torchao int4": Layout(torchao("Int4WeightOnlyConfig", group_size=group), torchao_int4(group)),
        "torchao float8": Layout(torchao("Float8WeightOnlyConfig"), torchao_float8),
    }
