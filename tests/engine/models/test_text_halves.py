"""The text halves of vision-language checkpoints against transformers' own classes, which get text only."""

import json
import logging
from pathlib import Path

import pytest
import torch
from transformers import Gemma3Config, PreTrainedModel

from engine.checkpoint.locate import read_eos_token_ids
from engine.errors import ModelError
from engine.models.families import model_config, read_model_config
from engine.models.loading.load import load_model
from tests.engine.models.paged import PagedRunner, Sequence, greedy
from tests.engine.models.tiny_models import build_model, oracle_logits
from tests.engine.models.tiny_text_halves import CASES

PROMPT = [5, 90, 3, 3, 61, 17, 44, 2, 8, 96, 31, 12, 70]


def save(name: str, folder: Path, original_format: bool) -> PreTrainedModel:
    """A tiny random model, in the layout of its first checkpoints or of transformers 5 in memory."""
    model = build_model(name)
    model.save_pretrained(folder, save_original_format=original_format)
    return model


@pytest.mark.parametrize("original_format", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_text_of_a_vision_language_checkpoint(
    name: str, original_format: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    oracle = save(name, tmp_path, original_format)
    with caplog.at_level(logging.INFO):
        config = read_model_config(tmp_path)
        model = load_model(
            tmp_path, config, dtype=torch.float32, device=torch.device("cpu"), load_format="auto", seed=0
        )
    (line,) = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    texts = ("model.language_model.", "language_model.", "lm_head.")
    vision = sum(1 for key in oracle.state_dict() if not key.startswith(texts))
    assert line.startswith(f"skipped {vision} tensors that text does not need: ") and "vis" in line
    (logits,) = PagedRunner(model).step([(Sequence(PROMPT), len(PROMPT))])
    torch.testing.assert_close(logits, oracle_logits(oracle, PROMPT), atol=2e-5, rtol=2e-5)
    if original_format:
        (text,) = greedy(PagedRunner(model), [PROMPT], 64)
        choices = oracle_logits(oracle, PROMPT + text).argmax(-1).tolist()
        assert text == choices[len(PROMPT) - 1 : -1]


def test_config_without_text_config_and_with_mrope(tmp_path: Path) -> None:
    """Qwen2.5-VL's first config.json: the fields of the text at its top, rope type "mrope"."""
    save("qwen2_5_vl", tmp_path, original_format=True)
    raw = json.loads((tmp_path / "config.json").read_text())
    text = raw.pop("text_config")
    rope = {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    flat = {**text, **raw, **rope, "model_type": "qwen2_5_vl"}
    assert model_config(flat) == read_model_config(tmp_path)


def test_fields_that_gemma3_leaves_out() -> None:
    """config.json of the published 4B: most fields of the text have their defaults."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    ours, theirs = model_config({**raw, "torch_dtype": "bfloat16"}), Gemma3Config(text_config=text).text_config
    assert (ours.vocab_size, ours.num_heads, ours.num_kv_heads, ours.head_dim) == (
        theirs.vocab_size, theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim,
    )  # fmt: skip
    assert ours.max_position_embeddings == theirs.max_position_embeddings and ours.dtype == "bfloat16"
    assert ours.tie_embeddings and ours.sliding_window == 1024


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_rope_theta_and_epsilon_that_text_config_leaves_out(name: str) -> None:
    raw = CASES[name]().to_dict() | {"architectures": None}
    text = raw["text_config"]
    del text["rms_norm_eps"], text["rope_parameters"]["rope_theta"]
    ours, theirs = model_config(raw), type(CASES[name]())(text_config=dict(text)).text_config
    assert (ours.rope_theta, ours.norm_eps) == (theirs.rope_parameters["rope_theta"], theirs.rms_norm_eps)


def test_trained_length_of_ministral3_at_the_top() -> None:
    """It goes before that of rope_parameters, for YaRN and for the factors of queries, as in transformers."""
    raw = CASES["mistral3_ministral3"]().to_dict() | {"architectures": None}
    raw["text_config"]["original_max_position_embeddings"] = 32
    config = model_config(raw)
    assert config.rope_scaling is not None and config.query_scaling is not None
    assert config.rope_scaling.original_max_position == config.query_scaling.period == 32


def test_unknown_text_model_is_refused() -> None:
    raw = {"model_type": "mistral3", "text_config": {"model_type": "mamba"}}
    with pytest.raises(ModelError, match="text_config: model_type 'mamba' is not served; known are mistral"):
        model_config(raw)


def test_end_tokens_of_text_config(tmp_path: Path) -> None:
    """transformers 5 writes eos_token_id into text_config; generation_config.json goes before it."""
    save("qwen3_vl", tmp_path, original_format=False)
    assert read_eos_token_ids(tmp_path) == [2]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert read_eos_token_ids(tmp_path) == [5, 7]
