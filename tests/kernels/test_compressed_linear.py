"""Linear layers over weights of 12 bits, against the plain panels: the same bits, for any weights."""

import pytest
import torch

from kernels.dispatch import cpu_kernels
from kernels.linear.packed import PackedGatedLinear, PackedLinear

cpu = cpu_kernels()
pytestmark = pytest.mark.skipif(
    cpu is None or not cpu.linear.supports_linear(torch.zeros(16, 2, dtype=torch.bfloat16), None),
    reason="this CPU does not multiply bf16 pairs",
)
IN_TILES = cpu is not None and cpu.features.HAS_BF16_TILES
# (out_features, in_features): a part of a panel, whole panels, a deep one, the least there is, without and with AMX
SHAPES = [(80, 40), (128, 96), (208, 4098), (16, 2)] if not IN_TILES else [(80, 64), (128, 96), (208, 4128), (16, 32)]


def normal(shape):
    return torch.randn(shape).bfloat16()


def one_exponent(shape):
    return torch.randint(0x3F80, 0x4000, shape, dtype=torch.int16).view(torch.bfloat16)


def with_rare_exponents(shape):
    """Sixteen exponents and, at a few places, others: zeros, subnormal numbers, infinities, the largest numbers."""
    weight = (torch.rand(shape) + 0.5) * 2.0 ** -torch.randint(0, 15, shape)
    weight = weight.bfloat16() * torch.randn(shape).sign().bfloat16()
    flat = weight.view(-1)
    places = torch.randperm(flat.numel())[: max(1, flat.numel() // 3000)]
    rare = torch.tensor([0.0, -0.0, 1e-39, -3e38, torch.inf, 1e-30]).bfloat16()
    flat[places] = rare[torch.arange(len(places)) % len(rare)]
    flat[0], flat[-1] = 1e20, -1e-20  # the first pair of inputs, and the last
    return weight


def inputs_of(shape, rows):
    return torch.randn(rows, shape[1]).bfloat16()


@pytest.mark.parametrize("make", [normal, one_exponent, with_rare_exponents])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_few_rows_have_the_bits_of_plain_weights(shape, make, monkeypatch):
    monkeypatch.setattr(cpu.compressed_linear, "MAX_OTHER", 1)  # small matrices have more rare exponents
    torch.manual_seed(0)
    weight, bias = make(shape), torch.randn(shape[0]).bfloat16()
    layer, plain = PackedLinear(weight, bias, compresses=True), PackedLinear(weight, bias)
    assert layer.compressed is not None and plain.compressed is None
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for rows in [*range(10), 16, 17, 32, 33, 65, 128, 129]:
                x = inputs_of(shape, rows)
                assert layer(x).view(torch.int16).equal(plain(x).view(torch.int16)), rows
                assert layer.compressed.takes(x) == (0 < rows <= cpu.compressed_linear.MAX_ROWS)
                if layer.compressed.takes(x):
                    out = layer.compressed.linear(x, bias, shape[0])
                    assert out.view(torch.int16).equal(plain(x).view(torch.int16)), rows
    finally:
        torch.set_num_threads(threads)


def sixteen_exponents(shape):
    return (2.0 ** -(torch.arange(shape[0] * shape[1]) % 16)).bfloat16().view(shape)


def test_rare_exponents_are_kept_apart_in_order():
    weight = sixteen_exponents((192, 96))
    for row, column in [(70, 95), (64, 0), (127, 1), (99, 37), (80, 36)]:
        weight[row, column] = 2.0**9
    panels = cpu.linear.pack(weight)
    compressed = cpu.compressed_linear.compress(panels)
    assert compressed.starts.tolist() == [0, 0, 3, 3]
    assert compressed.others.tolist() == [0, 18, 47]
    assert compressed.plain.equal(panels[1, [0, 18, 47]])


def test_weights_with_many_rare_exponents_are_not_compressed():
    weight = sixteen_exponents((64, 96))
    weight[5, 0:6:2] = 2.0**9  # three of 48 words: one in sixteen
    assert PackedLinear(weight, None, compresses=True).compressed is not None
    weight[6, 6] = 2.0**9
    layer = PackedLinear(weight, None, compresses=True)
    assert layer.compressed is None and layer.panels is not None
    x = inputs_of(weight.shape, 2)
    assert layer(x).equal(PackedLinear(weight, None)(x))


@pytest.mark.skipif(not IN_TILES, reason="this CPU has no AMX")
def test_shapes_that_tiles_do_not_fill_are_not_compressed():
    assert PackedLinear(torch.ones(64, 80).bfloat16(), None, compresses=True).compressed is None


def test_other_dtypes_are_not_compressed():
    assert PackedLinear(torch.ones(64, 96), None, compresses=True).compressed is None


@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_gated_layer_has_the_bits_of_plain_weights(with_bias, name):
    torch.manual_seed(0)
    shape = (192, SHAPES[2][1])
    weight = torch.randn(shape).bfloat16() / shape[1] ** 0.5
    bias = torch.randn(shape[0]).bfloat16() if with_bias else None
    layer, plain = (PackedGatedLinear(weight, bias, name, compresses) for compresses in (True, False))
    assert layer.compressed is not None and plain.compressed is None
    for rows in [*range(8), 16, 17, 32, 33, 65, 128, 129]:
        x = inputs_of(shape, rows)
        assert layer(x).equal(plain(x)), rows


def test_rows_may_be_strided():
    torch.manual_seed(0)
    layer, plain = (PackedLinear(torch.ones(64, 96).bfloat16(), None, compresses) for compresses in (True, False))
    wide = torch.randn(6, 2 * 96 + 1).bfloat16()
    for x in (wide[:, :96], wide[:, 1:97], wide[::3, 96:192], wide[:, ::2][:, :96]):
        assert layer(x).equal(plain(x))


def test_a_copy_takes_three_quarters_of_the_bytes():
    weight = torch.randn(1024, 768, generator=torch.Generator().manual_seed(0)).bfloat16()
    layer = PackedLinear(weight, None, compresses=True)
    assert 0.75 < layer.compressed.num_bytes / (2 * weight.numel()) < 0.77
