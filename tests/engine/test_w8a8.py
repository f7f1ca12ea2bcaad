"""--quantization w8a8: a sequence gets the same text in any batch. The real Worker, the bundled model in bf16."""

import asyncio

import pytest

from engine.errors import ConfigError
from engine.llm import LLM
from kernels.dispatch import cpu_kernels
from tests.engine.bundled_driver import CASES, read, running_driver, start

cpu = cpu_kernels()


@pytest.mark.skipif(cpu is None or not cpu.features.HAS_INT8_DOT, reason="needs AVX512-VNNI")
async def test_text_does_not_depend_on_the_batch():
    async with running_driver(dtype="bfloat16", quantization="w8a8", enable_prefix_caching=False) as driver:
        alone = [await read(start(driver, f"a{i}", case)) for i, case in enumerate(CASES)]
        together = await asyncio.gather(*(read(start(driver, f"b{i}", case)) for i, case in enumerate(CASES)))
        assert together == alone


def test_a_model_in_fp32_is_refused_before_its_weights_are_read():
    with pytest.raises(ConfigError, match=r"quantization: w8a8 is not served here: .*use --dtype bfloat16"):
        LLM(quantization="w8a8", dtype="float32", device="cpu")
