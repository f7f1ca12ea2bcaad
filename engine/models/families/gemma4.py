"""Gemma 4 (Google DeepMind 2026), text only: Gemma 3 with other heads in full layers, whose RoPE turns a share of the
pairs; norms of v; and, by size, experts beside the MLP, inputs of each layer by token, and layers that share KV."""

from dataclasses import replace
from typing import Any

from engine.errors import ModelError
from engine.models.config import Heads, ModelConfig, MoEConfig
from engine.models.families import gemma, gemma2, gemma3, llama
from engine.models.family import ExpertTensor, Family
from engine.models.reader import ConfigReader, short

LAYER = "model.layers.{}"
WEIGHTS = {
    **gemma3.WEIGHTS,
    f"{LAYER}.layer_scalar": "layers.{}.scalar.weight",
    "model.embed_tokens_per_layer": "layer_embedding",
    "model.per_layer_model_projection": "layer_projection",
    "model.per_layer_projection_norm": "layer_projection_norm",
    f"{LAYER}.per_layer_input_gate": "layers.{}.input_gate",
    f"{LAYER}.per_layer_projection": "layers.{}.input_out",
    f"{LAYER}.post_per_layer_input_norm": "layers.{}.input_norm",
    f"{LAYER}.router.proj": "layers.{}.router",
    f"{LAYER}.router.scale": "layers.{}.router_norm.weight",
    f"{LAYER}.router.per_expert_scale": "layers.{}.expert_scales.weight",
    f"{LAYER}.experts.{{expert}}.gate_proj": "layers.{}.experts_in.gate",  # as llm-compressor quantises them
    f"{LAYER}.experts.{{expert}}.up_proj": "layers.{}.experts_in.up",
    f"{LAYER}.experts.{{expert}}.down_proj": "layers.{}.experts_out",
    f"{LAYER}.post_feedforward_layernorm_1": "layers.{}.mlp_branch_norm",
    f"{LAYER}.pre_feedforward_layernorm_2": "layers.{}.experts_norm",
    f"{LAYER}.post_feedforward_layernorm_2": "layers.{}.experts_post_norm",
}
EXPERT_TENSORS = {
    f"{LAYER}.experts.gate_up_proj": ExpertTensor("layers.{}.experts_in.weight"),
    f"{LAYER}.experts.down_proj": ExpertTensor("layers.{}.experts_out.weight"),
}
ROPE: dict[str, Any] = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
SIZES = {"vocab_size": 262144, "num_key_value_heads": 4, "head_dim": 256, "rope_parameters": ROPE}


def to_config(reader: ConfigReader) -> ModelConfig:
    if reader.raw.get("use_bidirectional_attention") == "vision":  # text stays causal
        reader = ConfigReader({**reader.raw, "use_bidirectional_attention": None}, reader.where)
    reader = reader.with_defaults(**SIZES)
    full, windowed = gemma3.rope_readers(reader)
    config = gemma.to_config(full)
    layers = range(config.num_layers)
    default = tuple(layer for layer in layers[:-1] if (layer + 1) % 6)
    window_layers = reader.window_layers(config.num_layers, default) or ()
    others = tuple(layer for layer in layers if layer not in window_layers)
    shared = reader.size("num_kv_shared_layers", 0, low=0, high=config.num_layers - 1)
    own = tuple(layer for layer in others if layer < config.num_layers - shared)
    input_size = reader.size("hidden_size_per_layer_input", 256, low=0)
    # every token has a row in this embedding, too
    input_rows = reader.size("vocab_size_per_layer_input", 262144, low=config.vocab_size) if input_size else 0
    return replace(
        config,
        family="gemma4_text",
        activation=reader.activation("hidden_activation", "gelu_pytorch_tanh"),
        norm_weight_offset=0.0,
        post_norms=True,
        qk_norm="head",
        v_norm=True,
        attn_scale=1.0,
        sliding_window=reader.size("sliding_window", 512),
        window_layers=window_layers,
        rope_theta=full.rope_theta(1e6),
        window_rope_theta=windowed.rope_theta(1e4),
        full_heads=_full_heads(reader, config, others),
        num_kv_shared_layers=shared,
        values_from_keys=own if reader.flag("attention_k_eq_v", False) else (),
        logit_softcap=gemma2.softcap(reader, "final_logit_softcapping", 0.0),
        layer_input_size=input_size,
        layer_input_vocab_size=input_rows,
        layer_scalars=True,
        wide_mlp_layers=tuple(layers[len(layers) - shared :]) if reader.flag("use_double_wide_mlp", False) else (),
        moe=_moe(reader) if reader.flag("enable_moe_block", False) else None,
    )


def _full_heads(reader: ConfigReader, config: ModelConfig, full_layers: tuple[int, ...]) -> Heads | None:
    """The heads of layers without a window. transformers 5 writes per_layer_config, by layer, for the first fields."""
    by_layer = reader.object("per_layer_config").raw
    if by_layer:
        first = next(iter(by_layer.values()))
        if set(by_layer) != {str(layer) for layer in full_layers} or any(v != first for v in by_layer.values()):
            raise ModelError(
                f"{reader.where}: per_layer_config must hold the same for each full_attention layer, not "
                f"{short(by_layer)}."
            )
        if not isinstance(first, dict) or set(first) - {"head_dim", "num_key_value_heads"}:
            raise ModelError(f"{reader.where}: per_layer_config holds {short(first)}; only heads are served.")
        inner = ConfigReader(first, f"{reader.where}: per_layer_config")
        sizes = inner.size("num_key_value_heads", config.num_kv_heads), inner.size("head_dim", config.head_dim)
    elif reader.has("per_layer_config"):  # {}: transformers 5 writes no other field if all layers have the same heads
        sizes = config.num_kv_heads, config.head_dim
    else:
        grouped = reader.flag("attention_k_eq_v", False)
        heads = reader.size("num_global_key_value_heads", config.num_kv_heads) if grouped else config.num_kv_heads
        sizes = heads, reader.size("global_head_dim", 512)
    return Heads(*sizes) if full_layers else None


def _moe(reader: ConfigReader) -> MoEConfig:
    return MoEConfig(
        num_experts=reader.num_experts(0),
        experts_per_token=reader.size("top_k_experts"),
        intermediate_size=reader.size("moe_intermediate_size"),
        norm_topk_prob=True,
        beside_mlp=True,
    )


FAMILY = Family(
    "gemma4_text",
    ("Gemma4ForCausalLM",),
    to_config,
    WEIGHTS,
    prefix="model.",
    buffers=llama.BUFFERS,
    expert_tensors=EXPERT_TENSORS,
)
