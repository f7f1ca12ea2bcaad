"""The families of the papers: tiny transformers models, and plain references of families without code in transformers.

A reference follows the published architecture in fp32 torch, without a cache. Its parameters have the names of the
published checkpoints.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    BloomConfig,
    FalconConfig,
    GPTBigCodeConfig,
    GPTJConfig,
    MptConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

VOCAB = 97
BAICHUAN_2_VOCAB = 125_696


def _bloom(**changes: Any) -> PreTrainedConfig:
    return BloomConfig(**{"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 2, "n_head": 4, **changes})


def _falcon(**changes: Any) -> PreTrainedConfig:
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "max_position_embeddings": 128}
    return FalconConfig(**{"vocab_size": VOCAB, **sizes, **changes})


def _gpt(kind: Callable[..., PreTrainedConfig], **changes: Any) -> PreTrainedConfig:
    return kind(**{"vocab_size": VOCAB, "n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 128, **changes})


def _internlm3(**changes: Any) -> PreTrainedConfig:
    sizes: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "head_dim": 16}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 128}
    return transformers.InternLM3Config(vocab_size=VOCAB, **sizes, **changes)


def _mpt(**changes: Any) -> PreTrainedConfig:
    return MptConfig(**{"vocab_size": VOCAB, "d_model": 48, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, **changes})


def _opt(**changes: Any) -> PreTrainedConfig:
    sizes = {"hidden_size": 48, "ffn_dim": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    return OPTConfig(vocab_size=VOCAB, max_position_embeddings=128, **sizes, **changes)


CLIPPED = {"clip_qkv": 0.7, "alibi_bias_max": 16, "softmax_scale": 0.2}
CASES: dict[str, Callable[[], PreTrainedConfig]] = {
    "bloom": _bloom,
    "bloom_12_heads": lambda: _bloom(n_head=12, layer_norm_epsilon=1e-3, tie_word_embeddings=False),
    "falcon": _falcon,
    "falcon_grouped": lambda: _falcon(new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=80),
    "falcon_grouped_one_norm": lambda: _falcon(
        new_decoder_architecture=True, num_kv_heads=3, num_ln_in_parallel_attn=1, tie_word_embeddings=False
    ),
    # transformers rounds these slopes to bf16; those of 4 heads are powers of 4, which that keeps.
    "falcon_rw": lambda: _falcon(
        alibi=True, bias=True, multi_query=False, parallel_attn=False, num_attention_heads=4, layer_norm_epsilon=1e-3
    ),
    "gpt_bigcode": lambda: _gpt(GPTBigCodeConfig),
    "gpt_bigcode_multi_head": lambda: _gpt(
        GPTBigCodeConfig, multi_query=False, activation_function="gelu", tie_word_embeddings=False, n_inner=80
    ),
    "gptj": lambda: _gpt(GPTJConfig, rotary_dim=4),
    "gptj_tied": lambda: _gpt(GPTJConfig, rotary_dim=12, n_inner=80, tie_word_embeddings=True),
    "internlm3": lambda: _internlm3(num_key_value_heads=2),
    "internlm3_bias": lambda: _internlm3(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "mpt": _mpt,
    "mpt_12_heads_clipped": lambda: _mpt(n_heads=12, attn_config=CLIPPED, tie_word_embeddings=False),
    "mpt_logit_scale": lambda: _mpt(logit_scale="inv_sqrt_d_model"),
    "opt_plain_norms": lambda: _opt(layer_norm_elementwise_affine=False, enable_bias=False),
}
if not hasattr(transformers, "InternLM3Config"):  # transformers 5.17 has none: no oracle there
    CASES = {name: make for name, make in CASES.items() if not name.startswith("internlm3")}
# transformers' "eager" adds Falcon's ALiBi twice; its "sdpa" adds it once, as the model was trained.
ATTENTION = {"falcon_rw": "sdpa"}


def repair(name: str, model: PreTrainedModel) -> None:
    """Make a transformers model follow fields that it ignores and that the published MPT code follows."""
    config = model.config
    if name == "mpt_12_heads_clipped":
        biases, exponent = model.transformer.build_mpt_alibi_tensor, config.attn_config.alibi_bias_max
        model.transformer.build_mpt_alibi_tensor = lambda *sizes, **kw: biases(*sizes, alibi_bias_max=exponent, **kw)
    if name == "mpt_logit_scale":
        model.lm_head.register_forward_hook(lambda head, inputs, logits: logits / config.d_model**0.5)


# config.json of the references, with the fields of the published ones that the architecture depends on.
SIZES = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "hidden_act": "silu", "tie_word_embeddings": False}
AQUILA = {**SIZES, "architectures": ["AquilaModel"], "model_type": "aquila", "rms_norm_eps": 1e-6}
AQUILA |= {"max_position_embeddings": 128}
BAICHUAN = {**SIZES, "architectures": ["BaiChuanForCausalLM"], "model_type": "baichuan", "rms_norm_eps": 1e-6}
INTERNLM = {**SIZES, "architectures": ["InternLMForCausalLM"], "model_type": "internlm", "rms_norm_eps": 1e-6}
INTERNLM |= {"max_position_embeddings": 128}
INTERNLM2 = {**SIZES, "architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "rms_norm_eps": 1e-5}
INTERNLM2 |= {"max_position_embeddings": 128, "num_key_value_heads": 2, "rope_theta": 1000000, "bias": False}
QWEN = {**SIZES, "architectures": ["QWenLMHeadModel"], "model_type": "qwen", "layer_norm_epsilon": 1e-6}
QWEN |= {"kv_channels": 12, "seq_length": 128, "max_position_embeddings": 512, "no_bias": True, "rotary_pct": 1.0}
QWEN |= {"rotary_emb_base": 10000, "use_dynamic_ntk": True, "use_logn_attn": True, "scale_attn_weights": True}
EXAONE = {**SIZES, "architectures": ["ExaoneForCausalLM"], "model_type": "exaone", "layer_norm_epsilon": 1e-5}
EXAONE |= {"num_layers": 2, "activation_function": "silu", "max_position_embeddings": 128, "num_key_value_heads": 2}
EXAONE |= {"rope_theta": 1000000, "head_dim": 12}
REFERENCES: dict[str, dict[str, Any]] = {
    "aquila": AQUILA,
    "aquila2": {**AQUILA, "architectures": ["AquilaForCausalLM"], "num_key_value_heads": 2},
    "baichuan": {**BAICHUAN, "max_position_embeddings": 128},
    "baichuan_alibi": {
        **BAICHUAN, "architectures": ["BaichuanForCausalLM"], "model_max_length": 128, "num_attention_heads": 12
    },
    "baichuan2_normalised_head": {
        **BAICHUAN,
        "architectures": ["BaichuanForCausalLM"],
        "max_position_embeddings": 128,
        "model_max_length": 128,
        "vocab_size": BAICHUAN_2_VOCAB,
        "hidden_size": 16,
    },
    "internlm": {**INTERNLM, "bias": True},
    "internlm_no_bias": {**INTERNLM, "bias": False, "rotary": {"base": 500, "type": "dynamic"}},
    "internlm2": INTERNLM2,
    "internlm2_5": {**INTERNLM2, "rope_theta": 50000000, "rope_scaling": {"type": "dynamic", "factor": 2.5}},
    "qwen": QWEN,
    "exaone": {name: EXAONE[name] for name in EXAONE if name not in ("num_hidden_layers", "hidden_act")},
}  # fmt: skip


class Names:
    """The names of one published checkpoint: `q`, `k` and `v` are one matrix where `qkv` names one."""

    def __init__(self, layer: str, modules: str, embedding: str, final_norm: str, head: str) -> None:
        self.embedding, self.final_norm, self.head = embedding, final_norm, head
        roles = ("norm1", "norm2", "out", "gate", "up", "down", "qkv") if modules.count(" ") == 6 else (
            "norm1", "norm2", "out", "gate", "up", "down", "q", "k", "v"
        )  # fmt: skip
        self.layer = {role: f"{layer}.{name}" for role, name in zip(roles, modules.split(), strict=True)}


ENDS = ("model.embed_tokens", "model.norm", "lm_head")
LLAMA_BLOCK = "input_layernorm post_attention_layernorm self_attn.o_proj mlp.gate_proj mlp.up_proj mlp.down_proj"
LLAMA_NAMES = Names("model.layers.{}", f"{LLAMA_BLOCK} self_attn.q_proj self_attn.k_proj self_attn.v_proj", *ENDS)
NAMES = {
    "aquila": LLAMA_NAMES,
    "internlm": LLAMA_NAMES,
    "baichuan": Names("model.layers.{}", f"{LLAMA_BLOCK} self_attn.W_pack", *ENDS),
    "internlm2": Names(
        "model.layers.{}",
        "attention_norm ffn_norm attention.wo feed_forward.w1 feed_forward.w3 feed_forward.w2 attention.wqkv",
        "model.tok_embeddings", "model.norm", "output",
    ),
    "qwen": Names(
        "transformer.h.{}",
        "ln_1 ln_2 attn.c_proj mlp.w2 mlp.w1 mlp.c_proj attn.c_attn",
        "transformer.wte", "transformer.ln_f", "lm_head",
    ),
    "exaone": Names(
        "transformer.h.{}",
        "ln_1 ln_2 attn.attention.out_proj mlp.c_fc_0 mlp.c_fc_1 mlp.c_proj attn.attention.q_proj "
        "attn.attention.k_proj attn.attention.v_proj",
        "transformer.wte", "transformer.ln_f", "lm_head",
    ),
}  # fmt: skip


def num_layers(config: dict[str, Any]) -> int:
    """EXAONE 3 has a name of its own for it."""
    layers: int = config["num_layers"] if config["model_type"] == "exaone" else config["num_hidden_layers"]
    return layers


def reference_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a published checkpoint with this config.json."""
    kind, hidden, vocab = config["model_type"], config["hidden_size"], config["vocab_size"]
    names, heads = NAMES[kind], config["num_attention_heads"]
    kv = config.get("num_key_value_heads", heads) * hidden // heads
    inner = config["intermediate_size"] // (2 if kind == "qwen" else 1)
    modules: dict[str, tuple[int, ...]] = {"norm1": (hidden,), "norm2": (hidden,), "out": (hidden, hidden)}
    modules |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    modules |= {"q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden), "qkv": (hidden + 2 * kv, hidden)}
    biases = {"internlm": ("q", "k", "v", "out"), "qwen": ("qkv",)}.get(kind, ())
    if kind == "internlm" and not config["bias"]:
        biases = ()
    shapes: dict[str, tuple[int, ...]] = {f"{names.embedding}.weight": (vocab, hidden)}
    for layer in range(num_layers(config)):
        for role, name in names.layer.items():
            shapes[f"{name.format(layer)}.weight"] = modules[role]
            if role in biases:
                shapes[f"{name.format(layer)}.bias"] = modules[role][:1]
    return {**shapes, f"{names.final_norm}.weight": (hidden,), f"{names.head}.weight": (vocab, hidden)}


class Reference(torch.nn.Module):
    """A decoder-only model by its config.json: RMSNorm, rotary embedding or ALiBi, SwiGLU."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        generator = torch.Generator().manual_seed(0)
        self.weights = torch.nn.ParameterDict()
        for name, shape in reference_shapes(config).items():
            noise = torch.randn(shape, generator=generator) * 0.25
            value = noise + 1 if len(shape) == 1 and name.endswith("weight") else noise
            self.weights[name.replace(".", "/")] = torch.nn.Parameter(value, requires_grad=False)

    def save_pretrained(self, folder: Path) -> None:
        code = {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}, "torch_dtype": "float32"}
        (folder / "config.json").write_text(json.dumps({**self.config, **code}))
        tensors = {name.replace("/", "."): weight.data.contiguous() for name, weight in self.weights.items()}
        save_file(tensors, folder / "model.safetensors")

    def forward(self, ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        """ids int64 [1, length] -> logits [1, length, vocab]."""
        config, names = self.config, NAMES[self.config["model_type"]]
        x = self._weight(names.embedding)[ids[0]]
        for layer in range(num_layers(config)):
            block = {role: name.format(layer) for role, name in names.layer.items()}
            x = x + self._linear(block["out"], self._attend(self._norm(block["norm1"], x), block))
            h = self._norm(block["norm2"], x)
            x = x + self._linear(block["down"], F.silu(self._linear(block["gate"], h)) * self._linear(block["up"], h))
        head = self._weight(names.head)
        if config["vocab_size"] == BAICHUAN_2_VOCAB:
            head = head / head.norm(dim=1, keepdim=True)
        return SimpleNamespace(logits=(self._norm(names.final_norm, x) @ head.T)[None])

    def _attend(self, x: Tensor, block: dict[str, str]) -> Tensor:
        length, heads = len(x), self.config["num_attention_heads"]
        dim = self.config["hidden_size"] // heads
        q, k, v = (rows.view(length, -1, dim).transpose(0, 1) for rows in self._qkv(x, block, dim))
        k, v = (rows.repeat_interleave(heads // len(rows), 0) for rows in (k, v))
        distance = torch.arange(length)[:, None] - torch.arange(length)
        bias = torch.zeros(heads, length, length)
        if "max_position_embeddings" in self.config:
            q, k = self._rotate(q), self._rotate(k)
        else:
            bias = -torch.tensor(slopes(heads))[:, None, None] * distance
        scores = (q @ k.transpose(1, 2) / math.sqrt(dim) + bias).masked_fill(distance < 0, -math.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1)

    def _qkv(self, x: Tensor, block: dict[str, str], dim: int) -> tuple[Tensor, ...]:
        if "q" in block:
            return tuple(self._linear(block[role], x) for role in "qkv")
        rows = self._linear(block["qkv"], x)
        if self.config["model_type"] != "internlm2":
            return rows.chunk(3, -1)
        group = self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        parts = rows.view(len(x), -1, group + 2, dim)  # for each KV head its queries, its key, its value
        return tuple(part.reshape(len(x), -1) for part in (parts[:, :, :group], parts[:, :, group], parts[:, :, -1]))

    def _rotate(self, x: Tensor) -> Tensor:
        theta = self.config.get("rope_theta") or self.config.get("rotary", {}).get("base", 10000)
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[1])[:, None] / theta ** (torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        eps = self.config.get("rms_norm_eps") or self.config["layer_norm_epsilon"]
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self._weight(name)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        bias = f"{name}.bias".replace(".", "/")
        return x @ self._weight(name).T + (self.weights[bias] if bias in self.weights else 0)

    def _weight(self, name: str) -> Tensor:
        return self.weights[f"{name}.weight".replace(".", "/")]


def slopes(heads: int) -> list[float]:
    """ALiBi's slopes (Press et al. 2022), with the authors' rule for a number of heads that is no power of 2."""
    whole = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 * i / whole) for i in range(1, whole + 1)]
    return first + [2 ** (-4 * i / whole) for i in range(1, 2 * (heads - whole), 2)]


def _index(text: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes, one tensor a line."""
    rows = (line.split() for line in text.strip().splitlines())
    return {name: tuple(map(int, shape.split("x"))) for name, shape in rows}


# config.json and the tensors of published checkpoints that transformers has no code for: those of layer 0, and those of
# no layer. Buffers such as rotary_emb.inv_freq are left out.
PUBLISHED = {
    "Aquila2-34B": (
        {**AQUILA, "architectures": ["AquilaForCausalLM"], "vocab_size": 100008, "hidden_size": 6144,
         "intermediate_size": 24576, "num_hidden_layers": 60, "num_attention_heads": 48, "num_key_value_heads": 8,
         "max_position_embeddings": 8192, "rms_norm_eps": 1e-5},
        _index("""
            model.embed_tokens.weight 100008x6144
            model.layers.0.input_layernorm.weight 6144
            model.layers.0.self_attn.q_proj.weight 6144x6144
            model.layers.0.self_attn.k_proj.weight 1024x6144
            model.layers.0.self_attn.v_proj.weight 1024x6144
            model.layers.0.self_attn.o_proj.weight 6144x6144
            model.layers.0.post_attention_layernorm.weight 6144
            model.layers.0.mlp.gate_proj.weight 24576x6144
            model.layers.0.mlp.up_proj.weight 24576x6144
            model.layers.0.mlp.down_proj.weight 6144x24576
            model.norm.weight 6144
            lm_head.weight 100008x6144
        """),
    ),
    "Baichuan2-13B": (
        {**BAICHUAN, "architectures": ["BaichuanForCausalLM"], "vocab_size": 125696, "hidden_size": 5120,
         "intermediate_size": 13696, "num_hidden_layers": 40, "num_attention_heads": 40, "model_max_length": 4096},
        _index("""
            model.embed_tokens.weight 125696x5120
            model.layers.0.input_layernorm.weight 5120
            model.layers.0.self_attn.W_pack.weight 15360x5120
            model.layers.0.self_attn.o_proj.weight 5120x5120
            model.layers.0.post_attention_layernorm.weight 5120
            model.layers.0.mlp.gate_proj.weight 13696x5120
            model.layers.0.mlp.up_proj.weight 13696x5120
            model.layers.0.mlp.down_proj.weight 5120x13696
            model.norm.weight 5120
            lm_head.weight 125696x5120
        """),
    ),
    "internlm-7b": (
        {**INTERNLM, "vocab_size": 103168, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
         "num_attention_heads": 32, "max_position_embeddings": 2048, "bias": True},
        _index("""
            model.embed_tokens.weight 103168x4096
            model.layers.0.input_layernorm.weight 4096
            model.layers.0.self_attn.q_proj.weight 4096x4096
            model.layers.0.self_attn.q_proj.bias 4096
            model.layers.0.self_attn.k_proj.weight 4096x4096
            model.layers.0.self_attn.k_proj.bias 4096
            model.layers.0.self_attn.v_proj.weight 4096x4096
            model.layers.0.self_attn.v_proj.bias 4096
            model.layers.0.self_attn.o_proj.weight 4096x4096
            model.layers.0.self_attn.o_proj.bias 4096
            model.layers.0.post_attention_layernorm.weight 4096
            model.layers.0.mlp.gate_proj.weight 11008x4096
            model.layers.0.mlp.up_proj.weight 11008x4096
            model.layers.0.mlp.down_proj.weight 4096x11008
            model.norm.weight 4096
            lm_head.weight 103168x4096
        """),
    ),
    "internlm2-7b": (
        {**INTERNLM2, "vocab_size": 92544, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768},
        _index("""
            model.tok_embeddings.weight 92544x4096
            model.layers.0.attention_norm.weight 4096
            model.layers.0.attention.wqkv.weight 6144x4096
            model.layers.0.attention.wo.weight 4096x4096
            model.layers.0.ffn_norm.weight 4096
            model.layers.0.feed_forward.w1.weight 14336x4096
            model.layers.0.feed_forward.w2.weight 4096x14336
            model.layers.0.feed_forward.w3.weight 14336x4096
            model.norm.weight 4096
            output.weight 92544x4096
        """),
    ),
    "Qwen-7B": (
        {**QWEN, "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
         "num_attention_heads": 32, "kv_channels": 128, "seq_length": 8192, "max_position_embeddings": 32768},
        _index("""
            transformer.wte.weight 151936x4096
            transformer.h.0.ln_1.weight 4096
            transformer.h.0.attn.c_attn.weight 12288x4096
            transformer.h.0.attn.c_attn.bias 12288
            transformer.h.0.attn.c_proj.weight 4096x4096
            transformer.h.0.ln_2.weight 4096
            transformer.h.0.mlp.w1.weight 11008x4096
            transformer.h.0.mlp.w2.weight 11008x4096
            transformer.h.0.mlp.c_proj.weight 4096x11008
            transformer.ln_f.weight 4096
            lm_head.weight 151936x4096
        """),
    ),
}  # fmt: skip
