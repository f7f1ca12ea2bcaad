"""Locates a checkpoint: the bundled folder, a local folder, or a Hugging Face id. Driver side, no torch."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from engine.checkpoint.gguf import is_gguf, read_gguf, split_names
from engine.checkpoint.json_files import read_json, read_json_fields
from engine.checkpoint.links import check_links, path_inside
from engine.checkpoint.pooling import dense_folders
from engine.checkpoint.raw_config import CONFIG_FILE, PARAMS_FILE, config_path, read_config
from engine.checkpoint.weight_files import (
    LAYOUTS,
    choose_gguf,
    existing_weight_files,
    find_layout,
    no_weights,
    other_layout,
)
from engine.config import EngineConfig
from engine.errors import ModelError

T = TypeVar("T")

BUNDLED_MODEL = Path(__file__).parents[1] / "models" / "bundled"
# Fields of tokenizer_config.json that list special tokens without a name of their own. transformers 5 has the first.
EXTRA_TOKENS = ("extra_special_tokens", "additional_special_tokens")
TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "tokenizer.model.v?", "*.tiktoken", "merges.txt", "vocab.txt")


def resolve_model(config: EngineConfig, flag: str = "--model") -> Path:
    """The local folder or GGUF file of `config.model`; a hub id is downloaded first. Raises ModelError, whose message
    names `flag` where there is no such folder."""
    if not config.model:
        return BUNDLED_MODEL
    folder = _local_folder(config.model, flag)
    on_hub = folder is None
    if folder is None:
        folder = _download(config.model, config.revision, TOKENIZER_FILES, flag)
    check_links(folder)
    if not is_gguf(folder) and any((folder / name).is_file() for name in (CONFIG_FILE, PARAMS_FILE)):
        read_config(folder)
        if config.load_format == "dummy":
            return folder
        if on_hub:
            _download_weights(config.model, folder)
            for module in dense_folders(folder, config.pooling):
                _download(config.model, folder.name, (f"{module}/*.safetensors", f"{module}/*.bin"), flag)
            check_links(folder)
        if find_layout(folder) is not None:
            return folder
    gguf = _find_gguf(config.model, folder, on_hub)
    if gguf is None:
        read_config(folder)
        raise ModelError(no_weights(folder, on_hub))
    read_gguf(gguf)
    read_config(gguf)
    return gguf


def _find_gguf(name: str, folder: Path, on_hub: bool) -> Path | None:
    """`folder` itself if it is a GGUF file, else the only GGUF file in it; that of a hub id is downloaded first."""
    if is_gguf(folder):
        return folder
    file = choose_gguf(folder, (path.name for path in folder.glob("*")))
    if file is None and on_hub:
        file = choose_gguf(name, _hub_files(name, folder.name))
        if file is not None:
            _download(name, folder.name, split_names(file), "--model")
    if file is None:
        return None
    for part in split_names(file):
        path_inside(folder, part)
    return folder / file


def resolve_tokenizer(config: EngineConfig, model_dir: Path) -> Path:
    """The folder of the tokenizer: `config.tokenizer` if set, else the model's folder."""
    if not config.tokenizer:
        return model_dir
    folder = _local_folder(config.tokenizer, "--tokenizer")
    folder = folder or _download(config.tokenizer, None, TOKENIZER_FILES, "--tokenizer")
    check_links(folder)
    return folder


def read_eos_token_ids(model_dir: Path) -> list[int]:
    """The ids in generation_config.json (chat models add some), else those in config.json or in its text_config (of a
    vision-language checkpoint); and as in vLLM the eos_token of the tokenizer's files, because fine-tunes for chats
    often change that one alone. Empty if none has any."""
    config = read_config(model_dir)
    text = config.get("text_config")
    sources = {"generation_config.json": read_json(model_dir / "generation_config.json"), "config.json": config}
    sources["config.json: text_config"] = text if isinstance(text, dict) else {}
    found: list[int] = []
    for name, fields in sources.items():
        ids = fields.get("eos_token_id")
        if ids is not None:
            found = ids if isinstance(ids, list) else [ids]
            if not all(type(i) is int and i >= 0 for i in found):
                raise ModelError(f"{name}: eos_token_id must be a token id or a list of them, not {found!r}")
            break
    named = _eos_of_tokenizer(model_dir)
    return found if named is None or named in found else [*found, named]


def read_tokenizer_config(model_dir: Path) -> dict[str, Any]:
    """tokenizer_config.json. Older checkpoints, whose file does not list the added tokens, name special tokens in
    special_tokens_map.json; that file goes first, as in transformers."""
    settings = read_json(model_dir / "tokenizer_config.json")
    if "added_tokens_decoder" in settings:
        return settings
    names = read_json(model_dir / "special_tokens_map.json")
    return settings | {name: names[name] for name in names if name.endswith("_token") or name in EXTRA_TOKENS}


class _AddedTokens(msgspec.Struct):
    """The part of tokenizer.json that nearly always has the special tokens."""

    added_tokens: Any = None


