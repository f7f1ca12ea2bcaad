"""The bf16 linear layer of CPUs that multiply bf16 pairs, against torch in fp64."""

import pytest
import torch
import torch.nn.functional as F

from kernels.dispatch import cpu_kernels
from kernels.elementwise.activation import gated_activation
from kernels.linear.packed import PackedGatedLinear, PackedLinear, supports_gated_linear

# (out_features, in_features): a part of a panel, whole panels, several depths, the least there is, depths of tiles
SHAPES = [(80, 40), (128, 96), (208, 4098), (16, 2), (208, 2112)]

cpu = cpu_kernels()
pytestmark = pytest.mark.skipif(
    cpu is None or not cpu.linear.supports_linear(torch.zeros(16, 2, dtype=torch.bfloat16), None),
    reason="this CPU does not multiply bf16 pairs",
)


def layer_of(shape, with_bias):
    torch.manual_seed(0)
    weight, bias = torch.randn(shape).bfloat16(), torch.randn(shape[0]).bfloat16()
    layer = PackedLinear(weight, bias if with_bias else None)
    assert layer.panels is not None and layer.weight is None
    return layer, lambda x: F.linear(x.double(), weight.double(), bias.double() if with_bias else None)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_number_of_rows(shape, with_bias):
    layer, exact = layer_of(shape, with_bias)
    for rows in [0, 1, 2, 3, 4, 5, 6, 7, 11, 13, 16, 17, 31, 32, 33, 95, 96, 97, 200, 300]:
        x = torch.randn(rows, shape[1]).bfloat16()
        out = layer(x)
        assert out.shape == (rows, shape[0]) and out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), exact(x), atol=1e-2 * shape[1] ** 0.5, rtol=1e-2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_wherever_it_stands(shape):
    layer, _ = layer_of(shape, True)
    x = torch.randn(300, shape[1]).bfloat16()
    together = layer(x)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for first, last in [(0, 1), (3, 5), (40, 47), (94, 130), (129, 130), (250, 290), (299, 300)]:
                assert torch.equal(layer(x[first:last]), together[first:last])
    finally:
        torch.set_num_threads(threads)


def test_rows_may_be_strided():
    layer, exact = layer_of((128, 96), True)
    wide = torch.randn(20, 2 * 96 + 1).bfloat16()
    for x in (wide[:, :96], wide[:, 1:97], wide[::3, 96:192], wide[:96, :20].T.repeat(1, 5)[:, :96]):
        torch.testing.assert_close(layer(x), exact(x).bfloat16(), atol=0.2, rtol=1e-2)


def test_rows_that_do_not_fit_into_l2_may_be_strided():
    layer, _ = layer_of((128, 2112), True)
    wide = torch.randn(300, 2 * 2112).bfloat16()
    for x in (wide[:, :2112], wide[:, 2112:]):
        assert torch.equal(layer(x), layer(x.contiguous()))
        assert torch.equal(layer(x)[256:], layer(x[256:]))


def test_what_is_not_a_number_stays_in_its_row():
    layer, _ = layer_of((80, 40), False)
    x = torch.randn(9, 40).bfloat16()
    clean = layer(x)
    x[4, 7] = torch.nan
    out = layer(x)
    assert out[4].isnan().all()
    assert torch.equal(out[:4], clean[:4]) and torch.equal(out[5:], clean[5:])


@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(64, 40), (256, 96), (192, 4098), (192, 2112)], ids=str)
def test_a_gated_layer_computes_its_activation(shape, with_bias, name):
    torch.manual_seed(0)
    weight, bias = torch.randn(shape).bfloat16() / shape[1] ** 0.5, torch.randn(shape[0]).bfloat16()
    bias = bias if with_bias else None
    assert supports_gated_linear(weight, bias, name)
    layer = PackedGatedLinear(weight, bias, name)
    for rows in [0, 1, 6, 7, 97, 200, 300]:
        x = torch.randn(rows, shape[1]).bfloat16()
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        out = layer(x)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), gated_activation(exact, name), atol=1e-3, rtol=2**-8)


def test_gates_that_do_not_fill_panels_or_have_no_kernel_stay_apart():
    weight = torch.zeros(96, 40, dtype=torch.bfloat16)
    assert not supports_gated_linear(weight, None, "silu")
    assert not supports_gated_linear(torch.zeros(128, 40), None, "silu")
