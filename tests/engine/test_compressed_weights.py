"""Weights kept a second time in 12 bits: the same text as without them. The real Worker, the bundled model in bf16."""

import asyncio

import pytest
import torch

from kernels.dispatch import cpu_kernels
from tests.engine.bundled_driver import CASES, read, running_driver, start

cpu = cpu_kernels()
pytestmark = pytest.mark.skipif(
    cpu is None or not cpu.linear.supports_linear(torch.zeros(16, 2, dtype=torch.bfloat16), None),
    reason="this CPU does not multiply bf16 pairs, or multiplies them in tiles",
)


async def texts(**settings):
    """Every case alone, then all of them together; and the bytes that the second copy takes."""
    async with running_driver(dtype="bfloat16", enable_prefix_caching=False, **settings) as driver:
        alone = [await read(start(driver, f"a{i}", case)) for i, case in enumerate(CASES)]
        together = await asyncio.gather(*(read(start(driver, f"b{i}", case)) for i, case in enumerate(CASES)))
        return [*alone, *together], driver.model.memory.get("compressed_weights", 0)


async def test_the_text_is_the_same():
    plain, none = await texts(compressed_weights=False)
    compressed, some = await texts(compressed_weights=True)
    assert compressed == plain
    assert none == 0 and some > 0


async def test_a_server_compresses_by_default_where_memory_is_plentiful():
    async with running_driver(dtype="bfloat16") as driver:
        assert driver.model.memory["compressed_weights"] > 0
