"""convert_tokenizer: the Tokenizer of a checkpoint that has a tokenizer in another form than tokenizer.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from engine.checkpoint.json_files import read_json_object
from engine.errors import ModelError
from engine.text.conversion.sentencepiece import build_tokenizer, read_model
from engine.text.conversion.tiktoken import LLAMA3, TIKTOKENS, build_tekken, build_tiktoken, read_ranks

MAX_BYTES = 64 << 20  # the largest vocabularies have below 20 MB


def convert_tokenizer(folder: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer | None:
    """The Tokenizer of a sentencepiece, tiktoken or tekken file; None if the folder has none of them.

    `settings` is tokenizer_config.json. ModelError names the file that is damaged or not served.
    """
    path = _find_file(folder)
    if path is None:
        return None
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES >> 20} MiB")
        tokenizer = _convert(path, settings)
        _add_tokens(tokenizer, folder, settings)
    except ModelError:
        raise
    except Exception as error:  # a damaged file; the library raises bare Exception, too
        raise ModelError(f"the model's {path.name} cannot be read as a tokenizer: {error!r:.200}") from error
    return tokenizer


def _find_file(folder: Path) -> Path | None:
    fixed = [folder / "tekken.json", *sorted(folder.glob("*.tiktoken")), folder / "tokenizer.model"]
    versions = sorted(folder.glob("tokenizer.model.v*"), reverse=True)  # in mistral's own repositories
    return next((path for path in (*fixed, *versions) if path.is_file()), None)


def _convert(path: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    data = path.read_bytes()
    if path.name == "tekken.json":
        return build_tekken(json.loads(data))
    if path.suffix == ".tiktoken":
        facts = TIKTOKENS.get(path.name)
        if facts is None:
            known = ", ".join(name for name in TIKTOKENS if name.endswith(".tiktoken"))
            raise ModelError(
                f"{path.name} leaves out how texts are split and which tokens are special; known are {known}. "
                "Point --tokenizer at a folder with a tokenizer.json."
            )
        return build_tiktoken(read_ranks(data), facts)
    try:
        model = read_model(data)
    except ValueError:
        return build_tiktoken(read_ranks(data), LLAMA3)
    return build_tokenizer(model, settings)


def _add_tokens(tokenizer: tokenizers.Tokenizer, folder: Path, settings: Mapping[str, Any]) -> None:
    """Add the tokens of tokenizer_config.json and added_tokens.json, which must get the ids that these files say."""
    added: dict[int, AddedToken] = {}
    # Gemma's runs of spaces, which tokenizer_config.json lists, too
    normalized = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.normalized}
    path = folder / "added_tokens.json"
    for text, token_id in (read_json_object(path) if path.is_file() else {}).items():
        added[int(token_id)] = AddedToken(text, normalized=False, special=True)
    for token_id, token in (settings.get("added_tokens_decoder") or {}).items():
        flags = {name: bool(token.get(name)) for name in ("special", "lstrip", "rstrip", "single_word", "normalized")}
        flags["normalized"] |= token["content"] in normalized
        added[int(token_id)] = AddedToken(token["content"], **flags)
    for token_id in sorted(added):
        token = added[token_id]
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        if tokenizer.token_to_id(token.content) != token_id:
            raise ModelError(f"the tokenizer's added token {token.content!r} cannot get the id {token_id}.")
