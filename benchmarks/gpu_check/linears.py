"""The linear layers of Llama-3-8B at every number of rows that matters, by each kernel that the engine chooses from.

At its start the engine times them (kernels/linear/choice.py) and keeps the fastest by shape and rows. The part
called decode records the choice. Each candidate is a case of its own here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_check.bench import Bench
from benchmarks.gpu_check.datasheets import find_limits
from benchmarks.gpu_check.kernels import SHAPE, TINY_SHAPE
from benchmarks.gpu_check.parts import Setting
from benchmarks.gpu_check.record import Recorder
from benchmarks.gpu_check.timing import Stopwatch, pick_device
from benchmarks.kernel_speed import Case, Shape
from kernels.linear.choice import PRODUCTS
from kernels.linear.packed import PackedLinear

ROWS, TINY_ROWS = (1, 64, 256, 8, 16, 32, 128, 2, 4, 8192), (1, 2)
MOST_GEMV_ROWS = 8
LARGEST_CACHE = 96 << 20  # bytes; weights of several layers in turn exceed it, as in a model


@dataclass(frozen=True, slots=True)
class Layer:
    """A plain weight [out_features, in_features], and on a CPU the layer that packs it."""

    weight: Tensor
    packed: PackedLinear


def run(recorder: Recorder, setting: Setting) -> None:
    """One layer at a time is in memory; its cases are its numbers of rows."""
    device = pick_device(setting.tiny)
    bench = Bench(recorder, device, Stopwatch(device, seconds=0.06), find_limits(setting, recorder))
    shape, rows = (TINY_SHAPE, TINY_ROWS) if setting.tiny else (SHAPE, ROWS)
    for name, (n_out, n_in) in layer_sizes(shape).items():
        layers: list[Layer] = []
        for num_rows in rows:
            for product in products(device, num_rows):
                measure = partial(time_product, bench, layers, product, name, n_out, n_in, num_rows)
                recorder.case(f"{product} {name} {num_rows} rows", measure, seconds=30)


def products(device: torch.device, num_rows: int) -> list[str]:
    """Names of the kernels that compute a layer at this number of rows."""
    if device.type == "cpu":
        return ["packed", "cublas"]
    return [name for name in PRODUCTS if name != "gemv" or num_rows <= MOST_GEMV_ROWS]


def layer_sizes(shape: Shape) -> dict[str, tuple[int, int]]:
    """(out_features, in_features) of the linear layers, those with the most bytes first."""
    qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    return {
        "gate_up": (2 * shape.intermediate_size, shape.hidden_size),
        "down": (shape.hidden_size, shape.intermediate_size),
        "qkv": (qkv, shape.hidden_size),
        "out": (shape.hidden_size, shape.num_heads * shape.head_dim),
        "head": (shape.vocab_size, shape.hidden_size),
    }


@torch.no_grad()
def time_product(
    bench: Bench, layers: list[Layer], product: str, name: str, n_out: int, n_in: int, num_rows: int
) -> None:
    """One kernel at one number of rows; its result is compared with F.linear's. The first case fills `layers`.

    Layers take turns, so that no weight is found in a cache.
    """
    if not layers:
        layers += make_layers(n_out, n_in, bench.device)
    x = torch.randn(num_rows, n_in, device=bench.device).bfloat16()
    calls = [layer.packed if product == "packed" else partial(PRODUCTS[product], weight=layer.weight, bias=None)
             for layer in layers]  # fmt: skip
    compare(calls[0](x), F.linear(x, layers[0].weight))
    turn = iter(range(10**9))
    moved, flops = (n_out * n_in + num_rows * (n_in + n_out)) * 2, 2 * num_rows * n_out * n_in
    call = partial(_in_turn, calls, turn, x)
    bench.time(Case(f"{product} {name}", f"{num_rows} rows", call, moved, flops), by=product)


def _in_turn(calls: list[Callable[[Tensor], Tensor]], turn: Iterator[int], x: Tensor) -> Tensor:
    return calls[next(turn) % len(calls)](x)


def make_layers(n_out: int, n_in: int, device: torch.device) -> list[Layer]:
    """Layers with random weights, more of them than a cache holds."""
    count = max(1, LARGEST_CACHE // (n_out * n_in * 2)) if device.type == "cuda" else 1
    weights = [torch.randn(n_out, n_in, device=device).mul_(n_in**-0.5).bfloat16() for _ in range(count)]
    return [Layer(weight, PackedLinear(weight)) for weight in weights]


def compare(ours: Tensor, theirs: Tensor) -> None:
    """AssertionError where the results differ by more than bf16's rounding."""
    error = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
    if not error < 0.02:  # NaN is no number below it
        raise AssertionError(f"the layer's result differs from F.linear's by {error:.2g} of its norm")
