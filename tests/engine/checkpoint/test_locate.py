"""Places of a checkpoint, and every reason to refuse one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from engine.checkpoint.checkpoint import open_checkpoint
from engine.checkpoint.locate import (
    BUNDLED_MODEL,
    model_identity,
    read_eos_token_ids,
    read_json,
    resolve_model,
    resolve_tokenizer,
)
from engine.checkpoint.weight_files import find_layout, other_layout
from engine.config import EngineConfig
from engine.errors import ModelError
from tests.checkpoints import save_fake_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make_folder(folder: Path, *files: str, config: str = "{}") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config)
    for name in files:
        (folder / name).write_bytes(b"")
    return folder


class FakeHub:
    """Stands in for snapshot_download: copies nothing, remembers what it was asked for."""

    def __init__(self, snapshot: Path, error: Exception | None = None) -> None:
        self.snapshot, self.error = snapshot, error
        self.calls: list[tuple[str, str | None, list[str]]] = []
        self.files: list[str] = []  # of the whole repository

    def __call__(self, repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        self.calls.append((repo_id, revision, allow_patterns))
        if self.error is not None:
            raise self.error
        return str(self.snapshot)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "cache" / "snapshots" / COMMIT)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda name, revision: fake.files)
    return fake


def hub_error(kind: Callable[..., Exception]) -> Exception:
    """The library's HTTP errors want a response; which HTTP client makes it differs between versions."""
    return kind("no", response=SimpleNamespace(status_code=403, headers={}, request=None))


def test_empty_model_is_the_bundled_one() -> None:
    assert resolve_model(EngineConfig()) == BUNDLED_MODEL
    assert BUNDLED_MODEL.is_dir()


def test_local_folder(tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path / "org" / "model", "model.safetensors")
    assert resolve_model(EngineConfig(model=str(tmp_path / "org" / "model"))) == tmp_path / "org" / "model"
    monkeypatch.chdir(tmp_path)
    assert resolve_model(EngineConfig(model="org/model")) == tmp_path / "org" / "model"
    assert not hub.calls


def test_dummy_weights_need_only_the_config(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    assert resolve_model(EngineConfig(model=str(folder), load_format="dummy")) == folder


@pytest.mark.parametrize("pickle", ["model.pt", "consolidated.00.pth", "model.ckpt"])
def test_other_kinds_of_weights_are_refused_with_the_way_out(tmp_path: Path, pickle: str) -> None:
    folder = make_folder(tmp_path, pickle)
    with pytest.raises(ModelError, match=rf"{pickle} is not read.*save_pretrained"):
        resolve_model(EngineConfig(model=str(folder)))


def test_a_folder_with_a_pickle(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "pytorch_model.bin")
    assert resolve_model(EngineConfig(model=str(folder))) == folder


def test_folder_without_weights_or_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_model(EngineConfig(model=str(tmp_path)))
    with pytest.raises(ModelError, match=r"holds no weights: none of model\.safetensors, "):
        resolve_model(EngineConfig(model=str(make_folder(tmp_path))))


@pytest.mark.parametrize("name", ["/no/such/folder", "./no-such", "~/no-such-folder-here", "~nobody-here/m", "a/b/c"])
def test_a_path_is_never_taken_for_a_hub_id(name: str, hub: FakeHub) -> None:
    with pytest.raises(ModelError, match="--model: there is no folder"):
        resolve_model(EngineConfig(model=name))
    assert not hub.calls


def test_the_error_about_a_draft_model_names_its_setting(tmp_path):
    with pytest.raises(ModelError, match=r"^--speculative: there is no folder"):
        open_checkpoint(EngineConfig(speculative=f"{tmp_path}/nowhere:4"))


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"{}")
    with pytest.raises(ModelError, match="is a file"):
        resolve_model(EngineConfig(model=str(tmp_path / "model.safetensors")))


