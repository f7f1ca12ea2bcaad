"""The tokenizer in a GGUF file: a sentencepiece vocabulary with scores, or byte-level BPE with merges."""

from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from engine.checkpoint.gguf import Gguf
from engine.errors import ModelError
from engine.text.conversion.sentencepiece import (
    BPE,
    BYTE,
    CONTROL,
    USER_DEFINED,
    SentencePieceModel,
    add_document_marks,
    build_tokenizer,
)
from engine.text.conversion.tiktoken import PATTERN

NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
ADDED = ("add_bos_token", "add_eos_token")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WORD = r"[^\r\n\p{L}\p{N}]?"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Split(NamedTuple):
    """How a byte-level tokenizer splits texts. pattern None: GPT-2's."""

    pattern: str | None = None
    digits: bool = False  # every digit stands alone
    whole_words: bool = False  # a split that is a token is not merged from its parts
    bos: bool = False  # texts begin with the BOS token unless the file says otherwise
    nfc: bool = False


_LLAMA3 = Split(PATTERN % r"\p{N}{1,3}", whole_words=True, bos=True)
_QWEN2 = Split(PATTERN % r"\p{N}", nfc=True)
# By tokenizer.ggml.pre.
SPLITS = {
    "gpt-2": Split(),
    "phi-2": Split(),
    "smollm": Split(digits=True),
    "starcoder": Split(digits=True),
    "refact": Split(digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": Split(PATTERN % r"\p{N}{1,3}"),
    "smaug-bpe": Split(PATTERN % r"\p{N}{1,3}"),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": Split(rf"{WORD}{UPPER}*{LOWER}+|{WORD}{UPPER}+{LOWER}*|\p{{N}}{REST}", whole_words=True, bos=True),
    "gpt-4o": Split(rf"{WORD}{UPPER}*{LOWER}+{CONTRACTION}|{WORD}{UPPER}+{LOWER}*{CONTRACTION}|\p{{N}}{{1,3}}{REST}"),
}


class Vocabulary(NamedTuple):
    """The lists of tokenizer.ggml, checked."""

    tokens: list[str]
    kinds: list[int]  # as in sentencepiece models
    scores: list[float]
    merges: list[str]


def convert_gguf(gguf: Gguf) -> tokenizers.Tokenizer:
    """The Tokenizer of a file. ModelError names the field that is missing or not served."""
    builders = {"llama": _sentencepiece, "gpt2": _byte_level}
    model = gguf.metadata.get("tokenizer.ggml.model")
    build = builders.get(model) if isinstance(model, str) else None
    if build is None:
        raise ModelError(
            f"{gguf.path.name}: tokenizer.ggml.model {model!r:.100} is not served; served are "
            f"{' and '.join(map(repr, builders))}. Point --tokenizer at a folder with a tokenizer.json."
        )
    vocabulary = _vocabulary(gguf)
    try:
        return build(gguf, vocabulary)
    except ModelError:
        raise
    except Exception as error:  # the library raises bare Exception for a vocabulary that does not fit its merges
        raise ModelError(f"{gguf.path.name}: tokenizer.ggml cannot be read as a tokenizer: {error!r:.200}") from error


def tokenizer_settings(gguf: Gguf) -> dict[str, Any]:
    """The fields of tokenizer_config.json that a file holds: the texts of special tokens and the chat template."""
    tokens, settings = _strings(gguf, "tokens"), {}
    for name, theirs in NAMED.items():
        token_id = gguf.metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if type(token_id) is int and 0 <= token_id < len(tokens):
            settings[name] = tokens[token_id]
    template = gguf.metadata.get("tokenizer.chat_template")
    return settings | ({"chat_template": template} if isinstance(template, str) else {})


def _vocabulary(gguf: Gguf) -> Vocabulary:
    tokens = _strings(gguf, "tokens")
    kinds = gguf.metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    scores = gguf.metadata.get("tokenizer.ggml.scores", [0.0] * len(tokens))
    for name, numbers in (("token_type", kinds), ("scores", scores)):
        fits = isinstance(numbers, list) and len(numbers) == len(tokens)
        if not fits or not all(type(number) in (int, float) for number in numbers):
            raise ModelError(f"{gguf.path.name}: tokenizer.ggml.{name} must hold a number for each token.")
    if not tokens:
        raise ModelError(f"{gguf.path.name}: tokenizer.ggml.tokens is missing or empty.")
    return Vocabulary(tokens, kinds, scores, _strings(gguf, "merges"))


def _strings(gguf: Gguf, name: str) -> list[str]:
    value = gguf.metadata.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise ModelError(f"{gguf.path.name}: tokenizer.ggml.{name} must be a list of strings.")
    return value


def _sentencepiece(gguf: Gguf, vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    field = gguf.metadata.get
    model = SentencePieceModel(
        pieces=list(zip(vocabulary.tokens, vocabulary.scores, vocabulary.kinds, strict=True)),
        algorithm=BPE,
        byte_fallback=BYTE in vocabulary.kinds,
        bos_id=int(field("tokenizer.ggml.bos_token_id", 1)),
        eos_id=int(field("tokenizer.ggml.eos_token_id", 2)),
        add_dummy_prefix=bool(field("tokenizer.ggml.add_space_prefix", True)),
        remove_extra_whitespaces=bool(field("tokenizer.ggml.remove_extra_whitespaces", False)),
    )
    marks = {name: field(f"tokenizer.ggml.{name}", name == "add_bos_token") for name in ADDED}
    return build_tokenizer(model, marks)


def _byte_level(gguf: Gguf, vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    name = gguf.metadata.get("tokenizer.ggml.pre")
    split = SPLITS.get(name) if isinstance(name, str) else None
    if split is None:
        raise ModelError(
            f"{gguf.path.name}: tokenizer.ggml.pre {name!r:.100} is not served; served are {', '.join(SPLITS)}. "
            "Point --tokenizer at a folder with a tokenizer.json."
        )
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.merges)]
    tokenizer = tokenizers.Tokenizer(models.BPE(ids, merges, fuse_unk=False, ignore_merges=split.whole_words))
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    steps += [pre_tokenizers.Split(Regex(split.pattern), behavior="isolated")] if split.pattern else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True):
        if kind == CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    named = tokenizer_settings(gguf)
    add_bos = gguf.metadata.get("tokenizer.ggml.add_bos_token", split.bos)
    add_eos = gguf.metadata.get("tokenizer.ggml.add_eos_token", False)
    add_document_marks(
        tokenizer, named.get("bos_token") if add_bos else None, named.get("eos_token") if add_eos else None
    )
    return tokenizer
