"""Tokenizer: bytes of tokens, chat templates in a sandbox, clear errors."""

import json
import random
import string
import time

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from engine.checkpoint.locate import BUNDLED_MODEL
from engine.errors import InvalidRequestError, ModelError
from engine.text.chat_template import syntax_error
from engine.text.tokenizer import CUT_MARGIN, Tokenizer
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


@pytest.mark.parametrize(
    "template",
    [
        "{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}{% endfor %}",  # GLM-4.5
        "{{ tools | tojson(separators=(',', ':')) }}",  # Kimi K2
        "{{ tools | tojson(ensure_ascii=True, indent=2, sort_keys=True) }}",
        "{{ tools | tojson(true) }}{{ tools | tojson(4) }}",  # the first argument is ensure_ascii, not indent
        "{% for m in messages %}\n {% generation %}\n {{ m.content }}{{ loop.last }}{% endgeneration %}\n{% endfor %}",
        "{% for m in messages %}{%- generation -%}{% set x = m %}a {%- endgeneration -%}{{ x is defined }}{% endfor %}",
    ],
)
def test_templates_render_as_in_transformers(folder, template):
    messages = [{"role": "user", "content": "Grüße <b>"}, {"role": "assistant", "content": "x"}]
    tools = [{"type": "function", "function": {"name": "größe", "parameters": {"b": [1, None], "a": {}}}}]
    (expected,), _ = render_jinja_template([messages], tools, chat_template=template)
    assert syntax_error(template) is None
    assert Tokenizer(folder, chat_template=template).chat_prompt(messages, tools=tools).text == expected


TEMPLATES = {
    "default": "\n{% for m in messages %}\n{{ m.content }}\n  {% endfor %}\n  \n",
    "tool_use": "\n  {% macro show(t) %}{{ t.function.name }}{% endmacro %}\n{{ show(tools[0]) }} \n\n",
    "rag": "{{ documents }}",
}


EDGES = {"default": " {% set x = 1 %} a\r\n", "tool_use": "  {# two #} b\n\r\n"}  # spaces before the first tag


@pytest.mark.parametrize("templates", [TEMPLATES, EDGES])
@pytest.mark.parametrize("files", [True, False])
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f", "parameters": {}}}]])
def test_a_template_of_its_own_for_tools(folder, files, tools, templates):
    """Templates with names: in tokenizer_config.json, or in files as transformers 5 writes them."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if files:
        (folder / "chat_template.jinja").write_text(templates["default"])
        (folder / "additional_chat_templates").mkdir()
        for name in templates.keys() - {"default"}:
            (folder / "additional_chat_templates" / f"{name}.jinja").write_text(templates[name])
    else:
        settings["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tools=tools, tokenize=False)
    assert Tokenizer(folder).chat_prompt(messages, **({"tools": tools} if tools else {})).text == expected


def test_calls_of_earlier_turns_are_for_the_template_of_tools(folder):
    """Also in a request without tools: the default template may leave them out."""
    tool_use = "{% for t in tools %}{{ t }}{% endfor %}{{ messages[0].tool_calls[0] }}"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": tool_use}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    tokenizer = Tokenizer(folder)
    assert tokenizer.chat_prompt([{"role": "assistant", "tool_calls": ["call"]}]).text == "call"
    assert tokenizer.chat_prompt([{"role": "assistant", "content": "x"}]).text == "plain"


def test_the_template_of_a_processor(folder):
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}))
    assert Tokenizer(folder).chat_prompt([{"role": "user", "content": "x"}]).text == "x!"


def test_tools_and_documents_of_a_request_without_them_are_none(folder):
    template = "{% if tools is not none %}tools{% endif %}{{ documents }}{{ tools is defined }}{{ other is defined }}"
    messages = [{"role": "user", "content": "x"}]
    (expected,), _ = render_jinja_template([messages], chat_template=template)
    assert Tokenizer(folder, chat_template=template).chat_prompt(messages).text == expected == "NoneTrueFalse"


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


MARKED = {"__type": "AddedToken", "content": "<|im_end|>", "lstrip": True}
LISTED = {"content": "<|im_end|>", "lstrip": True, "rstrip": True, "special": False}


@pytest.mark.parametrize(
    "settings, special_map",
    [
        ({"eos_token": "b", "bos_token": MARKED, "pad_token": None}, None),
        ({"added_tokens_decoder": {"258": {"content": "<tool>", "special": False}, "257": LISTED}}, {"eos_token": "b"}),
        ({"eos_token": "<tool>", "added_tokens_decoder": {"258": {"content": "<tool>", "special": False}}}, None),
        ({"additional_special_tokens": ["c", "<|im_end|>"]}, None),
        ({"extra_special_tokens": {"image_token": "c"}, "boi_token": "<|im_start|>"}, None),
        ({"eos_token": "<|im_end|>"}, {"eos_token": {"content": "c", "lstrip": True}, "bos_token": "<|im_start|>"}),
    ],
)
def test_special_tokens_of_the_settings(folder, settings, special_map):
    """Tokens that tokenizer.json lacks, or has with other flags, are those that transformers adds."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if special_map is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(special_map))
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    text = "a <|im_end|> b <tool> c <|im_start|>"
    assert ours.encode(text) == theirs(text).input_ids
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text).input_ids, skip_special_tokens=True)
    names = "{{ bos_token }} {{ eos_token }} {{ boi_token }}"
    (expected,) = theirs.apply_chat_template([[{}]], chat_template=names, tokenize=False)
    assert ours.template(names).render([], True, {}) == expected


