"""Tiny random encoders of transformers: the oracle of test_encoder.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModel,
    BertConfig,
    DistilBertConfig,
    PreTrainedConfig,
    PreTrainedModel,
    RobertaConfig,
    XLMRobertaConfig,
)

VOCAB = 97


def sizes(**changes: Any) -> dict[str, Any]:
    sizes = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}
    return {**sizes, "num_attention_heads": 4, "max_position_embeddings": 80, **changes}


CASES: dict[str, Callable[[], PreTrainedConfig]] = {
    "bert": lambda: BertConfig(**sizes()),
    "bert_options": lambda: BertConfig(**sizes(hidden_act="gelu_new", layer_norm_eps=1e-5, type_vocab_size=1)),
    "roberta": lambda: RobertaConfig(**sizes(pad_token_id=1, type_vocab_size=1)),
    "xlm_roberta": lambda: XLMRobertaConfig(**sizes(pad_token_id=3, type_vocab_size=1, num_hidden_layers=2)),
    "distilbert": lambda: DistilBertConfig(
        vocab_size=VOCAB, dim=48, hidden_dim=80, n_layers=3, n_heads=4, max_position_embeddings=80
    ),
}


def randomise(model: PreTrainedModel) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * 0.25
            parameter.copy_(noise if parameter.dim() >= 2 else parameter + noise)
    return model.eval()


def save_encoder(name: str, folder: Path) -> PreTrainedModel:
    model = randomise(AutoModel.from_config(CASES[name](), attn_implementation="eager"))
    model.save_pretrained(folder)
    return model
