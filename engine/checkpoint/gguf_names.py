"""placed_tensors: the tensors of a GGUF file by their names in Hugging Face's form, with the change of each."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from engine.checkpoint.gguf import PLAIN_TYPES, Gguf, GgufTensor

LAYER = "model.layers.{}"
LLAMA = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{}.attn_norm": f"{LAYER}.input_layernorm",
    "blk.{}.attn_q": f"{LAYER}.self_attn.q_proj",
    "blk.{}.attn_k": f"{LAYER}.self_attn.k_proj",
    "blk.{}.attn_v": f"{LAYER}.self_attn.v_proj",
    "blk.{}.attn_qkv": f"{LAYER}.self_attn.qkv_proj",
    "blk.{}.attn_output": f"{LAYER}.self_attn.o_proj",
    "blk.{}.attn_q_norm": f"{LAYER}.self_attn.q_norm",
    "blk.{}.attn_k_norm": f"{LAYER}.self_attn.k_norm",
    "blk.{}.ffn_norm": f"{LAYER}.post_attention_layernorm",
    "blk.{}.ffn_gate": f"{LAYER}.mlp.gate_proj",
    "blk.{}.ffn_up": f"{LAYER}.mlp.up_proj",
    "blk.{}.ffn_down": f"{LAYER}.mlp.down_proj",
    "blk.{}.ffn_gate_inp": f"{LAYER}.block_sparse_moe.gate",
    "blk.{}.ffn_gate_exps": f"{LAYER}.block_sparse_moe.experts.{{expert}}.w1",
    "blk.{}.ffn_up_exps": f"{LAYER}.block_sparse_moe.experts.{{expert}}.w3",
    "blk.{}.ffn_down_exps": f"{LAYER}.block_sparse_moe.experts.{{expert}}.w2",
}
QWEN3_MOE = {
    "blk.{}.ffn_gate_inp": f"{LAYER}.mlp.gate",
    "blk.{}.ffn_gate_exps": f"{LAYER}.mlp.experts.{{expert}}.gate_proj",
    "blk.{}.ffn_up_exps": f"{LAYER}.mlp.experts.{{expert}}.up_proj",
    "blk.{}.ffn_down_exps": f"{LAYER}.mlp.experts.{{expert}}.down_proj",
}
GEMMA2 = {
    "blk.{}.post_attention_norm": f"{LAYER}.post_attention_layernorm",
    "blk.{}.ffn_norm": f"{LAYER}.pre_feedforward_layernorm",
    "blk.{}.post_ffw_norm": f"{LAYER}.post_feedforward_layernorm",
}
GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "blk.{}.attn_norm": "transformer.h.{}.ln_1",
    "blk.{}.attn_qkv": "transformer.h.{}.attn.c_attn",
    "blk.{}.attn_output": "transformer.h.{}.attn.c_proj",
    "blk.{}.ffn_norm": "transformer.h.{}.ln_2",
    "blk.{}.ffn_up": "transformer.h.{}.mlp.c_fc",
    "blk.{}.ffn_down": "transformer.h.{}.mlp.c_proj",
}
# By general.architecture.
NAMES = {
    "llama": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "qwen3moe": LLAMA | QWEN3_MOE,
    "granite": LLAMA,
    "smollm3": LLAMA,
    "gemma": LLAMA,
    "gemma2": LLAMA | GEMMA2,
    "gemma3": LLAMA | GEMMA2,
    "phi3": LLAMA | {"blk.{}.ffn_up": f"{LAYER}.mlp.gate_up_proj"},
    "gpt2": GPT2,
}
PAIRED = ("llama", "granite", "smollm3")  # q and k have the two rows of each rotated pair side by side
NORMS_PLUS_ONE = ("gemma", "gemma2", "gemma3")  # norms are stored as 1 + weight
TRANSPOSED = ("gpt2",)  # Hugging Face stores the linear layers [in, out]
SKIPPED = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")  # read with the metadata


MAX_EXPERTS = 512


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor, or the part of one expert, by its name in Hugging Face's form.

    `paired_heads`: the rows are those of so many heads in pairs (0: they are not). `offset` is added to each value.
    """

    name: str
    tensor: GgufTensor
    shape: tuple[int, ...]
    expert: int | None = None
    paired_heads: int = 0
    offset: float = 0.0
    transposed: bool = False


def placed_tensors(gguf: Gguf) -> Iterator[Placed]:
    """All tensors in the order of the files. A tensor that the architecture does not have keeps the file's name."""
    architecture = gguf.metadata.get("general.architecture")
    names = NAMES.get(architecture, {}) if isinstance(architecture, str) else {}
    heads = gguf.metadata.get(f"{architecture}.attention.head_count", 0)
    heads_of = {"attn_q": heads, "attn_k": gguf.metadata.get(f"{architecture}.attention.head_count_kv", heads)}
    for tensor in sorted(gguf.tensors.values(), key=lambda tensor: (tensor.file, tensor.start)):
        if tensor.name in SKIPPED:
            continue
        module, _, ending = tensor.name.rpartition(".")
        layer = re.match(r"blk\.(\d+)\.", module)
        pattern = names.get(re.sub(r"^blk\.\d+\.", "blk.{}.", module))
        stacked = pattern is not None and "{expert}" in pattern
        if pattern is None or (stacked and (len(tensor.shape) != 3 or tensor.shape[0] > MAX_EXPERTS)):
            yield Placed(tensor.name, tensor, tensor.shape)
            continue
        number = layer.group(1) if layer else ""
        if stacked:
            for expert in range(tensor.shape[0]):
                yield Placed(f"{pattern.format(number, expert=expert)}.{ending}", tensor, tensor.shape[1:], expert)
            continue
        part = module.rpartition(".")[2]
        paired = heads_of.get(part, 0) if architecture in PAIRED else 0
        plus_one = architecture in NORMS_PLUS_ONE and part.endswith("norm")
        linear = layer is not None and len(tensor.shape) == 2
        transposed = architecture in TRANSPOSED and linear and tensor.kind.name in PLAIN_TYPES
        yield Placed(
            f"{pattern.format(number)}.{ending}",
            tensor,
            tensor.shape[::-1] if transposed else tensor.shape,
            paired_heads=paired if isinstance(paired, int) else paired[0],
            offset=-1.0 if plus_one else 0.0,
            transposed=transposed,
        )
