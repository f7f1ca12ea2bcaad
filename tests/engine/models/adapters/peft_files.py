"""Writes LoRA adapters as PEFT does, with random numbers, and merges them into a transformers model by hand."""

import json
import math
import re

import torch
from safetensors.torch import save_file

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(folder, model, *, targets=TARGETS, rank=4, alpha=8, seed=0, pickled=False, **config):
    """An adapter of the transformers `model` in `folder`. rank_pattern and alpha_pattern may be part of `config`.
    Returns {module name: what PEFT's merge adds to its weight}."""
    folder.mkdir(parents=True, exist_ok=True)
    generator, tensors, merged = torch.Generator().manual_seed(seed), {}, {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] not in targets:
            continue
        own_rank = _matching(config.get("rank_pattern", {}), name, rank)
        own_alpha = _matching(config.get("alpha_pattern", {}), name, alpha)
        rows, columns = module.weight.shape
        if type(module).__name__ == "Conv1D":
            rows, columns = columns, rows
        a = torch.randn(own_rank, columns, generator=generator) / columns**0.5
        b = torch.randn(rows, own_rank, generator=generator) / own_rank**0.5
        tensors[f"base_model.model.{name}.lora_A.weight"], tensors[f"base_model.model.{name}.lora_B.weight"] = a, b
        divisor = math.sqrt(own_rank) if config.get("use_rslora") else own_rank
        delta = b @ a * (own_alpha / divisor)
        merged[name] = delta.T if type(module).__name__ == "Conv1D" else delta
    assert tensors, "a target of the model"
    if pickled:
        torch.save(tensors, folder / "adapter_model.bin")
    else:
        save_file(tensors, folder / "adapter_model.safetensors")
    plain = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "target_modules": sorted(targets)}
    plain |= {"task_type": "CAUSAL_LM", "lora_dropout": 0.1, "init_lora_weights": True, "use_dora": False}
    (folder / "adapter_config.json").write_text(json.dumps(plain | config))
    return merged


class Merged:
    """Inside the context, the transformers model has the adapter merged into its weights."""

    def __init__(self, model, deltas):
        self._modules = [(model.get_submodule(name).weight, delta) for name, delta in deltas.items()]

    def __enter__(self):
        self._before = [weight.detach().clone() for weight, _ in self._modules]
        with torch.no_grad():
            for weight, delta in self._modules:
                weight += delta

    def __exit__(self, *error):
        with torch.no_grad():
            for (weight, _), before in zip(self._modules, self._before, strict=True):
                weight.copy_(before)


def _matching(patterns, name, default):
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), default)
