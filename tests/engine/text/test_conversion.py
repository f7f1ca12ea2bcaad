"""Tokenizers from sentencepiece, tiktoken, tekken and GGUF files: the ids of the packages that define these files."""

import base64
import io
import json
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
import tiktoken
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from engine.errors import ModelError
from engine.text.conversion.gguf import SPLITS
from engine.text.conversion.tiktoken import LLAMA3, QWEN, TEKKEN_SPECIAL, build_byte_level
from engine.text.tokenizer import Tokenizer

README = Path(__file__).parents[3] / "README.md"
TEXTS = [
    "Hello world",
    "  leading and   inner spaces  ",
    "",
    "naïve café 日本語 テキスト 😀",
    "x=1;\n\n\ty = 12345.678\n",
    "don't DON'T we'll",
    "\u200bzero\u00a0width",
    "a" * 50,
    "ﬁne ｆｕｌｌ ①²",
]


def corpus() -> list[str]:
    lines = [line for line in README.read_text(encoding="utf-8").splitlines() if line.strip()]
    return lines + ["naïve café 日本語 テスト", "x = 3;  y  =  4", "    indented", "emoji 😀"] * 5


def train_sentencepiece(folder: Path, **settings: Any) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()),
        model_writer=model,
        vocab_size=700,
        character_coverage=0.99,
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


SPACES = ["\u2581" * 2, "\u2581" * 4, "\n\n"]  # Gemma has runs of spaces so
PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "bpe", "split_digits": True, "allow_whitespace_only_pieces": True, **PLAIN},  # as LLaMA's
        {"model_type": "bpe", "user_defined_symbols": ["<|im|>", "\n\n"], "add_dummy_prefix": False, **PLAIN},
        {"model_type": "bpe", "user_defined_symbols": SPACES, "add_dummy_prefix": False, **PLAIN},
        {"model_type": "bpe", "normalization_rule_name": "identity", "byte_fallback": True},
        {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc"},
        {"model_type": "unigram", **PLAIN},
    ],
)
def test_sentencepiece(tmp_path: Path, settings: dict[str, Any]) -> None:
    reference = train_sentencepiece(tmp_path, **settings)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.vocab_size == reference.get_piece_size()
    for text in TEXTS:
        ids = reference.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.encode(text) == [reference.bos_id(), *ids]
        if reference.unk_id() not in ids:
            assert tokenizer.decode(ids) == reference.decode(ids)
    assert tokenizer.encode("</s>", add_special_tokens=False)[-1] == reference.eos_id()


def test_runs_of_spaces_that_tokenizer_config_lists(tmp_path: Path) -> None:
    """As Gemma's: tokenizer_config.json has every user-defined piece of tokenizer.model, as not normalised."""
    settings = {"model_type": "bpe", "user_defined_symbols": SPACES, "add_dummy_prefix": False, **PLAIN}
    reference = train_sentencepiece(tmp_path, **settings)
    listed = {
        str(reference.piece_to_id(piece)): {"content": piece, "normalized": False, "special": piece == "</s>"}
        for piece in (*SPACES, "</s>")
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed, "eos_token": "</s>"}))
    tokenizer = Tokenizer(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text)


def test_spaces_behind_words_are_refused(tmp_path: Path) -> None:
    train_sentencepiece(tmp_path, model_type="bpe", treat_whitespace_as_suffix=True, **PLAIN)
    with pytest.raises(ModelError, match=r"treat_whitespace_as_suffix, which is not served\. Point --tokenizer at"):
        Tokenizer(tmp_path)


