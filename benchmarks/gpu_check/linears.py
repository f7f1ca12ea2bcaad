"""The linear layers of Llama-3-8B at every number of rows that matters: the engine's choice beside cuBLAS.

The engine's layer is what the models call; cuBLAS is F.linear on the same weights. Where the engine has candidates to
choose from (kernels/linear), the times of both say whether it chose well.
"""

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
from kernels.linear.packed import PackedLinear

ROWS, TINY_ROWS = (1, 64, 256, 8, 16, 32, 128, 2, 4, 8192), (1, 2)
LARGEST_CACHE = 96 << 20  # bytes; weights of several layers in turn exceed it, as in a model


def run(recorder: Recorder, setting: Setting) -> None:
    """One layer at a time is in memory; its cases are its numbers of rows."""
    device = pick_device(setting.tiny)
    bench = Bench(recorder, device, Stopwatch(device, seconds=0.06), find_limits(setting, recorder))
    shape, rows = (TINY_SHAPE, TINY_ROWS) if setting.tiny else (SHAPE, ROWS)
    for name, (n_out, n_in) in layer_sizes(shape).items():
        layers: list[tuple[PackedLinear, Tensor]] = []
        for num_rows in rows:
            measure = partial(time_layer, bench, layers, name, n_out, n_in, num_rows)
            recorder.case(f"linear {name} {num_rows} rows", measure, seconds=30)


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
def time_layer(
    bench: Bench, layers: list[tuple[PackedLinear, Tensor]], name: str, n_out: int, n_in: int, num_rows: int
) -> None:
    """Both ways at one number of rows; results are compared on the way. The first case fills `layers`."""
    if not layers:
        layers += make_layers(n_out, n_in, bench.device)
    x = torch.randn(num_rows, n_in, device=bench.device).bfloat16()
    compare(layers[0][0](x), F.linear(x, layers[0][1]))
    moved, flops = (n_out * n_in + num_rows * (n_in + n_out)) * 2, 2 * num_rows * n_out * n_in
    ours, cublas = iter_calls(layers, x)
    seconds = bench.time(Case(f"linear {name}", f"{num_rows} rows", ours, moved, flops))
    peer = bench.time(Case(f"F.linear {name}", f"{num_rows} rows", cublas, moved, flops), by="F.linear")
    bench.recorder.figure(f"linear {name} {num_rows} rows, F.linear / ours", peer / seconds, "x")


def iter_calls(layers: list[tuple[PackedLinear, Tensor]], x: Tensor) -> tuple[partial[Tensor], partial[Tensor]]:
    """Calls that take the layers in turn, so that no weight is found in a cache."""
    turns = [iter(range(10**9)) for _ in range(2)]

    def ours() -> Tensor:
        return layers[next(turns[0]) % len(layers)][0](x)

    def cublas() -> Tensor:
        return F.linear(x, layers[next(turns[1]) % len(layers)][1])

    return partial(ours), partial(cublas)


def make_layers(n_out: int, n_in: int, device: torch.device) -> list[tuple[PackedLinear, Tensor]]:
    """Layers with random weights beside the same plain weights (a layer on a CPU keeps a packed copy alone)."""
    count = max(1, LARGEST_CACHE // (n_out * n_in * 2)) if device.type == "cuda" else 1
    weights = [torch.randn(n_out, n_in, device=device).mul_(n_in**-0.5).bfloat16() for _ in range(count)]
    return [(PackedLinear(weight), weight) for weight in weights]


def compare(ours: Tensor, theirs: Tensor) -> None:
    """AssertionError where the results differ by more than bf16's rounding."""
    error = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
    if not error < 0.02:  # NaN is no number below it
        raise AssertionError(f"the layer's result differs from F.linear's by {error:.2g} of its norm")