class _TokenModel(msgspec.Struct):
    vocab: Any = None


class _Vocabulary(msgspec.Struct):
    """Half of tokenizer.json; most of the rest are merges."""

    model: _TokenModel | None = None


def _eos_of_tokenizer(model_dir: Path) -> int | None:
    """The id of the token that tokenizer_config.json calls eos_token; None if there is none."""
    settings = read_tokenizer_config(model_dir)
    token = settings.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return None
    added = settings.get("added_tokens_decoder")
    entries = added.items() if isinstance(added, dict) else ()
    for token_id, entry in entries:
        if isinstance(entry, dict) and entry.get("content") == text and token_id.isdecimal():
            return int(token_id)
    path = model_dir / "tokenizer.json"
    tokens = read_json_fields(path, _AddedTokens).added_tokens
    for entry in tokens if isinstance(tokens, list) else ():
        if isinstance(entry, dict) and entry.get("content") == text and type(entry.get("id")) is int:
            return int(entry["id"])
    model = read_json_fields(path, _Vocabulary).model
    token_id = model.vocab.get(text) if model is not None and isinstance(model.vocab, dict) else None
    return token_id if type(token_id) is int else None


def model_identity(model_dir: Path, config: EngineConfig) -> bytes:
    """32 bytes that differ between models whose KV blocks differ: a hash of config.json, weights and dtypes. With
    `batch_invariant` a block has the same bits whichever batch computed it; other blocks have not.

    Weights enter by the names, sizes and modification times of their files: reading the files would slow every start.
    """
    numbers = config.dtype, config.kv_cache_dtype, config.quantization, config.batch_invariant
    facts: list[object] = [*numbers, config.load_format]
    if config.load_format == "dummy":
        facts.append(config.seed)
    else:
        files = existing_weight_files(model_dir)
        facts += [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps(facts).encode() + _config_bytes(model_dir)).digest()


def _config_bytes(model_dir: Path) -> bytes:
    return b"" if is_gguf(model_dir) else config_path(model_dir).read_bytes()  # a GGUF file is its own config


def _local_folder(name: str, flag: str) -> Path | None:
    """The folder called `name`; None if the name can only be a hub id. `flag` opens the error message."""
    try:
        folder = Path(name).expanduser()
    except RuntimeError:  # "~name" of an unknown user
        raise ModelError(f"{flag}: there is no folder {name}") from None
    if folder.is_dir():
        return folder.resolve()
    if folder.exists():
        if is_gguf(folder):
            return folder.absolute()  # a snapshot's link leads to a file with another name
        raise ModelError(f"{flag}: {name} is a file; give the folder of a checkpoint in Hugging Face form")
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ModelError(f"{flag}: there is no folder {name}")
    return None


def _download_weights(name: str, folder: Path) -> None:
    """Download the weights of the first layout that the hub has, else of other_layout, of the commit of `folder`.

    Only the shards that an index names: some repositories hold a second copy of the weights.
    """
    for layout in LAYOUTS:
        names = tuple(name for name in layout.names(folder) if name.endswith(layout.suffix))
        _download(name, folder.name, names, "--model")
        if layout.is_in(folder):
            return
    other = other_layout(_hub_files(name, folder.name))
    if other is not None:
        _download(name, folder.name, (other.single, other.index_file), "--model")
        _download(name, folder.name, other.names(folder), "--model")


def _download(name: str, revision: str | None, patterns: tuple[str, ...], flag: str) -> Path:
    """Download the files that match `patterns`, never code; returns the folder. Respects HF_HUB_OFFLINE."""
    from huggingface_hub import snapshot_download

    return Path(
        _ask_hub(
            lambda: snapshot_download(name, revision=revision, allow_patterns=list(patterns)), name, revision, flag
        )
    )


def _hub_files(name: str, revision: str) -> list[str]:
    """The names of all files of a repository."""
    from huggingface_hub import list_repo_files

    return _ask_hub(lambda: list_repo_files(name, revision=revision), name, revision, "--model")


def _ask_hub(call: Callable[[], T], name: str, revision: str | None, flag: str) -> T:
    """The result of a call of huggingface_hub's. Its errors become ModelErrors."""
    from huggingface_hub import errors

    try:
        return call()
    except errors.GatedRepoError as error:
        raise ModelError(f"{flag}: {name} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{flag}: neither a folder nor a hub id is called {name} (for a private one, set HF_TOKEN)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"--revision: {name} has no branch, tag or commit {revision!r}") from error
    except errors.LocalEntryNotFoundError as error:
        raise ModelError(
            f"{flag}: {name} is not a local folder, not complete in the local cache, and the hub cannot be reached "
            "(no network, or HF_HUB_OFFLINE is set)"
        ) from error
    except errors.HFValidationError as error:
        raise ModelError(f"{flag}: there is no folder {name}, and the name is not a valid hub id") from error
    except Exception as error:  # such as a full disk, a proxy, a broken connection: the user needs one clear line
        raise ModelError(f"{flag}: downloading {name} failed: {type(error).__name__}: {error}") from error
