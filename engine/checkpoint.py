"""Where a checkpoint lies: the bundled folder, a local folder, or a Hugging Face id. Driver side, no torch."""

import json
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.errors import ModelError

BUNDLED_MODEL = Path(__file__).parent / "models" / "bundled"
TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
MAX_JSON_BYTES = 64 << 20


def resolve_model(config: EngineConfig) -> Path:
    """The local folder of `config.model`, downloaded from the hub where it is an id. Raises ModelError."""
    if not config.model:
        return BUNDLED_MODEL
    patterns = TOKENIZER_FILES if config.load_format == "dummy" else (*TOKENIZER_FILES, "*.safetensors")
    folder = _resolve(config.model, config.revision, patterns, "--model")
    read_json(folder / "config.json", required=True)
    if config.load_format != "dummy" and not any(folder.glob("*.safetensors")):
        raise ModelError(_no_weights(folder))
    return folder


def resolve_tokenizer(config: EngineConfig, model_dir: Path) -> Path:
    """The folder of the tokenizer: the model's, unless the config names another."""
    if not config.tokenizer:
        return model_dir
    return _resolve(config.tokenizer, None, TOKENIZER_FILES, "--tokenizer")


def read_eos_token_ids(model_dir: Path) -> list[int]:
    """From generation_config.json, which chat models extend, else config.json; empty where neither names one."""
    for name in ("generation_config.json", "config.json"):
        ids = read_json(model_dir / name).get("eos_token_id")
        if ids is not None:
            ids = ids if isinstance(ids, list) else [ids]
            if not all(type(i) is int and i >= 0 for i in ids):
                raise ModelError(f"{name}: eos_token_id must be a token id or a list of them, not {ids!r}")
            return ids
    return []


def read_json(path: Path, required: bool = False) -> dict[str, Any]:
    """A JSON object from a checkpoint's file; {} where the file is missing and not required. Raises ModelError."""
    if not path.is_file():
        if required:
            raise ModelError(f"{path.parent} has no {path.name}: it is not a model folder in Hugging Face form")
        return {}
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ModelError(f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def _resolve(name: str, revision: str | None, patterns: tuple[str, ...], flag: str) -> Path:
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ModelError(f"{flag}: there is no folder {name}")
    return _download(name, revision, patterns, flag)


def _download(name: str, revision: str | None, patterns: tuple[str, ...], flag: str) -> Path:
    """Only safetensors, JSON and tokenizer files are fetched: never code, never a pickle."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except GatedRepoError as error:
        raise ModelError(f"{flag}: {name} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"{flag}: neither a folder nor a hub id is called {name}") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(f"{flag}: {name} is no folder here, and the hub cannot be reached to look for it") from error
    except HFValidationError as error:
        raise ModelError(f"{flag}: there is no folder {name}, and it is no hub id either") from error


def _no_weights(folder: Path) -> str:
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    if not pickles:
        return f"{folder} holds no *.safetensors file"
    return (
        f"{folder} holds only pickle weights ({pickles[0]}), which can run code when loaded and are refused. "
        "Convert them with save_pretrained(..., safe_serialization=True) in transformers."
    )