def test_hub_id_fetches_no_code_no_pickle_and_each_shard_once(hub: FakeHub) -> None:
    make_folder(hub.snapshot, "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "a.safetensors", "q": "evil.py"}}
    (hub.snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert resolve_model(EngineConfig(model="org/name", revision="v1")) == hub.snapshot
    (_, first_revision, patterns), (_, second_revision, shards) = hub.calls
    assert (first_revision, second_revision) == ("v1", COMMIT)  # both from one commit
    assert not any(pattern.endswith((".py", ".bin", ".pt", "*")) for pattern in patterns)
    assert shards == ["a.safetensors", "b.safetensors"]


def test_hub_id_with_one_file(hub: FakeHub) -> None:
    make_folder(hub.snapshot, "model.safetensors")
    assert resolve_model(EngineConfig(model="name")) == hub.snapshot
    assert hub.calls[1] == ("name", COMMIT, ["model.safetensors"])


def test_hub_id_with_dummy_weights_fetches_none(hub: FakeHub) -> None:
    make_folder(hub.snapshot)
    assert resolve_model(EngineConfig(model="org/name", load_format="dummy")) == hub.snapshot
    assert len(hub.calls) == 1


def test_hub_id_with_pickles_only(hub: FakeHub) -> None:
    """The papers' own example, facebook/opt-125m, is one."""
    make_folder(hub.snapshot, "pytorch_model.bin")
    assert resolve_model(EngineConfig(model="org/name")) == hub.snapshot
    assert [patterns for _, _, patterns in hub.calls[1:]] == [
        ["model.safetensors"],
        ["consolidated.safetensors"],
        ["pytorch_model.bin"],
    ]


AUTOGPTQ = "gptq_model-4bit-128g.safetensors"


def test_weights_under_a_name_of_their_own(tmp_path: Path) -> None:
    """AutoGPTQ's names. Two such files may be two models, a shard without its index is a part of one, and an adapter is
    none."""
    folder = make_folder(tmp_path, AUTOGPTQ, "adapter_model.safetensors")
    layout = find_layout(folder)
    assert layout is not None and layout.names(folder) == (AUTOGPTQ,)
    assert resolve_model(EngineConfig(model=str(folder))) == folder
    (folder / "other.safetensors").touch()
    assert find_layout(folder) is None
    for number in (1, 2):
        (folder / f"gptq_model-4bit-128g-0000{number}-of-00002.safetensors").touch()
    shards = ["gptq_model-4bit-128g-00001-of-00002.safetensors", "gptq_model-4bit-128g-00002-of-00002.safetensors"]
    (folder / AUTOGPTQ).unlink()
    (folder / f"{AUTOGPTQ}.index.json").write_text(json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}))
    layout = find_layout(folder)
    assert layout is not None and layout.names(folder) == tuple(shards)
    assert other_layout([shards[0]]) is None and other_layout(["adapter_model.safetensors"]) is None


def test_hub_id_with_weights_under_a_name_of_their_own(hub: FakeHub) -> None:
    make_folder(hub.snapshot, AUTOGPTQ)
    hub.files = ["config.json", AUTOGPTQ, "parts/model.safetensors"]
    assert resolve_model(EngineConfig(model="org/name")) == hub.snapshot
    assert hub.calls[-1][2] == [AUTOGPTQ]


def test_hub_id_with_a_gguf_model_in_several_files(hub: FakeHub) -> None:
    hub.snapshot.mkdir(parents=True)
    hub.files = ["a-00002-of-00002.gguf", "a-00001-of-00002.gguf"]
    with pytest.raises(ModelError, match=r"cannot read .*a-00001-of-00002\.gguf"):
        resolve_model(EngineConfig(model="org/name"))
    assert hub.calls[-1][2] == ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]


def test_hub_id_without_weights(hub: FakeHub) -> None:
    make_folder(hub.snapshot)
    with pytest.raises(ModelError, match=r"holds no weights on the hub: none of model\.safetensors"):
        resolve_model(EngineConfig(model="org/name"))


def test_hub_id_with_gguf_files(hub: FakeHub) -> None:
    hub.snapshot.mkdir(parents=True)
    hub.files = ["README.md", "a-Q4_K_M.gguf", "a-Q8_0.gguf", "mmproj-a.gguf"]
    with pytest.raises(ModelError, match=r"org/name holds 2 GGUF files: a-Q4_K_M\.gguf, a-Q8_0\.gguf"):
        resolve_model(EngineConfig(model="org/name"))
    hub.files.remove("a-Q8_0.gguf")
    with pytest.raises(ModelError, match=r"cannot read .*a-Q4_K_M\.gguf"):  # the stand-in downloads nothing
        resolve_model(EngineConfig(model="org/name"))
    assert hub.calls[-1] == ("org/name", hub.snapshot.name, ["a-Q4_K_M.gguf"])


