"""For the tests of kernels: memory that nobody wrote is NaN, and a device that a test broke ends its process."""

import os

import pytest
import torch

DEVICE_BROKEN = 70  # exit status of a pytest-xdist process, which xdist then replaces


@pytest.fixture(autouse=True)
def poisoned():
    """torch.empty gives NaN (integers: the largest), so an output that a kernel does not write cannot pass by luck."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def working_device(request):
    """After an illegal access every later call of the process fails: the tests after this one need another process."""
    yield
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
    except Exception:
        if hasattr(request.config, "workerinput"):  # a process of pytest-xdist
            os._exit(DEVICE_BROKEN)
        raise
