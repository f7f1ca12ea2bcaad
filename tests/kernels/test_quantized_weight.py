"""QuantizedWeight against the formula, number by number."""

import pytest
import torch

from kernels.quantized.weight import INT4, QuantizedWeight, concatenate_rows, pack_4bit, unpack_4bit

NF4_LIKE = tuple(i * i / 8 - 1 for i in range(16))


def make(codebook: tuple[float, ...] | None, offsets: bool, permuted: bool, rows: int = 6) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(-128, 128, (rows, 8), generator=generator).to(torch.int8)
    if codebook is not None:
        codes = pack_4bit(torch.randint(16, (rows, 8), generator=generator).to(torch.uint8))
    return QuantizedWeight(
        codes,
        torch.rand(rows, 2, generator=generator) + 0.1,
        group_size=4,
        offsets=torch.rand(rows, 2, generator=generator) if offsets else None,
        codebook=codebook,
        permutation=torch.tensor([3, 0, 7, 1, 2, 6, 5, 4], dtype=torch.int32) if permuted else None,
    )


@pytest.mark.parametrize("codebook", [None, INT4, NF4_LIKE])
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("permuted", [False, True])
def test_each_value_follows_the_formula(codebook: tuple[float, ...] | None, offsets: bool, permuted: bool) -> None:
    weight = make(codebook, offsets, permuted)
    codes = weight.codes if codebook is None else unpack_4bit(weight.codes)
    values = weight.dequantize()
    assert weight.shape == values.shape == (6, 8)
    for row in range(6):
        for column in range(8):
            code = int(codes[row, column])
            meaning = code if codebook is None else codebook[code]
            expected = meaning * float(weight.scales[row, column // 4])
            expected += float(weight.offsets[row, column // 4]) if weight.offsets is not None else 0.0
            feature = column if weight.permutation is None else int(weight.permutation[column])
            assert float(values[row, feature]) == pytest.approx(expected, rel=1e-6)


def test_rows_of_like_parts_are_joined_and_of_unlike_parts_are_not() -> None:
    parts = [make(INT4, True, True, rows) for rows in (6, 3)]
    joined = concatenate_rows(parts)
    assert joined is not None
    assert torch.equal(joined.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert concatenate_rows([parts[0], make(INT4, False, True, 3)]) is None
    assert concatenate_rows([parts[0], make(NF4_LIKE, True, True, 3)]) is None
    assert concatenate_rows([parts[0], make(INT4, True, False, 3)]) is None


def test_bytes_count_all_tensors() -> None:
    assert make(INT4, True, True).num_bytes == 6 * 4 + 2 * 6 * 2 * 4 + 8 * 4
