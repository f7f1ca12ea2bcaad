"""A sentencepiece model (Kudo and Richardson 2018), unigram or BPE -> a Tokenizer with the same ids."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from engine.errors import ModelError
from engine.text.conversion.protobuf import as_float, fields

UNIGRAM, BPE = 1, 2  # trainer_spec.model_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of pieces
SPACE = "\u2581"  # stands for a space in pieces
TRAINER_FIELDS = {3: "algorithm", 24: "space_behind_words", 35: "byte_fallback", 41: "bos_id", 42: "eos_id"}


@dataclass(slots=True)
class SentencePieceModel:
    """The settings of a model file that change its ids. Defaults are those of sentencepiece_model.proto."""

    pieces: list[tuple[str, float, int]] = field(default_factory=list)  # text, score, type
    algorithm: int = UNIGRAM
    byte_fallback: bool = False
    bos_id: int = 1
    eos_id: int = 2
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    space_behind_words: bool = False  # treat_whitespace_as_suffix


def read_model(data: bytes) -> SentencePieceModel:
    """Parse a model file. ValueError if it is none, ModelError for a setting that is not served."""
    model = SentencePieceModel()
    for number, value in fields(data):
        if number == 1 and isinstance(value, bytes):
            model.pieces.append(_read_piece(value))
        elif number == 2 and isinstance(value, bytes):
            _read_settings(model, value, TRAINER_FIELDS)
        elif number == 3 and isinstance(value, bytes):
            _read_settings(model, value, {2: "charsmap", 3: "add_dummy_prefix", 4: "remove_extra_whitespaces"})
    if not model.pieces or model.algorithm not in (UNIGRAM, BPE):
        raise ValueError("it is not a sentencepiece model of type unigram or BPE")
    if model.space_behind_words:
        raise ModelError(
            "the tokenizer's sentencepiece model says treat_whitespace_as_suffix, which is not served. "
            "Point --tokenizer at a folder with a tokenizer.json."
        )
    return model


def build_tokenizer(model: SentencePieceModel, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The Tokenizer of a model. `settings`: add_bos_token, add_eos_token and legacy of tokenizer_config.json."""
    vocabulary = [text for text, _, _ in model.pieces]
    unknown = next((i for i, (_, _, kind) in enumerate(model.pieces) if kind == UNKNOWN), None)
    if model.algorithm == BPE:
        tokenizer = tokenizers.Tokenizer(
            models.BPE(
                vocab={text: i for i, text in enumerate(vocabulary)},
                merges=_merges(model.pieces),
                unk_token=None if unknown is None else vocabulary[unknown],
                fuse_unk=True,
                byte_fallback=model.byte_fallback,
            )
        )
    else:
        scored = [(text, score) for text, score, _ in model.pieces]
        tokenizer = tokenizers.Tokenizer(models.Unigram(scored, unknown, model.byte_fallback))
    first_only = settings.get("legacy") is False and model.add_dummy_prefix
    _set_spaces(tokenizer, model, first_only)
    for text, _, kind in model.pieces:
        if kind in (CONTROL, UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True)])
        elif kind == USER_DEFINED:
            # Gemma's runs of spaces stand in normalised text; a prefix there would change them.
            spaces = SPACE in text and model.algorithm == BPE and not model.add_dummy_prefix
            tokenizer.add_tokens([AddedToken(text, normalized=spaces)])
    add_document_marks(
        tokenizer,
        _piece(vocabulary, model.bos_id) if settings.get("add_bos_token", True) else None,
        _piece(vocabulary, model.eos_id) if settings.get("add_eos_token", False) else None,
    )
    return tokenizer


def add_document_marks(tokenizer: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Let encode() put these special tokens before and behind a text."""
    tokens = [token for token in (bos, eos) if token is not None]
    if tokens:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in tokens],
        )


def _set_spaces(tokenizer: tokenizers.Tokenizer, model: SentencePieceModel, first_only: bool) -> None:
    """Normalisation and the spelling of spaces. first_only: the prefix stands at the start of the text only, and not
    behind special tokens."""
    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if first_only:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    else:
        steps += [normalizers.Prepend(SPACE)] if model.add_dummy_prefix else []
        steps.append(normalizers.Replace(" ", SPACE))
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    decoding += [decoders.Strip(" ", 1, 0)] if model.add_dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(decoding)


def _merges(pieces: Sequence[tuple[str, float, int]]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, the best score first."""
    usable = {text: i for i, (text, _, kind) in enumerate(pieces) if kind == NORMAL}
    found = []
    for text, i in usable.items():
        for cut in range(1, len(text)):
            left, right = usable.get(text[:cut]), usable.get(text[cut:])
            if left is not None and right is not None:
                found.append((-pieces[i][1], i, left, right, cut))
    return [(pieces[i][0][:cut], pieces[i][0][cut:]) for _, i, _, _, cut in sorted(found)]


def _piece(vocabulary: Sequence[str], piece_id: int) -> str | None:
    return vocabulary[piece_id] if 0 <= piece_id < len(vocabulary) else None


def _read_piece(data: bytes) -> tuple[str, float, int]:
    text, score, kind = "", 0.0, NORMAL
    for number, value in fields(data):
        if number == 1 and isinstance(value, bytes):
            text = value.decode("utf-8")
        elif number == 2:
            score = as_float(value)
        elif number == 3 and isinstance(value, int):
            kind = value
    return text, score, kind


def _read_settings(model: SentencePieceModel, data: bytes, names: Mapping[int, str]) -> None:
    for number, value in fields(data):
        name = names.get(number)
        if name is None:
            continue
        if isinstance(value, bytes) is not (name == "charsmap"):
            raise ValueError(f"{name} has the wrong type")
        kind: Callable[[Any], Any] = type(getattr(model, name))
        number_or_bytes = value - (1 << 64) if isinstance(value, int) and value >> 63 else value  # -1: no such piece
        setattr(model, name, kind(number_or_bytes))
