"""Every format of quantised checkpoints against transformers with the matrices that the checkpoint means.

benchmarks/formats writes the checkpoints and computes what they mean, apart from engine/models/formats.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from benchmarks.formats.layouts import bnb, compressed, gptq_config, layouts, torchao
from benchmarks.formats.writers import Layout, Writer, e4m3, gptq, mxfp4_experts, write_checkpoint
from engine.errors import ModelError
from engine.models.families import read_model_config
from engine.models.formats import read_quantization
from engine.models.loading.load import load_model, weight_bytes
from engine.models.loading.loader import load_weights
from engine.models.weight_format import InputFormat, Matrix
from kernels.quantized.weight import QuantizedWeight
from tests.engine.models.paged import PagedRunner, Sequence
from tests.engine.models.tiny_models import VOCAB, load_oracle, oracle_logits

CPU = torch.device("cpu")
PROMPT = [5, 17, 3, 88, 41, 9, 60, 2, 2, 31]
TOLERANCE = 1e-4  # the issue asks for 1e-3
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2}
SMALL = layouts(group=32, block=48)  # whole groups, and blocks that end within the matrix


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaForCausalLM, Path]:
    """A tiny random model and its plain checkpoint."""
    folder = tmp_path_factory.mktemp("plain")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=VOCAB, max_position_embeddings=128)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.25)
    model.save_pretrained(folder)
    return model, folder


def logits(folder: Path) -> Tensor:
    model = load_model(folder, read_model_config(folder), dtype=torch.float32, device=CPU, load_format="auto", seed=0)
    return PagedRunner(model).step([(Sequence(PROMPT), len(PROMPT))])[0]


def assert_logits(oracle: LlamaForCausalLM, meant: dict[str, Tensor], folder: Path) -> None:
    oracle.load_state_dict(meant)
    expected = oracle_logits(oracle, PROMPT)
    torch.testing.assert_close(logits(folder), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", SMALL)
def test_logits(oracle: tuple[LlamaForCausalLM, Path], tmp_path: Path, name: str) -> None:
    model, plain = oracle
    meant = write_checkpoint(plain, tmp_path, SMALL[name])
    assert_logits(model, meant, tmp_path)
    config = read_model_config(tmp_path)
    held = load_weights(tmp_path, config, torch.float32, CPU).values()
    parts = [part for weight in held for part in (weight if isinstance(weight, tuple) else (weight,))]
    assert any(isinstance(part, QuantizedWeight) for part in parts)
    num_bytes = sum(part.num_bytes if isinstance(part, QuantizedWeight) else part.nbytes for part in parts)
    assert num_bytes == pytest.approx(weight_bytes(config, 4), rel=0.15)


NVFP4 = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
MODELOPT_FILE = {"producer": {"name": "modelopt", "version": "0.23.0"}, "quantization": NVFP4}
OLDER: dict[str, tuple[str, dict[str, Any], str]] = {  # file beside config.json -> layout, its settings, a wrong value
    "quantize_config.json": (
        "gptq 4 bits act-order",
        {"bits": 4, "group_size": 32, "damp_percent": 0.1, "desc_act": True, "sym": True, "model_file_base_name": "m"},
        "quantize_config.json: bits = 3",
    ),
    "quant_config.json": ("awq", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}, "w_bit = 3"),
    "hf_quant_config.json": ("modelopt nvfp4", MODELOPT_FILE, "hf_quant_config.json: quantization: quant_algo 3"),
}


@pytest.mark.parametrize("file", OLDER)
def test_settings_in_a_file_of_their_own(oracle: tuple[LlamaForCausalLM, Path], tmp_path: Path, file: str) -> None:
    layout, settings, message = OLDER[file]
    meant = write_checkpoint(oracle[1], tmp_path, SMALL[layout])
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model_config(tmp_path).quantization is None
    (tmp_path / file).write_text(json.dumps(settings))
    if file == "quantize_config.json":
        (tmp_path / "model.safetensors").rename(tmp_path / "gptq_model-4bit-32g.safetensors")
    assert_logits(oracle[0], meant, tmp_path)
    with pytest.raises(ModelError, match="quantised already"):
        read_model_config(tmp_path, "int8")
    wrong = re.sub(r'(?<=bits": )4|(?<=bit": )4|"NVFP4"', "3", json.dumps(settings))
    (tmp_path / file).write_text(wrong)
    with pytest.raises(ModelError, match=message):
        read_model_config(tmp_path)
    (tmp_path / file).write_text("[")
    with pytest.raises(ModelError, match=f"{file} is not valid JSON"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": SMALL[layout].config}))
    assert read_model_config(tmp_path).quantization is not None  # config.json goes before the file


CACHE_ALONE: dict[str, tuple[str, dict[str, Any]]] = {  # file, its settings
    "modelopt": ("hf_quant_config.json", {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}),
    "compressed-tensors": ("config.json", compressed("dense") | {"config_groups": {}, "kv_cache_scheme": {}}),
    "attention": (
        "config.json",
        compressed("dense")
        | {"config_groups": {"a": {"targets": ["LlamaAttention"], "weights": None, "input_activations": {}}}},
    ),
    "no settings": ("unread.json", {}),  # as in the checkpoints of text-generation-inference
}


@pytest.mark.parametrize("name", CACHE_ALONE)
def test_scales_of_the_cache_beside_plain_weights(
    oracle: tuple[LlamaForCausalLM, Path], tmp_path: Path, name: str
) -> None:
    model, plain = oracle
    file, settings = CACHE_ALONE[name]
    fields = json.loads((plain / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": settings}))
    if file != "config.json":
        (tmp_path / "config.json").write_text(json.dumps(fields))
        (tmp_path / file).write_text(json.dumps(settings))
    tensors = load_file(plain / "model.safetensors")
    scales = {f"model.layers.0.self_attn.{end}": torch.tensor(2.0) for end in ("kv_scale", "k_scale", "v_proj.v_scale")}
    save_file(tensors | scales, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_logits(model, tensors, tmp_path)


def test_awq_settings_under_the_name_of_gptq(oracle: tuple[LlamaForCausalLM, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((oracle[1] / "config.json").read_bytes())
    (tmp_path / "quantize_config.json").write_text(json.dumps(OLDER["quant_config.json"][1]))
    found = read_model_config(tmp_path).quantization
    assert found is not None and found.name == "awq"


def add_unused(tensors: dict[str, Tensor]) -> None:
    """AutoGPTQ's zero biases, and the scales of a quantised KV cache."""
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(2.0)


