"""A GGUF file in place of a checkpoint folder: LLM, the tokenizer, the plan, and the choice of the file."""

import shutil
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.formats.gguf_writer import write_gguf
from engine.checkpoint.checkpoint import open_checkpoint
from engine.checkpoint.locate import BUNDLED_MODEL, resolve_model
from engine.config import EngineConfig
from engine.errors import ModelError
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer
from engine.worker.memory_plan import main as plan
from tests.engine.models.family_checks import load
from tests.engine.models.paged import PagedRunner, greedy

TEXTS = (
    "Once upon a time, in 1984, there was",
    "def f(x):\n\treturn  x+1",
    "Ünïcode — 你好 👋🏽!",
    "<|im_start|>user\nHi",
)
TOKENS = 12


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with its matrices in Q8_0."""
    return write_gguf(BUNDLED_MODEL, tmp_path_factory.mktemp("gguf") / "bundled.gguf", "Q8_0")


def test_serves_one_file(file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompt = Tokenizer(BUNDLED_MODEL).encode(TEXTS[0])
    with LLM(str(file), dtype="float32", num_blocks=64) as llm:
        ours = llm.generate([TEXTS[0]], SamplingParams(temperature=0, max_tokens=TOKENS))[0].outputs[0].token_ids
    assert list(ours) == greedy(PagedRunner(load(dequantized(tmp_path))), [prompt], TOKENS)[0]
    assert plan(["--model", str(file)]) == 0
    assert "weights" in capsys.readouterr().out


def dequantized(folder: Path) -> Path:
    """The bundled model with the values of its matrices in Q8_0, by the `gguf` package."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(BUNDLED_MODEL / name, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            blocks = gguf.quants.quantize(tensor.float().numpy(), gguf.GGMLQuantizationType.Q8_0)
            values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
            tensors[name] = torch.from_numpy(values)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_tokenizer_and_small_facts_are_those_of_the_folder(file: Path) -> None:
    ours, theirs = Tokenizer(file), Tokenizer(BUNDLED_MODEL)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    messages = [{"role": "user", "content": "Hello <|im_end|>"}]
    assert ours.chat_prompt(messages) == theirs.chat_prompt(messages)
    assert ours.special_token_ids == theirs.special_token_ids
    assert ours.document_start == theirs.document_start
    facts = open_checkpoint(EngineConfig(model=str(file)))
    assert sorted(facts.eos_token_ids) == [0, 2]


def test_a_folder_with_one_file_is_that_file(file: Path, tmp_path: Path) -> None:
    shutil.copy(file, tmp_path / "a.gguf")
    config = EngineConfig(model=str(tmp_path))
    assert resolve_model(config) == tmp_path / "a.gguf"
    shutil.copy(file, tmp_path / "b.gguf")
    with pytest.raises(ModelError, match=r"2 GGUF files: a\.gguf, b\.gguf\. Give --model the path"):
        resolve_model(config)
