"""A tiny llama checkpoint, made by transformers, and runners for it.

Fixtures import runners.py, and so the kernels, when they run: fake_cuda_cases.py imports triton before the kernels.
"""

from functools import partial

import pytest
import torch

VOCAB_SIZE = 96


@pytest.fixture(scope="session")
def hf_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.3,  # far from uniform, so that greedy choices are clear
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def model_dir(hf_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-llama")
    hf_model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def hf_greedy(hf_model):
    """hf_greedy(prompt, n): the n most likely next tokens, one after the other, by transformers."""

    @torch.inference_mode()
    def generate(prompt, n):
        tokens = list(prompt)
        for _ in range(n):
            tokens.append(int(hf_model(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(prompt) :]

    return generate


@pytest.fixture(scope="session")
def decoder(model_dir):
    from tests.engine.worker.runners import load_decoder

    return load_decoder(model_dir)


@pytest.fixture(scope="module")
def cpu_runner(model_dir):
    from tests.engine.worker.runners import load_cpu_runner

    return load_cpu_runner(model_dir)


@pytest.fixture
def make_runner(model_dir, decoder):
    """make_runner(queue, **settings): a runner that decodes as on a GPU; see runners.make_queue_runner."""
    from tests.engine.worker.runners import make_queue_runner

    return partial(make_queue_runner, model_dir, decoder)