def test_a_special_token_without_an_embedding_stays_text(folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]", "extra_special_tokens": ["[X]"]}))
    assert Tokenizer(folder).encode("[PAD][X]") == list(b"[PAD][X]")


def test_sentencepiece_spelling(tmp_path):
    backend = Backend(models.BPE(vocab={"\u2581the": 0, "<0xE2>": 1, "<0x82>": 2, "<0xAC>": 3, "s": 4}, merges=[]))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert b"".join(map(tokenizer.token_bytes, [0, 4, 1, 2, 3])).decode() == " thes€"


def test_added_tokens_of_spaces(tmp_path):
    """Gemma's vocabulary has runs of spaces as added tokens."""
    vocabulary = {token: i for i, token in enumerate(("\u2581", "a", "\u2581\u2581"))}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[("\u2581", "\u2581")]))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_tokens([AddedToken("\u2581\u2581", normalized=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode("a  a")
    assert ids == [1, 2, 1] and tokenizer.decode(ids) == "a  a" == backend.decode(ids)
    assert b"".join(map(tokenizer.token_bytes, ids)) == b"a  a"


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
def test_the_token_that_starts_a_document(tmp_path, settings, added, expected):
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


def metaspace_tokenizer():
    """Unigram over U+2581, as SentencePiece has it."""
    words = ["the", "fox", "a", "night", "in", "of", "one", "ght", "n", "is", "s"]
    letters = sorted({*"abcdefghijklmnopqrstuvwxyz,.\n0123456789é的是一"} - {"a", "n", "s"})
    pieces = [*(f"\u2581{word}" for word in words), *words, "\u2581"]
    vocabulary = [
        ("<unk>", -20.0),
        *((piece, -3.0 - len(piece) / 9) for piece in pieces),
        *((x, -9.0) for x in letters),
    ]
    tokenizer = Backend(models.Unigram(vocabulary, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def word_tokenizer():
    words = ["the", "fox", "a", "night", "in", "##ght", "##n", "is", ",", "."]
    letters = [x for letter in "abcdefghijklmnopqrstuvwxyz的是" for x in (letter, f"##{letter}") if x not in words]
    vocabulary = {word: i for i, word in enumerate(["[UNK]", *words, *letters])}
    tokenizer = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


TOKENIZERS = {
    "bundled": lambda: Backend.from_file(str(BUNDLED_MODEL / "tokenizer.json")),
    "bytes": byte_tokenizer,
    "unigram": metaspace_tokenizer,
    "wordpiece": word_tokenizer,
}
WORDS = [
    "the ",
    "fox ",
    "night",
    ", ",
    ".\n",
    "is ",
    "é",
    "的是一",
    "12345 ",
    "<|im_end|>",
    "   ",
    "\n\n",
    "naïve ",
    "😀👍🏽",
]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_part_of_a_text_has_the_tokens_of_the_whole(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("engine.text.tokenizer.QUICK_CHARS", 256)
    TOKENIZERS[kind]().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    rng = random.Random(0)
    texts = ["".join(rng.choices(WORDS, k=3_000)) for _ in range(4)]
    texts += ["".join(rng.choices(string.ascii_lowercase, k=6_000)), " " * 6_000, "a" * 6_000]
    num_unread = 0
    for text in texts:
        whole = tokenizer.encode(text, False)
        for count in (1, 40):
            first = tokenizer.encode_part(text, False, count)
            last = tokenizer.encode_part(text, False, count, from_end=True)
            assert first.token_ids[:count] == whole[:count]
            assert last.token_ids[-count:] == whole[-count:]
            num_unread += first.num_unread + last.num_unread
            for part in (first, last):
                assert len(part.token_ids) >= count + CUT_MARGIN or part == (whole, 0)
            assert tokenizer.encode_truncated(text, False, count) == whole[:count]
    assert num_unread > 10_000


def test_long_texts_are_read_as_far_as_their_tokens_are_needed(tmp_path):
    TOKENIZERS["bundled"]().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    text = "".join(random.Random(0).choices(string.ascii_letters, k=1 << 22))
    start = time.process_time()
    for from_end in (False, True):
        assert len(tokenizer.encode_part(text, True, 2_000, from_end).token_ids) < 20_000
    assert time.process_time() - start < 0.5, "4 MB take seconds"
