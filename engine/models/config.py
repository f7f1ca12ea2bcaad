"""ModelConfig: a decoder or an encoder described by data. `pageserve plan` sizes a model with it, without weights."""

from dataclasses import dataclass, replace
from math import prod

from engine.errors import ModelError
from engine.models.weight_format import WeightFormat
from kernels.kv_format import KVFormat

FLOAT32 = (".correction.bias",)  # endings of parameters that are always fp32


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """The change of the rotary frequencies for sequences longer than the trained length.

    engine/models/layers/position.py has the formulas. kind "linear" uses factor only; "ntk" too: it raises rope_theta
    by factor ** (rotary_dim / (rotary_dim - 2)); "llama3" uses the two frequency factors; "yarn" uses the two betas and
    attention_factor, which multiplies cosines and sines; "longrope" uses attention_factor and, in place of factor, one
    factor per pair: short_factors, or long_factors if sequences may be longer than original_max_position.
    "proportional" divides all frequencies by factor, and turns the first rotated_share of the pairs of a head alone.
    """

    kind: str
    factor: float
    original_max_position: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    long_max_position: int = 0  # longest sequence in tokens with long_factors
    rotated_share: float = 1.0


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """A factor of the queries that grows with the position: 1 + factor * ln(1 + floor((position + offset) / period)).

    Llama 4 has period floor_scale, factor attn_scale and offset 1, on its nope_layers; Ministral 3 has period
    original_max_position_embeddings, factor llama_4_scaling_beta and offset 0.
    """

    factor: float
    period: int
    offset: int = 0
    layers: tuple[int, ...] | None = None  # the layers with it; None: every layer


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """A mixture of experts in place of the MLP, in every layer but `dense_layers`.

    kernels/linear/moe_routing.py has the formulas of routing, kernels/linear/moe_kernels.py those of an expert.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # width of one expert
    norm_topk_prob: bool  # divide the weights of a token's experts by their sum
    dense_layers: tuple[int, ...] = ()
    scoring: str = "softmax"  # "softmax" or "sigmoid" of the router's logits, or "sparsemixer" (Phi-MoE)
    correction_bias: bool = False  # a number per expert ("correction.bias") joins the scores for the choice alone
    num_groups: int = 1  # groups of experts, of which a token chooses groups_per_token first
    groups_per_token: int = 1
    scaling: float = 1.0  # factor of the weights
    jitter: float = 0.0  # threshold of "sparsemixer"
    router_bias: bool = False
    router_float32: bool = False  # the router's weights and logits are fp32, whatever the model's dtype
    shared_size: int = 0  # width of the shared experts, which every token passes, as one MLP; 0: none
    shared_gate: bool = False  # the shared experts' output is multiplied by sigmoid(shared_gate . x)
    bias: bool = False  # biases of the experts' two matrices
    clamp_limit: float = 0.0  # L > 0: the clamped SwiGLU of gpt-oss takes the activation's place
    clamp_alpha: float = 1.702
    weights_on_input: bool = False  # a token's weight multiplies the expert's input, not its output (Llama 4)
    # The experts work beside the dense MLP, on the residual: engine/models/layers/moe.py, MLPBesideExperts (Gemma 4)
    beside_mlp: bool = False

    def __post_init__(self) -> None:
        if self.experts_per_token > self.num_experts:
            raise ModelError(
                f"config.json: num_experts_per_tok {self.experts_per_token} is above the number of experts, "
                f"{self.num_experts}."
            )
        if self.num_groups > 1:
            self._check_groups()

    def _check_groups(self) -> None:
        size, rest = divmod(self.num_experts, self.num_groups)
        if rest or size < 2 or self.groups_per_token > self.num_groups:
            raise ModelError(
                f"config.json: {self.num_experts} experts cannot form n_group {self.num_groups} groups of two or more, "
                f"of which a token chooses topk_group {self.groups_per_token}."
            )
        chosen = size * self.groups_per_token
        if self.experts_per_token > chosen:
            raise ModelError(
                f"config.json: num_experts_per_tok {self.experts_per_token} is above the {chosen} experts in "
                f"topk_group {self.groups_per_token} groups."
            )


@dataclass(frozen=True, slots=True)
class Shard:
    """The place of a rank in a tensor-parallel group of `size` ranks, and the config of the whole model."""

    rank: int
    size: int
    whole: "ModelConfig"


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of keys and values in a layer. Queries have the same head_dim."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes come from config.json, behaviour from these fields, nothing from a model's name.

    A field exists once a family needs it. `family` chooses the weight names of the checkpoint and nothing else.
    """

    family: str
    vocab_size: int  # width of the logits
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int  # longest sequence in tokens; see also max_positions
    norm: str  # "rms" or "layer"
    norm_eps: float
    position: str  # "rope", "learned" or "alibi"
    activation: str  # "xielu", with two learned numbers a layer, needs an MLP without a gate
    gated_mlp: bool
    parallel_residual: bool = False  # attention and MLP both read the layer's input; one sum adds both to it
    mlp_norm: bool = True  # False: with parallel_residual, the MLP reads the output of attention's norm
    pre_norm: bool = True  # False: normalise after adding to the residual (OPT-350m)
    final_norm: bool = True
    post_norms: bool = False  # with pre_norm: also normalise the outputs of attention and MLP (Gemma 2)
    norm_weight: bool = True  # False: a LayerNorm that only normalises
    norm_bias: bool = True  # False: a LayerNorm without bias
    input_norms: bool = True  # False: with post_norms, attention and MLP read the residual as it is (OLMo 2)
    norm_weight_offset: float = 0.0  # every norm multiplies by this value plus its weight (Gemma, Nemotron: 1)
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_interleaved: bool = False  # a rotated pair is elements 2i and 2i + 1 of a head, not i and i + rotary_dim / 2
    nope_layers: tuple[int, ...] = ()  # the layers without rotary embedding
    partial_rotary_factor: float = 1.0  # share of each head that is rotated, from the start of the head
    position_offset: int = 0  # OPT's learned positions start at row 2
    alibi_bias_max: float = 8.0  # with "alibi": the flattest slope is 2 ** -alibi_bias_max
    alibi_scaled: bool = False  # with "alibi": softmax_scale multiplies the biases, too (Falcon-RW)
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    clip_qkv: float = 0.0  # c: q, k and v are limited to -c .. c after qk_norm and before RoPE; 0: off
    # Norm of q and k with norm_eps. "head": over each head, weights [head_dim] for all heads; "per_head": over each
    # head, weights [heads, head_dim]; "all": over the row of all heads, weights [heads * head_dim]; None: no norm.
    qk_norm: str | None = None
    qk_norm_layers: tuple[int, ...] | None = None  # the layers with qk_norm; None: every layer
    qk_norm_kind: str = "rms"  # "rms", "layer" (LayerNorm without bias) or "l2" (RMSNorm without weights)
    qk_norm_after_rope: bool = False  # True: RoPE first, then qk_norm
    v_norm: bool = False  # RMSNorm without weights over each head of v
    query_scaling: QueryScaling | None = None
    attention_sinks: bool = False  # a learned logit per head ("sinks.weight") joins the softmax's denominator
    # Tokens that a token attends to, itself included (not causal: those to each side, itself included); 0: all
    sliding_window: int = 0
    window_layers: tuple[int, ...] | None = None  # the layers with the window; None: every layer
    # rope_theta of the layers with a window, and the scaling of their frequencies; None: same RoPE as the other layers
    window_rope_theta: float | None = None
    window_rope_scaling: RopeScaling | None = None  # with window_rope_theta
    # c > 0: positions are cut into chunks of c, and a token attends to the tokens of its own chunk up to itself
    attention_chunk: int = 0
    chunk_layers: tuple[int, ...] | None = None  # the layers with attention_chunk; None: every layer
    attn_scale: float | None = None  # None: head_dim ** -0.5
    full_heads: Heads | None = None  # the heads of layers without a window; None: those of the other layers
    num_kv_shared_layers: int = 0  # the last layers, which make no keys and values, see kv_source
    values_from_keys: tuple[int, ...] = ()  # the layers whose values are the projected keys before any norm
    attn_softcap: float = 0.0  # c: a score s becomes c * tanh(s / c) before the softmax; 0: off
    logits_scale: float = 1.0
    logit_softcap: float = 0.0  # the same formula for the logits
    embedding_scale: float = 1.0  # factor of the embeddings
    round_embedding_scale: bool = False  # round embedding_scale to the embeddings' dtype, as in Gemma's training
    layer_input_size: int = 0  # width of the inputs that each layer gets by token, see LayerInputs; 0: none
    layer_input_vocab_size: int = 0  # rows of their embedding
    layer_scalars: bool = False  # a learned number ("scalar.weight") multiplies the output of each layer
    wide_mlp_layers: tuple[int, ...] = ()  # the layers whose MLP has twice the intermediate_size
    tie_embeddings: bool = False
    lm_head_bias: bool = False
    normalized_head: bool = False  # every row of lm_head is divided by its L2 norm as it is loaded (Baichuan 2)
    embedding_proj_dim: int | None = None  # width of the embedding if not hidden_size (OPT-350m)
    moe: MoEConfig | None = None
    causal: bool = True  # False: an encoder, each token attends to all tokens (engine/models/encoder.py)
    embeds_only: bool = False  # the checkpoint has no lm_head: it generates nothing; also for every encoder
    embedding_norm: bool = False  # LayerNorm of the embeddings
    token_types: int = 0  # rows of BERT's second embedding; the first row is added to every token
    dtype: str = "float32"  # the checkpoint's: float32, bfloat16 or float16
    quantization: WeightFormat | None = None  # form of the matrices that are held in 4 or 8 bits; None: all are plain
    # This config describes the part of a rank (engine/models/parallel/shard.py): its heads, its widths; None: the whole
    shard: Shard | None = None

    def __post_init__(self) -> None:
        for heads in self.head_shapes():
            if self.num_heads % heads.num_kv_heads:
                raise ModelError(
                    f"config.json: {self.num_heads} attention heads cannot share {heads.num_kv_heads} KV heads evenly."
                )
        if self.num_kv_shared_layers:
            self._check_kv_sources()
        if self.has_extended_layers and not (self.post_norms and self.input_norms and self.mlp_norm and self.pre_norm):
            raise ModelError("config.json: inputs, scalars and experts beside the MLP need norms around both parts.")
        if self.normalized_head and self.tie_embeddings:
            raise ModelError("config.json: tie_word_embeddings is not served where lm_head is normalised.")
        if not self.input_norms and (not self.post_norms or not self.pre_norm or self.parallel_residual):
            raise ModelError("config.json: layers without input_norms are served with post_norms in series only.")
        if self.position == "rope":
            self._check_rope()
        if self.moe is not None and (self.mlp_bias or not self.gated_mlp):
            raise ModelError("config.json: mlp_bias, or an MLP without a gate, is not served with experts.")

    def _check_kv_sources(self) -> None:
        owners = {bool(self.window(layer)) for layer in range(self.num_layers - self.num_kv_shared_layers)}
        if any(bool(self.window(layer)) not in owners for layer in range(self.num_layers)):
            raise ModelError(
                f"config.json: num_kv_shared_layers {self.num_kv_shared_layers} leaves no layer that keeps the keys "
                "and values of each kind in layer_types."
            )

    def _check_rope(self) -> None:
        if self.rotary_dim % 2 or not self.rotary_dim:
            share = "" if self.partial_rotary_factor == 1 else f" (partial_rotary_factor {self.partial_rotary_factor})"
            raise ModelError(f"config.json: rotary embeddings need an even head_dim, not {self.rotary_dim}{share}.")
        scaling, pairs = self.rope_scaling, self.rotary_dim // 2
        if scaling is not None and scaling.kind == "longrope":
            for name, factors in (("short_factor", scaling.short_factors), ("long_factor", scaling.long_factors)):
                if len(factors) != pairs:
                    raise ModelError(f"config.json: {name} must list {pairs} numbers, not {len(factors)}.")

    @property
    def rotary_dim(self) -> int:
        """Values of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor + 1e-6)  # 30 / 44 * 44 is below 30

    @property
    def max_positions(self) -> int:
        """The longest sequence that max_model_len may ask for. With "longrope" this exceeds max_position_embeddings."""
        longest = self.rope_scaling.long_max_position if self.rope_scaling else 0
        return max(self.max_position_embeddings, longest)

    def has_long_rope(self, max_model_len: int) -> bool:
        """True if max_model_len makes all sequences use the long_factors of "longrope"."""
        scaling = self.rope_scaling
        return scaling is not None and scaling.kind == "longrope" and max_model_len > scaling.original_max_position

    @property
    def q_size(self) -> int:
        """Values of one token's query over all heads; the widest layer's."""
        return self.num_heads * max(heads.head_dim for heads in self.head_shapes())

    @property
    def kv_size(self) -> int:
        """Values of one token's key (or value) over all KV heads; the widest layer's."""
        return max(heads.num_kv_heads * heads.head_dim for heads in self.head_shapes())

    def heads(self, layer: int) -> Heads:
        """The heads of the keys and values that a layer reads."""
        if self.full_heads is not None and not self.window(layer):
            return self.full_heads
        return Heads(self.num_kv_heads, self.head_dim)

    def head_shapes(self) -> tuple[Heads, ...]:
        """The different heads of the layers."""
        if self.full_heads is None:
            return (Heads(self.num_kv_heads, self.head_dim),)
        return tuple(dict.fromkeys(self.heads(layer) for layer in range(self.num_layers)))

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values a layer reads: its own number, or that of the last layer of its kind, with
        or without a window, before the num_kv_shared_layers."""
        first_shared = self.num_layers - self.num_kv_shared_layers
        if layer < first_shared:
            return layer
        windowed = bool(self.window(layer))
        return next(i for i in reversed(range(first_shared)) if bool(self.window(i)) == windowed)

    def qkv_rows(self, layer: int) -> tuple[int, int, int]:
        """Rows of q, k and v in the layer's qkv matrix."""
        heads = self.heads(layer)
        kv_size = heads.num_kv_heads * heads.head_dim if self.kv_source(layer) == layer else 0
        return self.num_heads * heads.head_dim, kv_size, 0 if layer in self.values_from_keys else kv_size

    @property
    def has_extended_layers(self) -> bool:
        """True if the layers have parts that need the sum of residual and MLP, see DecoderLayer.forward_extended."""
        return bool(self.layer_input_size or self.layer_scalars or (self.moe is not None and self.moe.beside_mlp))

    def mlp_size(self, layer: int) -> int:
        """intermediate_size of a layer."""
        return self.intermediate_size * (2 if layer in self.wide_mlp_layers else 1)

    @property
    def vocab_part(self) -> range:
        """The tokens whose rows of embedding and lm_head are here: all, or a rank's share. The last ranks may have
        fewer."""
        if self.shard is None:
            return range(self.vocab_size)
        each = -(-self.vocab_size // self.shard.size)
        return range(self.vocab_size)[self.shard.rank * each : (self.shard.rank + 1) * each]

    @property
    def embedding_size(self) -> int:
        return self.embedding_proj_dim or self.hidden_size

    @property
    def softmax_scale(self) -> float:
        """The factor of the scores q.k."""
        return self.head_dim**-0.5 if self.attn_scale is None else self.attn_scale

    def window(self, layer: int) -> int:
        """The sliding window of a layer in tokens; 0 for none."""
        return self.sliding_window if self.window_layers is None or layer in self.window_layers else 0

    def chunk(self, layer: int) -> int:
        """attention_chunk of a layer in tokens; 0 for none."""
        return self.attention_chunk if self.chunk_layers is None or layer in self.chunk_layers else 0

    def has_qk_norm(self, layer: int) -> bool:
        """True if the layer normalises q and k."""
        return self.qk_norm is not None and (self.qk_norm_layers is None or layer in self.qk_norm_layers)

    def scales_queries(self, layer: int) -> bool:
        """True if query_scaling applies to the layer."""
        scaling = self.query_scaling
        return scaling is not None and (scaling.layers is None or layer in scaling.layers)

    def window_rope(self) -> "ModelConfig | None":
        """This config with the RoPE of the layers with a window; None where all layers share one RoPE."""
        if self.window_rope_theta is None:
            return None
        theta, scaling = self.window_rope_theta, self.window_rope_scaling
        return replace(self, rope_theta=theta, rope_scaling=scaling, full_heads=None)

    def full_rope(self) -> "ModelConfig":
        """This config with the head_dim of the layers without a window, for their RoPE."""
        return self if self.full_heads is None else replace(self, head_dim=self.full_heads.head_dim, full_heads=None)

    def experts(self, layer: int) -> MoEConfig | None:
        """The mixture of experts of a layer; None for a plain MLP."""
        return None if self.moe is None or layer in self.moe.dense_layers else self.moe

    @property
    def mlp_activations(self) -> int:
        """Values of one token at the MLP's peak: input and output of the activation, the result, and (with
        parallel_residual) attention's result."""
        dense = (3 if self.gated_mlp else 2) * max(self.mlp_size(layer) for layer in range(self.num_layers))
        dense += self.hidden_size
        dense += self.hidden_size if self.parallel_residual else 0
        if self.moe is None:
            return dense
        rows = self.moe.experts_per_token * (3 * self.moe.intermediate_size + self.hidden_size)
        shared = 3 * self.moe.shared_size + self.hidden_size if self.moe.shared_size else 0
        experts = rows + shared + 2 * self.moe.num_experts + self.hidden_size
        if self.moe.beside_mlp:
            return 2 * self.hidden_size + max(experts, dense)
        return max(experts, dense) if self.moe.dense_layers else experts

    def kv_bytes_per_token(self, dtype_bytes: int, kv_format: KVFormat | None = None) -> int:
        """Bytes of KV cache per token over all layers, in the model's dtype or quantised, scales included."""
        total = 0
        for layer in range(self.num_layers):
            if self.kv_source(layer) == layer:
                heads = self.heads(layer)
                row = heads.head_dim * dtype_bytes if kv_format is None else kv_format.width(heads.head_dim)
                total += 2 * heads.num_kv_heads * row
        return total

    def rotary_bytes(self, num_positions: int) -> int:
        """Bytes of the fp32 tables by position: cosines and sines (twice if layers with a window have their own RoPE)
        and the factors of query_scaling."""
        ropes = () if self.position != "rope" else (self.full_rope(), self.window_rope())
        numbers = sum(rope.rotary_dim for rope in ropes if rope is not None) + (self.query_scaling is not None)
        return numbers * num_positions * 4

    def num_parameters(self) -> int:
        """Number of parameters; a tied lm_head counts once."""
        return sum(prod(shape) for shape in self.parameter_shapes().values())

    def weight_bytes(self, dtype_bytes: int) -> int:
        """Bytes of plain weights; engine/models/loading/load.py counts quantised ones, too. A device that packs a
        tied lm_head separately holds more."""
        shapes, wide = self.parameter_shapes(), self.float32_parameters()
        return self.num_parameters() * dtype_bytes + sum(prod(shapes[name]) * (4 - dtype_bytes) for name in wide)

    def float32_parameters(self) -> set[str]:
        """The parameters that stay fp32 whatever the model's dtype: small ones that decide the choice of experts."""
        if self.moe is None:
            return set()
        ends = (".correction.bias", ".router.weight", ".router.bias") if self.moe.router_float32 else FLOAT32
        return {name for name in self.parameter_shapes() if name.endswith(ends)}

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of the model by name. q|k|v and gate|up are fused; linear weights are [out, in]."""
        hidden, width = self.hidden_size, self.embedding_size
        num_tokens = len(self.vocab_part)
        shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (num_tokens, width)}
        if self.position == "learned":
            rows = self.max_position_embeddings + self.position_offset
            shapes["position_embedding.weight"] = (rows, hidden)
        if self.token_types:
            shapes["token_type_embedding.weight"] = (self.token_types, hidden)
        if self.embedding_norm:
            shapes |= self._norm("embedding_norm")
        if self.layer_input_size:
            rows = self.num_layers * self.layer_input_size
            shapes["layer_embedding.weight"] = (self.layer_input_vocab_size, rows)
            shapes |= _linear("layer_projection", rows, hidden, False)
            shapes["layer_projection_norm.weight"] = (self.layer_input_size,)
        if width != hidden:
            shapes |= _linear("project_in", hidden, width, False) | _linear("project_out", width, hidden, False)
        for layer in range(self.num_layers):
            shapes |= {f"layers.{layer}.{name}": shape for name, shape in self._layer_shapes(layer).items()}
        if self.final_norm:
            shapes |= self._norm("final_norm")
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = (num_tokens, width)
        if self.lm_head_bias:
            shapes["lm_head.bias"] = (num_tokens,)
        return shapes

    def _layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        hidden = self.hidden_size
        shapes = self._norm("attn_norm") if self.input_norms else {}
        if self.input_norms and self.mlp_norm:
            shapes |= self._norm("mlp_norm")
        if self.post_norms:
            shapes |= self._norm("attn_post_norm") | self._norm("mlp_post_norm")
        rows = self.qkv_rows(layer)
        shapes |= _linear("qkv", sum(rows), hidden, self.qkv_bias)
        if self.has_qk_norm(layer) and self.qk_norm_kind != "l2":
            head_dim, kind = self.heads(layer).head_dim, self.qk_norm or "head"
            for name, size in zip(("q_norm", "k_norm"), rows, strict=False):
                row = {"head": (head_dim,), "per_head": (size // head_dim, head_dim), "all": (size,)}
                shapes |= {f"{name}.weight": row[kind]} if size else {}
        if self.attention_sinks:
            shapes["sinks.weight"] = (self.num_heads,)
        shapes |= _linear("attn_out", hidden, rows[0], self.out_bias)
        if self.layer_input_size:
            shapes |= _linear("input_gate", self.layer_input_size, hidden, False)
            shapes |= _linear("input_out", hidden, self.layer_input_size, False) | self._norm("input_norm")
        if self.layer_scalars:
            shapes["scalar.weight"] = (1,)
        return shapes | self._mlp_shapes(layer)

    def _mlp_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        hidden, inner, moe = self.hidden_size, self.mlp_size(layer), self.experts(layer)
        shapes: dict[str, tuple[int, ...]] = {}
        if moe is None or moe.beside_mlp:
            shapes = _linear("mlp_in", 2 * inner if self.gated_mlp else inner, hidden, self.mlp_bias)
            if self.activation == "xielu":
                shapes["xielu.weight"] = (2,)  # alpha_p, alpha_n
            shapes |= _linear("mlp_out", hidden, inner, self.mlp_bias)
        if moe is None:
            return shapes
        shapes |= _linear("router", moe.num_experts, hidden, moe.router_bias) | _expert_shapes(moe, hidden)
        if moe.beside_mlp:
            shapes |= {"router_norm.weight": (hidden,), "expert_scales.weight": (moe.num_experts,)}
            for name in ("mlp_branch_norm", "experts_norm", "experts_post_norm"):
                shapes |= self._norm(name)
        return shapes

    def _norm(self, name: str) -> dict[str, tuple[int, ...]]:
        kinds = ["weight"] * self.norm_weight + ["bias"] * (self.norm == "layer" and self.norm_bias)
        return {f"{name}.{kind}": (self.hidden_size,) for kind in kinds}


def _linear(name: str, rows: int, columns: int, bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, columns)}
    return shapes | ({f"{name}.bias": (rows,)} if bias else {})


def _expert_shapes(moe: MoEConfig, hidden: int) -> dict[str, tuple[int, ...]]:
    experts, inner = moe.num_experts, moe.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "experts_in.weight": (experts, 2 * inner, hidden),
        "experts_out.weight": (experts, hidden, inner),
    }
    if moe.bias:
        shapes |= {"experts_in.bias": (experts, 2 * inner), "experts_out.bias": (experts, hidden)}
    if moe.correction_bias:
        shapes["correction.bias"] = (experts,)
    if moe.shared_size:
        shapes |= _linear("shared.mlp_in", 2 * moe.shared_size, hidden, False)
        shapes |= _linear("shared.mlp_out", hidden, moe.shared_size, False)
    return shapes | (_linear("shared_gate", 1, hidden, False) if moe.shared_gate else {})
