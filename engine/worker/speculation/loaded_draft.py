"""load_draft: the draft model of `--speculative MODEL:K`, beside the model that is served."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.checkpoint.checkpoint import find_draft
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.families import read_model_config
from engine.models.loading.load import load_model
from engine.worker.cache.kv_cache import allocate_kv_caches, model_max_len, resolve_kv_format


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model with its weights."""

    model: ModelConfig
    decoder: Decoder

    def allocate(
        self, config: EngineConfig, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A KV cache with the block ids of the served model's."""
        kv_format = resolve_kv_format(config, self.model)
        return allocate_kv_caches(self.model, num_blocks, config.block_size, dtype, device, kv_format)


def read_draft_config(config: EngineConfig, draft_dir: Path, model: ModelConfig) -> ModelConfig:
    """The config of the draft model in `draft_dir`. ConfigError if it cannot propose tokens for `model`."""
    draft = read_model_config(draft_dir, config.quantization)
    if draft.embeds_only:
        raise ConfigError(f"speculative: {config.draft_model} embeds text only; a draft model generates text.")
    if draft.vocab_size != model.vocab_size:
        raise ConfigError(
            f"speculative: {config.draft_model} has a vocabulary of {draft.vocab_size} tokens and the model one of "
            f"{model.vocab_size}; a draft model needs the same vocabulary."
        )
    if (longest := model_max_len(config, draft)) < model_max_len(config, model):
        raise ConfigError(
            f"speculative: {config.draft_model} has {longest} positions, fewer than the model; "
            f"use --max-model-len {longest} or less."
        )
    return draft


def find_draft_config(config: EngineConfig, model: ModelConfig) -> ModelConfig | None:
    """The config of the draft model that `config` names, for a plan without weights; None without one. Raises
    ConfigError and ModelError."""
    draft_dir = find_draft(replace(config, load_format="dummy"))
    return None if draft_dir is None else read_draft_config(config, draft_dir, model)


def load_draft(
    config: EngineConfig,
    draft_dir: Path,
    draft: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    num_positions: int,
    compresses: bool,
) -> LoadedDraft:
    """Load the weights to `device`. num_positions: the longest sequence in tokens. compresses: see load_model. Raises
    ModelError."""
    decoder = load_model(
        draft_dir,
        draft,
        dtype=dtype,
        device=device,
        load_format=config.load_format,
        seed=config.seed,
        max_model_len=num_positions,
        compresses=compresses,
    )
    assert isinstance(decoder, Decoder), "a causal model is a decoder"
    return LoadedDraft(draft, decoder)
