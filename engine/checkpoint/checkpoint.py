"""Checkpoint: the facts about a checkpoint that the Driver needs before the Worker loads its weights."""

from dataclasses import dataclass, replace
from pathlib import Path

from engine.checkpoint.locate import model_identity, read_eos_token_ids, resolve_model, resolve_tokenizer
from engine.checkpoint.pooling import read_pooling
from engine.checkpoint.sampling_defaults import SamplingDefaults, read_sampling_defaults
from engine.config import EngineConfig
from engine.sampling_params import Pooling


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`pooling` is None if neither the files nor the configuration name one. `identity` (32 bytes) tells the KV blocks
    of this model from those of another. `draft_dir`: the draft model of `speculative`, if it names one."""

    model_dir: Path
    eos_token_ids: list[int]
    sampling_defaults: SamplingDefaults
    pooling: Pooling | None
    identity: bytes
    draft_dir: Path | None = None

    def find_tokenizer(self, config: EngineConfig) -> Path:
        """The folder of the tokenizer, which `config` may name apart from the model. Raises ModelError."""
        return resolve_tokenizer(config, self.model_dir)


def open_checkpoint(config: EngineConfig) -> Checkpoint:
    """Find the checkpoint of `config`, on the hub if need be, and read its small files. Raises ModelError."""
    model_dir = resolve_model(config)
    return Checkpoint(
        model_dir,
        read_eos_token_ids(model_dir),
        read_sampling_defaults(model_dir, config.generation_config),
        read_pooling(model_dir, config.pooling),
        model_identity(model_dir, config),
        find_draft(config),
    )


def find_draft(config: EngineConfig) -> Path | None:
    """The folder of the draft model, which is downloaded if need be; None without one. Raises ModelError."""
    if not config.draft_model:
        return None
    return resolve_model(replace(config, model=config.draft_model, revision=None, speculative=None), "--speculative")
