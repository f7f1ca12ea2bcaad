"""The Triton kernels where there is no GPU: in the interpreter, and compiled ahead of time. Each in its own process,
because both must be decided before triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
CASES = [
    str(Path(__file__).with_name(f"{name}.py"))
    for name in (
        "triton_cases",
        "triton_attention",
        "work_cases",
        "shared_cases",
        "fused_cases",
        "moe_cases",
        "sampling_cases",
        "matmul_cases",
        "gemv_cases",
        "code_matmul_cases",
        "scaled_matmul_cases",
        "token_mask_cases",
        "lora_cases",
    )
]
ROOT = Path(__file__).parents[2]


# The interpreter computes dots with numpy, and so with OpenBLAS. Its code for Haswell and Zen sums the last rows of a
# tile in another order than the first, and a row's bits would depend on the batch.
BLAS = {"OPENBLAS_CORETYPE": "Sandybridge"}


def run(*arguments, **environment):
    environment = {**os.environ, **BLAS, **environment}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the cases run on the device itself")
def test_in_the_interpreter():
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *CASES, TRITON_INTERPRET="1")
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the cases run on the device itself")
def test_slow_cases_in_the_interpreter():
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "slow", *CASES, TRITON_INTERPRET="1")
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


# Whole decoders (rotary embedding with QK-norm and of a part of each head, learned positions, post-norm, soft caps,
# parallel residual, attention_chunk), and plans through the ModelRunner with the sampler, against transformers
# or a formula: with TRITON_INTERPRET=1 every operator of a step that has a kernel goes to it.
FAMILIES = "tests/engine/models/test_families.py"
DECODERS = [
    f"{FAMILIES}::test_logits_and_size_of_a_variant[opt_350m]",
    "tests/engine/models/layers/test_attention.py::test_a_mechanism_against_its_formula[llama4]",
]
SLOW_DECODERS = [
    f"{FAMILIES}::test_family[qwen3_moe-chunked]",
    f"{FAMILIES}::test_family[gemma2-chunked]",
    *(
        f"{FAMILIES}::test_logits_and_size_of_a_variant[{name}]"
        for name in ("gpt2_options", "gpt_neox_sequential", "phi_tied")
    ),
]
RUNNER = "tests/engine/worker/test_model_runner.py::test_chunks_mixed_with_decodes_of_others"


@pytest.mark.skipif(torch.cuda.is_available(), reason="make gpu-check runs models on the device itself")
def test_a_whole_model_in_the_interpreter():
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *DECODERS, RUNNER, TRITON_INTERPRET="1")
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="make gpu-check runs models on the device itself")
def test_other_models_in_the_interpreter():
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *SLOW_DECODERS, TRITON_INTERPRET="1")
    assert done.returncode == 0 and "5 passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_device():
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *CASES)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


def test_compiled_for_every_architecture():
    """kernels/aot.py covers every kernel and finds no spill, no shared memory beyond the device's, and matrix
    instructions where they must be."""
    done = run("-W", "ignore", "-m", "kernels.aot", "--quick", "--jobs", "2", PYTHONPATH=str(ROOT))
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.slow
def test_every_variant_compiled_for_a100():
    """`make test` compiles one variant of the kernels that multiply no tiles."""
    done = run("-W", "ignore", "-m", "kernels.aot", "--sm", "80", "--jobs", "2", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


GATES = """
from dataclasses import replace
from types import SimpleNamespace
from kernels import aot
from kernels.aot_configuration import AotConfiguration

configuration = AotConfiguration(None, "", "bf16", {}, num_warps=4, max_spill=8, needs=("mma",))
good = aot.Report(registers=128, spilled=8, shared_memory=163 * 1024, tensor_memory=0, programs=1, mma=1, wgmma=0,
                  tcgen05=0, async_copies=0, wide=4, ahead=0)
assert aot.problems(configuration, 80, good) == []
for change, words in (({"spilled": 16}, "spills 16 bytes, 8 are allowed"), ({"mma": 0}, "has no mma"),
                      ({"shared_memory": 163 * 1024 + 1}, "the limit is 166912"),
                      ({"tensor_memory": 513}, "513 columns of tensor memory")):
    assert words in " ".join(aot.problems(configuration, 80, replace(good, **change))), words
assert aot.problems(configuration, 90, replace(good, shared_memory=200 * 1024)) == []
counted = replace(configuration, max_shared_memory=100)
assert "the limit is 100" in " ".join(aot.problems(counted, 80, replace(good, shared_memory=101)))
fetching = replace(configuration, needs=("wide", "ahead"))
assert aot.problems(fetching, 80, good) == [aot.NEEDS["ahead"]]
assert aot.problems(fetching, 80, replace(good, wide=0, ahead=3)) == [aot.NEEDS["wide"]]
assert aot.problems(fetching, 75, replace(good, shared_memory=0)) == [], "sm_75 has no asynchronous copies"

turing, ampere = aot.configurations(75), aot.configurations(80)
assert not any("bf16" in str((c.dtype, c.types)) for c in turing) and any(c.dtype == "bf16" for c in ampere)
counts = [len(aot.configurations(capability, quick=True)) for capability in (86, 80, 90)]
assert 0 < counts[0] < counts[1] < counts[2], counts
of_80, quick_of_80 = aot.configurations(80), aot.configurations(80, quick=True)
assert {c.kernel.__name__ for c in quick_of_80} == {c.kernel.__name__ for c in of_80 if c.quick}
assert {c.label for c in of_80 if c.quick and c.needs} <= {c.label for c in quick_of_80}

