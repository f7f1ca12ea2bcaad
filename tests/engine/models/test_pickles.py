"""Pickled checkpoints: read without running code; hostile and damaged ones refused in one line."""

import json
import logging
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.errors import ModelError
from engine.models.families import read_model_config
from engine.models.loading.load import load_model
from engine.models.loading.pickle_file import open_pickle
from tests.checkpoints import byte_tokenizer
from tests.engine.models.paged import PagedRunner, Sequence
from tests.engine.models.tiny_models import oracle_logits, save_model

ROOT = Path(__file__).parents[3]
PROMPT = [5, 17, 3, 88, 41, 9, 60, 2, 2, 31]


def load_logits(folder: Path) -> Tensor:
    cpu = torch.device("cpu")
    model = load_model(folder, read_model_config(folder), dtype=torch.float32, device=cpu, load_format="auto", seed=0)
    return PagedRunner(model).step([(Sequence(PROMPT), len(PROMPT))])[0]


def to_pickles(folder: Path, num_files: int, zipped: bool = True) -> None:
    """Replace model.safetensors by pickles of torch's current or its first form."""
    tensors = list(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    names = [f"pytorch_model-{i:05}-of-{num_files:05}.bin" for i in range(1, num_files + 1)]
    names = names if num_files > 1 else ["pytorch_model.bin"]
    for i, name in enumerate(names):
        torch.save(dict(tensors[i::num_files]), folder / name, _use_new_zipfile_serialization=zipped)
    weight_map = {tensor: names[i % num_files] for i, (tensor, _) in enumerate(tensors)}
    if num_files > 1:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(("num_files", "zipped"), [(1, True), (3, True), (1, False)])
def test_logits(tmp_path: Path, num_files: int, zipped: bool, caplog: pytest.LogCaptureFixture) -> None:
    oracle = save_model("opt", tmp_path)
    to_pickles(tmp_path, num_files, zipped)
    with caplog.at_level(logging.WARNING, "engine"):
        logits = load_logits(tmp_path)
    torch.testing.assert_close(logits, oracle_logits(oracle, PROMPT), atol=2e-5, rtol=2e-5)
    assert len([record for record in caplog.records if "is a pickle" in record.message]) == 1


class Hostile:
    """Unpickling makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_is_not_run(tmp_path: Path, zipped: bool) -> None:
    save_model("opt", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    path, made = tmp_path / "pytorch_model.bin", tmp_path / "made"
    torch.save({**tensors, "x": Hostile(made)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin would run \w+\.mkdir when unpickled") as error:
        load_logits(tmp_path)
    assert not made.exists()
    assert "\n" not in str(error.value)
    torch.load(path, weights_only=False)  # a loader without care does run it
    assert made.exists()


def test_a_plain_pickle_is_not_run_either(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(pickle.dumps(Hostile(tmp_path / "made")))
    with pytest.raises(ModelError, match=r"^pytorch_model\.bin (would run|is damaged)[^\n]*$"), open_pickle(path):
        pass
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("keep", [0, 3, 100, 4000, -1, -1000])
def test_truncated(tmp_path: Path, keep: int, zipped: bool) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"x": torch.zeros(100, 100)}, path, _use_new_zipfile_serialization=zipped)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"^pytorch_model\.bin is damaged or incomplete: [^\n]+$"), open_pickle(path):
        pass


def test_not_tensors(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"epoch": 3}, path)
    with pytest.raises(ModelError, match="does not hold tensors by name"), open_pickle(path):
        pass


def test_a_compressed_record_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"x": torch.zeros(8)}, path)
    with zipfile.ZipFile(path) as file:
        records = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in records.items():
            file.writestr(name, bytes(50 << 20) if "/data/" in name else data)
    with pytest.raises(ModelError, match=r"its records claim \d+ bytes, more than the file has"), open_pickle(path):
        pass


def test_a_storage_larger_than_its_record(tmp_path: Path) -> None:
    """The pickle says 2**40 elements; the record has 8."""
    path = tmp_path / "pytorch_model.bin"
    torch.save({"x": torch.zeros(8)}, path)
    with zipfile.ZipFile(path) as file:
        records = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        for name, data in records.items():
            hostile = data.replace(b"K\x08", b"\x8a\x06\x00\x00\x00\x00\x00\x01")
            file.writestr(name, hostile if name.endswith("data.pkl") else data)
    with pytest.raises(ModelError, match=r"^pytorch_model\.bin is damaged"), open_pickle(path):
        pass


def test_the_command_line_refuses_code(tmp_path: Path) -> None:
    """As a user sees it: one line after the warning, exit status 2, and no code was run."""
    save_model("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    torch.save({"x": Hostile(tmp_path / "made")}, tmp_path / "pytorch_model.bin")
    command = [sys.executable, "-m", "server.cli", "serve", str(tmp_path), "--port", "0", "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    *_, last = done.stderr.splitlines()
    assert done.returncode == 2
    assert last.startswith("pageserve: error: pytorch_model.bin would run posix.mkdir when unpickled, which is refused")
    assert not (tmp_path / "made").exists()
