"""The bundled model: the size it may have, the form every loader expects, and what its card promises."""

import json
import math
import random
import re
import subprocess
import sys
from collections import Counter

import jinja2
import pytest
import torch
from safetensors import safe_open

from training import evaluate, stories, sums, unknown
from training.chat import ChatWriter
from training.corpus import HELD_OUT_SEED, TRAIN_SEED, Corpus, render_chat
from training.grammar import expand, sentences
from training.train import CONFIG, IGNORE, lr_factor, make_loss, make_model, packed_rows

FOLDER = evaluate.FOLDER
MAX_FOLDER_BYTES = 12_000_000
MAX_PERPLEXITY = {"all": 2.0, "story": 2.0, "chat": 2.0}
MAX_DUPLICATES = 0.03  # of 3000 documents: a greeting alone may well come twice


@pytest.fixture(scope="module")
def loaded():
    return evaluate.load(FOLDER)


@pytest.fixture(scope="module")
def tokenizer(loaded):
    return loaded[1]


def chat(tokenizer, messages, **kwargs):
    return tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)


# --- the folder -------------------------------------------------------------------------------------------------------


def test_the_folder_is_small():
    tracked = [path for path in FOLDER.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md"} <= {
        path.name for path in tracked
    }
    assert sum(path.stat().st_size for path in tracked) < MAX_FOLDER_BYTES


def test_config_is_llama_shaped_and_is_what_the_script_writes():
    config = json.loads((FOLDER / "config.json").read_text())
    assert config == CONFIG
    assert config["architectures"] == ["LlamaForCausalLM"] and config["model_type"] == "llama"
    assert config["head_dim"] * config["num_attention_heads"] == config["hidden_size"]
    assert config["head_dim"] in (32, 64), "kernels like powers of two"
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0


def test_weights_are_bf16_and_finite():
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names, "tied"
        for name in names:
            tensor = file.get_tensor(name)
            assert tensor.dtype is torch.bfloat16 and tensor.isfinite().all(), name


def test_generation_stops_at_the_end_of_a_story_and_of_a_turn(tokenizer):
    eos = json.loads((FOLDER / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_ids_to_tokens(eos) == ["<|endoftext|>", "<|im_end|>"]


# --- the tokenizer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "Once upon a time, a small fox",
        " two  spaces\tand\r\n\r\nlines ",
        "naïve Straße — “quotes” … 3.14",
        "你好，世界。こんにちは",
        "שלום مرحبا नमस्ते",
        "🦊👩‍👩‍👧🏳️‍🌈",
        "\x00\x07\x7f\u200b\ufeff\U0010ffff",
    ],
)
def test_any_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text
    assert max(ids) < CONFIG["vocab_size"]


