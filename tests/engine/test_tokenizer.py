"""Tokenizer: bytes of tokens, chat templates in a sandbox, clear errors."""

import json

import pytest

from engine.errors import InvalidRequestError, ModelError
from engine.tokenizer import Tokenizer
from tests.checkpoints import byte_tokenizer, save_fake_checkpoint


@pytest.fixture
def folder(tmp_path):
    return save_fake_checkpoint(tmp_path / "model")


def test_round_trip_and_token_bytes(folder):
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode("héllo\n")
    assert tokenizer.decode(ids) == "héllo\n"
    assert b"".join(map(tokenizer.token_bytes, ids)) == "héllo\n".encode()
    assert tokenizer.token_text(0xC3) == "bytes:\\xc3"
    assert tokenizer.token_text(97) == "a"
    assert tokenizer.token_bytes(999) == b""


def test_chat_template_renders_and_adds_the_generation_prompt(folder):
    tokenizer = Tokenizer(folder)
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.chat_prompt(messages).text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.chat_prompt(messages, add_generation_prompt=False).text.endswith("<|im_end|>\n")
    assert tokenizer.encode("<|im_end|>") == [257]


@pytest.mark.parametrize(
    "template, words",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "refused"),
        ("{{ messages[7].content }}", "refused"),
        ("{% for %}", "refused"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_template_that_fails_is_the_requests_error(folder, template, words):
    with pytest.raises(InvalidRequestError, match=words) as caught:
        Tokenizer(folder, chat_template=template).chat_prompt([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"


def test_variables_of_a_request_cannot_replace_the_messages(folder):
    tokenizer = Tokenizer(folder, chat_template="{{ messages[0].content }}{{ mood }}{{ eos_token }}")
    rendered = tokenizer.chat_prompt([{"role": "user", "content": "x"}], mood="glad", eos_token="evil")
    assert rendered.text == "xglad<|im_end|>"


def test_without_template_the_error_says_what_to_do(tmp_path):
    tokenizer = Tokenizer(save_fake_checkpoint(tmp_path, chat_template=None))
    with pytest.raises(InvalidRequestError, match="--chat-template"):
        tokenizer.chat_prompt([{"role": "user", "content": "x"}])


def test_broken_tokenizer_file_is_a_model_error(folder):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer(folder)


@pytest.mark.parametrize(
    "name, content",
    [
        ("tokenizer_config.json", b"[" * 100_000),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"\xff"),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_damaged_settings_are_a_model_error(folder, name, content):
    (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=name):
        Tokenizer(folder)


def test_settings_of_another_shape_count_as_absent(folder):
    settings = {"bos_token": {"content": "<s>"}, "eos_token": {}, "unk_token": 7, "chat_template": [[], {"name": "x"}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer(folder)
    assert tokenizer.chat_template is None
    rendered = tokenizer.template("{{ bos_token }}{{ eos_token }}{{ unk_token }}").render([], True, {})
    assert rendered == "<s>"


def test_sentencepiece_spelling(tmp_path):
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.BPE(vocab={"\u2581the": 0, "<0xE2>": 1, "<0x82>": 2, "<0xAC>": 3, "s": 4}, merges=[]))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert b"".join(map(tokenizer.token_bytes, [0, 4, 1, 2, 3])).decode() == " thes€"


@pytest.mark.parametrize(
    "settings, added, expected",
    [
        ({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}, "<|endoftext|>", 256),
        ({"bos_token": {"content": "<|im_start|>"}}, "<|pad|>", 256),
        ({"bos_token": None, "eos_token": "<|im_end|>"}, "<|endoftext|>", 259),
        ({"bos_token": "no such token", "eos_token": "<|im_end|>"}, "<|pad|>", 257),
        ({}, "<|pad|>", None),
    ],
)
def test_what_stands_at_the_beginning_of_a_document(tmp_path, settings, added, expected):
    folder = save_fake_checkpoint(tmp_path / "model")
    vocabulary = byte_tokenizer()
    vocabulary.add_special_tokens([added])
    vocabulary.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert Tokenizer(folder).document_separator == expected


async def test_run_leaves_the_event_loop_free(folder):
    tokenizer = Tokenizer(folder)
    assert await tokenizer.run("", 2, tokenizer.encode, "ab", False) == [97, 98]
    tokenizer.close()
