"""Chooses the kernel of each linear layer on a GPU by timing the candidates at start, for each bucket of rows.

No library is the fastest for every shape: cuBLAS and cuBLASLt take different heuristics, and a matrix-vector kernel
reads a weight faster than both for a few rows. The candidates:

- cublas: F.linear.
- cublaslt: torch.addmm with a bias of zeros, which torch gives to cuBLASLt with the bias in the epilogue. torch offers
  no other switch per call (preferred_blas_library is global). F.linear does the same for a layer that has a bias.
- gemv: kernels/linear/gemv.py, for at most 8 rows.

Timing reads the weights of several layers in turn, as serving does, so that they do not stay in L2. The choice is kept
on disk for the card, the versions of torch, CUDA and Triton, and the shape. It is made before CUDA graphs are recorded
and never changes afterwards. A row's result may differ in rounding between buckets, as with cuBLAS alone.
"""

import json
import logging
import os
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import record_graph, triton
from kernels.linear.gemv import gemv, supports_gemv

logger = logging.getLogger(__name__)

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # more rows than the last one use cuBLAS
BUDGET_S = 2.0  # seconds of timing at start, without compilation
MAX_WEIGHTS = 8  # layers whose weights one measurement reads in turn
REPEATS = 3
# A candidate must be this much faster than cuBLAS: differences below it are noise.
LEAST_GAIN = 0.02
TOLERANCE = 0.02  # relative to the largest result: a candidate that is further from cuBLAS is not used

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # (x, weight, bias) -> x @ weight.T + bias
Timer = Callable[[Product, Tensor, Sequence["ChosenLinear"]], float]  # seconds of x through each of the layers


