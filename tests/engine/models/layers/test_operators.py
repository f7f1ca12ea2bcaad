"""The operators of `--batch-invariant` in whole decoders: logits bit for bit in one pass, in chunks and as decodes."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Qwen3Config,
)

from engine.errors import ConfigError
from engine.models.families import read_model_config
from engine.models.layers import operators
from engine.models.layers.operators import FastOperators, InvariantOperators, operators_for
from engine.models.loading.load import load_model
from engine.worker.attention_warmup import make_attention_plan
from kernels.dispatch import INTERPRET
from kernels.elementwise.activation import ACTIVATIONS
from kernels.elementwise.rows import limit
from kernels.elementwise.xielu import xielu
from tests.engine.models.paged import PagedRunner, Sequence
from tests.engine.models.tiny_models import VOCAB

CPU = torch.device("cpu")
DTYPES = [torch.float32] if INTERPRET else [torch.float32, torch.bfloat16]
LLAMA = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
         "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 128}  # fmt: skip
# Every norm, activation, window, soft cap and projection that has code of its own.
MODELS = {
    "llama": lambda: LlamaConfig(**LLAMA, tie_word_embeddings=True),
    "llama_gelu": lambda: LlamaConfig(**LLAMA, hidden_act="gelu_new", attention_bias=True, mlp_bias=True),
    "mistral": lambda: MistralConfig(**LLAMA, sliding_window=11),
    "qwen3": lambda: Qwen3Config(**LLAMA, head_dim=16),
    "gemma2": lambda: Gemma2Config(**LLAMA, head_dim=16, sliding_window=11, attn_logit_softcapping=0.5,
                                   final_logit_softcapping=0.5),
    "gemma3": lambda: Gemma3TextConfig(**LLAMA, head_dim=16, sliding_window=11, sliding_window_pattern=2),
    "gpt2": lambda: GPT2Config(vocab_size=VOCAB, n_embd=48, n_head=3, n_layer=2, n_positions=128),
    "opt": lambda: OPTConfig(vocab_size=VOCAB, hidden_size=48, ffn_dim=80, num_hidden_layers=2, num_attention_heads=3,
                             max_position_embeddings=128, do_layer_norm_before=False, word_embed_proj_dim=40),
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(MODELS[request.param]()).save_pretrained(path)
    return path


class InvariantRunner(PagedRunner):
    """With the attention plan that ModelRunner makes for the option."""

    def __init__(self, model, dtype):
        super().__init__(model, dtype=dtype)
        self.plan = make_attention_plan(model.config, 8, CPU, batch_invariant=True)

    def _batch(self, work):
        metadata, input_ids = super()._batch(work)
        return replace(metadata, plan=self.plan), input_ids


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_have_the_same_bits_however_tokens_are_scheduled(folder, dtype):
    model = load_model(folder, read_model_config(folder), dtype=dtype, device=CPU, load_format="auto", seed=0,
                       batch_invariant=True)  # fmt: skip
    prompts = [torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (40, 33, 21)]
    whole = [InvariantRunner(model, dtype).step([(Sequence(prompt), len(prompt))])[0] for prompt in prompts]
    sequences, runner = [Sequence(prompt) for prompt in prompts], InvariantRunner(model, dtype)
    collected = [[], [], []]
    for sizes in [(7, 1, 9), (1, 1, 9), (13, 16, 1), (1, 1, 1), (1, 14, 1), (17, 0, 0)]:
        work = [(i, n) for i, n in enumerate(sizes) if n]
        for (i, _), logits in zip(work, runner.step([(sequences[i], n) for i, n in work]), strict=True):
            collected[i].append(logits)
    for expected, parts in zip(whole, collected, strict=True):
        assert expected.isfinite().all() and torch.equal(torch.cat(parts), expected)
    together = InvariantRunner(model, dtype).step([(Sequence(prompt), len(prompt)) for prompt in prompts])
    assert all(torch.equal(a, b) for a, b in zip(together, whole, strict=True))


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("size", [3, 50, 64])
def test_activations_do_not_depend_on_the_place_of_a_row(name, size, gated):
    torch.manual_seed(0)
    activate = InvariantOperators().activation(gated)
    for dtype in DTYPES:
        x = (torch.randn(65, 2 * size) * 3).to(dtype)
        full = activate(x, name)
        assert torch.equal(torch.cat([activate(row, name) for row in x.split(1)]), full)
        assert torch.equal(activate(x[3:20], name), full[3:20])
        torch.testing.assert_close(full, FastOperators().activation(gated)(x, name))
        assert activate(x[:0], name).shape == full[:0].shape


@pytest.mark.parametrize("size", [3, 50])
def test_xielu_does_not_depend_on_the_place_of_a_row(size):
    torch.manual_seed(0)
    activate = InvariantOperators().elementwise(partial(xielu, positive=0.7, negative=1.3))
    for dtype in DTYPES:
        x = (torch.randn(65, size) * 3).to(dtype)
        full = activate(x)
        assert torch.equal(torch.cat([activate(row) for row in x.split(1)]), full)
        assert torch.equal(activate(x[3:20]), full[3:20])
        torch.testing.assert_close(full, xielu(x, 0.7, 1.3))


def test_soft_caps_do_not_depend_on_the_place_of_a_row():
    torch.manual_seed(0)
    for dtype, size in product(DTYPES, (97, 1003, 50_257)):
        x = (torch.randn(65, size) * 3).to(dtype)
        full, alone, some = x.clone(), x.clone(), x[3:20].clone()
        limit(full, 1.0, 2.0)
        for row in alone.split(1):
            limit(row, 1.0, 2.0)
        limit(some, 1.0, 2.0)
        assert torch.equal(alone, full) and torch.equal(some, full[3:20])
        torch.testing.assert_close(full, 2 * torch.tanh(x / 2))


@pytest.mark.skipif(INTERPRET, reason="the Triton kernels take every size")
@pytest.mark.parametrize(
    "changes, dtype, words",
    [
        ({}, torch.float16, "float16: set dtype"),
        ({"head_dim": 20}, torch.float32, "head_dim in 16s, this model has 20"),
        (
            {"hidden_size": 40, "num_attention_heads": 5, "head_dim": 16},
            torch.float32,
            "hidden_size in 16s, this model",
        ),
    ],
)
def test_what_a_cpu_cannot_keep_is_refused(tmp_path, changes, dtype, words):
    LlamaConfig(**LLAMA | changes).save_pretrained(tmp_path)
    config = read_model_config(_named(tmp_path))
    with pytest.raises(ConfigError, match="batch_invariant") as error:
        operators_for(config, dtype, CPU, batch_invariant=True)
    assert words in str(error.value)
    assert operators_for(config, dtype, CPU, batch_invariant=False) == FastOperators(dtype=dtype)


def test_a_mixture_of_experts_is_refused_on_every_device(tmp_path):
    """Its kernels follow the number of tokens that an expert gets."""
    sizes = {name: LLAMA[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")}
    MixtralConfig(**sizes, num_hidden_layers=1, num_local_experts=4).save_pretrained(tmp_path)
    config = read_model_config(_named(tmp_path, "MixtralForCausalLM"))
    for device in (CPU, torch.device("cuda")):
        with pytest.raises(ConfigError, match="batch_invariant is not served for mixtures of experts"):
            operators_for(config, torch.bfloat16, device, batch_invariant=True)


@pytest.mark.skipif(INTERPRET, reason="the Triton kernels need no numba")
def test_without_numba_it_is_refused(tmp_path, monkeypatch):
    LlamaConfig(**LLAMA).save_pretrained(tmp_path)
    monkeypatch.setattr(operators, "cpu_kernels", lambda: None)
    with pytest.raises(ConfigError, match="numba is missing"):
        operators_for(read_model_config(_named(tmp_path)), torch.float32, CPU, batch_invariant=True)


def _named(folder, architecture="LlamaForCausalLM"):
    """A config that was saved without its model lacks the architecture."""
    path = folder / "config.json"
    path.write_text(path.read_text().replace("{", f'{{"architectures": ["{architecture}"],', 1))
    return folder
