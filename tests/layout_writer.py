"""Writes tiny random checkpoints in every layout that the installed transformers can write, with their logits.

Usage: python -m tests.layout_writer FOLDER. It runs in an environment with another release of transformers than the
tests: see tests/checkpoint_layouts.py.
"""

import inspect
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

PROMPT = [5, 17, 3, 88, 41, 9, 60, 2, 2, 31]
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
OPT = {"vocab_size": 97, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_local_experts": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "llama_tied": ("Llama", {**SIZES, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", SIZES),
    "gemma": ("Gemma", {**SIZES, "head_dim": 8}),
    "phi3": ("Phi3", {**SIZES, "pad_token_id": 0}),
    "gpt2": ("GPT2", GPT2),
    "gpt_neox": ("GPTNeoX", {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}),
    "opt": ("OPT", {**OPT, "word_embed_proj_dim": 32, "max_position_embeddings": 64}),
    "mixtral": ("Mixtral", {**SIZES, **EXPERTS}),
    "qwen3_moe": ("Qwen3Moe", {**SIZES, **EXPERTS, "head_dim": 8}),
}


def make_model(name: str) -> Any:
    """A random model in fp32, the same one in every layout."""
    kind, settings = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**settings)
    names = {"GPT2": "GPT2LMHeadModel"}
    return getattr(transformers, names.get(kind, f"{kind}ForCausalLM"))(config).eval()


def layouts(model: Any) -> dict[str, dict[str, Any]]:
    """Arguments of save_pretrained by layout."""
    known = inspect.signature(model.save_pretrained).parameters
    found: dict[str, dict[str, Any]] = {"single": {}, "sharded": {"max_shard_size": "20KB"}}
    if "safe_serialization" in known:
        found["bin"] = {"safe_serialization": False}
        found["bin_sharded"] = {"safe_serialization": False, "max_shard_size": "20KB"}
    if "save_original_format" in known:
        found["as_in_memory"] = {"save_original_format": False}
    prefix = f"{model.base_model_prefix}."
    bare = {name.removeprefix(prefix): tensor for name, tensor in model.state_dict().items()}
    found["without_prefix"] = {"state_dict": bare}
    if transformers.__version__ < "5" and model.config.tie_word_embeddings:
        found["bin_tied_twice"] = {"safe_serialization": False, "state_dict": dict(model.state_dict())}
    return found


def main(folder: Path) -> None:
    for name in MODELS:
        model = make_model(name)
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT])).logits[0]
        for layout, arguments in layouts(model).items():
            place = folder / f"{name}-{layout}"
            model.save_pretrained(place, **arguments)
            torch.save(logits, place / "logits.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
