"""The mixture of experts of a layer: a router chooses a few experts for each token."""

from torch import Tensor

from engine.models.config import MoEConfig
from engine.models.layers.operators import Operators, take_linear, take_plain
from kernels.linear.moe import Experts
from kernels.quantized.weight import Weight


class MoE:
    """[num_tokens, hidden] -> [num_tokens, hidden]; takes the place of an MLP."""

    __slots__ = ("experts", "normalize", "router", "top_k")

    def __init__(
        self, config: MoEConfig, weights: dict[str, Weight], prefix: str, activation: str, operators: Operators
    ) -> None:
        """Take the weights. On a GPU this compiles the kernels, so that no request waits for a compiler."""
        self.top_k = config.experts_per_token
        self.normalize = config.norm_topk_prob
        self.router = take_linear(weights, f"{prefix}.router", operators)
        gate_up = take_plain(weights, f"{prefix}.experts_in.weight", operators.dtype)
        down = take_plain(weights, f"{prefix}.experts_out.weight", operators.dtype)
        self.experts = Experts(gate_up, down, activation)
        if gate_up.is_cuda:
            self.experts.warm_up(self.top_k, self.normalize)

    def __call__(self, x: Tensor) -> Tensor:
        return self.experts(x, self.router(x), self.top_k, self.normalize)
