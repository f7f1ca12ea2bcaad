"""How a checkpoint says that it is to be pooled."""

import json

import pytest

from engine.checkpoint.pooling import dense_folders, pooling_of_model, read_pooling
from engine.errors import ConfigError, ModelError
from engine.sampling_params import Pooling

PREFIX = "sentence_transformers.models."


def save(folder, pooling, *others, path="1_Pooling"):
    modules = [("", f"{PREFIX}Transformer"), (path, f"{PREFIX}Pooling"), *[(f"{i}_x", PREFIX + o) for i, o in others]]
    (folder / "modules.json").write_text(json.dumps([{"path": path, "type": kind} for path, kind in modules]))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def flags(**on):
    names = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    return {"word_embedding_dimension": 384, **{f"pooling_mode_{name}": on.get(name, False) for name in names}}


NORMALIZE = (2, "Normalize")


@pytest.mark.parametrize(
    "settings, kind",
    [
        (flags(cls_token=True), "cls"),
        (flags(mean_tokens=True), "mean"),
        (flags(lasttoken=True), "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken", "include_prompt": True}, "last"),
    ],
)
def test_modules_of_sentence_transformers(tmp_path, settings, kind):
    assert read_pooling(save(tmp_path, settings), "auto") == Pooling(kind, normalize=False)
    assert read_pooling(save(tmp_path, settings, NORMALIZE), "auto") == Pooling(kind, normalize=True)


def test_an_option_wins_and_keeps_the_normalisation(tmp_path):
    assert read_pooling(tmp_path, "auto") is None
    assert read_pooling(tmp_path, "cls") == Pooling("cls", normalize=True)
    assert read_pooling(save(tmp_path, flags(max_tokens=True)), "last") == Pooling("last", normalize=False)
    assert read_pooling(save(tmp_path, flags(mean_tokens=True), NORMALIZE), "last") == Pooling("last", normalize=True)


@pytest.mark.parametrize(
    "settings, others, words",
    [
        (flags(max_tokens=True), (), "pooling_mode_max_tokens"),
        (flags(mean_tokens=True, cls_token=True), (), "pooling_mode_cls_token, pooling_mode_mean_tokens"),
        (flags(), (), "nothing"),
        ({"pooling_mode": "weightedmean"}, (), "weightedmean"),
        (flags(mean_tokens=True), ((2, "LayerNorm"),), "'LayerNorm' is not served"),
        (flags(mean_tokens=True), (NORMALIZE, (3, "Dense")), "the order Transformer, Pooling, Normalize, Dense is not"),
    ],
)
def test_an_unserved_pooling_is_named_with_the_alternative(tmp_path, settings, others, words):
    with pytest.raises(ModelError, match=words) as caught:
        read_pooling(save(tmp_path, settings, *others), "auto")
    assert "--pooling" in str(caught.value)


@pytest.mark.parametrize("text", ["{", "5", '[{"type": "x"}]', "[[]]", '[{"path": "../..", "type": "a.Pooling"}]'])
def test_damaged_files_are_model_errors(tmp_path, text):
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ModelError, match=r"modules\.json"):
        read_pooling(tmp_path, "auto")


def test_a_module_outside_of_the_folder_is_not_read(tmp_path):
    outside, model = tmp_path / "outside", tmp_path / "model"
    outside.mkdir()
    (outside / "config.json").write_text('{"pooling_mode": "mean"}')
    model.mkdir()
    (model / "modules.json").write_text('[{"path": "1_Pooling", "type": "a.Pooling"}]')
    (model / "1_Pooling").symlink_to(outside)
    with pytest.raises(ModelError, match="leaves the model's folder"):
        read_pooling(model, "auto")


def test_linear_layers_are_found_in_order_unless_the_pooling_is_chosen(tmp_path):
    save(tmp_path, {"pooling_mode": "mean"}, (2, "Dense"), (3, "Dense"), (4, "Normalize"))
    assert read_pooling(tmp_path, "auto") == Pooling("mean", normalize=True)
    assert dense_folders(tmp_path, "auto") == ["2_x", "3_x"] and dense_folders(tmp_path, "last") == []


def test_default_poolings_and_a_senseless_one():
    assert pooling_of_model(None, encoder=True) == Pooling("mean")
    assert pooling_of_model(None, encoder=False) == Pooling("last")
    assert pooling_of_model(Pooling("cls"), encoder=True) == Pooling("cls")
    with pytest.raises(ConfigError, match="--pooling last or mean"):
        pooling_of_model(Pooling("cls"), encoder=False)
