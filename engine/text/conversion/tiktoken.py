"""Byte-level BPE by ranks: tiktoken files (Qwen 1, Llama 3) and mistral's tekken.json. The ids stay the same."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from engine.text.conversion.sentencepiece import add_document_marks

# Contractions, words, numbers of one or of up to three digits, punctuation, white space. Published with each model.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Tiktoken:
    """Facts that a vocabulary's file leaves out: the split of texts, and the special tokens behind the ranks."""

    pattern: str
    special: tuple[str, ...]
    bos: str | None = None


def _llama3_special() -> tuple[str, ...]:
    """The 256 special tokens of Llama 3.1 and later, in the order of their ids from 128000."""
    named = {
        0: "<|begin_of_text|>",
        1: "<|end_of_text|>",
        4: "<|finetune_right_pad_id|>",
        6: "<|start_header_id|>",
        7: "<|end_header_id|>",
        8: "<|eom_id|>",
        9: "<|eot_id|>",
        10: "<|python_tag|>",
    }
    reserved = iter(range(256))
    return tuple(named.get(i) or f"<|reserved_special_token_{next(reserved)}|>" for i in range(256))


QWEN = Tiktoken(
    PATTERN % r"\p{N}",
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))),
)
LLAMA3 = Tiktoken(PATTERN % r"\p{N}{1,3}", _llama3_special(), bos="<|begin_of_text|>")
# By the name of the file, in the checkpoints that are published with one.
TIKTOKENS = {"qwen.tiktoken": QWEN, "tokenizer.model": LLAMA3}

# Special tokens of a tekken.json that lists none.
TEKKEN_SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip


def read_ranks(data: bytes) -> list[bytes]:
    """The tokens of a tiktoken file, lines of a token in base64 and its rank, by rank. ValueError if it is none."""
    ranks: dict[int, bytes] = {}
    for line in data.splitlines():
        if line:
            token, rank = line.split()
            ranks[int(rank)] = base64.b64decode(token, validate=True)
    if sorted(ranks) != list(range(len(ranks))) or len(ranks) < 256:
        raise ValueError("its ranks are not 0, 1, 2 and so on, for all bytes at least")
    return [ranks[rank] for rank in range(len(ranks))]


def build_tiktoken(ranks: Sequence[bytes], facts: Tiktoken) -> tokenizers.Tokenizer:
    """The Tokenizer of a tiktoken file: token ids are ranks, special tokens follow."""
    tokenizer = build_byte_level(ranks, facts.pattern, first_id=0)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in facts.special])
    add_document_marks(tokenizer, facts.bos, None)
    return tokenizer


def build_tekken(tekken: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The Tokenizer of a tekken.json: special tokens first, then ranks. ValueError, KeyError, TypeError if damaged."""
    config = tekken["config"]
    num_special = int(config["default_num_special_tokens"])
    listed = tekken.get("special_tokens")
    named = dict(enumerate(TEKKEN_SPECIAL)) if listed is None else {int(t["rank"]): str(t["token_str"]) for t in listed}
    special = [named.get(i, f"<SPECIAL_{i}>") for i in range(num_special)]
    num_ranks = int(config["default_vocab_size"]) - num_special
    ranks = [base64.b64decode(entry["token_bytes"]) for entry in tekken["vocab"][:num_ranks]]
    tokenizer = build_byte_level(ranks, str(config["pattern"]), first_id=num_special, special=special)
    add_document_marks(tokenizer, "<s>", None)
    return tokenizer


def build_byte_level(
    ranks: Sequence[bytes], pattern: str, first_id: int, special: Sequence[str] = ()
) -> tokenizers.Tokenizer:
    """BPE over bytes: of all neighbours that make a token, those with the lowest rank are joined first. `special`
    tokens have the ids before first_id."""
    spell = _byte_alphabet()
    spelled = ["".join(spell[byte] for byte in token) for token in ranks]
    vocabulary = {text: i for i, text in enumerate(special)} | {t: first_id + i for i, t in enumerate(spelled)}
    known, merges = set(spelled), []
    rank_of = {text: rank for rank, text in enumerate(spelled)}
    for text in spelled:
        pairs = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        pairs = [pair for pair in pairs if pair[0] in known and pair[1] in known]
        merges += sorted(pairs, key=lambda pair: (rank_of[pair[0]], rank_of[pair[1]]))
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, fuse_unk=False, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def _byte_alphabet() -> list[str]:
    """GPT-2's character for each byte: itself if it is printable, else one from chr(256) on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
