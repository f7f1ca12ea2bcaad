"""gguf_config: the metadata of a GGUF file -> the config.json of the same model in Hugging Face's form."""

from collections.abc import Callable
from math import log
from typing import Any

from engine.checkpoint.gguf import PLAIN_TYPES, Gguf
from engine.checkpoint.gguf_names import placed_tensors
from engine.errors import ModelError

# Tokens that end an answer, by their text: older files name the end of the text only.
END_TEXTS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Fields of an architecture that say nothing about the computation, or say what the tensors say as well.
IGNORED = (
    "vocab_size", "context_length", "expert_gating_func", "rope.scaling.finetuned", "tensor_data_layout",
    "attention.key_length_mla", "interleave_moe_layer_step",
)  # fmt: skip
LAST = 3  # llama.cpp's number of the pooling that embeddings of a decoder have without --pooling


class _Fields:
    """Fields of the file's architecture. Those that nothing asked for are refused by `close`."""

    def __init__(self, gguf: Gguf) -> None:
        self.gguf, self.architecture = gguf, gguf.metadata.get("general.architecture")
        self.asked = set(IGNORED)

    def get(self, name: str, kinds: tuple[type, ...] = (int,), default: Any = None) -> Any:
        """A field of one of these types; None or `default` if absent."""
        self.asked.add(name)
        full = f"{self.architecture}.{name}"
        value = self.gguf.metadata.get(full, default)
        if isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]  # some files give one number per layer
        if value is not None and type(value) not in kinds:
            raise ModelError(f"{self.gguf.path.name}: {full} is {value!r:.100}, which is not served.")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number, which must be there without a default."""
        value = self.get(name, default=default)
        if value is None or value < 1:
            raise ModelError(
                f"{self.gguf.path.name}: {self.architecture}.{name} must be a number above 0, not {value}."
            )
        return int(value)

    def number(self, name: str, default: float | None = None) -> float | None:
        value = self.get(name, (float, int), default)
        return None if value is None else float(value)

    def close(self) -> None:
        """ModelError for a field that nothing asked for: it may change the output."""
        prefix = f"{self.architecture}."
        for key, value in self.gguf.metadata.items():
            if key.startswith(prefix) and key.removeprefix(prefix) not in self.asked and value not in (0, False, ""):
                raise ModelError(f"{self.gguf.path.name}: {key} = {value!r:.100} is not served.")


def gguf_config(gguf: Gguf) -> dict[str, Any]:
    """The config.json of a file. ModelError names the field that is missing or not served."""
    fields = _Fields(gguf)
    make = ARCHITECTURES.get(fields.architecture) if isinstance(fields.architecture, str) else None
    if make is None:
        known = ", ".join(ARCHITECTURES)
        asked = f"{fields.architecture!r:.100}"
        raise ModelError(f"{gguf.path.name}: general.architecture {asked} is not served from GGUF; served are {known}.")
    config = make(fields)
    if not fields.get("attention.causal", (bool,), True):
        raise ModelError(f"{gguf.path.name}: {fields.architecture}.attention.causal = False is not served from GGUF.")
    if gguf.metadata.get(f"{fields.architecture}.pooling_type") == LAST:
        fields.asked.add("pooling_type")
    fields.close()
    kinds = {tensor.kind.name for tensor in gguf.tensors.values()}
    plain = "float32" if kinds == {"F32"} else "float16" if kinds <= {"F32", "F16"} else "bfloat16"
    config |= {"torch_dtype": plain, "tie_word_embeddings": "output.weight" not in gguf.tensors}
    ends = end_token_ids(gguf)
    config |= {"eos_token_id": ends} if ends else {}
    types = {
        placed.name.removesuffix(".weight"): placed.tensor.kind.name
        for placed in placed_tensors(gguf)
        if placed.tensor.kind.name not in PLAIN_TYPES
    }
    return config | ({"quantization_config": {"quant_method": "gguf", "types": types}} if types else {})


def end_token_ids(gguf: Gguf) -> list[int]:
    """The tokens that end an answer."""
    named = [gguf.metadata.get(f"tokenizer.ggml.{key}") for key in END_KEYS]
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    tokens = tokens if isinstance(tokens, list) else []
    by_text = [tokens.index(text) for text in END_TEXTS if text in tokens]
    return list(dict.fromkeys(i for i in (*named, *by_text) if type(i) is int and 0 <= i < 1 << 31))


def _sizes(fields: _Fields) -> dict[str, Any]:
    """The fields that all architectures share."""
    embedding = fields.gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{fields.gguf.path.name} has no matrix token_embd.weight.")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": fields.size("embedding_length"),
        "num_hidden_layers": fields.size("block_count"),
        "num_attention_heads": fields.size("attention.head_count"),
        "intermediate_size": fields.size("feed_forward_length"),
        "max_position_embeddings": fields.size("context_length"),
    }


def _llama_like(fields: _Fields, architecture: str, model_type: str) -> dict[str, Any]:
    config = _sizes(fields)
    heads = config["num_attention_heads"]
    head_dim = fields.size("attention.key_length", max(1, config["hidden_size"] // heads))
    if fields.size("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{fields.gguf.path.name}: attention.value_length must be attention.key_length.")
    config |= {
        "architectures": [architecture],
        "model_type": model_type,
        "num_key_value_heads": fields.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": fields.number("rope.freq_base", 10000.0),
    }
    rotary = fields.size("rope.dimension_count", head_dim)
    config |= {} if rotary == head_dim else {"partial_rotary_factor": rotary / head_dim}
    scaling = _rope_scaling(fields, config)
    return config | ({} if scaling is None else {"rope_scaling": scaling})


def _rope_scaling(fields: _Fields, config: dict[str, Any]) -> dict[str, Any] | None:
    """`rope_scaling` of config.json. Tensors of factors are LongRoPE; in files of Llama 3.1 and later one holds the
    factors that "llama3" stands for."""
    kind = fields.get("rope.scaling.type", (str,), "none")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear"))
    original = fields.get("rope.scaling.original_context_length")
    strength = fields.number("rope.scaling.attn_factor")
    one, short, long = (
        fields.gguf.floats(f"{name}.weight") for name in ("rope_freqs", "rope_factors_short", "rope_factors_long")
    )
    if short is not None and long is not None:
        config["original_max_position_embeddings"] = original or config["max_position_embeddings"]
        scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        return scaling | ({} if strength is None else {"attention_factor": strength})
    if one is not None:
        return {"rope_type": "longrope", "short_factor": one, "long_factor": one, "factor": 1.0}
    if kind == "yarn" and factor is not None:
        yarn = {"rope_type": kind, "factor": factor}
        yarn |= {"original_max_position_embeddings": original} if original else {}
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            value = fields.number(f"rope.scaling.{theirs}")
            yarn |= {} if value is None else {ours: value}
        if strength is not None:
            yarn["attention_factor"] = strength * (1 + 0.1 * log(max(factor, 1.0)))
        return yarn
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "factor": factor} if factor not in (None, 0.0, 1.0) else None
    raise ModelError(f"{fields.gguf.path.name}: rope.scaling.type {kind!r:.100} with these fields is not served.")


def _llama(fields: _Fields) -> dict[str, Any]:
    experts = fields.get("expert_count", default=0)
    if experts:
        config = _llama_like(fields, "MixtralForCausalLM", "mixtral")
        return config | {"num_local_experts": experts, "num_experts_per_tok": fields.size("expert_used_count")}
    fields.get("expert_used_count")
    window = fields.get("attention.sliding_window", default=0)
    if window:
        return _llama_like(fields, "MistralForCausalLM", "mistral") | {"sliding_window": window}
    biased = "blk.0.attn_q.bias" in fields.gguf.tensors
    return _llama_like(fields, "LlamaForCausalLM", "llama") | {"attention_bias": biased}


def _qwen2(fields: _Fields) -> dict[str, Any]:
    return _llama_like(fields, "Qwen2ForCausalLM", "qwen2")


def _qwen3(fields: _Fields) -> dict[str, Any]:
    return _llama_like(fields, "Qwen3ForCausalLM", "qwen3")


def _qwen3_moe(fields: _Fields) -> dict[str, Any]:
    return _llama_like(fields, "Qwen3MoeForCausalLM", "qwen3_moe") | {
        "num_experts": fields.size("expert_count"),
        "num_experts_per_tok": fields.size("expert_used_count"),
        "moe_intermediate_size": fields.size("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _granite(fields: _Fields) -> dict[str, Any]:
    """Granite 3, and Granite 4.0 without Mamba layers. llama.cpp turns RoPE off by rope.scaling.finetuned."""
    config = _llama_like(fields, "GraniteForCausalLM", "granite")
    if not fields.get("rope.scaling.finetuned", (bool,), True):
        raise ModelError(f"{fields.gguf.path.name}: granite.rope.scaling.finetuned = False is not served: no RoPE.")
    fields.get("expert_shared_feed_forward_length")  # Granite 4.0 repeats feed_forward_length here
    factors = {
        "attention_multiplier": fields.number("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": fields.number("embedding_scale", 1.0),
        "residual_multiplier": fields.number("residual_scale", 1.0),
        "logits_scaling": fields.number("logit_scale", 1.0),
    }
    return config | factors


def _smollm3(fields: _Fields) -> dict[str, Any]:
    return _llama_like(fields, "SmolLM3ForCausalLM", "smollm3")


def _gemma(fields: _Fields) -> dict[str, Any]:
    return _llama_like(fields, "GemmaForCausalLM", "gemma")


def _gemma2(fields: _Fields) -> dict[str, Any]:
    config = _llama_like(fields, "Gemma2ForCausalLM", "gemma2")
    return config | {
        "sliding_window": fields.size("attention.sliding_window", 4096),
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(config, 46),
    }


def _gemma3(fields: _Fields) -> dict[str, Any]:
    config = _llama_like(fields, "Gemma3ForCausalLM", "gemma3_text")
    config["rope_theta"] = fields.number("rope.freq_base", 1e6)
    cap = fields.number("final_logit_softcapping")
    return (
        config
        | ({"final_logit_softcapping": cap} if cap else {})
        | {
            "rope_local_base_freq": fields.number("rope.freq_base_swa", 1e4),
            "sliding_window": fields.size("attention.sliding_window"),
            "sliding_window_pattern": fields.size("attention.sliding_window_pattern", 6),
            "query_pre_attn_scalar": _query_scalar(config, 62),
        }
    )


def _query_scalar(config: dict[str, Any], layers_of_largest: int) -> int:
    """The scale of queries, which files leave out: the largest model of the family (27B) has one of its own."""
    if config["num_hidden_layers"] == layers_of_largest:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _phi3(fields: _Fields) -> dict[str, Any]:
    config = _llama_like(fields, "Phi3ForCausalLM", "phi3")
    window = fields.get("attention.sliding_window", default=0)
    return config | {"pad_token_id": None} | ({"sliding_window": window} if window else {})


def _gpt2(fields: _Fields) -> dict[str, Any]:
    sizes = _sizes(fields)
    if fields.size("attention.head_count_kv", sizes["num_attention_heads"]) != sizes["num_attention_heads"]:
        raise ModelError(f"{fields.gguf.path.name}: gpt2.attention.head_count_kv must be attention.head_count.")
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": sizes["vocab_size"],
        "n_embd": sizes["hidden_size"],
        "n_layer": sizes["num_hidden_layers"],
        "n_head": sizes["num_attention_heads"],
        "n_inner": sizes["intermediate_size"],
        "n_positions": sizes["max_position_embeddings"],
        "layer_norm_epsilon": fields.number("attention.layer_norm_epsilon", 1e-5),
    }


ARCHITECTURES: dict[str, Callable[[_Fields], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "granite": _granite,
    "smollm3": _smollm3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gpt2": _gpt2,
}
