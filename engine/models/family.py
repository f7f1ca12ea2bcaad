"""Family: one model family as data: its names in config.json and the names of its weights."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from engine.errors import ModelError
from engine.models.config import ModelConfig
from engine.models.reader import ConfigReader, short

GENERATES = r"(\w+)(?:ForCausalLM|LMHeadModel)"  # an architecture with lm_head


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """The place of a tensor that holds one matrix for every expert of a layer, [experts, out, in].

    `parameter` is our tensor, "layers.{}.experts_in.weight", or a part of it, "layers.{}.experts_in.gate.weight".
    `transposed`: the tensor is [experts, in, out]. `interleaved`: a row of gate, then a row of up, and so on. `flat`:
    experts and the axis behind are one axis. `single`: a vector has a leading axis of 1.
    """

    parameter: str
    transposed: bool = False
    interleaved: bool = False
    flat: bool = False
    single: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """`weights` maps module names of the checkpoint to our names (ModelConfig.parameter_shapes). "{}" is the layer
    number, "{expert}" the number of the expert, which is the first axis of our tensor, and "{head}" that of the head. A
    name of ours that ends in ".weight" or ".bias" belongs to a tensor of the checkpoint whose name stands there in
    full. `expert_tensors` has the full names of tensors with all experts of a layer; they replace the names in
    `weights` for the same parameter if the checkpoint has them.

    Our name may be a part of a fused matrix: "layers.{}.qkv.q" is the q rows of "layers.{}.qkv". `prefix` is the name
    of the base model inside the causal-lm model; some checkpoints leave the prefix out. `transposed`: the linear
    weights of the layers are stored [in, out]. `qkv_grouped`: the rows of qkv are the query heads of the first KV head,
    its key and its value, then those of the next KV head, instead of all of q, all of k and all of v. `renames`: parts
    of tensor names that stand in some checkpoints for the names in `weights`. `buffers` and `heads`: endings and
    beginnings of tensor names that loading skips. `constants`: endings of tensors that must hold one given number.
    `other_types`: older values of model_type, which count beside one of `architectures` only.
    """

    model_type: str
    architectures: tuple[str, ...]
    to_config: Callable[[ConfigReader], ModelConfig]
    weights: Mapping[str, str]
    prefix: str
    transposed: bool = False
    qkv_grouped: bool = False
    buffers: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    renames: Mapping[str, str] = field(default_factory=dict)
    other_types: tuple[str, ...] = ()
    constants: Mapping[str, float] = field(default_factory=dict)
    expert_tensors: Mapping[str, ExpertTensor] = field(default_factory=dict)

    @property
    def base_architectures(self) -> set[str]:
        """The names of the base models, which a checkpoint without lm_head has: MistralModel, Gemma3TextModel."""
        stems = [match[1] for name in self.architectures if (match := re.fullmatch(GENERATES, name))]
        return {stem + end for stem in stems for end in ("Model", "TextModel")}.difference(self.architectures)


def find_family(raw: Mapping[str, Any], groups: Mapping[str, Sequence[Family]]) -> Family:
    """The family of a config.json, by `architectures`, else by `model_type`. ModelError where the two disagree.

    `groups` holds the served families by the name of their group, for the message that lists them.
    """
    families = [family for group in groups.values() for family in group]
    architectures, model_type = raw.get("architectures"), raw.get("model_type")
    names = architectures if isinstance(architectures, list) else []
    by_architecture = [
        family
        for family in families
        if any(name in family.architectures or name in family.base_architectures for name in names)
    ]
    by_type = [
        family for family in families if model_type in (family.model_type, *(family.other_types if names else ()))
    ]
    found = by_architecture if names else by_type
    if not found:
        asked = f"architectures {short(names)}" if names else f"model_type {short(model_type)}"
        raise ModelError(f"config.json: {asked} is not served{_reason(raw)}{_served(names, model_type, groups)}")
    if model_type is not None:
        found = [family for family in found if family in by_type]
    if not found:
        raise ModelError(
            f"config.json contradicts itself: architectures {short(names)}, but model_type {short(model_type)}."
        )
    return found[0]


def without_head(config: ModelConfig) -> ModelConfig:
    """The decoder of a checkpoint that embeds only. A device may compute its logits in a warm-up: any head will do."""
    return replace(config, embeds_only=True, tie_embeddings=True, lm_head_bias=False, normalized_head=False)


def bidirectional(config: ModelConfig) -> ModelConfig:
    """The decoder with attention to later tokens, too, which embeds only: gte-Qwen2, EmbeddingGemma. ModelError if its
    attention has what an encoder's lacks.

    As in transformers, a window reaches config.sliding_window tokens to each side, and the token itself is one more.
    """
    lacking = {
        "a cap of attention scores": config.attn_softcap,
        "attention sinks": config.attention_sinks,
        "ALiBi": config.position == "alibi",
        "chunks of attention": config.attention_chunk,
        "caches that several layers share": config.num_kv_shared_layers,
    }
    for name, asked in lacking.items():
        if asked:
            raise ModelError(f"config.json: attention to later tokens (is_causal false) is not served with {name}.")
    window = config.sliding_window and config.sliding_window + 1
    return replace(without_head(config), causal=False, sliding_window=window)


# Fields of config.json that tell an architecture whose memory of earlier tokens is no cache of keys and values, or none
# with the same shape in every layer.
OTHER_MEMORY = {
    "kv_lora_rank": "latent attention (MLA)",
    "linear_num_value_heads": "recurrent states (linear attention)",
    "linear_attn_config": "recurrent states (linear attention)",
    "linear_conv_kernel_dim": "recurrent states (linear attention)",
    "mamba_d_state": "recurrent states (Mamba)",
    "mamba_num_heads": "recurrent states (Mamba)",
    "ssm_state_size": "recurrent states (Mamba)",
    "ssm_cfg": "recurrent states (Mamba)",
    "state_size": "recurrent states (Mamba)",
    "rescale_every": "recurrent states (RWKV)",
    "lru_width": "recurrent states (RG-LRU)",
    "qk_dim_factor": "recurrent states (xLSTM)",
    "conv_L_cache": "states of convolutions",
    "global_head_dim": "caches with larger heads in some layers (global_head_dim)",
    "per_layer_config": "caches with larger heads in some layers (per_layer_config)",
    "num_kv_shared_layers": "caches that several layers share (num_kv_shared_layers)",
}


def _reason(raw: Mapping[str, Any]) -> str:
    """The reason that an architecture is refused for, as far as config.json tells it."""
    inner = raw.get("text_config")
    fields = {**raw, **(inner if isinstance(inner, Mapping) else {})}
    kinds = fields.get("layer_types")
    memory = next((kind for name, kind in OTHER_MEMORY.items() if fields.get(name) not in (None, 0)), None)
    if memory is None and isinstance(kinds, list) and "linear_attention" in kinds:
        memory = OTHER_MEMORY["linear_attn_config"]
    if memory is not None:
        served = "only caches of keys and values are served"
        return f": it remembers earlier tokens by {memory}, and {served}"
    return "; the checkpoint's own code (auto_map) is never run" if "auto_map" in raw else ""


def _served(names: Sequence[Any], model_type: Any, groups: Mapping[str, Sequence[Family]]) -> str:
    """The served family nearest to the names asked for, and all served families, a line for each group of kin."""
    kinds = {group: [family.model_type for family in families] for group, families in groups.items()}
    stems: dict[str, str] = {}  # a name that two families share is that of the first
    for family in (family for families in groups.values() for family in families):
        for name in (*family.architectures, family.model_type):
            stems.setdefault(_stem(name), family.model_type)
    asked = [_stem(name[:200]) for name in (model_type, *names) if isinstance(name, str)]
    near = [match for stem in asked for match in get_close_matches(stem, stems, n=1, cutoff=0.6)]
    nearest = f" The nearest served model_type is {stems[near[0]]}." if near else ""
    lines = (f"\n  {group}: {', '.join(members)}" for group, members in kinds.items())
    return f".{nearest} Served are, by model_type:{''.join(lines)}"


def _stem(name: str) -> str:
    """The part of an architecture's name that tells it from others: "llama" of "LlamaForCausalLM"."""
    return re.sub(r"(for[a-z]+|lmheadmodel|model)$|_", "", name.lower())
