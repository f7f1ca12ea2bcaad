"""Token offsets against the text that is really sent, for any bytes, stops and chunk borders."""

import json
import random
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.outputs import CompletionOutput, FinishReason, TokenLogprobs, pack_top
from engine.sampling_params import SamplingParams
from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer
from server.output.logprobs import (
    PORTION,
    LogprobAligner,
    PackedEntries,
    TokenIds,
    chat_content,
    chat_logprobs,
    completion_logprobs,
    encoded_completion_logprobs,
)
from tests.checkpoints import save_fake_checkpoint


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(save_fake_checkpoint(tmp_path_factory.mktemp("logprobs")))


def token(token_id: int, logprob: float = -0.5, top=()) -> TokenLogprobs:
    return TokenLogprobs(token_id, logprob, pack_top(top))


def outputs(tokenizer, ids: list[int], sizes: list[int], params: SamplingParams, reason: FinishReason):
    """The Driver's outputs for `ids`, several tokens at a time."""
    detokenizer = Detokenizer(tokenizer, params)
    text, tokens, sent = "", [], []
    for i, token_id in enumerate(ids):
        new, match = detokenizer.append(token_id)
        text += new
        tokens.append(token(token_id))
        last = match is not None or i == len(ids) - 1
        if match is None and last:
            text += detokenizer.flush()
        if last or len(tokens) >= sizes[i % len(sizes)]:
            ended = (FinishReason.STOP if match else reason) if last else None
            sent.append(CompletionOutput(0, text, (), tuple(tokens), ended))
            text, tokens = "", []
        if last:
            return sent
    return sent


ODD = "aé漢🦊\u0301 .".encode()
BYTES = st.lists(st.one_of(st.sampled_from(list(ODD)), st.integers(0, 258)), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(ids=BYTES, sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), cut=st.booleans())
def test_offsets_are_where_each_tokens_text_starts(tokenizer, ids, sizes, cut):
    reason = FinishReason.LENGTH if cut else FinishReason.STOP
    params = SamplingParams(logprobs=0)
    aligner = LogprobAligner(tokenizer, skip_special_tokens=True)
    text, entries = "", []
    for output in outputs(tokenizer, ids, sizes, params, reason):
        taken = aligner.align(output)
        text += output.text
        assert all(offset < len(text) for offset, _ in taken) or output.finish_reason is FinishReason.LENGTH
        entries += taken
    shown = [entry.token_id for _, entry in entries]
    assert shown == ids[: len(shown)], "in order, none twice, none in the middle lost"
    if cut:
        assert shown == ids, "every token of a text that was cut off is reported"
    offsets = [offset for offset, _ in entries]
    assert offsets == sorted(offsets)
    raw = b""
    for offset, entry in entries:
        complete = raw.decode("utf-8", "ignore") if _is_clean(raw) else None
        if complete is not None:
            assert offset == len(complete) and text.startswith(complete)
        if entry.token_id < 256:
            raw += bytes([entry.token_id])
    assert raw.decode("utf-8", "replace") == text


