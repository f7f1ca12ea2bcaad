"""Recorded programs of CPU kernels: order, memory, threads, and the work that cannot be recorded."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from kernels.cpu import parallel
from kernels.cpu.elementwise.norms import rms_norm
from kernels.cpu.program import NotRecordable, Recording, Workspace, record
from kernels.elementwise.rows import limit, take_rows

ROWS, SIZE, DEPTH = 40, 64, 50


def layers(x, weight):
    """[ROWS, SIZE] -> [ROWS, SIZE] through DEPTH kernels, each of which needs all rows of the one before."""
    residual = None
    for _ in range(DEPTH):
        if residual is None:
            x, residual = rms_norm(x, weight, 1e-5, None, 0.0), x
        else:
            x, residual = rms_norm(x, weight, 1e-5, residual, 0.0)
    return x


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_a_program_computes_what_its_kernels_compute(num_threads):
    x, weight = torch.randn(ROWS, SIZE), torch.rand(SIZE)
    place = x.clone()
    program = record(lambda: layers(place, weight), Workspace())
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for _ in range(20):
            place.copy_(torch.randn(ROWS, SIZE))
            assert torch.equal(program(), layers(place, weight))
    finally:
        torch.set_num_threads(threads)


def test_results_that_nothing_refers_to_share_memory():
    workspace = Workspace()
    x, weight = torch.randn(ROWS, SIZE), torch.rand(SIZE)
    first = record(lambda: layers(x, weight), workspace)
    size = workspace.num_bytes
    assert size <= 5 * x.nbytes, "a layer needs its input, residual and result"
    second = record(lambda: layers(x[:7], weight), workspace)
    assert workspace.num_bytes <= size + x.nbytes
    expected = layers(x[:7], weight)
    first()
    assert torch.equal(second(), expected)


@pytest.mark.parametrize("shape", [(5, 512), (5, 4, 128), (1, 512), (0, 512)], ids=str)
def test_rows_that_would_share_a_set_of_l1_have_gaps(shape, monkeypatch):
    """Rows of 1 KiB in bf16, for tiles of AMX; a view without axes of its own for the gap."""
    monkeypatch.setattr(parallel, "HAS_BF16_TILES", True)
    recording = Recording(Workspace())
    rows = [parallel.empty_rows(shape, torch.bfloat16)]
    with recording, parallel.recording_to(recording):
        rows.append(parallel.empty_rows(shape, torch.bfloat16))
    for x in rows:
        assert x.shape == shape and x.view(-1, 512).shape == (shape[0], 512)
        assert shape[0] < 2 or x.stride(0) == 512 + 32
    assert parallel.empty_rows(shape, torch.float32).is_contiguous()
    assert parallel.empty_rows((5, 520), torch.bfloat16).is_contiguous()
    monkeypatch.setattr(parallel, "HAS_BF16_TILES", False)
    assert parallel.empty_rows(shape, torch.bfloat16).is_contiguous()


def test_recording_runs_no_kernel_but_those_of_other_threads():
    place, elsewhere = torch.ones(100), torch.ones(100)

    def work():
        limit(place, 2.0, 0.0)
        thread = threading.Thread(target=limit, args=(elsewhere, 2.0, 0.0))
        thread.start()
        thread.join()
        return place

    program = record(work, Workspace())
    assert place.eq(1).all() and elsewhere.eq(2).all()
    program()
    assert place.eq(2).all() and elsewhere.eq(2).all()


def test_a_program_takes_rows():
    x = torch.randn(9, 5, 32)
    places = torch.tensor([8, 0, 3])
    workspace = Workspace()
    for rows in (x, x[:, 1:4], x.view(9, -1), x.bfloat16(), x[:, 0, 3:]):
        assert torch.equal(record(lambda rows=rows: take_rows(rows, places), workspace)(), rows[places])
    assert record(lambda: take_rows(x, places[:0]), workspace)().shape == (0, 5, 32)
    transposed = x.transpose(1, 2)
    assert torch.equal(take_rows(transposed, places), transposed[places]), "its rows are not dense: torch computes it"


def test_operators_of_torch_are_refused():
    x, weight = torch.randn(ROWS, SIZE), torch.rand(SIZE)
    with pytest.raises(NotRecordable, match="mul"):
        record(lambda: layers(x, weight) * 2, Workspace())
    with pytest.raises(NotRecordable, match="empty"):
        record(lambda: torch.empty(3), Workspace())
    before = layers(x, weight)
    assert torch.equal(before, layers(x, weight)), "kernels after a refusal are not recorded"


def test_recording_does_not_import_the_compiler_of_torch():
    """torch._dynamo takes 1.5 s to import, which every start of a Worker would pay."""
    script = """
import sys, torch
from kernels.cpu import parallel
from kernels.cpu.program import Workspace, record
record(lambda: parallel.empty((2, 3), torch.float32), Workspace())
print("torch._dynamo" in sys.modules)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
