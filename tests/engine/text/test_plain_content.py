"""Client text stays text: it yields no special token, and no other token id changes."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as HfTokenizer

from engine.checkpoint.locate import BUNDLED_MODEL
from engine.errors import InvalidRequestError
from engine.text.plain_content import PlainContent
from engine.text.tokenizer import Tokenizer

TEXTS = [
    "the end of a user text and the system",
    "start im_end <|im <s> [INST] eot_id header_id",
    "a b c > < | [ ] / _",
]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
ZEPHYR = (  # special tokens that the template puts together of a role
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}\n{{ m['content'] + eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
BARE = "{% for m in messages %}{{ m.content }}{% endfor %}"  # texts of clients side by side
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1].lstrip() }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}"
)
TOJSON = "{% for m in messages %}<|im_start|>{{ m | tojson }}<|im_end|>{% endfor %}{{ extra | default('') }}"


def byte_level(*special, **flags):
    tokenizer = HfTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken(text, special=True, **flags) for text in special])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return tokenizer


def metaspace(scheme, *special, **flags):
    tokenizer = HfTokenizer(models.BPE(byte_fallback=False, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    alphabet = [chr(code) for code in range(0x21, 0x7F)] + ["\n", "é"]
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<unk>"])
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, **flags) for text in special])
    return tokenizer


def normalised():
    tokenizer = byte_level("<|im_start|>", "<|im_end|>", normalized=True)
    tokenizer.normalizer = normalizers.NFKC()
    return tokenizer


def with_bos(tokenizer):
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
STYLES = {
    "bundled": lambda: (HfTokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json")), None),
    "chatml": lambda: (byte_level(*IM), CHATML),
    "llama 3": lambda: (
        byte_level("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
        LLAMA_3,
    ),
    "mistral": lambda: (with_bos(metaspace("first", "<s>", "</s>", "[INST]", "[/INST]")), MISTRAL),
    "mistral, always": lambda: (metaspace("always", "<s>", "</s>", "[INST]", "[/INST]"), MISTRAL),
    "zephyr": lambda: (metaspace("first", "<s>", "</s>", "<|user|>", "<|system|>", "<|assistant|>"), ZEPHYR),
    "side by side": lambda: (byte_level(*IM), BARE),
    "strips": lambda: (byte_level(*IM, lstrip=True, rstrip=True), CHATML),
    "normalised": lambda: (normalised(), CHATML),
    "thinking": lambda: (byte_level(*IM), THINKING),
    "many": lambda: (byte_level(*IM, *(f"<|reserved_special_token_{i}|>" for i in range(40))), CHATML),
    "json": lambda: (byte_level(*IM), TOJSON),
}
SETTINGS = {"eos_token": "</s>", "bos_token": "<s>"}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    loaded = {}
    for name, make in STYLES.items():
        folder = tmp_path_factory.mktemp("tokenizer")
        tokenizer, template = make()
        tokenizer.save(str(folder / "tokenizer.json"))
        texts = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        names = {"bos_token": "<|begin_of_text|>"} if "<|begin_of_text|>" in texts else SETTINGS
        if template is None:
            template = json.loads((BUNDLED_MODEL / "tokenizer_config.json").read_text())["chat_template"]
        (folder / "tokenizer_config.json").write_text(json.dumps(names | {"chat_template": template}))
        loaded[name] = Tokenizer(folder)
    return loaded


def specials(tokenizer):
    return [tokenizer.token_text(token_id) for token_id in controls(tokenizer, sorted(tokenizer.special_token_ids))]


def controls(tokenizer, token_ids):
    """The special tokens among them; what stands for an unknown character is none."""
    special = tokenizer.special_token_ids
    return [token_id for token_id in token_ids if token_id in special and tokenizer.token_text(token_id) != "<unk>"]


def turns(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("content", ["x{}y", "{}", " {} ", "{}\n", "a {}{} b", "{} end", "é{}ü\n\n{}"])
def test_special_text_in_content_is_ordinary_text(tokenizers, style, content):
    tokenizer = tokenizers[style]
    assert specials(tokenizer)
    for special in specials(tokenizer):
        messages = turns(content.format(special, special))
        prompt = tokenizer.chat_prompt(messages)
        harmless = tokenizer.chat_prompt(turns("x"))
        found, expected = controls(tokenizer, prompt.token_ids), controls(tokenizer, harmless.token_ids)
        assert found == expected, f"{special} acts as a control token"
        assert prompt.text == tokenizer.template().render(messages, True, {})
        old = tokenizer.chat_prompt(messages, special_tokens_in_content=True)
        assert len(controls(tokenizer, old.token_ids)) > len(expected), "special tokens, as requested"


PARTS = "< | > <| |> im _ im_end <|im_ end|> s /s> [ INST ] / user start_header_id eot_id|> the é a header 😀".split()
WHOLE = "<|im_end|> <s> [INST] <|eot_id|> <|user|> <|im_<|im_end|>end|> ＜s＞ <|endoftext|> <think> </think>".split()
PIECES = st.lists(st.sampled_from([*PARTS, *WHOLE, " ", "\n", "\t"]), max_size=6).map("".join)


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=60, deadline=None)
@given(contents=st.lists(PIECES, min_size=1, max_size=4))
def test_any_content(tokenizers, style, contents):
    tokenizer = tokenizers[style]
    messages = turns(*contents)
    prompt = tokenizer.chat_prompt(messages)
    text = tokenizer.template().render(messages, True, {})
    assert prompt.text == text
    blank = tokenizer.chat_prompt(turns(*["x" for _ in contents])).token_ids
    assert controls(tokenizer, prompt.token_ids) == controls(tokenizer, blank)
    if not any(special in text.replace("\n", "") for special in _formed(tokenizer, messages, text)):
        assert prompt.token_ids == tokenizer.encode(text, add_special_tokens=False), "byte for byte the ordinary way"


def _formed(tokenizer, messages, text):
    """Special tokens of the text that the template did not write alone: more of them than for harmless content."""
    blank = tokenizer.template().render([message | {"content": "x"} for message in messages], True, {})
    normal = HfTokenizer.from_str(tokenizer.to_json()).normalizer
    seen = text if normal is None else normal.normalize_str(text)
    return [special for special in specials(tokenizer) if seen.count(special) != blank.count(special)]


def test_everything_a_client_says_is_covered(tokenizers):
    tokenizer = tokenizers["json"]
    message = {"role": "user", "content": "x", "name": "<|im_end|>", "more": [{"<|im_start|>": ["<|im_end|>"]}]}
    ids = tokenizer.chat_prompt([message], extra="<|im_end|>").token_ids
    names = [tokenizer.token_text(i) for i in ids if i in tokenizer.special_token_ids]
    assert names == ["<|im_start|>", "<|im_end|>"]
    assert tokenizer.decode(ids, skip_special_tokens=False).count("<|im_end|>") == 4


def test_templates_that_look_into_content_see_what_they_look_for(tokenizers):
    prompt = tokenizers["thinking"].chat_prompt(turns("hi", "<think>so</think>\n\nanswer <|im_end|>"))
    assert "so" not in prompt.text and "\nanswer <|im_end|><|im_end|>" in prompt.text
    assert sum(i in tokenizers["thinking"].special_token_ids for i in prompt.token_ids) == 4


def test_ordinary_content_never_takes_the_long_way(tokenizers, monkeypatch):
    monkeypatch.setattr(PlainContent, "encode", lambda *_: pytest.fail("the twin was asked"))
    tokenizers["chatml"].chat_prompt(turns("What is 2 < 3, and what is [this] | that > those?", "It is 😀."))


@pytest.mark.parametrize("shown", ["{{ m }}", "{{ m | tojson(ensure_ascii=True) }}"])
def test_templates_that_escape_what_a_client_says_show_no_mark(tokenizers, shown):
    template = f"{{% for m in messages %}}<|im_start|>{shown}<|im_end|>{{% endfor %}}"
    for content in ("end", "a <|im_end|> b", "é <|im_end|>", "\\udb80 <|im_end|> \\U000f"):
        message = {"role": "user", "content": content}
        prompt = tokenizers["chatml"].chat_prompt([message], chat_template=template)
        inside = prompt.text.removeprefix("<|im_start|>").removesuffix("<|im_end|>")
        assert inside == (str(message) if shown == "{{ m }}" else json.dumps(message))
        assert sum(i in tokenizers["chatml"].special_token_ids for i in prompt.token_ids) == 2


def test_private_characters_of_a_client_are_kept(tokenizers):
    text = "\U000f0000\U000f0001 <|im_end|> \ue000\ue001"
    prompt = tokenizers["chatml"].chat_prompt(turns(text))
    assert text in prompt.text
    assert tokenizers["chatml"].decode(prompt.token_ids, skip_special_tokens=False) == prompt.text


def test_the_final_message_goes_on(tokenizers):
    for style in ("chatml", "llama 3", "mistral", "bundled"):
        for content in ("The answer", "so <|im_end|> it [/INST] is", "<", "  two spaces  "):
            whole = tokenizers[style].chat_prompt(turns("hi", content), continue_final_message=True).text
            assert whole.endswith(content.lstrip()), style
            longer = tokenizers[style].template().render(turns("hi", content + "!"), False, {})
            assert longer.startswith(whole) or "trim" in tokenizers[style].chat_template
            ids = tokenizers[style].chat_prompt(turns("hi", content), continue_final_message=True).token_ids
            assert tokenizers[style].decode(ids[-1:], skip_special_tokens=False) in content


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "none"])
def test_a_final_message_that_the_template_leaves_out_cannot_go_on(tokenizers, template):
    with pytest.raises(InvalidRequestError, match="continue_final_message"):
        tokenizers["chatml"].chat_prompt(turns("a", "b"), continue_final_message=True, chat_template=template)


@pytest.mark.parametrize("text", ["<|im_end|>" * 30, "a <|im_end|> b <|im_<|im_start|>", "x" * 50, "<|im_end|" * 9])
def test_marks_are_the_same_however_a_text_is_cut_for_the_search(monkeypatch, text):
    content = PlainContent(byte_level("<|im_start|>", "<|im_end|>"))
    whole = content.mark([text], "\ue123")
    monkeypatch.setattr("engine.text.plain_content.PART_CHARS", 7)
    assert content.mark([text], "\ue123") == whole
