"""Linear layers of `--batch-invariant` on a CPU: the library's GEMM with row counts that keep a row's bits."""

import numpy as np
import pytest
import torch

from kernels.linear import invariant as invariant_linear
from kernels.linear.invariant import ROW_COUNTS, InvariantLinear, RowCounts, measure_row_counts
from kernels.linear.packed import PackedLinear

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(96, 64), (100, 72), (101, 333), (40, 3000), (7, 1)]


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def cancelling_rows(num_rows, shape, dtype):
    """x and weight whose products cancel, other ones than those that the layer was measured with."""
    half = shape[1] // 2
    x, weight = torch.randn(num_rows, shape[1]).to(dtype), torch.randn(shape).to(dtype)
    x[:, half : 2 * half], weight[:, half : 2 * half] = x[:, :half].flip(1), -weight[:, :half].flip(1)
    return x, weight


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_anywhere_in_any_batch(dtype, shape, has_bias, threads):
    torch.manual_seed(0)
    x, weight = cancelling_rows(600, shape, dtype)
    layer = InvariantLinear(weight, torch.zeros(shape[0], dtype=dtype) if has_bias else None, RowCounts())
    full = layer(x)
    for start, end in [(0, 1), (599, 600), (7, 9), (7, 10), (50, 55), (50, 57), (90, 103), (255, 260), (3, 600)]:
        assert torch.equal(layer(x[start:end]), full[start:end]), (start, end)
    order = torch.randperm(600)
    assert torch.equal(layer(x[order]), full[order])


@pytest.mark.parametrize("num_rows", [0, 1, 3, 16, 257, 600])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_fp64(dtype, num_rows):
    torch.manual_seed(0)
    weight, bias, x = (torch.randn(shape).to(dtype) for shape in ((72, 40), (72,), (num_rows, 40)))
    out = InvariantLinear(weight, bias, RowCounts())(x)
    assert out.dtype == dtype and out.shape == (num_rows, 72)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T + bias.double(), atol=tolerance, rtol=1e-2)


class Library(PackedLinear):
    """A GEMM that adds up the rows for which `backwards` is true from their last number to the first."""

    calls = []

    def __init__(self, weight, bias):
        super().__init__(weight, bias)
        self.numbers = weight.numpy()

    @staticmethod
    def backwards(num_rows, row):
        return False

    def __call__(self, x):
        self.calls.append(len(x))
        products = x.numpy()[:, None] * self.numbers
        turned = np.array([self.backwards(len(x), row) for row in range(len(x))])
        ordered = np.where(turned[:, None, None], products[:, :, ::-1], products)
        return torch.from_numpy(ordered.cumsum(2, dtype=np.float32)[:, :, -1])


@pytest.mark.parametrize(
    "backwards, expected",
    [
        (lambda n, row: n < 4, ROW_COUNTS[2:]),
        (lambda n, row: n % 16 != 0, tuple(n for n in ROW_COUNTS if n % 16 == 0)),
        (lambda n, row: n > 16 and row >= n // 8 * 8 - 4, ROW_COUNTS[:5]),  # by the place in the call
        (lambda n, row: row % 2 == 1, (1,)),
        (lambda n, row: n == 1 or row % 2 == 1, (1,)),
    ],
    ids=["few rows", "not 16s", "the end of a large call", "odd rows", "odd rows and single ones"],
)
def test_only_row_counts_that_agree_are_used(backwards, expected, monkeypatch):
    monkeypatch.setattr(Library, "backwards", staticmethod(backwards))
    monkeypatch.setattr(Library, "calls", [])
    monkeypatch.setattr(invariant_linear, "PackedLinear", Library)
    torch.manual_seed(0)
    assert measure_row_counts(torch.Size((20, 64)), torch.float32, False) == expected
    x, weight = cancelling_rows(300, (20, 64), torch.float32)
    layer = InvariantLinear(weight, None, RowCounts())
    Library.calls.clear()
    full = layer(x)
    assert set(Library.calls) <= set(expected)
    assert torch.equal(torch.cat([layer(x[i : i + 1]) for i in range(20)]), full[:20])
    assert torch.equal(layer(x[11:150]), full[11:150])


def test_each_kind_of_layer_is_measured_once(monkeypatch):
    measured = []
    monkeypatch.setattr(invariant_linear, "measure_row_counts", lambda *kind: measured.append(kind) or (1,))
    counts = RowCounts()
    for shape, has_bias in [((8, 4), False), ((8, 4), False), ((8, 4), True), ((4, 8), False), ((8, 4), True)]:
        counts.of(torch.zeros(shape), torch.zeros(shape[0]) if has_bias else None)
    assert [(tuple(shape), has_bias) for shape, _, has_bias in measured] == [
        ((8, 4), False), ((8, 4), True), ((4, 8), False),
    ]  # fmt: skip


def test_rows_that_do_not_start_at_a_cache_line():
    torch.manual_seed(0)
    weight, flat = torch.randn(48, 30), torch.randn(64 * 30 + 1)
    layer = InvariantLinear(weight, None, RowCounts())
    assert torch.equal(layer(flat[1:].view(64, 30)), layer(flat[1:].view(64, 30).clone()))
    wide = torch.randn(64, 60)
    assert torch.equal(layer(wide[:, :30]), layer(wide[:, :30].contiguous()))