def changed(name: str, **changes: Any) -> Layout:
    """A layout with other fields in its quantization_config."""
    return replace(SMALL[name], config=SMALL[name].config | changes)


def grouped(**groups: dict[str, Any]) -> dict[str, Any]:
    """config_groups by the targets of each group and the fields of its weights."""
    return {"config_groups": {name: {"targets": [], **group} for name, group in groups.items()}}


INT8_GROUP = {"weights": {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32}}
PACKED_4 = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}
AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
CHOSEN: dict[str, tuple[Layout, tuple[str, ...]]] = {  # layouts, and the modules that stay plain
    "gptq dynamic": (
        changed("gptq 4 bits", bits=8, dynamic={"-:.*down_proj": {}, r"+:model\.layers\.\d": {"bits": 4}}),
        ("down_proj",),
    ),
    "gptq some modules": (
        changed("gptq 4 bits", modules_in_block_to_quantize=[["self_attn.q_proj"], ["mlp.up_proj", "mlp.gate_proj"]]),
        ("k_proj", "v_proj", "o_proj", "down_proj"),
    ),
    "gptq unlisted": (SMALL["gptq 4 bits"], ("k_proj", "layers.1")),
    "awq": (changed("awq", modules_to_not_convert=["k_proj", "model.layers.1"]), ("k_proj", "layers.1")),
    "regular expressions": (
        changed("compressed-tensors int4 group", ignore=["lm_head", "re:.*self_attn.*", "model.layers.1.mlp.up_proj"]),
        ("self_attn", "layers.1.mlp.up_proj"),
    ),
    "targets": (
        changed(
            "compressed-tensors int8 packed",
            **grouped(
                a={"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "channel"}},
                b={"targets": [r"re:.*\.(layers)\..*"], **INT8_GROUP},
            ),
        ),
        (),
    ),
    "ragged groups": (Layout(gptq_config(4, 40, False), gptq(4, 40, False)), ()),
    "ragged groups in another order": (Layout(gptq_config(8, 40, True), gptq(8, 40, True, act_order=True)), ()),
    "auto-round": (
        changed(
            "gptq 4 bits",
            quant_method="auto-round",
            bits=8,
            packing_format="auto_round:auto_gptq",
            block_name_to_quantize="model.layers",
            extra_config={
                r".*layers\.\d": {"bits": 4},
                "model.layers.0.mlp.up_proj": {"bits": 16, "data_type": "float"},
                "lm_head": {"bits": 16},
            },
        ),
        ("layers.0.mlp.up_proj",),
    ),
    "auto-round awq": (
        changed(
            "awq",
            quant_method="auto-round",
            sym=False,
            packing_format="auto_round:auto_awq",
            extra_config={"model.layers.0.mlp.up_proj": {"bits": 16}},
        ),
        ("layers.0.mlp.up_proj",),
    ),
    "modelopt wildcards": (changed("modelopt nvfp4", ignore=["*q_proj", "model.layers.1*"]), ("q_proj", "layers.1")),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_some_modules_are_plain(oracle: tuple[LlamaForCausalLM, Path], tmp_path: Path, name: str) -> None:
    model, plain = oracle
    layout, skipped = CHOSEN[name]
    meant = write_checkpoint(plain, tmp_path, layout, skipped)
    if "gptq" in name:
        change_tensors(tmp_path, add_unused)
    assert_logits(model, meant, tmp_path)


@pytest.mark.parametrize("layout", [r"model\.language_model\.layers", r"language_model\.model\.layers"])
def test_settings_by_the_names_of_a_vision_language_checkpoint(layout: str) -> None:
    """Loading leaves the name of the text model out."""
    matrix = Matrix("model.layers.1.mlp.up_proj", "layers.1.mlp_in.weight", (96, 64))
    name = layout.replace("\\", "") + ".1.mlp.up_proj"
    groups = grouped(a={"targets": ["Linear"], **INT8_GROUP}, b={"targets": [f"re:{layout}.*"], **PACKED_4})
    packed = compressed("pack-quantized") | groups
    for settings, ending, shape in (
        (gptq_config(4, 32, True, dynamic={f"+:{layout}": {"bits": 8}}), ".qweight", (16, 96)),
        (gptq_config(4, 32, True) | AUTO_ROUND | {"extra_config": {name: {"bits": 8}}}, ".qweight", (16, 96)),
        (packed, ".weight_packed", (96, 8)),
        (compressed("pack-quantized") | {"ignore": [name]}, None, None),
    ):
        found = read_quantization({"quantization_config": settings})
        assert found is not None
        stored = found.tensors(matrix)
        assert (None if stored is None else stored[str(ending)].shape) == shape


@pytest.mark.parametrize("name", ["fp8 block", "gptq 8 bits", "awq", "compressed-tensors nvfp4", "bitsandbytes nf4"])
def test_experts(tmp_path: Path, name: str) -> None:
    """Experts are stored apart and served as one weight; the router is plain, whether listed or not."""
    torch.manual_seed(0)
    sizes = {**SIZES, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, vocab_size=VOCAB)).save_pretrained(tmp_path / "plain")
    meant = write_checkpoint(tmp_path / "plain", tmp_path, SMALL[name], skipped=("mlp.gate.",))
    save_file(meant, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    expected = oracle_logits(load_oracle(tmp_path / "plain", torch.float32), PROMPT)
    torch.testing.assert_close(logits(tmp_path), expected, atol=TOLERANCE, rtol=TOLERANCE)
    weight = load_weights(tmp_path, read_model_config(tmp_path), torch.float32, CPU)["layers.1.experts_in.weight"]
    assert isinstance(weight, QuantizedWeight) and weight.shape == (4, 64, 64)


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "vocab_size": VOCAB, "hidden_size": 64}
EXPERTS |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}
GEMMA4: dict[str, Any] = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
GEMMA4 |= {"global_head_dim": 16, "hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention"] * 2}
EACH_EXPERT: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama4": lambda: Llama4TextConfig(**{**EXPERTS, "intermediate_size_mlp": 48, "pad_token_id": None}),
    "gemma4": lambda: Gemma4TextConfig(**{**EXPERTS, **GEMMA4, "num_local_experts": None, "pad_token_id": None}),
}


