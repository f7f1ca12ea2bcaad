"""The tokenizer's files in a checkpoint: loading tokenizer.json, special tokens, the chat template.

Everything here runs once, when a Tokenizer is made. Raises ModelError for files that cannot be read or served.
"""

import json
import re
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from engine.checkpoint.gguf import is_gguf, read_gguf
from engine.checkpoint.json_files import read_json
from engine.checkpoint.links import path_inside
from engine.checkpoint.locate import EXTRA_TOKENS, read_tokenizer_config
from engine.errors import ModelError
from engine.text.conversion.convert import convert_tokenizer
from engine.text.conversion.gguf import convert_gguf, tokenizer_settings

TOKENIZER = "tokenizer.json"
# Models of these types drop text: one unknown token stands for any number of characters, a run of spaces for no token.
# No real text has more characters per token than MAX_CHARS_LOST.
MODELS_THAT_LOSE_TEXT, MAX_CHARS_LOST = ("Unigram", "WordLevel", "WordPiece"), 1024
LAST_BREAK = re.compile(r"(\r\n|\r|\n)\Z")
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def load_tokenizer(model_dir: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a checkpoint folder or GGUF file. No code from the checkpoint runs."""
    if is_gguf(model_dir):
        return convert_gguf(read_gguf(model_dir))
    tokenizer, settings = _load_from_folder(model_dir), read_settings(model_dir)
    if not (model_dir / TOKENIZER).is_file():
        settings.pop("added_tokens_decoder", None)  # the conversion has added its tokens
    tokenizer.add_tokens(_configured_tokens(tokenizer, settings))
    return tokenizer


def _load_from_folder(model_dir: Path) -> tokenizers.Tokenizer:
    path = model_dir / TOKENIZER
    if not path.is_file():
        converted = convert_tokenizer(model_dir, read_json(model_dir / "tokenizer_config.json"))
        return converted or _load_with_transformers(model_dir)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a file that it cannot read
        raise ModelError(f"the model's {path.name} cannot be read: {error}") from error


def read_settings(model_dir: Path) -> dict[str, Any]:
    """tokenizer_config.json (see read_tokenizer_config), or the fields of it that a GGUF file holds."""
    return tokenizer_settings(read_gguf(model_dir)) if is_gguf(model_dir) else read_tokenizer_config(model_dir)


def _configured_tokens(tokenizer: tokenizers.Tokenizer, settings: dict[str, Any]) -> list[AddedToken]:
    """The tokens of the settings that the tokenizer lacks or has with other flags, as transformers adds them: people
    who change the special tokens of a checkpoint often edit tokenizer_config.json alone. A name that is no token of
    the vocabulary and not listed stays text: the model has no embedding of it."""
    known = {token.content: _flags(token) for token in tokenizer.get_added_tokens_decoder().values()}
    listed = settings.get("added_tokens_decoder")
    entries = [token for _, token in sorted(listed.items(), key=_token_id)] if isinstance(listed, dict) else []
    tokens = {token.content: token for token in map(_read_token, entries) if token is not None}
    for text in tokens.keys() & known.keys():  # a special token stays one
        tokens[text].special |= known[text]["special"]
    for token in map(_read_token, _special_tokens(settings)):
        text = "" if token is None else token.content
        if token is not None and (text in tokens or tokenizer.token_to_id(text) is not None):
            tokens.setdefault(text, AddedToken(text, **known[text]) if text in known else token).special = True
    return [token for text, token in tokens.items() if _flags(token) != known.get(text)]


def _special_tokens(settings: dict[str, Any]) -> list[Any]:
    """The entries that name a special token: texts, objects or something else."""
    named = [token for name, token in settings.items() if name.endswith("_token")]
    extra: Any = next((settings[name] for name in EXTRA_TOKENS if settings.get(name)), [])
    return [*named, *(extra.values() if isinstance(extra, dict) else extra if isinstance(extra, list) else [])]


def _token_id(entry: tuple[str, Any]) -> int:
    return int(entry[0]) if entry[0].isdecimal() else 0


def _read_token(value: Any) -> AddedToken | None:
    """A token given as a text, which names a special token, or as an object; None for other values."""
    if isinstance(value, str) and value:
        return AddedToken(value, normalized=False, special=True)
    if not isinstance(value, dict) or not isinstance(text := value.get("content"), str) or not text:
        return None
    flags = {name: value[name] for name in FLAGS if isinstance(value.get(name), bool)}
    return AddedToken(text, **flags)


def _flags(token: AddedToken) -> dict[str, bool]:
    return {name: getattr(token, name) for name in FLAGS}


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
    """The texts of bos_token, eos_token and others in the settings, which give each as a text or as an object's
    `content`: variables that a chat template may use."""
    texts = {}
    for name in settings:
        token = settings[name] if name.endswith("_token") else None
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            texts[name] = text
    return texts


def find_chat_template(model_dir: Path, settings: dict[str, Any]) -> str | None:
    """The template in chat_template.jinja, else in tokenizer_config.json (one text, or a list with names), else in
    chat_template.json, where older vision-language checkpoints have it. Of several it is the "default" one, and
    "tool_use" for a conversation with tools, as in transformers, or with calls of earlier turns."""
    named: dict[str, Any] = {"default": _read_template(model_dir / "chat_template.jinja")}
    if named["default"] is not None:
        named["tool_use"] = _read_template(path_inside(model_dir, Path("additional_chat_templates/tool_use.jinja")))
    elif isinstance(template := settings.get("chat_template"), list):
        named = {str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, dict)}
    elif template is not None:
        named["default"] = template
    elif not is_gguf(model_dir):
        named["default"] = read_json(model_dir / "chat_template.json").get("chat_template")
    default, tool_use = named.get("default"), named.get("tool_use")
    if isinstance(default, str) and isinstance(tool_use, str):
        # Each stands at the start of a line, as alone, and its last line break counts for nothing. "+" keeps spaces.
        default, tool_use = (LAST_BREAK.sub("", text) for text in (default, tool_use))
        chosen = '{% if tools or messages | selectattr("tool_calls", "defined") | list %}{% set tools = tools or [] %}'
        return f"{chosen}\n{tool_use}{{%+ else %}}\n{default}{{%+ endif %}}"
    return default if isinstance(default, str) else None


def _read_template(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"the model's {path.name} cannot be read: {error}") from error
