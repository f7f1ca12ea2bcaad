"""A checkpoint that cannot be served is refused by its headers: the message names what was found and wanted, and no
weight is read before it. Two of the cases as a user meets them, from `pageserve serve`."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from engine.errors import ModelError
from engine.models.families import read_model_config
from engine.models.loading.load import load_model
from engine.models.loading.safetensors_file import SafetensorsFile
from engine.worker import memory_plan

NAME = "model.layers.1.mlp.down_proj.weight"


def change_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensor(folder: Path, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    changed = change(tensors.pop(NAME))
    tensors |= {} if changed is None else {NAME: changed}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


CASES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "architecture": (
        lambda folder: change_config(folder, architectures=["LlamoForCausalLM"], model_type="llamo"),
        ("LlamoForCausalLM", "llama", "encoders"),
    ),
    "missing": (lambda folder: change_tensor(folder, lambda tensor: None), (f"lacks {NAME}", "[32, 48]")),
    "misshaped": (
        lambda folder: change_tensor(folder, lambda tensor: tensor[:-3].contiguous()),
        (NAME, "[29, 48]", "[32, 48]"),
    ),
    "truncated": (truncate, ("model.safetensors is damaged or incomplete", "ends at byte")),
    "quantisation": (
        lambda folder: change_config(folder, quantization_config={"quant_method": "magic"}),
        ("'magic' is not served", "gptq"),
    ),
    "memory": (
        lambda folder: change_config(folder, hidden_size=1 << 17, intermediate_size=1 << 19, num_hidden_layers=60),
        ("no room for the weights", "TiB", "smaller or a quantised model"),
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, max_position_embeddings=64)).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", [name for name in CASES if name != "memory"])
def test_headers_tell_before_a_weight_is_read(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*arguments: object) -> None:
        raise AssertionError("a weight was read before the refusal")

    monkeypatch.setattr(SafetensorsFile, "tensor", read)
    change, words = CASES[name]
    change(folder)
    with pytest.raises(ModelError) as error:
        config = read_model_config(folder)
        load_model(folder, config, dtype=torch.float32, device=torch.device("cpu"), load_format="auto", seed=0)
    assert all(word in str(error.value) for word in words), error.value
    assert name == "architecture" or "\n" not in str(error.value)  # served families are listed in groups


@pytest.mark.parametrize("name", ["missing", "misshaped", "truncated", "quantisation"])
def test_plan_names_what_does_not_fit(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, words = CASES[name]
    change(folder)
    assert memory_plan.main(["--model", str(folder), "--device", "cpu"]) == 2
    printed = capsys.readouterr()
    assert not printed.out and printed.err.count("\n") == 1
    assert all(word in printed.err for word in words), printed.err


def test_plan_needs_no_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model.safetensors").unlink()
    assert memory_plan.main(["--model", str(folder), "--device", "cpu", "--memory", "8GiB"]) == 0
    assert "weights" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["misshaped", "memory"])
def test_serve_ends_with_one_line_and_a_status(name: str, folder: Path) -> None:
    change, words = CASES[name]
    (folder / "tokenizer.json").write_bytes(Path("engine/models/bundled/tokenizer.json").read_bytes())
    change(folder)
    command = [sys.executable, "-m", "server.cli", "serve", "--model", str(folder), "--port", "0"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PAGESERVE_")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode in (1, 2) and not done.stdout
    assert done.stderr.startswith("pageserve: error: ") and done.stderr.count("\n") == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
