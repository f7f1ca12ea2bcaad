"""Weights in 4 and 8 bits: each linear layer of Llama-3-8B at several numbers of rows, and steps of the whole model by
--quantization.

A layer in bf16 at the same number of rows is in the part "linears". Layers take turns, so that no weight is found in a
cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.gpu_check.bench import Bench
from benchmarks.gpu_check.bounds import RATE_OF_8_BITS
from benchmarks.gpu_check.datasheets import find_limits
from benchmarks.gpu_check.kernels import SHAPE, TINY_SHAPE
from benchmarks.gpu_check.linears import LARGEST_CACHE, compare, layer_sizes
from benchmarks.gpu_check.names import LLAMA
from benchmarks.gpu_check.parts import Setting
from benchmarks.gpu_check.record import Recorder
from benchmarks.gpu_check.steps import CONTEXT, TINY_CONTEXT, Steps, with_model
from benchmarks.gpu_check.timing import Stopwatch, pick_device
from benchmarks.kernel_speed import Case
from kernels.quantized.linear import FEW_ROWS, QuantizedLinear
from kernels.quantized.weight import INT4, UINT4, QuantizedWeight

ROWS, TINY_ROWS = (1, 16, 64, 256, 2048), (1, 3)
BATCHES, TINY_BATCHES = (1, 16, 64), (1, 3)
PROMPT, TINY_PROMPT = 1024, 24
QUANTIZATIONS = ("int4", "fp8", "int8", "w8a8")


@dataclass(frozen=True, slots=True)
class Codes:
    """A kind of quantised weight. group: columns that share a scale, 0 for a whole row; zeros: scales have offsets
    that are integer multiples of them, as in AWQ and GPTQ; minima: they have other ones, and codes count from 0, as in
    GGUF's Q4_1 and Q4_K. int8_inputs: the inputs are rounded, too."""

    name: str
    dtype: torch.dtype
    group: int
    zeros: bool = False
    minima: bool = False
    int8_inputs: bool = False

    def num_bytes(self, n_out: int, n_in: int) -> int:
        """Bytes of a matrix as the kernels read it: codes, scales in fp16, and offsets as int8 zeros or in fp32."""
        bits = 4 if self.dtype == torch.uint8 else 8
        of_group = 2 + (1 if self.zeros else 4 if self.minima else 0)
        return n_out * (n_in * bits // 8 + n_in // (self.group or n_in) * of_group)

    def weight(self, n_out: int, n_in: int, device: torch.device) -> QuantizedWeight:
        """Random codes and scales."""
        bits = 4 if self.dtype == torch.uint8 else 8
        codes = torch.randint(256, (n_out, n_in * bits // 8), dtype=torch.uint8, device=device)
        if self.dtype == torch.float8_e4m3fn:
            codes &= 0xBF  # no NaN
        group = self.group or n_in
        scales = (torch.rand(n_out, n_in // group, device=device) + 0.5).mul_(n_in**-0.5 / 8).half()
        offsets = None
        if self.zeros:
            scales = scales.float()
            offsets = scales * torch.randint(-7, 9, scales.shape, device=device)
        if self.minima:
            offsets = scales.float() * -16 * torch.rand(scales.shape, device=device)
        codebook = None if bits == 8 else UINT4 if self.minima else INT4
        return QuantizedWeight(codes.view(self.dtype), scales, group, offsets, codebook, int8_inputs=self.int8_inputs)


KINDS = (Codes("int4 g128 zeros", torch.uint8, 128, True), Codes("int4 g128", torch.uint8, 128),
         Codes("int4 g32", torch.uint8, 32), Codes("int4 g32 minima", torch.uint8, 32, minima=True),
         Codes("int8", torch.int8, 0), Codes("w8a8", torch.int8, 0, int8_inputs=True),
         Codes("int8 g32", torch.int8, 32), Codes("fp8", torch.float8_e4m3fn, 0),
         Codes("fp8 g128", torch.float8_e4m3fn, 128))  # fmt: skip


def run(recorder: Recorder, setting: Setting) -> None:
    """Steps first: they are what users feel."""
    for quantization in QUANTIZATIONS:
        with_model(LLAMA, recorder, setting, step_cases, quantization)
    device = pick_device(setting.tiny)
    bench = Bench(recorder, device, Stopwatch(device, seconds=0.04), find_limits(setting, recorder))
    sizes = layer_sizes(TINY_SHAPE if setting.tiny else SHAPE).items()
    for kind in KINDS:
        for name, (n_out, n_in) in sizes:
            layers: list[QuantizedLinear] = []
            for num_rows in TINY_ROWS if setting.tiny else ROWS:
                small = replace(kind, group=min(kind.group, n_in))
                measure = partial(time_layer, bench, layers, small, name, n_out, n_in, num_rows)
                recorder.case(f"{kind.name} {name} {num_rows} rows", measure, seconds=30)


def step_cases(steps: Steps) -> Iterator[tuple[str, partial[None]]]:
    """Decode steps, and one prompt."""
    tiny = steps.setting.tiny
    context, batches = (TINY_CONTEXT, TINY_BATCHES) if tiny else (CONTEXT, BATCHES)
    for batch in batches:
        yield f"decode {batch} x {context}", partial(steps.decode, {context: batch})
    prompt = TINY_PROMPT if tiny else PROMPT
    yield f"prefill {prompt}", partial(steps.prefill, prompt, 0)


@torch.no_grad()
def time_layer(
    bench: Bench, layers: list[QuantizedLinear], kind: Codes, name: str, n_out: int, n_in: int, num_rows: int
) -> None:
    """One layer at one number of rows; its result is compared with the decoded matrix's. The first case fills
    `layers`."""
    x = torch.randn(num_rows, n_in, device=bench.device).bfloat16()
    if not layers:
        count = max(1, LARGEST_CACHE // (n_out * n_in // 2)) if bench.device.type == "cuda" else 1
        weight = kind.weight(n_out, n_in, bench.device)
        matrix = weight.dequantize(torch.bfloat16)
        layers.append(QuantizedLinear(weight, None, torch.bfloat16))
        compare(layers[0](x), F.linear(x, matrix))
        layers += [QuantizedLinear(kind.weight(n_out, n_in, bench.device), None, torch.bfloat16)
                   for _ in range(count - 1)]  # fmt: skip
    turn = iter(range(10**9))
    moved = kind.num_bytes(n_out, n_in) + num_rows * (n_in + n_out) * 2
    in_8_bits = layers[0].rounded_inputs is not None and num_rows > FEW_ROWS

    def call() -> torch.Tensor:
        return layers[next(turn) % len(layers)](x)

    case = Case(f"{kind.name} {name}", f"{num_rows} rows", call, moved, 2 * num_rows * n_out * n_in)
    bench.time(case, times_rate=RATE_OF_8_BITS if in_8_bits else 1.0)
