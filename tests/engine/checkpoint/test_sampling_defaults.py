"""How a checkpoint wants to be sampled: generation_config.json, however it is written."""

import json
import logging

import pytest

from engine.checkpoint.locate import resolve_model
from engine.checkpoint.sampling_defaults import OPENAI, SamplingDefaults, read_sampling_defaults
from engine.config import EngineConfig
from engine.errors import ModelError
from tests.checkpoints import save_fake_checkpoint

FILE = "generation_config.json"


def written(folder, values) -> SamplingDefaults:
    (folder / FILE).write_text(values if isinstance(values, str) else json.dumps(values))
    return read_sampling_defaults(folder, "auto")


def test_its_values_are_taken(tmp_path):
    values = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
    others = {"do_sample": True, "max_new_tokens": 5, "eos_token_id": 1, "transformers_version": "4.51.0"}
    assert written(tmp_path, values | others) == SamplingDefaults(**values)
    assert read_sampling_defaults(tmp_path, "auto").changed == values
    assert read_sampling_defaults(tmp_path, "openai") == OPENAI and OPENAI.changed == {}


def test_do_sample_is_not_looked_at(tmp_path):
    assert written(tmp_path, {"do_sample": False, "temperature": 0.6}).temperature == 0.6
    assert written(tmp_path, {"do_sample": False}) == OPENAI


@pytest.mark.parametrize("values", [{}, {"temperature": None, "top_k": None}, {"top_k": -1, "temperature": 1}])
def test_without_values_it_is_openais(tmp_path, values):
    assert written(tmp_path, values) == OPENAI
    (tmp_path / FILE).unlink()
    assert read_sampling_defaults(tmp_path, "auto") == OPENAI


@pytest.mark.parametrize(
    "value",
    [
        '"temperature": NaN',
        '"temperature": 1e999',
        '"temperature": -0.1',
        '"temperature": 2.5',
        '"temperature": "0.6"',
        '"temperature": true',
        '"temperature": [0.6]',
        '"temperature": {"a": 1}',
        f'"temperature": "{"x" * 100_000}"',
        '"top_p": 1.1',
        '"top_k": 20.0',
        '"top_k": 1' + 30 * "0",
        '"top_k": -2',
        '"min_p": 2',
        '"repetition_penalty": 0',
        '"repetition_penalty": -Infinity',
    ],
)
def test_invalid_values_are_ignored_with_a_warning(tmp_path, caplog, value):
    with caplog.at_level(logging.WARNING):
        found = written(tmp_path, "{" + value + "}")
        assert found == OPENAI and written(tmp_path, '{"min_p": 0.2, ' + value + "}").min_p in (0.2, 0.0)
    name = json.loads("[" + value.partition(":")[0] + "]")[0]
    assert name in caplog.text and FILE in caplog.text and len(caplog.text) < 2000


@pytest.mark.parametrize("text", ["[", "[]", "{" * 100_000, '{"a": ' * 10_000])
def test_a_file_that_is_no_json_is_an_error(tmp_path, text):
    with pytest.raises(ModelError, match=FILE):
        written(tmp_path, text)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    (tmp_path / "secret.json").write_text('{"temperature": 0.1, "eos_token_id": 7}')
    model = save_fake_checkpoint(tmp_path / "model")
    (model / FILE).symlink_to("../secret.json")
    with pytest.raises(ModelError, match="is a link that leaves the model's folder"):
        resolve_model(EngineConfig(model=str(model), load_format="dummy"))
