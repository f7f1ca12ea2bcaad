"""Each quantised type of GGUF against the `gguf` package's own dequantisation, over random bytes."""

import gguf
import numpy as np
import pytest
import torch

from engine.checkpoint.gguf import PLAIN_TYPES, TENSOR_TYPES
from engine.models.formats.gguf import LAYOUTS, GgufFormat, read_blocks
from engine.models.weight_format import Matrix
from kernels.cpu.quantized.scales import FACTORED, FP16
from kernels.dispatch import cpu_kernels
from kernels.quantized.weight import concatenate_rows

ROWS, COLUMNS = 5, 768
COMPILED = cpu_kernels() is not None and cpu_kernels().features.MULTIPLIES_PAIRS
FP16_NUMBERS = {  # where the blocks of a type hold numbers in fp16, which random bytes would make infinite
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)
}  # fmt: skip


def random_blocks(kind: str) -> np.ndarray:
    """uint8 [ROWS, bytes] with small numbers as scales."""
    layout, random = LAYOUTS[kind], np.random.default_rng(7)
    blocks = random.integers(0, 256, (ROWS, COLUMNS // layout.block, layout.num_bytes), dtype=np.uint8)
    for start in FP16_NUMBERS.get(kind, (0,)):
        numbers = random.normal(0, 0.1, blocks.shape[:2]).astype(np.float16)
        blocks[..., start : start + 2] = numbers[..., None].view(np.uint8)
    return blocks.reshape(ROWS, -1)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_values_are_those_of_the_reference(kind: str) -> None:
    blocks = random_blocks(kind)
    weight = read_blocks(torch.from_numpy(blocks), kind)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    assert weight.shape == (ROWS, COLUMNS)
    np.testing.assert_allclose(weight.dequantize().numpy(), expected, rtol=1e-6, atol=1e-6)
    matrix = Matrix("m", "m", (ROWS, COLUMNS))
    assert GgufFormat((("m", kind),)).num_bytes(matrix, 2) == weight.num_bytes
    assert concatenate_rows([weight, weight]) is not None


@pytest.mark.skipif(not COMPILED, reason="needs pairs of bf16")
@pytest.mark.parametrize("kind", LAYOUTS)
def test_packed_codes_take_no_more_bytes_than_they_need(kind: str) -> None:
    blocks = torch.from_numpy(random_blocks(kind)).repeat(13, 1)[:64]  # a panel of a packed matrix
    packed = cpu_kernels().code_linear.PackedCodes(read_blocks(blocks, kind))
    assert packed.form == (FACTORED if LAYOUTS[kind].wide else FP16)
    assert packed.num_bytes == GgufFormat((("m", kind),)).packed_bytes(Matrix("m", "m", (64, COLUMNS)))


def test_the_two_tables_of_types_agree() -> None:
    sizes = {kind.name: (kind.block, kind.num_bytes) for kind in TENSOR_TYPES.values()}
    assert {name: (layout.block, layout.num_bytes) for name, layout in LAYOUTS.items()} == {
        name: size for name, size in sizes.items() if name not in PLAIN_TYPES
    }
    for number, kind in TENSOR_TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == kind.name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (kind.block, kind.num_bytes)