assert aot.uncovered_kernels() == []
from kernels.cache import copy_blocks
copy_blocks.aot_configurations = lambda capability: iter(())
assert aot.uncovered_kernels() == [f"kernels.cache.copy_blocks.{name}_blocks_kernel" for name in ("copy", "pack")]
"""

ONE_VARIANT = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from kernels.attention.aot_cases import case
from kernels.attention.decode import paged_attention_kernel
from kernels.attention.prefill import prefill_attention_kernel
from kernels.attention.shared import common_keys_kernel, window_constants, windows_kernel
from kernels.attention.work import reduce_chunks_kernel, reduce_constants, work_constants, work_map_kernel

shape = case("bf16", 32, 8, 128).shape
tile = shape.tile("decode", 90, 4)
constants = shape.constants(tile, 90)
backend = make_backend(GPUTarget("cuda", 90, 32))
numbers, floats = torch.zeros(4096, dtype=torch.int32), torch.zeros(64, dtype=torch.bfloat16)
partial = torch.zeros(4096)

def key(kernel, *arguments, **keywords):
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    return str(bind(*arguments, **keywords)[1])

def decode(start, stride):
    return key(paged_attention_kernel, *[floats] * 3, numbers[start:], numbers, numbers[start:], None, None, floats,
               partial, partial[start:], 0.5, 0.0, stride, WINDOW_ROWS=64, WINDOW_KEYS=64, **constants)

def prefill(start, stride):
    return key(prefill_attention_kernel, *[floats] * 3, numbers[start:], numbers, None, None, floats, partial,
               partial[start:], 0.5, 0.0, stride, ALWAYS_MASKED=False, OVERLAP=False, TMA=False, **constants)

def work_map(start, number):
    return key(work_map_kernel, *[numbers[start:]] * 3, numbers, *[numbers[start:]] * 3, *[number] * 8,
               **work_constants("decode", shape, tile))

def windows(start, number):
    sizes = {"BLOCK_SIZE": 16, "BLOCK_N": 64, "LEAST_KEYS": 512, "COMPARED": 512}
    return (key(common_keys_kernel, *[numbers[start:]] * 4, number, **sizes),
            key(windows_kernel, numbers[start:], numbers[start:], number, **window_constants(4)))

def reduce(start):
    return key(reduce_chunks_kernel, partial, partial[start:], numbers[start:], numbers[start:], None, floats,
               1 + 15 * start, **reduce_constants(shape))

assert len({decode(0, 1), decode(0, 16), decode(1, 7), decode(3, 4096)}) == 1
assert len({prefill(0, 1), prefill(0, 16), prefill(1, 7), prefill(3, 256)}) == 1
assert len({work_map(0, 1), work_map(0, 16), work_map(1, 7), work_map(3, 256)}) == 1
assert len({windows(0, 1), windows(0, 16), windows(1, 7), windows(3, 256)}) == 1
assert len({reduce(0), reduce(1), reduce(3)}) == 1
assert key(prefill_attention_kernel, *[floats] * 3, numbers, numbers, None, None, floats[1:], partial, partial, 0.5,
           0.0, 1, ALWAYS_MASKED=False, OVERLAP=False, TMA=False, **constants) != prefill(0, 1), "unaligned output"
"""


@pytest.mark.parametrize("script", [GATES, ONE_VARIANT], ids=["the gates", "one variant"])
def test_ahead_of_time_compiler(script):
    """The gates of kernels/aot.py; and that no attention launch is compiled again for another batch, table width or
    slice of a step's metadata."""
    done = run("-W", "ignore", "-c", "import triton\n" + script, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr[-4000:]


OVERLAPPED = r"""
import re
import sys
from kernels import aot

ends = sys.argv[1]
(found,) = [c for c in aot.configurations(90, True, "prefill_attention") if c.label.split()[-1].startswith(ends)]
ptx = aot.build(found, 90).asm["ptx"]
names = {"wgmma.mma_async": "product ", "wgmma.wait_group": "wait ", "ex2.approx": "softmax "}
loops = []
for label in re.findall(r"^(\$L__BB\w+):", ptx, re.M):
    body = re.search(rf"^{re.escape(label)}:(.*?)bra(?:\.uni)?\s+{re.escape(label)};", ptx, re.M | re.S)
    if body and "wgmma.mma_async" in body[1]:
        steps = re.findall("|".join(map(re.escape, names)), body[1])
        loops.append(re.sub(r"(\w+ )\1+", r"\1", "".join(names[name] for name in steps)).strip())
assert loops == ["product wait product softmax"] * 2, loops
"""


@pytest.mark.parametrize("ends", ["w", "tma"])
def test_softmax_overlaps_the_tensor_cores_on_hopper(ends):
    """Prefill of Llama-3-8B on sm_90, with masks and without, from blocks of 16 tokens and through TMA: after the wait
    for the scores a step starts the product of the probabilities before it, and waits for that product in the next
    step, after the exponentials."""
    done = run("-W", "ignore", "-c", "import triton\n" + OVERLAPPED, ends, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr[-4000:]
