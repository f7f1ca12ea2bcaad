"""Adapters beside a decoder against transformers with merged weights, and every checkpoint that is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Phi3Config, Qwen3MoeConfig

from engine.errors import ConfigError, ModelError
from engine.models.adapters.checkpoint import read_adapter
from engine.models.families import read_model_config
from engine.models.layers.adapted import AdapterLayers
from engine.models.loading.load import load_model
from tests.engine.models.adapters.peft_files import Merged, write_adapter
from tests.engine.models.paged import PagedRunner, Sequence

VOCAB, MAX_LORAS, MAX_RANK = 97, 8, 16
CPU = torch.device("cpu")
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


def make(folder, config):
    """(transformers model, its folder)"""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    return model


def load(folder, **options):
    """(decoder in fp32 with empty slots, its AdapterLayers)"""
    config = read_model_config(folder, options.pop("quantization", None))
    options = {"dtype": torch.float32, "device": CPU, "load_format": "auto", "seed": 0} | options
    decoder = load_model(folder, config, lora=(MAX_LORAS, MAX_RANK), **options)
    return decoder, decoder.operators.adapters


def fill(layers, slot, folder):
    layers.fill(slot, layers.pack(read_adapter(folder, layers.config, layers.parts, MAX_RANK, torch.float32).factors))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return make(folder, LlamaConfig(tie_word_embeddings=False, **SIZES)), folder


def run(decoder, layers, prompts, slots, *, last_only=False):
    """Logits of all sequences in one batch: the prompts but two tokens, then one token each."""
    runner = PagedRunner(decoder)
    sequences = [Sequence(ids) for ids in prompts]
    parts = []
    for counts in ([len(ids) - 2 for ids in prompts], [1] * len(prompts), [1] * len(prompts)):
        rows = torch.tensor(slots).repeat_interleave(torch.tensor(counts))
        ends = torch.tensor(counts).cumsum(0) - 1
        layers.set_rows(rows, ends if last_only else None, active=True)
        layers.set_logits_rows(torch.tensor(slots) if last_only else rows, active=True)
        parts.append(runner.step(list(zip(sequences, counts, strict=True)), last_only=last_only))
    return [torch.cat(own) for own in zip(*parts, strict=True)]


@torch.inference_mode()
def expected(model, prompt, deltas):
    with Merged(model, deltas):
        return model(torch.tensor([prompt])).logits[0]


VARIANTS = [
    {}, {"targets": ("q_proj",)}, {"targets": ("v_proj", "up_proj", "lm_head"), "rank": 16},
    {"use_rslora": True, "rank": 8}, {"targets": ("down_proj", "o_proj"), "pickled": True}, {"rank": 1, "alpha": 3},
    {"rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 7}, "alpha_pattern": {"down_proj": 1}},
    {"targets": ("k_proj", "gate_proj"), "rank": 5},
]  # fmt: skip


@pytest.mark.parametrize("last_only", [False, True], ids=["every row", "last rows"])
def test_eight_adapters_and_the_base_in_one_batch_equal_merged_weights(llama, tmp_path, last_only):
    model, folder = llama
    decoder, layers = load(folder)
    deltas = [write_adapter(tmp_path / str(i), model, seed=i, **variant) for i, variant in enumerate(VARIANTS)]
    for slot in range(MAX_LORAS):
        fill(layers, slot, tmp_path / str(slot))
    slots = [3, 0, -1, 1, 2, 4, 5, 6, 7, 0]
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, VOCAB, (n + 5,), generator=generator).tolist() for n in range(len(slots))]
    found = run(decoder, layers, prompts, slots, last_only=last_only)
    base = expected(model, prompts[0], {})
    for prompt, slot, logits in zip(prompts, slots, found, strict=True):
        want = expected(model, prompt, deltas[slot] if slot >= 0 else {})
        torch.testing.assert_close(logits, want[-3:] if last_only else want, atol=1e-4, rtol=1e-4)
    assert (expected(model, prompts[0], deltas[3]) - base).abs().max() > 0.1, "an adapter changes the logits"


FAMILIES = {
    "gpt2": (
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_head=4, n_layer=2, n_positions=64), ("c_attn", "c_proj", "c_fc")
    ),
    "phi3": (Phi3Config(pad_token_id=None, **SIZES), ("qkv_proj", "gate_up_proj")),
    "tied": (LlamaConfig(tie_word_embeddings=True, **SIZES), ("lm_head", "q_proj")),
    "moe": (
        Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8, **SIZES),
        ("q_proj", "o_proj"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_layouts_of_other_families(name, tmp_path):
    """Fused matrices, transposed ones, a tied head, attention beside experts."""
    config, targets = FAMILIES[name]
    model = make(tmp_path / "base", config)
    deltas = write_adapter(tmp_path / "lora", model, targets=targets)
    decoder, layers = load(tmp_path / "base")
    fill(layers, 2, tmp_path / "lora")
    prompts = [list(range(3, 12)), list(range(20, 26))]
    if name == "tied":  # PEFT leaves the embedding alone
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with_adapter, base = run(decoder, layers, prompts, [2, -1])
    torch.testing.assert_close(with_adapter, expected(model, prompts[0], deltas), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(base, expected(model, prompts[1], {}), atol=1e-4, rtol=1e-4)


def test_quantised_weights(llama, tmp_path):
    """The addition is that of the plain matrices, whatever holds the base."""
    model, folder = llama
    write_adapter(tmp_path / "lora", model, targets=("lm_head",), rank=4)
    decoder, layers = load(folder, quantization="int8")
    fill(layers, 0, tmp_path / "lora")
    prompt, seen, compute = list(range(3, 12)), [], decoder.compute_logits
    decoder.compute_logits = lambda hidden: seen.append(hidden) or compute(hidden)
    (base,) = run(decoder, layers, [prompt], [-1])
    (changed,) = run(decoder, layers, [prompt], [0])
    adapter = read_adapter(tmp_path / "lora", layers.config, layers.parts, MAX_RANK, torch.float32)
    ((a, b),) = adapter.factors["lm_head"]
    torch.testing.assert_close(changed - base, torch.cat(seen[:3]) @ a.T @ b.T, atol=1e-4, rtol=1e-3)


def test_a_slot_is_filled_anew(llama, tmp_path):
    model, folder = llama
    decoder, layers = load(folder)
    write_adapter(tmp_path / "first", model)
    deltas = write_adapter(tmp_path / "second", model, targets=("q_proj",), seed=5)
    fill(layers, 1, tmp_path / "first")
    fill(layers, 1, tmp_path / "second")
    (logits,) = run(decoder, layers, [list(range(9))], [1])
    torch.testing.assert_close(logits, expected(model, list(range(9)), deltas), atol=1e-4, rtol=1e-4)


REFUSED = {
    "peft_type": ({"peft_type": "IA3"}, "peft_type 'IA3': only LORA"),
    "dora": ({"use_dora": True}, "use_dora 'True': DoRA is not served"),
    "bias": ({"bias": "lora_only"}, "bias 'lora_only': only"),
    "lora_bias": ({"lora_bias": True}, "lora_bias"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "replication": ({"layer_replication": [[0, 2]]}, "layer_replication"),
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
    "trainable tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    "a later field": ({"use_qalora": True}, "use_qalora"),
    "rank above the limit": ({"r": 32}, "max_lora_rank is 16: raise it with --max-lora-rank 32"),
    "rank above all": ({"r": 512}, "from 1 to 256"),
    "alpha": ({"lora_alpha": "big"}, "lora_alpha 'big'"),
    "another rank": ({"r": 8}, r"lora_A.weight' is \[4, 32\] in F32; expected is \[8, 32\]"),
    "pattern": ({"rank_pattern": {"(": 4}}, "rank_pattern"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_config(llama, tmp_path, name):
    model, folder = llama
    changes, message = REFUSED[name]
    write_adapter(tmp_path, model, targets=("q_proj",))
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match=message):
        read(folder, tmp_path)


def read(model_dir, folder):
    config = read_model_config(model_dir)
    layers = AdapterLayers(config, 1, MAX_RANK, torch.float32, CPU)
    return read_adapter(folder, config, layers.parts, MAX_RANK, torch.float32)


PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"
BROKEN = {
    "embedding": (lambda t: t | {"base_model.model.model.embed_tokens.lora_embedding_A": t["a"]}, "lora_embedding_A"),
    "half": (lambda t: {k: v for k, v in t.items() if "layers.0.self_attn.q_proj.lora_B" not in k}, "lacks lora_B"),
    "unknown module": (lambda t: {k.replace("layers.0", "layers.7"): v for k, v in t.items()}, "does not have"),
    "a norm": (lambda t: {k.replace("self_attn.q_proj", "input_layernorm"): v for k, v in t.items()}, "input_layer"),
    "integers": (lambda t: {k: v.to(torch.int32) for k, v in t.items()}, "in I32; expected"),
    "shape": (lambda t: {k: v[:, :-1].contiguous() for k, v in t.items()}, r"expected is \[4, 32\]"),
    "nothing": (lambda t: {}, "holds no lora_A"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_refused_tensors(llama, tmp_path, name):
    model, folder = llama
    write_adapter(tmp_path, model, targets=("q_proj",))
    change, message = BROKEN[name]
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors = change(tensors | ({"a": torch.zeros(2, 2)} if name == "embedding" else {}))
    tensors.pop("a", None)
    save_file(tensors, path)
    with pytest.raises(ModelError, match=message):
        read(folder, tmp_path)


def test_experts_damage_and_missing_files(tmp_path):
    config, _ = FAMILIES["moe"]
    model = make(tmp_path / "base", config)
    write_adapter(tmp_path / "lora", model, targets=("q_proj",))
    path = tmp_path / "lora" / "adapter_model.safetensors"
    whole = load_file(path)
    save_file({k.replace("self_attn.q_proj", "mlp.experts.0.up_proj"): v for k, v in whole.items()}, path)
    with pytest.raises(ModelError, match=r"experts\.0\.up_proj.*served are the matrices of attention"):
        read(tmp_path / "base", tmp_path / "lora")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ModelError, match="damaged"):
        read(tmp_path / "base", tmp_path / "lora")
    path.unlink()
    with pytest.raises(ModelError, match="it is no adapter of PEFT"):
        read(tmp_path / "base", tmp_path / "lora")
    with pytest.raises(ModelError, match="adapter_config"):
        read(tmp_path / "base", tmp_path)


def test_batch_invariance_is_refused_with_adapters(llama):
    with pytest.raises(ConfigError, match="batch_invariant is not served with adapters"):
        load(llama[1], batch_invariant=True)