def test_hub_index_must_be_sane(hub: FakeHub) -> None:
    make_folder(hub.snapshot)
    (hub.snapshot / "model.safetensors.index.json").write_text('{"weight_map": {"x": 1}}')
    with pytest.raises(ModelError, match="weight_map must map"):
        resolve_model(EngineConfig(model="org/name"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hub_error(errors.GatedRepoError), "gated.*HF_TOKEN"),
        (hub_error(errors.RepositoryNotFoundError), "neither a folder nor a hub id is called org/name"),
        (hub_error(errors.RevisionNotFoundError), "--revision: org/name has no branch, tag or commit 'v1'"),
        (errors.LocalEntryNotFoundError("no"), "hub cannot be reached"),
        (errors.HFValidationError("no"), "not a valid hub id"),
        (OSError(28, "No space left on device"), "failed: OSError.*No space left"),
    ],
)
def test_hub_errors_are_clear(hub: FakeHub, error: Exception, message: str) -> None:
    hub.error = error
    with pytest.raises(ModelError, match=message):
        resolve_model(EngineConfig(model="org/name", revision="v1"))


def test_offline_with_the_real_library(tmp_path: Path) -> None:
    """HF_HUB_OFFLINE: what the cache holds is served, what it lacks is a clear error; no request is made."""
    repo = tmp_path / "hub" / "models--org--cached"
    make_folder(repo / "snapshots" / COMMIT, "model.safetensors")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    code = """if True:
        from engine.checkpoint.locate import resolve_model
        from engine.config import EngineConfig
        from engine.errors import ModelError
        print(resolve_model(EngineConfig(model="org/cached")))
        try:
            resolve_model(EngineConfig(model="org/absent"))
        except ModelError as error:
            print(error)
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True, check=True
    )
    found, absent = done.stdout.splitlines()
    assert found == str(repo / "snapshots" / COMMIT)
    assert "org/absent" in absent and "HF_HUB_OFFLINE" in absent


def test_tokenizer_of_its_own(tmp_path: Path, hub: FakeHub) -> None:
    model_dir, other = make_folder(tmp_path / "model"), make_folder(tmp_path / "other")
    assert resolve_tokenizer(EngineConfig(), model_dir) == model_dir
    assert resolve_tokenizer(EngineConfig(tokenizer=str(other)), model_dir) == other
    assert not hub.calls
    assert resolve_tokenizer(EngineConfig(tokenizer="org/name"), model_dir) == hub.snapshot
    with pytest.raises(ModelError, match="--tokenizer: there is no folder"):
        resolve_tokenizer(EngineConfig(tokenizer="/no/such"), model_dir)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, None, [2]),
        ({"eos_token_id": 2}, {"eos_token_id": [7, 2]}, [7, 2]),
        ({"eos_token_id": 2}, {"eos_token_id": None}, [2]),
        ({"eos_token_id": [0, 1]}, {}, [0, 1]),
        ({}, None, []),
    ],
)
def test_eos_token_ids(tmp_path: Path, config: Any, generation: Any, expected: list[int]) -> None:
    make_folder(tmp_path, config=json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_eos_token_ids(tmp_path) == expected


LISTED = {"2": {"content": "</s>"}, "7": {"content": "<|im_end|>"}}


@pytest.mark.parametrize(
    ("settings", "tokens", "expected"),
    [
        ({"eos_token": "<|im_end|>", "added_tokens_decoder": LISTED}, [], [2, 7]),
        ({"eos_token": "</s>", "added_tokens_decoder": LISTED}, [], [2]),
        ({"eos_token": {"content": "<|im_end|>"}}, [{"id": 7, "content": "<|im_end|>"}], [2, 7]),
        ({"eos_token": "<|im_end|>", "added_tokens_decoder": {"7": [], "x": {"content": "<|im_end|>"}}}, [[]], [2]),
        ({"eos_token": None}, [{"id": 7, "content": "<|im_end|>"}], [2]),
        ({"eos_token": "<|im_end|>"}, None, [2]),
    ],
)
def test_end_token_of_the_tokenizer(tmp_path: Path, settings: Any, tokens: Any, expected: list[int]) -> None:
    make_folder(tmp_path, config=json.dumps({"eos_token_id": 2}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if tokens is not None:
        (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    assert read_eos_token_ids(tmp_path) == expected


def test_the_eos_token_is_that_of_transformers(tmp_path: Path) -> None:
    """Older files name it in special_tokens_map.json, and it may be a plain token of the vocabulary."""
    make_folder(tmp_path, config=json.dumps({"eos_token_id": 2}))
    backend = Tokenizer(models.BPE({"</s>": 2, "<|im_end|>": 3, "<|end|>": 4}, []))
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    for names, expected in (({}, 3), ({"eos_token": {"content": "<|end|>"}}, 4), ({"eos_token": "<|end|>"}, 4)):
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
        assert AutoTokenizer.from_pretrained(tmp_path).eos_token_id == expected
        assert read_eos_token_ids(tmp_path) == [2, expected]


@pytest.mark.parametrize("value", ["2", -1, 1.0, True, [1, "2"], {}])
def test_wrong_eos_token_ids(tmp_path: Path, value: Any) -> None:
    make_folder(tmp_path, config=json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelError, match=r"config\.json: eos_token_id"):
        read_eos_token_ids(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "must hold a JSON object"),
    ],
)
def test_malformed_json(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ModelError, match=message):
        read_json(tmp_path / "config.json")


def test_huge_json_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(65 << 20)  # sparse: takes no space
    with pytest.raises(ModelError, match="larger than 64 MiB"):
        read_json(tmp_path / "config.json")


def test_model_identity_changes_with_whatever_changes_the_cache(tmp_path):
    save_fake_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    config = EngineConfig(model=str(tmp_path))
    first = model_identity(tmp_path, config)
    assert model_identity(tmp_path, config) == first and len(first) == 32
    found = {first}
    found.add(model_identity(tmp_path, EngineConfig(model=str(tmp_path), dtype="float32")))
    found.add(model_identity(tmp_path, EngineConfig(model=str(tmp_path), quantization="int4")))
    found.add(model_identity(tmp_path, EngineConfig(model=str(tmp_path), batch_invariant=True)))
    found.add(model_identity(tmp_path, EngineConfig(model=str(tmp_path), load_format="dummy")))
    found.add(model_identity(tmp_path, EngineConfig(model=str(tmp_path), load_format="dummy", seed=1)))
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    found.add(model_identity(tmp_path, config))
    with (tmp_path / "config.json").open("a") as file:
        file.write(" ")
    found.add(model_identity(tmp_path, config))
    assert len(found) == 8


LINKS = ("config.json", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
LINKS += ("model.safetensors", "model.safetensors.index.json", "merges.txt", "tokenizer.model", "modules.json")


@pytest.mark.parametrize("name", LINKS)
def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path, name: str) -> None:
    """Else /tokenize would tell the text of any file of this machine, as a chat template."""
    secret = tmp_path / "secret"
    secret.write_text("{}")
    folder = save_fake_checkpoint(tmp_path / "model")
    (folder / "model.safetensors").touch()
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    with pytest.raises(ModelError, match=f"{name}.* is a link that leaves the model's folder: put the file itself"):
        resolve_model(EngineConfig(model=str(folder)))
    with pytest.raises(ModelError, match="leaves the model's folder"):
        resolve_tokenizer(EngineConfig(tokenizer=str(folder)), tmp_path)


def test_links_within_the_folder_and_to_it_are_followed(tmp_path: Path) -> None:
    folder = save_fake_checkpoint(tmp_path / "model")
    (folder / "real.jinja").write_text("{{ messages }}")
    (folder / "chat_template.jinja").symlink_to("real.jinja")
    (folder / "nowhere.json").symlink_to("gone.json")
    (folder / "pytorch_model.bin").symlink_to(tmp_path / "elsewhere")  # never read
    (tmp_path / "name").symlink_to(folder)
    assert resolve_model(EngineConfig(model=str(tmp_path / "name"), load_format="dummy")) == folder


def test_a_snapshot_of_the_hub_holds_links_to_its_blobs(hub: FakeHub, tmp_path: Path) -> None:
    blobs = tmp_path / "cache" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc").write_text("{}")
    hub.snapshot.mkdir(parents=True)
    (hub.snapshot / "config.json").symlink_to("../../blobs/abc")
    config = EngineConfig(model="org/name", load_format="dummy")
    assert resolve_model(config) == hub.snapshot
    (tmp_path / "secret").write_text("{}")
    (hub.snapshot / "chat_template.jinja").symlink_to("../../../secret")
    with pytest.raises(ModelError, match="leaves the model's folder"):
        resolve_model(config)


def test_the_vocabulary_is_not_parsed_for_an_eos_token_that_is_an_added_token(tmp_path: Path) -> None:
    """Half a second for the 24 MB of a large vocabulary, before the Worker starts."""
    make_folder(tmp_path, config=json.dumps({"eos_token_id": 2}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    file = tmp_path / "tokenizer.json"
    added = b'{"added_tokens": [{"id": 7, "content": "<|im_end|>"}], "model": '
    file.write_bytes(added + b'{"vocab": {"\xff": 1}}}')  # no UTF-8: a parser would refuse it
    assert read_eos_token_ids(tmp_path) == [2, 7]
    file.write_bytes(added + b"{")
    with pytest.raises(ModelError, match=r"tokenizer\.json is not valid JSON: "):
        read_eos_token_ids(tmp_path)
