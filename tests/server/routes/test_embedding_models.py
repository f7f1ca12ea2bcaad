"""Real models behind /v1/embeddings: the bundled decoder, and a BERT with the files of sentence-transformers."""

import json

import httpx
import numpy as np
import openai
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, MistralConfig

from engine.checkpoint.locate import BUNDLED_MODEL
from tests.checkpoints import save_fake_checkpoint
from tests.engine.models.tiny_encoders import decoder_sizes, randomise, save_dense, save_encoder, save_modules
from tests.server.conftest import serving
from tests.server.live import assert_error

TEXTS = ["The fox runs.", "the fox", "A dog and a cat, a fox and a hen! " * 2, "unbelievable", "Füchse über alles"]
WORDS = ["the", "fox", "dog", "cat", "hen", "a", "and", "run", "##s", "un", "##believ", "##able", ".", ",", "!"]


@torch.no_grad()
def oracle(model, ids: list[int], kind: str) -> np.ndarray:
    hidden = model(torch.tensor([ids])).last_hidden_state[0].double()
    vector = hidden.mean(0) if kind == "mean" else hidden[-1]
    return (vector / vector.norm()).numpy()


def word_piece() -> Tokenizer:
    vocab = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """(folder, the model in transformers)"""
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS) + 4,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    model = BertModel(config).eval()
    model.save_pretrained(folder)
    word_piece().save(str(folder / "tokenizer.json"))
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    (folder / "modules.json").write_text(
        json.dumps([{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules])
    )
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 32, "do_lower_case": False}))
    return folder, model


def test_a_sentence_transformer(bert):
    folder, model = bert
    tokenizer = word_piece()
    with serving("--model", str(folder), "--served-model-name", "bert") as url, httpx.Client(base_url=url) as client:
        api = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        answer = api.embeddings.create(model="bert", input=TEXTS)
        ids = [tokenizer.encode(text).ids for text in TEXTS]
        for own, entry in zip(ids, answer.data, strict=True):
            np.testing.assert_allclose(entry.embedding, oracle(model, own, "mean"), atol=1e-5)
        assert answer.usage.prompt_tokens == sum(map(len, ids))

        long = "the fox " * 40
        with pytest.raises(openai.BadRequestError) as caught:
            api.embeddings.create(model="bert", input=["the fox", long])
        assert caught.value.code == "context_length_exceeded" and caught.value.param == "input[1]"
        answer = api.embeddings.create(model="bert", input=long, extra_body={"truncate_prompt_tokens": -1})
        cut = [2, *[4, 5] * 15, 3]  # [CLS] and [SEP] are kept
        np.testing.assert_allclose(answer.data[0].embedding, oracle(model, cut, "mean"), atol=1e-5)
        answer = api.embeddings.create(
            model="bert", input="the fox", encoding_format="float", extra_body={"add_special_tokens": False}
        )
        np.testing.assert_allclose(answer.data[0].embedding, oracle(model, [4, 5], "mean"), atol=1e-5)

        assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 32
        tokens = client.post("/tokenize", json={"prompt": "The foxs", "return_token_strs": True}).json()
        assert tokens["token_strs"] == ["[CLS]", "the", "fox", "##s", "[SEP]"]
        assert client.post("/detokenize", json={"tokens": [4, 5, 12]}).json() == {"prompt": "the foxs"}
        assert_error(client.post("/v1/completions", json={"model": "bert", "prompt": "the fox"}), 400, "model")
        assert client.get("/metrics").status_code == client.get("/health").status_code == 200


@pytest.mark.parametrize("kind", ["gemma3_both_ways", "mistral"])
def test_a_base_model_with_linear_layers_behind_the_pooling(tmp_path, kind):
    """EmbeddingGemma, whose tokens attend to later ones, and a decoder without lm_head, as e5-mistral is."""
    save_fake_checkpoint(tmp_path)
    if kind == "gemma3_both_ways":
        model = save_encoder(kind, tmp_path, vocab_size=260)
    else:
        sizes = decoder_sizes() | {"vocab_size": 260, "is_causal": True}
        model = randomise(AutoModel.from_config(MistralConfig(**sizes)))
        model.save_pretrained(tmp_path)
    save_modules(tmp_path, "Transformer", "Pooling", "Dense", "Dense", "Normalize")
    wide = save_dense(tmp_path, 2, 48, 64)
    narrow = save_dense(tmp_path, 3, 64, 24, bias=True, activation_function="torch.nn.modules.activation.Tanh")
    args = "--model", str(tmp_path), "--served-model-name", "e", "--dtype", "float32"
    with torch.no_grad(), serving(*args) as url:
        api = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        texts = ["A fox.", "The fox runs and runs and runs.", "x"]
        for dimensions in (24, 7):
            answer = api.embeddings.create(model="e", input=texts, dimensions=dimensions)
            for text, entry in zip(texts, answer.data, strict=True):
                hidden = model(torch.tensor([list(text.encode())])).last_hidden_state[0].mean(0)
                expected = torch.tanh(narrow(torch.nn.functional.linear(hidden, wide.weight)))[:dimensions].numpy()
                np.testing.assert_allclose(entry.embedding, expected / np.linalg.norm(expected), atol=1e-5)
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            api.embeddings.create(model="e", input=texts, dimensions=25)
        with pytest.raises(openai.BadRequestError, match=r"embeds text .* and generates none"):
            api.completions.create(model="e", prompt="A fox")


def test_the_bundled_decoder(bundled_server):
    """Texts with a common beginning, so that the prefix cache takes part."""
    texts = [*TEXTS, "Once upon a time there was a fox who lived in a wood. " * 6 + "It", "Once upon a time there was"]
    model = AutoModel.from_pretrained(BUNDLED_MODEL, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    with httpx.Client(base_url=bundled_server, timeout=60) as client:
        for _ in range(2):
            answer = client.post("/v1/embeddings", json={"model": "pageserve", "input": texts}).json()
            for text, entry in zip(texts, answer["data"], strict=True):
                expected = oracle(model, tokenizer(text).input_ids, "last")
                assert np.dot(entry["embedding"], expected) > 0.999, "bf16"
