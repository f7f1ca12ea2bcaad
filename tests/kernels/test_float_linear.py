"""The linear layer over fp32 rows, with weights in fp16, bf16 or fp32, against torch in fp64."""

import pytest
import torch
import torch.nn.functional as F

from kernels.dispatch import cpu_kernels
from kernels.linear.packed import PackedLinear

# (out_features, in_features): a part of a panel, whole panels and an odd number of inputs, several depths, the least
SHAPES = [(80, 40), (128, 97), (208, 1030), (1, 1)]
FORMS = (torch.float16, torch.bfloat16, torch.float32)

cpu = cpu_kernels()
pytestmark = pytest.mark.skipif(
    cpu is None or not cpu.float_linear.supports_floats(torch.zeros(1, 1), None), reason="needs AVX2"
)


def weight_of(shape, form):
    """A weight in fp32 whose numbers `form` alone of the forms before it holds."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if form == torch.float16:
        weight[0, 0] = 1 + 2**-10  # too many digits for bf16
    if form == torch.bfloat16:
        weight[0, 0] = 2.0**40  # too large for fp16
    return weight.to(form).float()


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_number_of_rows(shape, form):
    weight, bias = weight_of(shape, form), torch.randn(shape[0])
    for layer, terms in ((PackedLinear(weight, bias), bias), (PackedLinear(weight), None)):
        assert layer.weight is None and layer.floats.panels.dtype == form
        for rows in [0, 1, 2, 3, 4, 5, 6, 7, 11, 13, 95, 96, 97, 200]:
            x = torch.randn(rows, shape[1])
            exact = F.linear(x.double(), weight.double(), None if terms is None else terms.double())
            size = F.linear(x.abs(), weight.abs(), None if terms is None else terms.abs())  # of what is added up
            out = layer(x)
            assert out.dtype == torch.float32 and out.shape == exact.shape
            assert ((out - exact).abs() <= 2e-6 * size).all(), rows


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_row_has_the_same_bits_wherever_it_stands(form):
    layer = PackedLinear(weight_of((208, 1030), form), torch.randn(208))
    x, threads = torch.randn(130, 1030), torch.get_num_threads()
    together = layer(x)
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for first, last in [(0, 1), (3, 5), (7, 10), (40, 47), (94, 130), (129, 130)]:
                assert torch.equal(layer(x[first:last]), together[first:last])
    finally:
        torch.set_num_threads(threads)


def test_rows_may_be_strided():
    weight = weight_of((128, 96), torch.float16)
    layer, wide = PackedLinear(weight), torch.randn(40, 2 * 96 + 1)
    for x in (wide[:, :96], wide[:, 1:97], wide[::3, 96:192], wide.T[:40, :40].T.repeat(1, 3)[:, :96], wide.T[:96].T):
        torch.testing.assert_close(layer(x), F.linear(x, weight), rtol=1e-4, atol=1e-4)


def test_what_no_number_of_16_bits_holds_stays():
    for value in (float("nan"), float("inf"), 1e-42, 65520.0):
        weight = torch.full((3, 2), value)
        assert torch.equal(PackedLinear(weight)(torch.ones(1, 2)).isnan(), weight[:, 0].isnan()[None])
    assert PackedLinear(torch.full((3, 2), 1e-42))(torch.ones(1, 2)).allclose(torch.tensor(2e-42), rtol=1e-2, atol=0)
