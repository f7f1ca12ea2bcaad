"""The tokenizer's files in a checkpoint: loading tokenizer.json, special tokens, the chat template.

Everything here runs once, when a Tokenizer is made. Raises ModelError for files that cannot be read or served.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers

from engine.checkpoint.gguf import is_gguf, read_gguf
from engine.checkpoint.locate import read_json
from engine.errors import ModelError
from engine.text.conversion.convert import convert_tokenizer
from engine.text.conversion.gguf import convert_gguf, tokenizer_settings

# Models of these types drop text: one unknown token stands for any number of characters, a run of spaces for no token.
# No real text has more characters per token than MAX_CHARS_LOST.
MODELS_THAT_LOSE_TEXT, MAX_CHARS_LOST = ("Unigram", "WordLevel", "WordPiece"), 1024
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")  # variables that a chat template may use


def load_tokenizer(model_dir: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a checkpoint folder or GGUF file. No code from the checkpoint runs."""
    if is_gguf(model_dir):
        return convert_gguf(read_gguf(model_dir))
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        converted = convert_tokenizer(model_dir, read_json(model_dir / "tokenizer_config.json"))
        return converted or _load_with_transformers(model_dir)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a file that it cannot read
        raise ModelError(f"the model's {path.name} cannot be read: {error}") from error


def read_settings(model_dir: Path) -> dict[str, Any]:
    """tokenizer_config.json, or the fields of it that a GGUF file holds."""
    if is_gguf(model_dir):
        return tokenizer_settings(read_gguf(model_dir))
    return read_json(model_dir / "tokenizer_config.json")


def _load_with_transformers(model_dir: Path) -> tokenizers.Tokenizer:
    """For checkpoints that hold only vocab.json and merges.txt, or vocab.txt. Imports torch."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model_dir), trust_remote_code=False, local_files_only=True)
        backend: tokenizers.Tokenizer = tokenizer.backend_tokenizer
    except Exception as error:  # a foreign checkpoint can make the library raise anything; the user needs one line
        raise ModelError(
            f"{model_dir} has no tokenizer.json and transformers finds no tokenizer there either ({error}). "
            "Point --tokenizer at a folder that has one."
        ) from error
    return backend


def max_chars_per_token(tokenizer: tokenizers.Tokenizer) -> int:
    """The most characters of text that one token can stand for."""
    if type(tokenizer.model).__name__ in MODELS_THAT_LOSE_TEXT:
        return MAX_CHARS_LOST
    return max((len(token) for token in tokenizer.get_vocab()), default=1)


def uses_byte_level(tokenizer: tokenizers.Tokenizer) -> bool:
    """True if tokens are spelled in GPT-2's byte alphabet. The decoder's type decides, never the model's name."""
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    kinds = {decoder.get("type")} | {part.get("type") for part in decoder.get("decoders", [])}
    if not kinds & {"ByteLevel", "Metaspace", "ByteFallback", "WordPiece"}:
        raise ModelError(
            f"the tokenizer's decoder ({decoder.get('type')}) is not byte-level BPE, SentencePiece or WordPiece"
        )
    return "ByteLevel" in kinds


def named_token_texts(settings: dict[str, Any]) -> dict[str, str]:
    """The texts of NAMED_TOKENS in tokenizer_config.json, which gives each as a text or as an object's `content`."""
    texts = {}
    for name in NAMED_TOKENS:
        token = settings.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            texts[name] = text
    return texts


def find_chat_template(model_dir: Path, settings: dict[str, Any]) -> str | None:
    """The template in chat_template.jinja, else in tokenizer_config.json (one text, or a list with a "default")."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"the model's {path.name} cannot be read: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None
