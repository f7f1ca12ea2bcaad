"""CPU kernels compiled for processors with fewer instructions. `make processors` runs all tests of the kernels so."""

import pytest
from llvmlite import binding

from tests.kernels.other_processors import run_tests

pytestmark = pytest.mark.skipif(not binding.get_host_cpu_features().get("avx2"), reason="runs code for AVX2")


@pytest.mark.parametrize("arguments", [
    ("test_compressed_linear.py",),
    pytest.param(("test_quantized_linear.py",), marks=pytest.mark.slow),
    pytest.param(("test_attention.py", "-k", "tiles or chunk"), marks=pytest.mark.slow),
    pytest.param(("test_lora.py",), marks=pytest.mark.slow),
], ids=lambda arguments: arguments[0])  # fmt: skip
def test_kernels_for_avx2(arguments):
    file, *choice = arguments
    done = run_tests("haswell", "-n", "0", "-p", "no:cacheprovider", f"tests/kernels/{file}", *choice)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]


@pytest.mark.skipif(not binding.get_host_cpu_features().get("avx512bw"), reason="runs code for AVX-512")
def test_integer_codes_for_avx512_without_bf16():
    files = ("tests/kernels/test_quantized_linear.py", "tests/kernels/test_w8a8.py")
    choice = (*files, "-k", "w8a8 or int4 or int6 or int8 or large_group")
    done = run_tests("icelake-server", "-n", "0", "-p", "no:cacheprovider", *choice)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]
