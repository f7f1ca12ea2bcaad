"""Scores of prompts over HTTP, as lm-eval and other harnesses read them, through the official Python client."""

import openai
import pytest

from engine.text.tokenizer import Tokenizer
from server.intake import logprob_limits
from server.output.prompt_logprobs import text_offsets
from tests.checkpoints import byte_tokenizer, save_fake_checkpoint
from tests.fake_device import expected_score
from tests.server.live import MODEL, LiveServer, assert_error, chat_body, chat_prompt, completion_body, expected_text

ODD = "aé漢 🦊."
ODD_IDS = list(ODD.encode())
ODD_OFFSETS = [0, 1, 1, 2, 2, 2, 3, 4, 4, 4, 4, 5]


@pytest.fixture(scope="module")
def api(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        yield api


def scores(ids):
    return [expected_score(ids[: i + 1])[0] for i in range(1, len(ids))]


def complete(api, prompt="hello", **fields):
    fields = {"model": MODEL, "max_tokens": 1, "seed": 1, "echo": True, "logprobs": 1} | fields
    return api.completions.create(prompt=prompt, **fields)


def test_the_request_of_lm_eval(api):
    """Ids, one token, temperature 0: one entry per prompt token and one more, the same floats in both arrays."""
    response = complete(api, [ODD_IDS, [104, 105]], temperature=0, seed=1234)
    for choice, ids in zip(response.choices, (ODD_IDS, [104, 105]), strict=True):
        found = choice.logprobs
        assert {len(x) for x in (found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset)} == {
            len(ids) + 1
        }
        assert found.token_logprobs[:-1] == [None, *scores(ids)]
        assert found.top_logprobs[0] is None
        assert choice.text.startswith(bytes(ids).decode())
        for token, logprob, top in zip(found.tokens[1:], found.token_logprobs[1:], found.top_logprobs[1:], strict=True):
            assert logprob == top[token]
            assert (logprob == max(top.values())) == (len(set(top.values())) == 1 or logprob > -1)
    assert response.usage.prompt_tokens == len(ODD_IDS) + 2 and response.usage.completion_tokens == 2


@pytest.mark.parametrize("prompt", [ODD, ODD_IDS], ids=["text", "ids"])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_offsets_count_characters_of_the_returned_text(api, prompt, max_tokens):
    (choice,) = complete(api, prompt, max_tokens=max_tokens).choices
    assert choice.text == ODD + expected_text(ODD_IDS, 1, max_tokens)
    assert choice.finish_reason == "length"
    assert choice.logprobs.text_offset == ODD_OFFSETS + [len(ODD) + i for i in range(max_tokens)]
    assert choice.logprobs.tokens[:3] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert len(choice.logprobs.tokens) == len(ODD_IDS) + max_tokens


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
@pytest.mark.parametrize("n", [1, 2])
def test_chunks_join_to_the_whole(api, max_tokens, n):
    fields = {"prompt": [ODD, "hi"], "max_tokens": max_tokens, "n": n}
    whole = complete(api, **fields)
    assert len(whole.choices) == 2 * n
    text = ["" for _ in whole.choices]
    lists = [{"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []} for _ in whole.choices]
    ends = {}
    for chunk in complete(api, stream=True, **fields):
        for choice in chunk.choices:
            text[choice.index] += choice.text
            for name, values in lists[choice.index].items():
                values += getattr(choice.logprobs, name)
            assert all(offset <= len(text[choice.index]) for offset in choice.logprobs.text_offset)
            assert ends.get(choice.index) is None, "the chunk with the finish_reason is the last"
            ends[choice.index] = choice.finish_reason
    for choice in whole.choices:
        assert text[choice.index] == choice.text and ends[choice.index] == choice.finish_reason
        assert lists[choice.index] == choice.logprobs.model_dump()


def test_no_alternatives_leave_the_token_itself(api):
    found = complete(api, "abc", logprobs=0).choices[0].logprobs
    assert found.top_logprobs[1:3] == [{"b": scores(list(b"abc"))[0]}, {"c": scores(list(b"abc"))[1]}]


def test_an_end_of_sequence_token_has_its_entry(folder):
    with LiveServer(folder, "--eos-every", "1") as live:
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as api:
            whole = complete(api, "hé").choices[0]
            chunks = [chunk.choices[0] for chunk in complete(api, "hé", stream=True)]
            plain = complete(api, "hé", echo=False).choices[0]
    assert whole.text == "hé" and whole.finish_reason == "stop"
    assert whole.logprobs.tokens == ["h", "bytes:\\xc3", "bytes:\\xa9", "<|im_end|>"]
    assert whole.logprobs.text_offset == [0, 1, 1, 2]
    assert [offset for chunk in chunks for offset in chunk.logprobs.text_offset] == [0, 1, 1, 2]
    assert plain.logprobs.tokens == []


def test_best_of_returns_the_prompts_of_its_choices(api):
    response = complete(api, ["abc", "de"], n=2, extra_body={"best_of": 3}, temperature=1, max_tokens=3)
    assert [choice.text[:2] for choice in response.choices] == ["ab", "ab", "de", "de"]
    assert [len(choice.logprobs.tokens) for choice in response.choices] == [6, 6, 5, 5]
    assert response.choices[3].logprobs.token_logprobs[:2] == [None, *scores(list(b"de"))]


def test_max_tokens_0_without_echo_is_an_empty_text(api):
    response = complete(api, "abc", max_tokens=0, echo=False, n=2)
    assert [(choice.text, choice.finish_reason) for choice in response.choices] == [("", "length")] * 2
    assert response.choices[0].logprobs.tokens == []
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (3, 0)
    (chunk,) = complete(api, "abc", max_tokens=0, echo=False, logprobs=None, stream=True)
    assert (chunk.choices[0].text, chunk.choices[0].finish_reason) == ("", "length")


def test_prompts_are_scored_whatever_the_cache_holds(api):
    prompt = "the same prompt, of many tokens, again and again"
    first, second = (complete(api, prompt) for _ in range(2))
    assert first.choices[0].logprobs == second.choices[0].logprobs
    assert second.usage.prompt_tokens_details.cached_tokens == 0


def test_prompt_logprobs_of_vllm(client):
    body = completion_body(prompt=["abc", "d"], prompt_logprobs=2, n=2, echo=True, logprobs=1, max_tokens=2)
    response = client.post("/v1/completions", json=body).json()
    first, _, last, _ = response["choices"]
    logprob, rank = expected_score(list(b"ab"))
    assert first["prompt_logprobs"][0] is None
    assert first["prompt_logprobs"][1] == {
        "98": {"logprob": logprob, "rank": rank, "decoded_token": "b"},
        "97": {"logprob": -1.0, "rank": 1, "decoded_token": "a"},
    }
    assert list(first["prompt_logprobs"][2]) == ["99", "97", "98"] and len(first["prompt_logprobs"]) == 3
    assert last["prompt_logprobs"] == [None]
    assert set(first["logprobs"]["top_logprobs"][1]) == {"a", "b"}, "logprobs keep their own number"
    plain = client.post("/v1/completions", json=completion_body(prompt="abc", prompt_logprobs=0)).json()["choices"][0]
    assert [len(entry) for entry in plain["prompt_logprobs"][1:]] == [1, 1] and plain["logprobs"] is None
    assert "prompt_logprobs" not in client.post("/v1/completions", json=completion_body()).json()["choices"][0]


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_prompt_logprobs_of_a_chat(client, max_tokens):
    response = client.post("/v1/chat/completions", json=chat_body(prompt_logprobs=0, max_tokens=max_tokens, n=2)).json()
    ids = chat_prompt("hello")
    found = response["prompt_logprobs"]
    assert len(found) == len(ids) == response["usage"]["prompt_tokens"] and found[0] is None
    assert [entry[str(token_id)]["logprob"] for entry, token_id in zip(found[1:], ids[1:], strict=True)] == scores(ids)
    assert response["choices"][0]["message"]["content"] == expected_text(ids, 1, max_tokens)
    assert "prompt_logprobs" not in client.post("/v1/chat/completions", json=chat_body()).json()


def test_a_response_that_would_be_enormous_is_refused(client, monkeypatch):
    monkeypatch.setattr(logprob_limits, "MAX_REPORTED", 99)
    body = completion_body(prompt=["abcde"] * 2, echo=True, logprobs=4, n=2)
    assert "100 logprobs" in assert_error(client.post("/v1/completions", json=body), 400, "logprobs")
    assert client.post("/v1/completions", json=body | {"n": 1}).status_code == 200


def test_the_bundled_model_adds_no_token_and_finds_its_own_choices_likely(bundled_server):
    with openai.OpenAI(base_url=f"{bundled_server}/v1", api_key="none", max_retries=0) as api:
        model = api.models.list().data[0].id
        greedy = complete(api, "Once upon a time", model=model, temperature=0, max_tokens=12, logprobs=0)
        ids = api.post("/completions", cast_to=object, body={
            "model": model, "prompt": greedy.choices[0].text, "max_tokens": 0, "prompt_logprobs": 0,
        })["choices"][0]["prompt_logprobs"]  # fmt: skip
        ids = [int(next(iter(entry))) for entry in ids[1:]]
        found = complete(api, [ids, ids[::-1]], model=model, temperature=0)
    likely, unlikely = ([
        logprob == max(top.values())
        for logprob, top in zip(choice.logprobs.token_logprobs[1:], choice.logprobs.top_logprobs[1:], strict=True)
    ] for choice in found.choices)  # fmt: skip
    assert len(likely) == len(unlikely) == len(ids) and found.usage.prompt_tokens == 2 * len(ids)
    assert sum(likely) > 0.8 * len(ids) and sum(unlikely) < 0.3 * len(ids)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(save_fake_checkpoint(tmp_path_factory.mktemp("tokenizer")))


def test_offsets_of_special_tokens_and_of_halves_at_the_end(tokenizer):
    ids = [256, 97, 257, *"é".encode(), 0xF0, 0x9F]
    hidden, shown = tokenizer.decode(ids), tokenizer.decode(ids, skip_special_tokens=False)
    assert text_offsets(tokenizer, ids, hidden, True) == [0, 0, 1, 1, 1, 2, 2]
    assert text_offsets(tokenizer, ids, shown, False) == [0, 12, 13, 23, 23, 24, 24]


def test_offsets_where_the_tokenizer_changes_the_text(tmp_path):
    """A normaliser joins letter and accent, as Qwen's does: the offsets are those of the text that was sent."""
    from tokenizers import normalizers

    tokenizer = byte_tokenizer()
    tokenizer.normalizer = normalizers.NFC()
    folder = save_fake_checkpoint(tmp_path / "model")
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(folder)
    text = "ae\u0301b"
    ids = tokenizer.encode(text)
    assert len(ids) == 4
    assert text_offsets(tokenizer, ids, text, True) == [0, 1, 1, 3]


def test_a_space_that_the_tokenizer_puts_before_the_text_counts_for_nothing(tmp_path):
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers

    library = Library(models.WordLevel({"\u2581a": 0, "\u2581bc": 1, "?": 2}, "?"))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    folder = save_fake_checkpoint(tmp_path / "model")
    library.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(folder)
    assert tokenizer.decode([0, 1, 0]) == "a bc a"
    assert text_offsets(tokenizer, [0, 1, 0], "a bc a", True) == [0, 1, 4]
