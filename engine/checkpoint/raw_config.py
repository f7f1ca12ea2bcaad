"""A checkpoint's settings as one JSON object, from config.json, mistral's params.json or a GGUF file, and the files of
quantisation settings that older checkpoints have beside it."""

from pathlib import Path
from typing import Any

from engine.checkpoint.gguf import is_gguf, read_gguf
from engine.checkpoint.gguf_config import gguf_config
from engine.checkpoint.json_files import read_json_object
from engine.errors import ModelError

CONFIG_FILE, PARAMS_FILE = "config.json", "params.json"
# params.json names no architecture, and no end token: in each of mistral's tokenizers "</s>" is 2.
PARAMS_DEFAULTS = {"architectures": ["MistralParams"], "model_type": "mistral_params", "eos_token_id": 2}

# Files that older tools wrote instead of quantization_config -> the quant_method, which most of them do not hold.
QUANTIZATION_FILES = {
    "quantize_config.json": "gptq",  # AutoGPTQ
    "quant_config.json": "awq",  # AutoAWQ
    "hf_quant_config.json": "modelopt",
}


def config_path(folder: Path) -> Path:
    """The file with the settings. ModelError if the folder has none."""
    for name in (CONFIG_FILE, PARAMS_FILE):
        if (folder / name).is_file():
            return folder / name
    raise ModelError(f"{folder} has no {CONFIG_FILE}: it is not a model folder in Hugging Face form")


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed settings. ModelError if the file is missing or damaged."""
    if is_gguf(folder):
        return gguf_config(read_gguf(folder))
    path = config_path(folder)
    raw = read_json_object(path)
    return raw | PARAMS_DEFAULTS if path.name == PARAMS_FILE else raw


def read_quantization_file(folder: Path) -> tuple[str, dict[str, Any]] | None:
    """(name of the file, settings with quant_method) from the first of QUANTIZATION_FILES; None if there is none, or if
    ModelOpt quantised no weights. ModelError if the file is damaged."""
    for name, method in QUANTIZATION_FILES.items():
        if not (folder / name).is_file():
            continue
        settings = read_json_object(folder / name)
        inner = settings.get("quantization")
        if method == "modelopt" and isinstance(inner, dict) and inner.get("quant_algo") is None:
            return None  # the KV cache alone
        method = "awq" if "w_bit" in settings else method  # early AutoAWQ used AutoGPTQ's name
        return name, {"quant_method": method, **settings}
    return None