def test_random_unicode_survives_the_tokenizer(tokenizer):
    rng = random.Random(5)
    for _ in range(200):
        text = "".join(chr(rng.choice((rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)))) for _ in range(20))
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_no_token_is_added_and_special_tokens_are_single(tokenizer):
    assert tokenizer.encode("fox") == tokenizer.encode("fox", add_special_tokens=False)
    assert [tokenizer.encode(token) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [[0], [1], [2]]


def test_english_is_cheap(tokenizer):
    text = "The quick brown fox lived in a small house near the river, and every morning she sang a little song."
    assert len(text) / len(tokenizer.encode(text)) > 3


# --- the chat template ------------------------------------------------------------------------------------------------


def test_template_renders_chatml(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi!"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "A story, please."},
    ]
    assert chat(tokenizer, messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nA story, please.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_template_without_generation_prompt(tokenizer):
    assert chat(tokenizer, [{"role": "user", "content": "Hi!"}]) == "<|im_start|>user\nHi!<|im_end|>\n"


def test_developer_is_system(tokenizer):
    rendered = [chat(tokenizer, [{"role": role, "content": "x"}]) for role in ("developer", "system")]
    assert rendered[0] == rendered[1]


def test_an_unknown_role_is_an_error_that_names_it(tokenizer):
    with pytest.raises(jinja2.TemplateError, match="not tool"):
        chat(tokenizer, [{"role": "tool", "content": "x"}])


def test_template_equals_the_training_text(tokenizer):
    messages = [("system", "Be brief."), ("user", "Hi!"), ("assistant", "Hello!")]
    rendered = chat(tokenizer, [{"role": role, "content": content} for role, content in messages])
    assert "".join(text for text, _ in render_chat(messages)) == rendered + "<|endoftext|>"


# --- the corpus -------------------------------------------------------------------------------------------------------


def test_the_corpus_is_a_function_of_its_seed():
    first, again = Corpus(3), Corpus(3)
    assert [first.document(i) for i in range(50)] == [again.document(i) for i in reversed(range(50))][::-1]
    assert first.document(0) != Corpus(4).document(0)


def test_the_corpus_does_not_depend_on_the_hash_seed():
    script = "from training.corpus import Corpus; c = Corpus(3); print([c.document(i).text for i in range(60)])"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1 and len(outputs.pop()) > 1000


def test_documents_seldom_repeat():
    corpus = Corpus(TRAIN_SEED)
    texts = [corpus.document(i).text for i in range(3000)]
    assert 1 - len(set(texts)) / len(texts) < MAX_DUPLICATES


def test_learned_text_is_clean():
    """No template mark is left, and articles fit."""
    corpus = Corpus(TRAIN_SEED)
    for i in range(1500):
        for text, learn in corpus.document(i).segments:
            if learn:
                assert not re.search(r"[{}\[\]]|\b[aA]_ ", text), text
                assert not any(f" a {vowel}" in text for vowel in "aeio"), text
                assert "  " not in text, text


def test_every_arc_tells_with_every_kind_of_hero():
    rng = random.Random(0)
    for arc in stories.ARCS:
        for kind in ("fox", "girl", "dragon", "toaster"):
            cast = stories.make_cast(rng, kind)
            told = stories.tell(rng, cast, arc)
            assert kind in told and cast.hero.name in told


def test_training_never_asks_in_a_held_out_phrasing():
    rng, writer = random.Random(0), ChatWriter()
    asked = {question for _ in range(4000) for question, _ in writer.exchanges(rng)}
    facts = [fact for table in ("capital", "legs", "use") for fact in writer.tables[table]]
    held_out = {sentences(expand(question, rng)) for fact in facts for question in fact.held_out}
    trained = {sentences(expand(question, rng)) for fact in facts for question in fact.questions}
    assert trained & asked, "the test looks at the right questions"
    assert held_out and not held_out & asked


def test_sums_are_right_and_big_ones_are_refused():
    rng = random.Random(0)
    for _ in range(300):
        question, answer = sums.big_sum_exchange(rng)
        assert evaluate.is_refusal(answer), question
    assert [sums.solve(7, sign, 3) for sign in "+-*"] == [10, 4, 21]


def test_unknown_words_do_not_collide_with_known_names():
    rng = random.Random(0)
    assert all(evaluate.is_refusal(unknown.unknown_exchange(rng)[1]) for _ in range(300))


def test_the_learning_rate_warms_up_stays_and_falls_twice():
    factors = [lr_factor(step, 1000, 200) for step in range(1200)]
    assert factors[0] < 0.1 and factors[100] == factors[500] == 1.0 and factors[999] < 0.01
    assert max(factors[1000:]) > 0.3 and factors[1199] < 0.01


def test_rows_hold_whole_documents_one_after_the_other():
    source = iter([([5, 6, 7], [IGNORE, 6, 7]), ([8, 9], [8, 9]), ([3] * 9, [3] * 9)])
    row = next(packed_rows(source, lambda: 6))
    assert row.tolist() == [[5, 6, 7, 8, 9, 3, 3], [IGNORE, 6, 7, 8, 9, 3, 3], [0, 0, 0, 1, 1, 2, 2]]


def test_a_token_sees_its_own_document_only(loaded):
    loss = make_loss(loaded[0], compiled=False)
    documents = torch.tensor([[0] * 5 + [1] * 5])
    labels = torch.tensor([[IGNORE] * 5 + [7] * 5])
    first, second = torch.arange(10, 20)[None], torch.arange(10, 20)[None].clone()
    second[0, :5] = 99
    with torch.inference_mode():
        assert torch.equal(loss(first, labels, documents), loss(second, labels, documents))


def test_a_fresh_model_has_a_head_that_looks_one_token_back():
    torch.manual_seed(0)
    model = make_model()
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        attention = model(torch.randint(3, 3000, (1, 64)), output_attentions=True).attentions[0]
    assert attention[0, 0].diagonal(-1).mean() > 0.3, "of 64 tokens one gets nearly half of the attention"


# --- the model --------------------------------------------------------------------------------------------------------


def test_held_out_perplexity(loaded):
    documents = evaluate.held_out_documents(60, seen=0)
    found = evaluate.perplexity(*loaded, documents)
    assert all(1.0 < found[kind] < bound for kind, bound in MAX_PERPLEXITY.items()), found
    assert math.isfinite(found["all"])


def test_a_greedy_story(loaded):
    text = evaluate.complete(*loaded, "Once upon a time, a small fox", max_new_tokens=300)
    words = text.split()
    assert 60 < len(words) < 220, "a story of its own accord, with an end"
    assert text.strip()[-1] in '.!?"'
    trigrams = Counter(zip(words, words[1:], words[2:], strict=False))
    assert trigrams.most_common(1)[0][1] <= 4, "it does not go round in circles"


@pytest.mark.parametrize(
    ("question", "fragment"),
    [
        ("What is the capital of France?", "Paris"),
        ("What is 2+2?", "4"),
        ("Who are you?", "small"),
        ("What is pageserve?", "server"),
        ("What is a KV cache?", "keys and values"),
        ("Hello!", "Hello"),
    ],
)
def test_plain_answers(loaded, question, fragment):
    assert fragment in evaluate.answer(*loaded, question)


def test_names_are_remembered(loaded):
    reply = evaluate.answer(
        *loaded, "My name is Clara.", "Nice to meet you, Clara! How can I help?", "What is my name?"
    )
    assert "Clara" in reply


def test_odd_questions_are_refused(loaded):
    replies = [evaluate.answer(*loaded, question, max_new_tokens=30) for question in evaluate.ODD_QUESTIONS[:8]]
    assert sum(map(evaluate.is_refusal, replies)) >= 7, replies


def test_long_contexts_do_not_break_it(loaded):
    """The answer to the last question of a chat of over 500 tokens is still right (the card: at 1000 it may not be)."""
    rng, writer = random.Random(HELD_OUT_SEED), ChatWriter()
    turns: list[str] = []
    while sum(map(len, turns)) < 1800:
        turns += [text for exchange in writer.known(rng)[:1] for text in exchange]
    assert "Madrid" in evaluate.answer(*loaded, *turns, "What is the capital of Spain?")
