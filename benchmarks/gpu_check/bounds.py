"""Lower bounds for the time of steps and workloads, from the card's own measured limits.

A decode step of B sequences with S tokens each reads every weight once (the embedding is a gather) and all their keys
and values: max((W + B S k) / bandwidth, B (2 P + 4 L H d S) / rate). A prefill of S tokens computes
2 P S + 2 L H d S^2 (causal) and one row of the head. In a mixture of experts P counts the experts of one token, and W
those that the tokens of the step reach where all are equally likely: E (1 - (1 - k/E)^B) of E, k for each token.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from benchmarks.gpu_check.operators import Operator, Rows, floor_seconds, step_operators
from engine.models.config import ModelConfig

RATE_OF_8_BITS = 2.0  # the rate of products in int8 or e4m3 to that in bf16, in the datasheet of each card with them


@dataclass(frozen=True, slots=True)
class Limits:
    """bandwidth: bytes/s of a large read, or of a copy (both directions counted) where that is faster. rate: FLOP/s of
    a large bf16 matrix product. copy: bytes/s of a large copy; 0 where only the bandwidth is known."""

    bandwidth: float
    rate: float
    copy: float = 0.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of one model in one dtype on one card. Seconds, bytes and FLOPs.

    quantized_bytes: of a number in the matrices, which the bounds of steps count; None: they are not quantised.
    eight_bits_from: the tokens of a step from which on it multiplies its matrices in 8 bits; None: it never does.
    """

    model: ModelConfig
    limits: Limits
    dtype_bytes: int = 2
    quantized_bytes: float | None = None
    eight_bits_from: int | None = None

    @property
    def body_parameters(self) -> int:
        """All but the embedding and the head."""
        matrices = self.model.vocab_size * self.model.embedding_size
        return self.model.num_parameters() - matrices * (1 if self.model.tie_embeddings else 2)

    @property
    def head_parameters(self) -> int:
        return self.model.vocab_size * self.model.embedding_size

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with: all but the embedding, the head and the unused experts."""
        return round(self.body_parameters - self._idle_expert_parameters(1))

    def weight_bytes(self, num_tokens: int) -> float:
        """Read by a step of that many tokens."""
        read = self.body_parameters + self.head_parameters - self._idle_expert_parameters(num_tokens)
        return read * self.dtype_bytes

    def _idle_expert_parameters(self, num_tokens: int) -> float:
        """Parameters of experts that no token is routed to, in all layers."""
        moe = self.model.moe
        if moe is None:
            return 0.0
        idle = moe.num_experts * (1 - moe.experts_per_token / moe.num_experts) ** num_tokens
        layers = sum(self.model.experts(layer) is not None for layer in range(self.model.num_layers))
        return layers * idle * 3 * self.model.hidden_size * moe.intermediate_size

    @property
    def _attention_flops(self) -> int:
        """Operations for one query and one key, in all layers."""
        return 4 * self.model.num_layers * self.model.num_heads * self.model.head_dim

    def decode_bytes(self, batch: int, cached_tokens: float) -> float:
        """cached_tokens: of the whole batch. Activations are too small to count."""
        return self.weight_bytes(batch) + cached_tokens * self.model.kv_bytes_per_token(self.dtype_bytes)

    def decode_seconds(self, batch: int, cached_tokens: float) -> float:
        flops = batch * 2 * (self.active_parameters + self.head_parameters) + cached_tokens * self._attention_flops
        return max(self.decode_bytes(batch, cached_tokens) / self.limits.bandwidth, flops / self.limits.rate)

    def step_seconds(self, step: list[Rows]) -> float:
        """The bound of totals of any step in which every sequence samples a token."""
        operators = [operator for operator in self.operators(step) if operator.kind != "row"]
        keys = sum(rows.count * rows.context for rows in step) * self.model.kv_bytes_per_token(self.dtype_bytes)
        moved = sum(operator.weight_bytes for operator in operators) + keys
        flops = sum(operator.flops for operator in operators)
        return max(moved / self.limits.bandwidth, flops / self.limits.rate)

    def floor_seconds(self, step: list[Rows]) -> float:
        """The per-operator floor of the same step: attention and products run one after the other."""
        return floor_seconds(self.operators(step), self.limits.bandwidth, self.limits.rate)

    def operators(self, step: list[Rows]) -> list[Operator]:
        """The operators of a step. A product in 8 bits has 1 / RATE_OF_8_BITS of its FLOPs, to hold against `rate`."""
        found = list(step_operators(self.model, step, self.dtype_bytes, weight_bytes=self.quantized_bytes))
        if self.eight_bits_from is None or sum(rows.tokens for rows in step) < self.eight_bits_from:
            return found
        return [replace(one, flops=one.flops / RATE_OF_8_BITS) if one.kind == "gemm" else one for one in found]

    def prefill_flops(self, num_tokens: int) -> float:
        body = 2 * self.active_parameters * num_tokens + self._attention_flops * num_tokens**2 / 2
        return body + 2 * self.head_parameters

    def prefill_seconds(self, num_tokens: int) -> float:
        read = self.weight_bytes(num_tokens) / self.limits.bandwidth
        return max(self.prefill_flops(num_tokens) / self.limits.rate, read)

    def workload_seconds(self, lengths: Iterable[tuple[int, int]]) -> float:
        """Requests of (prompt, output) tokens, all at once and none ever waiting: the decode steps alone.

        Prompts are left out (3 % of the nano-vllm workload), as in the figures that others are compared by.
        """
        return sum(self.decode_seconds(*step) for step in decode_steps(lengths))


def decode_steps(lengths: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """(sequences, cached tokens) of each decode step where all start together; a prefill gives the first token."""
    live = sorted(((output, prompt) for prompt, output in lengths), reverse=True)
    step = 1
    while live and live[0][0] > step:
        while live[-1][0] <= step:
            live.pop()
        yield len(live), sum(prompt for _, prompt in live) + len(live) * step
        step += 1
