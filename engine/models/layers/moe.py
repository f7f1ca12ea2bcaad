"""The mixture of experts of a layer: a router chooses a few experts for each token, and shared experts see them all."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.models.config import ModelConfig, MoEConfig
from engine.models.layers.norm import RMSNorm, take_norm
from engine.models.layers.operators import (
    Linear,
    Operators,
    take_linear,
    take_optional,
    take_plain,
    take_tensor,
    with_adapters,
)
from kernels.dispatch import cpu_kernels
from kernels.elementwise.rows import add, gate_rows
from kernels.linear.moe import Experts
from kernels.linear.moe_kernels import ExpertFormula
from kernels.linear.moe_routing import RoutingRule, route
from kernels.linear.packed import PackedLinear
from kernels.quantized.weight import QuantizedWeight, Weight


class MoE:
    """[num_tokens, hidden] -> [num_tokens, hidden]; takes the place of an MLP."""

    __slots__ = ("correction", "experts", "router", "rule", "shared")

    def __init__(
        self,
        config: MoEConfig,
        weights: dict[str, Weight],
        prefix: str,
        activation: str,
        operators: Operators,
        shared: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Take the weights; `shared` is the MLP of the shared experts. On a GPU this compiles the kernels, so that no
        request waits for a compiler."""
        self.rule = _rule(config)
        self.shared = shared
        if config.shared_gate and shared is not None:
            self.shared = GatedMLP(shared, take_linear(weights, f"{prefix}.shared_gate", operators))
        self.router = _take_router(config, weights, f"{prefix}.router", operators)
        self.correction = take_optional(weights, f"{prefix}.correction.bias")
        formula = ExpertFormula(activation, config.clamp_limit, config.clamp_alpha, config.weights_on_input)
        gate_up = _take_experts(weights, f"{prefix}.experts_in.weight")
        down = _take_experts(weights, f"{prefix}.experts_out.weight")
        gate_up_bias = take_optional(weights, f"{prefix}.experts_in.bias")
        down_bias = take_optional(weights, f"{prefix}.experts_out.bias")
        self.experts = Experts(gate_up, down, formula, gate_up_bias, down_bias, operators.dtype, operators.compresses)
        router_dtype = torch.float32 if config.router_float32 else operators.dtype
        if gate_up.device.type == "cuda":
            self.experts.warm_up(self.rule, self.correction, router_dtype)

    def __call__(self, x: Tensor) -> Tensor:
        out = self.experts(x, route(self.router(x), self.rule, self.correction))
        return out if self.shared is None else add(out, self.shared(x))


class MLPBesideExperts:
    """Joins the MLP's output with that of experts that read the residual.

        joined = norm(mlp) + norm(experts(norm(residual))), by the router's choice for RMSNorm(residual)

    A number per expert multiplies its weight.
    """

    __slots__ = ("experts_norm", "experts_post_norm", "mlp_branch_norm", "moe", "router_norm", "scales")

    def __init__(self, config: ModelConfig, weights: dict[str, Weight], layer: int, operators: Operators) -> None:
        prefix = f"layers.{layer}"
        scale = take_tensor(weights, f"{prefix}.router_norm.weight") * config.hidden_size**-0.5
        self.router_norm = RMSNorm(scale, config.norm_eps, 0.0)
        self.scales = take_tensor(weights, f"{prefix}.expert_scales.weight").float()
        self.mlp_branch_norm = take_norm(config, weights, f"{prefix}.mlp_branch_norm")
        self.experts_norm = take_norm(config, weights, f"{prefix}.experts_norm")
        self.experts_post_norm = take_norm(config, weights, f"{prefix}.experts_post_norm")
        moe = config.experts(layer)
        assert moe is not None
        self.moe = MoE(moe, weights, prefix, config.activation, operators)

    def join(self, mlp: Tensor, residual: Tensor) -> Tensor:
        """The MLP's output and the residual before it, [num_tokens, hidden] each -> [num_tokens, hidden]."""
        moe = self.moe
        routing = route(moe.router(self.router_norm(residual)[0]), moe.rule, moe.correction, self.scales)
        experts = moe.experts(self.experts_norm(residual)[0], routing)
        return add(self.mlp_branch_norm(mlp)[0], self.experts_post_norm(experts)[0])


class GatedMLP:
    """sigmoid(gate(x)) * mlp(x)"""

    __slots__ = ("gate", "mlp")

    def __init__(self, mlp: Callable[[Tensor], Tensor], gate: Linear) -> None:
        self.mlp, self.gate = mlp, gate

    def __call__(self, x: Tensor) -> Tensor:
        return gate_rows(self.mlp(x), self.gate(x))


class Float32Linear:
    """A linear layer that computes in fp32, whatever the dtype of its input; on a CPU its few rows by a kernel."""

    __slots__ = ("linear", "packed")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.linear = PackedLinear(weight, bias)
        cpu = cpu_kernels() if weight.device.type == "cpu" and bias is None else None
        self.packed = cpu.routing.pack_router(weight) if cpu else None

    def __call__(self, x: Tensor) -> Tensor:
        cpu = None if self.packed is None else cpu_kernels()
        if cpu and cpu.routing.supports_router(x):
            return cpu.routing.router(x, self.packed, self.linear.out_features)  # type: ignore[no-any-return]
        return self.linear(x.float())


def _take_router(
    config: MoEConfig, weights: dict[str, Weight], name: str, operators: Operators
) -> Linear | Float32Linear:
    if not config.router_float32:
        if operators.ranks is None or not isinstance(weights[f"{name}.weight"], Tensor):
            return take_linear(weights, name, operators)
        # Every rank routes by itself. Kernels that ranks choose by their own timings may round differently, and then
        # the ranks would add parts of different experts.
        plain = PackedLinear(take_tensor(weights, f"{name}.weight"), take_optional(weights, f"{name}.bias"))
        return with_adapters(plain, name, operators)
    weight = take_plain(weights, f"{name}.weight", torch.float32)
    return Float32Linear(weight, take_optional(weights, f"{name}.bias"))


def _take_experts(weights: dict[str, Weight], name: str) -> Tensor | QuantizedWeight:
    weight = weights.pop(name)
    assert not isinstance(weight, tuple), f"the parts of {name} differ in kind"
    return weight


def _rule(config: MoEConfig) -> RoutingRule:
    return RoutingRule(
        top_k=config.experts_per_token,
        normalize=config.norm_topk_prob,
        scoring=config.scoring,
        scaling=config.scaling,
        num_groups=config.num_groups,
        groups_per_token=config.groups_per_token,
        jitter=config.jitter,
    )