@pytest.mark.parametrize("name", EACH_EXPERT)
@pytest.mark.parametrize("layout", ["compressed-tensors int4 group", "compressed-tensors fp8 channel"])
def test_experts_that_were_one_tensor_before_they_were_quantised(tmp_path: Path, name: str, layout: str) -> None:
    """llm-compressor makes a linear layer of each expert."""
    torch.manual_seed(0)
    oracle = AutoModelForCausalLM.from_config(EACH_EXPERT[name](), attn_implementation="eager")
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.normal_(std=0.25)
    plain = tmp_path / "plain"
    oracle.save_pretrained(plain, save_original_format=False)
    tensors, turned = load_file(plain / "model.safetensors"), name == "llama4"
    together = [key for key in tensors if tensors[key].dim() == 3]
    assert len(together) == 4
    apart = {key: tensor for key, tensor in tensors.items() if key not in together}
    for key in together:
        module, part = key.rsplit(".", 1)
        for expert, matrix in enumerate(tensors[key].mT if turned else tensors[key]):
            halves = matrix.chunk(2) if part == "gate_up_proj" else [matrix]
            for end, half in zip(("gate_proj", "up_proj") if len(halves) == 2 else (part,), halves, strict=True):
                apart[f"{module}.{expert}.{end}.weight"] = half.contiguous()
    save_file(apart, plain / "model.safetensors", metadata={"format": "pt"})
    meant = write_checkpoint(plain, tmp_path, SMALL[layout], skipped=("router",))
    for key in together:
        module, part = key.rsplit(".", 1)
        ends = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        each = [torch.cat([meant.pop(f"{module}.{i}.{end}.weight") for end in ends]) for i in range(4)]
        meant[key] = torch.stack([matrix.mT if turned else matrix for matrix in each])
    oracle.load_state_dict(meant, strict=name != "gemma4")
    expected = oracle_logits(oracle.eval(), PROMPT)
    torch.testing.assert_close(logits(tmp_path), expected, atol=TOLERANCE, rtol=TOLERANCE)
    weight = load_weights(tmp_path, read_model_config(tmp_path), torch.float32, CPU)["layers.1.experts_in.weight"]
    assert isinstance(weight, QuantizedWeight) and weight.shape == (4, 64, 64)


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def save_all_experts(folder: Path, config: PreTrainedConfig, write: Writer, settings: dict[str, Any]) -> None:
    """A random checkpoint whose layers hold all experts in one tensor [experts, in, out], and one of what it means."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.25)
    model.save_pretrained(folder / "plain", save_original_format=False)
    stored = load_file(folder / "plain" / "model.safetensors")
    meant = dict(stored)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj")) and stored[name].dim() == 3]:
        tensors, value = write(stored.pop(name).mT)
        meant[name] = value.mT.contiguous()
        stored |= {name + ending: tensor.contiguous() for ending, tensor in tensors.items()}
    assert len(stored) > len(meant)
    save_file(meant, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "plain" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": settings}))


def fbgemm_experts(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """FP8 codes [experts, in, out] and a scale for each output."""
    scales = weight.abs().amax(-1, keepdim=True) / 448
    codes, meant = e4m3(weight, scales)
    return {"": codes.mT, "_scale": scales.mT}, meant


ALL_EXPERTS: dict[str, tuple[Callable[[], PreTrainedConfig], Writer, dict[str, Any]]] = {
    "gpt-oss mxfp4": (
        lambda: GptOssConfig(**EXPERTS, max_position_embeddings=128),
        mxfp4_experts,
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    ),
    "llama4 fbgemm_fp8": (
        lambda: Llama4TextConfig(**EXPERTS, intermediate_size_mlp=48),
        fbgemm_experts,
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["self_attn", "shared_expert", "router"]},
    ),
}


@pytest.mark.parametrize("name", ALL_EXPERTS)
def test_all_experts_in_one_tensor(tmp_path: Path, name: str) -> None:
    config, write, settings = ALL_EXPERTS[name]
    save_all_experts(tmp_path, config(), write, settings)
    expected = oracle_logits(load_oracle(tmp_path / "plain", torch.float32), PROMPT)
    torch.testing.assert_close(logits(tmp_path), expected, atol=TOLERANCE, rtol=TOLERANCE)
    weights = load_weights(tmp_path, read_model_config(tmp_path), torch.float32, CPU)
    assert isinstance(weights["layers.1.experts_in.weight"], QuantizedWeight)
    assert isinstance(weights["layers.1.qkv.weight"], Tensor)


Q_PROJ = "model.layers.0.self_attn.q_proj"
DAMAGES: dict[str, tuple[str, Callable[[dict[str, Tensor]], object], str]] = {
    "missing": ("gptq 4 bits", lambda t: t.pop(f"{Q_PROJ}.qzeros"), rf"lacks {Q_PROJ}.qzeros"),
    "shape": ("awq", lambda t: t.update({f"{Q_PROJ}.scales": torch.ones(1, 3)}), r"asks for \[2, 64\]"),
    "type": ("bitsandbytes int8", lambda t: t.update({f"{Q_PROJ}.weight": torch.ones(64, 64).int()}), "expected .* I8"),
    "groups": (
        "gptq 4 bits act-order",
        lambda t: t[f"{Q_PROJ}.g_idx"].zero_(),
        rf"{Q_PROJ}.g_idx' does not give 32 columns",
    ),
    "state": (
        "bitsandbytes nf4",
        lambda t: t[f"{Q_PROJ}.weight.quant_state.bitsandbytes__nf4"].zero_(),
        "quant_state.* is not JSON",
    ),
    "absmax": (
        "bitsandbytes nf4",
        lambda t: t.update({f"{Q_PROJ}.weight.absmax": torch.ones(7)}),
        "absmax' has 7 numbers; wanted is one for each 64",
    ),
    "nan": ("fp8 block", lambda t: t[f"{Q_PROJ}.weight"].view(torch.uint8).fill_(127), "holds NaN"),
    "scales": (
        "modelopt fp8",
        lambda t: t.update({f"{Q_PROJ}.weight_scale": torch.ones(5)}),
        r"has shape \[5\]; wanted is one number",
    ),
    "bias": ("gptq 4 bits", lambda t: t.update({f"{Q_PROJ}.bias": torch.ones(64)}), "q_proj.bias, which .* no place"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_tensors(oracle: tuple[LlamaForCausalLM, Path], tmp_path: Path, name: str) -> None:
    layout, damage, message = DAMAGES[name]
    write_checkpoint(oracle[1], tmp_path, SMALL[layout])
    change_tensors(tmp_path, damage)
    with pytest.raises(ModelError, match=message):
        load_weights(tmp_path, read_model_config(tmp_path), torch.float32, CPU)


@pytest.mark.parametrize(("name", "rounds"), [
    ("compressed-tensors w8a8", True), ("compressed-tensors int8", False), ("torchao int8 dynamic", True),
    ("torchao int8", False),
])  # fmt: skip
def test_int8_inputs_are_those_that_the_checkpoint_asks_for(
    oracle: tuple[LlamaForCausalLM, Path], tmp_path: Path, name: str, rounds: bool
) -> None:
    layout = SMALL.get(name) or replace(SMALL["torchao int8"], config=torchao("Int8DynamicActivationInt8WeightConfig"))
    write_checkpoint(oracle[1], tmp_path, layout)
    config = read_model_config(tmp_path)
    assert isinstance(config.quantization, InputFormat) and config.quantization.int8_inputs == rounds
    weights = load_weights(tmp_path, config, torch.bfloat16, CPU).values()
    found = {weight.int8_inputs for weight in weights if isinstance(weight, QuantizedWeight)}
    assert found == {rounds}


@pytest.mark.parametrize("strategy", ["tensor", "block"])
@pytest.mark.parametrize(("layout", "bits"), [("pack-quantized", 4), ("pack-quantized", 8), ("int-quantized", 8)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_integers_with_a_scale_for_the_matrix_or_each_block(
    layout: str, bits: int, strategy: str, symmetric: bool
) -> None:
    """compressed-tensors packs the zeros of rows and groups alone; the last blocks end within the matrix."""
    block = [16, 32] if strategy == "block" else None
    fields = {"num_bits": bits, "strategy": strategy, "symmetric": symmetric, "block_structure": block}
    found = read_quantization({"quantization_config": compressed(layout, **fields)})
    matrix, middle = Matrix("model.layers.1.mlp.up_proj", "layers.1.mlp_in.weight", (40, 80)), 1 << (bits - 1)
    codes = torch.randint(-middle, middle, matrix.shape)
    scales = torch.rand(3, 3) + 0.5 if block else torch.rand(1) + 0.5
    zeros = torch.randint(-middle, middle, scales.shape)
    words = (codes + middle).unflatten(-1, (-1, 32 // bits)) << torch.arange(0, 32, bits)
    stored = {".weight_scale": scales, ".weight": codes.to(torch.int8)}
    if layout == "pack-quantized":
        stored = {".weight_scale": scales, ".weight_packed": words.sum(-1).to(torch.int32)}
    stored |= {} if symmetric else {".weight_zero_point": zeros.to(torch.int8)}
    assert found is not None
    wanted = found.tensors(matrix) or {}
    assert {name for name, tensor in wanted.items() if not tensor.optional} <= stored.keys() <= wanted.keys()
    names = {torch.int8: "I8", torch.int32: "I32", torch.float32: "F32"}
    for name, tensor in stored.items():
        assert wanted[name].shape in (None, tensor.shape) and names[tensor.dtype] in wanted[name].dtypes
    if block:
        scales, zeros = (x.repeat_interleave(16, 0)[:40].repeat_interleave(32, 1)[:, :80] for x in (scales, zeros))
    meant = (codes - (0 if symmetric else zeros)) * scales
    torch.testing.assert_close(found.quantized(matrix, stored).dequantize(), meant)


@pytest.mark.parametrize("inputs", [None, {"num_bits": 8, "type": "float"}, {"num_bits": 4, "type": "int"}])
def test_other_inputs_keep_their_dtype(inputs: dict[str, Any] | None) -> None:
    found = read_quantization({"quantization_config": compressed("int-quantized", inputs, strategy="channel")})
    assert isinstance(found, InputFormat) and not found.int8_inputs


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"quant_method": "hqq"},
        "quant_method 'hqq' is not served; served are auto-round, awq, bitsandbytes, compressed-t",
    ),
    ({}, "quant_method None is not served"),
    (gptq_config(3, 128, True), "bits = 3 is not served; served are 4 and 8"),
    (gptq_config(4, 128, True, checkpoint_format="marlin"), "checkpoint_format 'marlin' is not served"),
    (gptq_config(4, 128, True, dynamic={"+:(": {}}), "dynamic holds '\\(', no regular expression"),
    (gptq_config(4, 128, True, dynamic={"+:a": {"bits": 2}}), "dynamic: bits = 2 is not served"),
    (
        AUTO_ROUND | {"packing_format": "auto_round:exllamav2"},
        "served are auto_round:auto_gptq and auto_round:auto_awq",
    ),
    (
        AUTO_ROUND | {"packing_format": None, "backend": "auto_round:triton"},
        "packing_format 'auto_round:triton' is not",
    ),
    (AUTO_ROUND | {"bits": 2}, "bits = 2 is not served"),
    (AUTO_ROUND | {"data_type": "mx_fp"}, "data_type = 'mx_fp' is not supported"),
    (AUTO_ROUND | {"extra_config": {"(": {"bits": 8}}}, "extra_config holds '\\(', no regular expression"),
    (AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "extra_config": {"a": {"bits": 8}}}, "settings of its own"),
    ({"quant_method": "awq", "bits": 8}, "bits = 8 is not supported"),
    ({"quant_method": "awq", "version": "gemv"}, "version = 'gemv' is not supported \\(only 'gemm' is served"),
    ({"quant_method": "awq", "backend": "llm-awq"}, "backend 'llm-awq'"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not served; known are e4m3"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be a list of two sizes"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' is not served; known are NVFP4"),
    (bnb(True, bnb_4bit_quant_storage="bfloat16"), "bnb_4bit_quant_storage = 'bfloat16'"),
    ({"quant_method": "bitsandbytes"}, "load_in_4bit or load_in_8bit must be true"),
    (torchao("Int4WeightOnlyConfig", int4_packing_format="tile_packed_to_4d"), "int4_packing_format 'tile_packed"),
    (torchao("FqnToConfig"), "_type 'FqnToConfig' is not served"),
    ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "quant_type 'int4_weight_only' is not served"),
    (compressed("marlin-24"), "format 'marlin-24' is not served"),
    (compressed("pack-quantized", num_bits=3), "num_bits 3 of type 'int' in format 'pack-quantized'"),
    (compressed("pack-quantized") | {"transform_config": {"a": 1}}, "transform_config = .* is not served"),
    (compressed("pack-quantized") | {"ignore": ["re:*"]}, "ignore holds '\\*', no regular expression"),
    (compressed("int-quantized", dynamic=True), "weights: dynamic = True"),
    (compressed("int-quantized") | {"config_groups": {"W8A8": ["Linear"]}}, "config_groups must map names to schemes"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_refused_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_quantization({"quantization_config": settings})
