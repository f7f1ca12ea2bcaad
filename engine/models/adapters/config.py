"""PeftConfig: adapter_config.json of a LoRA adapter, with every field that changes the output followed or refused."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.json_files import read_json_object
from engine.errors import ModelError

CONFIG_FILE = "adapter_config.json"
MAX_RANK = 256

# Fields with the values that change nothing, beside null, false and what is empty.
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),
    "runtime_config": ({"ephemeral_gpu_offload": False},),
}
# Fields that concern training, merging or the search for modules: the tensors of the file say which modules are meant.
IGNORED = frozenset(
    (
        "alpha_pattern", "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules",
        "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout",
        "loftq_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern",
        "revision", "target_modules", "task_type", "use_rslora", "ensure_weight_tying",
    )
)  # fmt: skip
FIXES = {
    "use_dora": "DoRA is not served; merge the adapter into its base model",
    "modules_to_save": "whole modules are not served; merge the adapter into its base model",
    "bias": 'only "none" is served; merge the adapter into its base model',
    "init_lora_weights": "such an adapter changes its base model; convert it to plain LoRA (PEFT: save_pretrained with "
    "path_initial_model_for_weight_conversion)",
}


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Rank and alpha by module: patterns go before the values for all modules."""

    rank: int
    alpha: float
    rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        """The rank of a module by its name in the base model."""
        return int(_matching(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """The factor of B A x: alpha / r, or alpha / sqrt(r) (rsLoRA: Kalajdzievski 2023)."""
        rank = self.rank_of(module)
        return _matching(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.rslora else rank)


def read_peft_config(folder: Path, max_rank: int) -> PeftConfig:
    """The config of an adapter's folder. ModelError names the field that is wrong or not served."""
    raw = read_json_object(folder / CONFIG_FILE)
    if (kind := raw.get("peft_type")) != "LORA":
        raise _wrong("peft_type", kind, "only LORA is served")
    for name, value in raw.items():
        if name in IGNORED or value in (None, False, "", [], {}) or value in HARMLESS.get(name, ()):
            continue
        raise _wrong(name, value, FIXES.get(name, "this version does not follow the field"))
    config = PeftConfig(
        rank=_rank("r", raw.get("r", 8), max_rank),
        alpha=_number("lora_alpha", raw.get("lora_alpha", 8)),
        rslora=bool(raw.get("use_rslora")),
        rank_pattern={k: _rank(f"rank_pattern, {k}", v, max_rank) for k, v in _mapping(raw, "rank_pattern").items()},
        alpha_pattern={k: _number(f"alpha_pattern, {k}", v) for k, v in _mapping(raw, "alpha_pattern").items()},
    )
    for pattern in (*config.rank_pattern, *config.alpha_pattern):
        try:
            re.compile(pattern)
        except re.error as error:
            raise _wrong("rank_pattern or alpha_pattern", pattern, f"no regular expression: {error}") from None
    return config


def _matching(patterns: Mapping[str, float], module: str, default: float) -> float:
    """PEFT's rule: a pattern is a regular expression for the end of a module's name; the first that matches counts."""
    return next((v for k, v in patterns.items() if re.match(rf"(.*\.)?({k})$", module)), default)


def _mapping(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = raw.get(name) or {}
    if not isinstance(value, dict):
        raise _wrong(name, value, "it must be an object")
    return value


def _rank(name: str, value: Any, max_rank: int) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise _wrong(name, value, f"a rank is an integer from 1 to {MAX_RANK}")
    if value > max_rank:
        raise _wrong(name, value, f"max_lora_rank is {max_rank}: raise it with --max-lora-rank {value}")
    return value


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise _wrong(name, value, "it must be a number")
    return float(value)


def _wrong(name: str, value: Any, why: str) -> ModelError:
    return ModelError(f"{CONFIG_FILE}: {name} {str(value)[:80]!r}: {why}.")