def test_settings_of_tokenizer_config(tmp_path: Path) -> None:
    reference = train_sentencepiece(tmp_path, model_type="bpe", **PLAIN)
    size = reference.get_piece_size()
    settings = {
        "add_bos_token": False,
        "add_eos_token": True,
        "legacy": False,
        "added_tokens_decoder": {str(size): {"content": "<|im_start|>", "special": True}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|more|>": size + 1}))
    tokenizer = Tokenizer(tmp_path)
    ids = [*reference.encode("a b"), size, *reference.encode("é")[1:], reference.eos_id()]
    assert reference.encode("é")[0] == reference.piece_to_id("\u2581")
    assert tokenizer.encode("a b<|im_start|>é") == ids  # without "legacy", no prefix behind a special token
    assert tokenizer.encode("<|more|>")[-2] == size + 1
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|more|>": size + 7}))
    with pytest.raises(ModelError, match=rf"'<\|more\|>' cannot get the id {size + 7}"):
        Tokenizer(tmp_path)


def train_ranks(pattern: str) -> dict[bytes, int]:
    """A vocabulary of bytes and merges, in tiktoken's form."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trained.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet))
    decoder = tokenizers.decoders.ByteLevel()
    spelled = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    single = {chr(i): bytes([i]) for i in range(256) if chr(i) in alphabet}
    others = [byte for byte in range(256) if chr(byte) not in single]
    single |= {chr(256 + i): bytes([byte]) for i, byte in enumerate(others)}
    assert decoder.decode(["Ġ"]) == " "
    return {b"".join(single[c] for c in token): rank for rank, token in enumerate(spelled)}


def save_ranks(path: Path, ranks: dict[bytes, int]) -> None:
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))


@pytest.mark.parametrize(("name", "facts"), [("qwen.tiktoken", QWEN), ("tokenizer.model", LLAMA3)])
def test_tiktoken(tmp_path: Path, name: str, facts: Any) -> None:
    ranks = train_ranks(facts.pattern)
    save_ranks(tmp_path / name, ranks)
    special = {token: len(ranks) + i for i, token in enumerate(facts.special)}
    reference = tiktoken.Encoding(name, pat_str=facts.pattern, mergeable_ranks=ranks, special_tokens=special)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.vocab_size == reference.n_vocab
    for text in [*TEXTS, f"a{facts.special[1]}b {facts.special[7]}"]:
        ids = reference.encode(text, allowed_special="all")
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.encode(text) == ([special["<|begin_of_text|>"]] if facts.bos else []) + ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == reference.decode(ids) == text


@pytest.mark.parametrize("listed", [True, False])
def test_tekken(tmp_path: Path, listed: bool) -> None:
    ranks = train_ranks(LLAMA3.pattern)
    names = [*TEKKEN_SPECIAL, "<SPECIAL_20>", "<SPECIAL_21>"]
    special = {name: i for i, name in enumerate(names)}
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in ranks.items()
    ]
    config = {
        "pattern": LLAMA3.pattern,
        "default_vocab_size": len(ranks) + len(names) - 100,  # the file holds more than the model uses
        "default_num_special_tokens": len(names),
    }
    tekken = {"config": config, "vocab": vocab}
    if listed:
        tekken["special_tokens"] = [{"rank": i, "token_str": name, "is_control": True} for name, i in special.items()]
    (tmp_path / "tekken.json").write_text(json.dumps(tekken))
    used = {token: rank for token, rank in ranks.items() if rank < len(ranks) - 100}
    reference = tiktoken.Encoding("tekken", pat_str=LLAMA3.pattern, mergeable_ranks=used, special_tokens={})
    tokenizer = Tokenizer(tmp_path)
    for text in TEXTS:
        ids = [i + len(names) for i in reference.encode(text)]
        assert tokenizer.encode(text) == [1, *ids]
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("[INST]a[/INST]", add_special_tokens=False)[::2] == [3, 4]


def damaged_files() -> Sequence[tuple[str, bytes, str]]:
    return [
        ("tokenizer.model", b"\x0a\xff\xff\xff\xff\x7f", "ranks|split|base64|unpack"),
        ("tokenizer.model", b"", "its ranks are not"),
        ("qwen.tiktoken", b"IQ== 0\nIg== 7\n", "its ranks are not"),
        ("other.tiktoken", b"IQ== 0\n", "leaves out how texts are split.*known are qwen.tiktoken.*--tokenizer"),
        ("tekken.json", b"{}", "KeyError"),
        ("tekken.json", b"[" * 100_000, "RecursionError|JSONDecodeError"),
    ]


@pytest.mark.parametrize(("name", "data", "message"), damaged_files())
def test_damaged(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ModelError, match=rf"{name}.*({message})") as error:
        Tokenizer(tmp_path)
    assert "\n" not in str(error.value)


def write_vocabulary(folder: Path, model: str, tokens: Sequence[str], kinds: Sequence[int], **fields: Any) -> Path:
    """A GGUF file without tensors."""
    path = folder / "vocabulary.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(kinds))
    for name, value in fields.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        else:
            (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("prefix", [True, False])
def test_gguf_with_scores(tmp_path: Path, prefix: bool) -> None:
    symbols = {} if prefix else {"user_defined_symbols": ["<|im|>", "\n\n"]}
    reference = train_sentencepiece(tmp_path, model_type="bpe", add_dummy_prefix=prefix, **symbols, **PLAIN)
    ids = range(reference.get_piece_size())
    kinds = [
        2 if reference.is_unknown(i) else 3 if reference.is_control(i) else 6 if reference.is_byte(i) else 1
        for i in ids
    ]
    for symbol in symbols.get("user_defined_symbols", []):
        kinds[reference.piece_to_id(symbol)] = 4
    fields = {"scores": [reference.get_score(i) for i in ids], "add_space_prefix": prefix, "bos_token_id": 1}
    pieces = [reference.id_to_piece(i) for i in ids]
    tokenizer = Tokenizer(write_vocabulary(tmp_path, "llama", pieces, kinds, **fields))
    for text in TEXTS:
        expected = reference.encode(text)
        assert tokenizer.encode(text) == [1, *expected]
        if reference.unk_id() not in expected:
            assert tokenizer.decode(expected) == reference.decode(expected)


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2", "tekken", "gpt-4o"])
def test_gguf_with_merges(tmp_path: Path, name: str) -> None:
    pattern = SPLITS[name].pattern
    assert pattern is not None
    ranks = train_ranks(pattern)
    trained = json.loads(build_byte_level(list(ranks), pattern, 0).to_str())["model"]
    tokens = [*sorted(trained["vocab"], key=trained["vocab"].__getitem__), "<|begin|>", "<think>"]
    fields = {"pre": name, "merges": [" ".join(pair) for pair in trained["merges"]], "bos_token_id": len(ranks)}
    path = write_vocabulary(tmp_path, "gpt2", tokens, [1] * len(ranks) + [3, 4], **fields)
    tokenizer = Tokenizer(path)
    reference = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    for text in TEXTS:
        text = unicodedata.normalize("NFC", text)
        ids = reference.encode(text)
        assert tokenizer.encode(text) == [len(ranks)] * SPLITS[name].bos + ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.special_token_ids == {len(ranks)}
    assert tokenizer.encode("<think>", add_special_tokens=False) == [len(ranks) + 1]


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        ("bert", {}, "tokenizer.ggml.model 'bert' is not served"),
        ("gpt2", {"pre": "viking"}, "tokenizer.ggml.pre 'viking' is not served.*--tokenizer"),
        ("llama", {"scores": [0.5]}, "tokenizer.ggml.scores must hold a number for each token"),
        ("gpt2", {"pre": "qwen2", "merges": ["a z"]}, "tokenizer.ggml cannot be read as a tokenizer"),
        ("gpt2", {"pre": "qwen2", "merges": [1]}, "tokenizer.ggml.merges must be a list of strings"),
    ],
)
def test_gguf_vocabulary_that_is_damaged(tmp_path: Path, model: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=rf"vocabulary\.gguf: {message}"):
        Tokenizer(write_vocabulary(tmp_path, model, ["a", "b"], [1, 1], **fields))