def cublas(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product by torch's default library."""
    return F.linear(x, weight, bias)


def cublaslt(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product by cuBLASLt, whose epilogue adds the bias: for layers without one, zeros."""
    return torch.addmm(_zeros(len(weight), weight.dtype, weight.device) if bias is None else bias, x, weight.t())


PRODUCTS: Mapping[str, Product] = {"cublas": cublas, "cublaslt": cublaslt, "gemv": gemv}
_ZEROS: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}


def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    key = (size, dtype, device)
    if key not in _ZEROS:
        _ZEROS[key] = torch.zeros(size, dtype=dtype, device=device)
    return _ZEROS[key]


def candidates(weight: Tensor, bias: Tensor | None, num_rows: int) -> dict[str, Product]:
    """The products that can compute a layer at this number of rows, by name; cublas is the first."""
    names = ["cublas", *["cublaslt"] * (bias is None), *["gemv"] * supports_gemv(weight, num_rows)]
    return {name: PRODUCTS[name] for name in names}


@dataclass(frozen=True, slots=True)
class LayerKind:
    """The facts that a choice depends on, beside the card."""

    out_features: int
    in_features: int
    dtype: torch.dtype
    has_bias: bool

    @property
    def name(self) -> str:
        """The kind's key on disk."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.out_features} x {self.in_features} {dtype}" + " bias" * self.has_bias


class ChosenLinear:
    """y = x @ weight.T + bias by the product chosen for the number of rows. weight [out_features, in_features]."""

    __slots__ = ("bias", "products", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, products: list[Product]) -> None:
        self.weight = weight
        self.bias = bias
        self.products = products  # by number of rows, up to the largest bucket; shared by the layers of a kind

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]"""
        product = self.products[len(x)] if len(x) < len(self.products) else cublas
        return product(x, self.weight, self.bias)


@dataclass(slots=True)
class LinearChoices:
    """The layers of one model by kind, and the product of each kind at each number of rows: cuBLAS until choose()."""

    layers: dict[LayerKind, list[ChosenLinear]] = field(default_factory=dict)
    products: dict[LayerKind, list[Product]] = field(default_factory=dict)

    def linear(self, weight: Tensor, bias: Tensor | None) -> ChosenLinear:
        """A layer that follows the choice for its kind."""
        kind = LayerKind(*weight.shape, weight.dtype, bias is not None)
        products = self.products.setdefault(kind, [cublas] * (ROW_BUCKETS[-1] + 1))
        layer = ChosenLinear(weight, bias, products)
        self.layers.setdefault(kind, []).append(layer)
        return layer

    def names(self, kind: LayerKind) -> dict[int, str]:
        """The chosen product of each bucket of rows."""
        known = {product: name for name, product in PRODUCTS.items()}
        return {rows: known[self.products[kind][rows]] for rows in ROW_BUCKETS}

    def choose(self, timer: Timer, known: dict[str, dict[str, str]], max_rows: int, budget_s: float = BUDGET_S) -> bool:
        """Choose for every kind and bucket up to max_rows; True if something was measured, and added to `known`.

        known: choices by kind's name and bucket. Kinds are measured bucket by bucket, few rows first, until the budget
        is spent; what is left keeps cuBLAS.
        """
        started, measured, compiling = time.perf_counter(), 0, 0.0
        for rows in ROW_BUCKETS[: bisect_left(ROW_BUCKETS, max_rows) + 1]:
            for kind, layers in self.layers.items():
                entry = known.setdefault(kind.name, {})
                name = entry.get(str(rows))
                if name not in candidates(layers[0].weight, layers[0].bias, rows):
                    if time.perf_counter() - started - compiling > budget_s:
                        continue
                    before = time.perf_counter()
                    usable = _usable(layers[0], rows)
                    compiling += time.perf_counter() - before
                    name = entry[str(rows)] = _fastest(layers[:MAX_WEIGHTS], rows, usable, timer)
                    measured += 1
                self._set(kind, rows, PRODUCTS[name])
        if measured:
            spent = time.perf_counter() - started
            logger.info(
                "timed matrix kernels for %d shapes and row counts in %.1f s of %.1f s, and compiled them in %.1f s",
                measured, spent - compiling, budget_s, compiling,
            )  # fmt: skip
        for kind in self.layers:
            logger.info("matrix kernels of %s: %s", kind.name, self.names(kind))
        return measured > 0

    def _set(self, kind: LayerKind, rows: int, product: Product) -> None:
        """Use the product for the row counts of one bucket: those above the bucket before it."""
        first = max((bucket for bucket in ROW_BUCKETS if bucket < rows), default=0) + 1
        self.products[kind][first : rows + 1] = [product] * (rows + 1 - first)


def _example(layer: ChosenLinear, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, layer.weight.shape[1], generator=generator)
    return x.to(layer.weight.dtype).to(layer.weight.device)


def _usable(layer: ChosenLinear, rows: int) -> dict[str, Product]:
    """The candidates that run here and agree with cuBLAS, except for rounding. This compiles them, or loads them from
    Triton's cache."""
    x = _example(layer, rows)
    expected = cublas(x, layer.weight, layer.bias).float()
    found: dict[str, Product] = {}
    for name, product in candidates(layer.weight, layer.bias, rows).items():
        try:
            difference = (product(x, layer.weight, layer.bias).float() - expected).abs().amax()
            problem = "" if bool(difference <= TOLERANCE * expected.abs().amax()) else f"differs by {difference:.2g}"
        except Exception as error:  # a kernel that this card, or this Triton, cannot run
            problem = f"{type(error).__name__}: {error}"
        if problem:
            logger.warning("the matrix kernel %s is not used at %d rows: %s", name, rows, problem)
        else:
            found[name] = product
    return found


def _fastest(layers: list[ChosenLinear], rows: int, usable: Mapping[str, Product], timer: Timer) -> str:
    """The name of the fastest product for layers of one kind."""
    x = _example(layers[0], rows)
    seconds = {name: timer(product, x, layers) for name, product in usable.items()}
    best = min(seconds, key=lambda name: seconds[name], default="cublas")
    return best if seconds and seconds[best] < (1 - LEAST_GAIN) * seconds.get("cublas", float("inf")) else "cublas"


def graph_timer(product: Product, x: Tensor, layers: Sequence[ChosenLinear]) -> float:
    """Seconds of device time, in a CUDA graph as in serving: the best of a few replays."""

    def work() -> None:
        for layer in layers:
            product(x, layer.weight, layer.bias)

    graph = record_graph(work)
    graph.replay()
    best = float("inf")
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1000)
    return best


def cache_file(device: torch.device) -> Path:
    """The file of this card's choices. Another version of torch, CUDA or Triton has another file."""
    card = torch.cuda.get_device_name(device)
    versions = f"torch-{torch.__version__}-cuda-{torch.version.cuda}-triton-{triton.__version__}"
    name = "".join(c if c.isalnum() or c in "-.+" else "-" for c in f"{card}-{versions}")
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "pageserve" / f"matrix-kernels-{name}.json"


def read_choices(path: Path) -> dict[str, dict[str, str]]:
    """The choices in a file, by kind and rows; empty if there is no file or it is damaged."""
    try:
        found = json.loads(path.read_text())
        if all(isinstance(v, str) for entry in found.values() for v in entry.values()):
            return {str(kind): dict(entry) for kind, entry in found.items()}
        problem = "values are not names"
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        problem = str(error)
    logger.warning("%s is ignored and written again: %s", path, problem)
    return {}


def write_choices(path: Path, known: Mapping[str, Mapping[str, str]]) -> None:
    """Replace the file in one step, so that no other process reads a part of it. A folder without space only logs."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
            json.dump(known, file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("the choice of matrix kernels is not kept for the next start: %s", error)


@torch.inference_mode()
def choose_on_device(choices: LinearChoices, device: torch.device, max_rows: int) -> None:
    """Choose the products of a model's layers on a CUDA device: from the file of earlier starts, else by timing."""
    path = cache_file(device)
    known = read_choices(path)
    if choices.choose(graph_timer, known, max_rows):
        write_choices(path, known)
