"""write_gguf: a plain checkpoint folder -> one GGUF file of a type, with the `gguf` package's names and values."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from benchmarks.formats.gguf_blocks import K_TYPES, quantize_k
from engine.models.loading.weight_files import find_weight_files

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma",
    "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3", "gpt2": "gpt2", "qwen3_moe": "qwen3moe",
    "granite": "granite", "granitemoehybrid": "granite", "smollm3": "smollm3",
}  # fmt: skip
PAIRED = ("llama", "granite", "smollm3")  # the pairs of each rotated head side by side
EXPERT_PARTS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "down_proj": "down", "up_proj": "up"}


def write_gguf(source: Path, target: Path, kind: str = "F32", tensors_per_file: int = 0) -> Path:
    """Write the matrices in `kind` where their rows are whole blocks, else in F16 or F32; returns `target`.

    tensors_per_file: write several files beside it, called as llama-gguf-split calls them; 0: one file.
    """
    config = json.loads((source / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(target, architecture, split_max_tensors=tensors_per_file)
    _write_config(writer, config)
    if (source / "tokenizer.json").is_file():
        _write_tokenizer(writer, source, config["vocab_size"])
    for name, array in _tensors(source, config, architecture):
        used = _kind_of(name, array, kind)
        data = quantize_k(array, used) if used in K_TYPES else _quantize(array, used)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[used])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _quantize(array: np.ndarray, kind: str) -> np.ndarray:
    return gguf.quants.quantize(array, gguf.GGMLQuantizationType[kind])


def _kind_of(name: str, array: np.ndarray, kind: str) -> str:
    if array.ndim < 2 or "position_embd" in name or "ffn_gate_inp" in name:
        return "F32"
    block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return kind if array.shape[-1] % block == 0 else "F16"


def _write_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config.get("num_attention_heads") or config["n_head"]
    hidden = config.get("hidden_size") or config["n_embd"]
    writer.add_context_length(config.get("max_position_embeddings") or config["n_positions"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config.get("num_hidden_layers") or config["n_layer"])
    inner = config.get("shared_intermediate_size") or config.get("intermediate_size") or config.get("n_inner")
    writer.add_feed_forward_length(inner or 4 * hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    if config["model_type"] == "gpt2":
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    head_dim = config.get("head_dim") or hidden // heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    writer.add_rope_freq_base(full.get("rope_theta", config.get("rope_theta", 10000.0)))
    writer.add_rope_dimension_count(int(head_dim * full.get("partial_rotary_factor", 1.0)))
    if full.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(full["rope_type"]))
        writer.add_rope_scaling_factor(full["factor"])
    if full.get("original_max_position_embeddings"):
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    if "sliding_attention" in rope:
        writer.add_float32("gemma3.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("sliding_window_pattern"):
        writer.add_uint32("gemma3.attention.sliding_window_pattern", config["sliding_window_pattern"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["model_type"].startswith("granite"):
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if config.get("shared_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
        writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
    if experts := config.get("num_local_experts") or config.get("num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _tensors(source: Path, config: dict[str, Any], architecture: str) -> list[tuple[str, np.ndarray]]:
    """All tensors by their names in the file, fp32, in the file's layout."""
    layers = config.get("num_hidden_layers") or config["n_layer"]
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, layers)
    made: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for path in find_weight_files(source):
        for name, tensor in load_file(path).items():
            array = tensor.float().numpy()
            if ".experts." in name:
                _, _, layer, *_, expert, part, _ = name.split(".")
                place = f"blk.{layer}.ffn_{EXPERT_PARTS[part]}_exps.weight"
                experts.setdefault(place, {})[int(expert)] = array
                continue
            if name.endswith("shared_mlp.input_linear.weight"):
                for part, half in zip(("gate", "up"), np.split(array, 2), strict=True):
                    made[f"blk.{name.split('.')[2]}.ffn_{part}.weight"] = half
                continue
            name = name.replace("shared_mlp.output_linear", "mlp.down_proj")
            place = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if place is None:
                raise ValueError(f"{name} has no place in a GGUF file of {architecture}")
            made[place] = _arranged(place, array, config, architecture)
    for place, parts in experts.items():
        made[place] = np.stack([parts[i] for i in range(len(parts))])
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        made["rope_freqs.weight"] = _llama3_factors(config, rope)
    for length in ("long", "short") if rope.get("rope_type") == "longrope" else ():
        made[f"rope_factors_{length}.weight"] = np.array(rope[f"{length}_factor"], np.float32)
    return list(made.items())


def _arranged(name: str, array: np.ndarray, config: dict[str, Any], architecture: str) -> np.ndarray:
    """The pairs of each rotated head side by side (PAIRED), 1 + weight (norms of Gemma), [out, in] (GPT-2)."""
    heads = {"attn_q": config.get("num_attention_heads"), "attn_k": config.get("num_key_value_heads")}
    part = name.split(".")[-2]
    if architecture in PAIRED and part in heads:
        rows = array.reshape(heads[part], 2, -1, *array.shape[1:])
        return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(array.shape))
    if architecture.startswith("gemma") and part.endswith("norm"):
        return array + 1
    transposed = architecture == "gpt2" and name.startswith("blk.") and array.ndim == 2
    return np.ascontiguousarray(array.T) if transposed else array


def _llama3_factors(config: dict[str, Any], rope: dict[str, Any]) -> np.ndarray:
    """The divisor of each frequency (Llama 3.1): 1 for short waves, `factor` for long ones, between them a blend."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] / waves
    blend = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - blend) / rope["factor"] + blend)).astype(np.float32)


def _write_tokenizer(writer: gguf.GGUFWriter, source: Path, vocab_size: int) -> None:
    """A byte-level BPE tokenizer.json, its special tokens and the chat template."""
    raw = json.loads((source / "tokenizer.json").read_text())
    settings_file = source / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text()) if settings_file.is_file() else {}
    tokens = {i: (token, gguf.TokenType.NORMAL) for token, i in raw["model"]["vocab"].items()}
    for token in raw["added_tokens"]:
        kind = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
        tokens[token["id"]] = (token["content"], kind)
    listed = [tokens.get(i, (f"[PAD{i}]", gguf.TokenType.UNUSED)) for i in range(vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm" if "Digits" in json.dumps(raw["pre_tokenizer"]) else "gpt-2")
    writer.add_token_list([token for token, _ in listed])
    writer.add_token_types([kind for _, kind in listed])
    pairs = raw["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in pairs])
    ids = {token: i for i, (token, _) in enumerate(listed)}
    for name in ("bos", "eos"):
        token = settings.get(f"{name}_token")
        text = token["content"] if isinstance(token, dict) else token
        if text in ids:
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", ids[text])
    template = source / "chat_template.jinja"
    text = template.read_text() if template.is_file() else settings.get("chat_template")
    if text:
        writer.add_chat_template(text)