def _is_clean(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


@settings(max_examples=100, deadline=None)
@given(
    text=st.text("abc", min_size=1, max_size=30), stop=st.text("abc", min_size=1, max_size=3), size=st.integers(1, 4)
)
def test_tokens_of_a_stop_string_are_not_reported(tokenizer, text, stop, size):
    params = SamplingParams(logprobs=0, stop=(stop,))
    aligner = LogprobAligner(tokenizer, skip_special_tokens=True)
    sent, shown = "", ""
    for output in outputs(tokenizer, list(text.encode()), [size], params, FinishReason.LENGTH):
        sent += output.text
        shown += "".join(chr(entry.token_id) for _, entry in aligner.align(output))
        assert sent.startswith(shown)
    assert shown == sent == text.split(stop)[0]


def test_echo_shifts_the_offsets(tokenizer):
    aligner = LogprobAligner(tokenizer, True, start=7)
    entries = aligner.align(CompletionOutput(0, "ab", (97, 98), (token(97), token(98)), None))
    assert [offset for offset, _ in entries] == [7, 8]


def test_special_tokens_have_text_when_they_are_shown(tokenizer):
    aligner = LogprobAligner(tokenizer, skip_special_tokens=False)
    output = CompletionOutput(0, "a<|pad|>b", (), (token(97), token(258), token(98)), FinishReason.STOP)
    assert [offset for offset, _ in aligner.align(output)] == [0, 1, 8]


def test_shape_of_completions(tokenizer):
    entry = (3, token(97, -1.0, [(98, -0.5), (97, -1.0), (0xF0, -2.0)]))
    assert completion_logprobs([entry, (4, token(0x80, float("-inf")))], tokenizer) == {
        "tokens": ["a", "bytes:\\x80"],
        "token_logprobs": [-1.0, -9999.0],
        "top_logprobs": [{"b": -0.5, "a": -1.0, "bytes:\\xf0": -2.0}, {"bytes:\\x80": -9999.0}],
        "text_offset": [3, 4],
    }


def test_the_chosen_token_is_always_among_the_top(tokenizer):
    top = completion_logprobs([(0, token(99, -5.0, [(97, -0.125), (98, -0.25)]))], tokenizer)["top_logprobs"][0]
    assert top == {"a": -0.125, "b": -0.25, "c": -5.0}


def test_two_ids_of_one_spelling_keep_the_likelier(tokenizer):
    unknown = 9999  # ids without a token share the empty text
    top = completion_logprobs([(0, token(unknown, -3.0, [(9998, -1.0), (9997, -2.0)]))], tokenizer)["top_logprobs"][0]
    assert top == {"": -1.0}


def test_shape_of_chat(tokenizer):
    entries = [(0, token(0xE9, -1.0, [(97, -0.5), (34, -1.5)])), (1, token(9999, float("-inf")))]
    assert json.loads(bytes(chat_logprobs(entries, tokenizer))) == {
        "content": [
            {
                "token": "bytes:\\xe9",
                "logprob": -1.0,
                "bytes": [0xE9],
                "top_logprobs": [
                    {"token": "a", "logprob": -0.5, "bytes": [97]},
                    {"token": '"', "logprob": -1.5, "bytes": [34]},
                ],
            },
            {"token": "", "logprob": -9999.0, "bytes": [], "top_logprobs": []},
        ],
        "refusal": None,
    }
    assert bytes(chat_content([], tokenizer)) == b"[]"


def test_tokens_as_ids_are_not_taken_for_the_texts_of_the_same_tokens(tokenizer):
    entries = [(0, token(97, -1.0, [(98, -0.5)]))]
    for names, texts in ((tokenizer, "ab"), (TokenIds(tokenizer), ("token_id:97", "token_id:98")), (tokenizer, "ab")):
        (found,) = json.loads(bytes(chat_content(entries, names)))
        assert (found["token"], found["top_logprobs"][0]["token"]) == tuple(texts)
        assert (found["bytes"], found["top_logprobs"][0]["bytes"]) == ([97], [98])


@pytest.mark.parametrize("count", [0, 1, PORTION, 3 * PORTION + 7])
def test_what_is_kept_as_arrays_and_encoded_in_portions_says_the_same(tokenizer, count):
    def named(token_id, logprob):
        text, raw = tokenizer.token_text(token_id), list(tokenizer.token_bytes(token_id))
        return {"token": text, "logprob": logprob, "bytes": raw}

    rng = random.Random(count)
    entries = []
    for start in range(count):
        top = sorted(((rng.randrange(256), -rng.random()) for _ in range(rng.randrange(4))), key=lambda one: -one[1])
        entries.append((start, token(rng.randrange(256), -10 * rng.random(), top)))
    packed = PackedEntries()
    for start in range(0, count, 5):
        packed.extend(entries[start : start + 5])
    assert len(packed) == count and [*chain(*packed.portions())] == entries
    content = [
        named(token.token_id, token.logprob) | {"top_logprobs": [named(*pair) for pair in token.top]}
        for _, token in entries
    ]
    for kept in (packed, entries):
        assert json.loads(bytes(chat_content(kept, tokenizer))) == content
    lists = completion_logprobs(entries, tokenizer)
    assert json.loads(bytes(encoded_completion_logprobs(None, packed, tokenizer))) == lists
    echoed = {"tokens": ["a", "b"], "token_logprobs": [None, -1.5], "top_logprobs": [None, {"b": -1.5}]}
    echoed["text_offset"] = [0, 1]
    both = {name: echoed[name] + values for name, values in lists.items()}
    assert json.loads(bytes(encoded_completion_logprobs(echoed, packed, tokenizer))) == both
