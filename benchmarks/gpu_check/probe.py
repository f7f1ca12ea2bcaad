"""`python -m benchmarks.gpu_check.probe [decode prefill rows linear sampling]`: each kernel a few times, for tools.

ncu and compute-sanitizer run this program and watch its kernels. It times nothing.
"""

import sys
from collections.abc import Iterator

import torch

from benchmarks.gpu_check.kernels import SHAPE
from benchmarks.kernel_speed import (
    Case,
    decode_case,
    linear_cases,
    prefill_case,
    row_cases,
    sampling_cases,
    uneven_decode_case,
)

GROUPS = ("decode", "prefill", "rows", "linear", "sampling")
RUNS = 2


def cases(group: str, device: torch.device) -> Iterator[Case]:
    """The cases of one group at the shapes of Llama-3-8B."""
    if group == "decode":
        yield decode_case(SHAPE, device, 64, 1024)
        yield decode_case(SHAPE, device, 1, 4096)
        yield uneven_decode_case(SHAPE, device, {1024: 15, 8192: 1})
    elif group == "prefill":
        yield prefill_case(SHAPE, device, 1, 2048, 2048)
        yield prefill_case(SHAPE, device, 1, 32, 8192)
    elif group == "rows":
        yield from row_cases(SHAPE, 64, device)
    elif group == "linear":
        yield from linear_cases(SHAPE, 8, device)
    elif group == "sampling":
        yield from sampling_cases(16, device)


def main() -> None:
    device = torch.device("cuda")
    for group in sys.argv[1:] or GROUPS:
        for case in cases(group, device):
            print(case.kernel, case.size, flush=True)
            for _ in range(RUNS):
                case.call()
            torch.cuda.synchronize()


if __name__ == "__main__":
    main()
