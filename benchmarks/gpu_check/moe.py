"""Mixtures of experts at the shapes of Mixtral and Qwen3-MoE, beside torch's own grouped matrix product.

The bandwidth figure counts only the experts that tokens reach: at 16 tokens, all 8 experts of Mixtral, about 82 of the
128 of Qwen3-MoE.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_check.bench import Bench
from benchmarks.gpu_check.record import Recorder
from benchmarks.gpu_check.torch_peers import compare
from benchmarks.kernel_speed import MOE_SHAPES, MOE_TOKENS, Case, MoELayer, MoEShape, moe_case
from kernels.linear.moe_routing import RoutingRule, route, route_reference

TINY_SHAPES, TINY_TOKENS = (MoEShape("toy", 6, 2, 64, 32),), (1, 5)

GroupedProduct = Callable[[Tensor, Tensor, Tensor], Tensor]


def run(recorder: Recorder, bench: Bench, tiny: bool) -> None:
    """One layer at a time is in memory. The first case makes it; if that fails, so does each of its others."""
    for shape in TINY_SHAPES if tiny else MOE_SHAPES:
        layers: list[MoELayer] = []
        for num_tokens in TINY_TOKENS if tiny else MOE_TOKENS:
            measure = partial(measure_layer, bench, layers, shape, num_tokens)
            recorder.case(f"moe {shape.name} {num_tokens} rows", measure, seconds=60)


@torch.no_grad()
def measure_layer(bench: Bench, layers: list[MoELayer], shape: MoEShape, num_tokens: int) -> None:
    """Ours and torch's, whose results are compared on the way. `layers` keeps the layer between calls."""
    if not layers:
        layers.append(MoELayer.random(shape, bench.device))
    layer = layers[0]
    x, logits = layer.inputs(num_tokens)
    case = moe_case(layer, x, logits)
    bench.time(case)
    name, product = grouped_product(layer)
    call = partial(torch_experts, product, layer, x, logits)
    compare(layer.experts(x, route(logits, RoutingRule(shape.top_k, True))), call())
    bench.time(Case(f"{name} {case.kernel}", case.size, call, case.num_bytes, case.flops), by=name)


def grouped_product(layer: MoELayer) -> tuple[str, GroupedProduct]:
    """torch's grouped matrix product where it runs on this device, else expert by expert."""
    ends = torch.tensor([1] * layer.shape.num_experts, dtype=torch.int32, device=layer.down.device)
    try:
        grouped(layer.down.new_zeros(1, layer.shape.inner_size), layer.down, ends)
    except (AttributeError, NotImplementedError, RuntimeError):
        return "expert loop", loop
    return "grouped_mm", grouped


def grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """rows [num_rows, n_in] sorted by expert, weights [num_experts, n_out, n_in], ends int32 [num_experts]: where each
    expert's rows end -> [num_rows, n_out]
    """
    product: Tensor = torch._grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    return product


def loop(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """The same, one matrix product for each expert that has rows."""
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    parts = zip(rows.split(counts), weights, strict=True)
    return torch.cat([F.linear(part, weight) for part, weight in parts if len(part)])


def torch_experts(product: GroupedProduct, layer: MoELayer, x: Tensor, logits: Tensor) -> Tensor:
    """As the formula has it: sort by expert, two products, and the weighted sum in fp32."""
    shape, routing = layer.shape, route_reference(logits, RoutingRule(layer.shape.top_k, True))
    experts, order = routing.experts.flatten().sort(stable=True)
    numbers = torch.arange(shape.num_experts, dtype=experts.dtype, device=experts.device)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    gate, up = product(x[order // shape.top_k], layer.gate_up, ends).chunk(2, dim=-1)
    results = product(F.silu(gate) * up, layer.down, ends)
    weighted = torch.empty(results.shape, dtype=torch.float32, device=x.device)
    weighted[order] = results.float() * routing.weights.flatten()[order, None]
    return weighted.view(len(x), shape.top_k, -1).sum(1).to(x.dtype)
