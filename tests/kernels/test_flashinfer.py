"""FlashInfer as a backend: our arguments against its documented semantics, and against its signatures if installed."""

import ast
import importlib.util
import inspect
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.attention.flashinfer import NUM_TURNS, FlashInferPrefill, PromptAttention, device_bytes
from kernels.attention.prefill import prefill_attention_reference
from tests.engine.worker.lazy_queue import LazyQueue
from tests.kernels.fake_flashinfer import as_package
from tests.kernels.oracle import attention, fused_q, paged


def sizes(**changes):
    usual = dict(num_heads=4, num_kv_heads=2, head_dim=16, block_size=8, dtype=torch.float32, scale=0.3, softcap=0.0,
                 windows=(0,))  # fmt: skip
    return PromptAttention(**usual | changes)


def block_ids(data, block_size):
    """The used entries of each block table, one sequence after the other."""
    counts = [-(-n // block_size) for n in data.seq_lens.tolist()]
    return torch.cat([table[:n] for table, n in zip(data.block_tables, counts, strict=True)])


CASES = [
    {},
    {"windows": (0, 1, 5, 64), "scale": 1.0},
    {"softcap": 1.5, "windows": (0, 7)},
    {"num_heads": 3, "num_kv_heads": 3, "block_size": 16},
    {"num_heads": 8, "num_kv_heads": 1, "head_dim": 64, "dtype": torch.bfloat16},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_random_mixes_of_prompts_and_chunks(monkeypatch, case):
    """Whole prompts, chunks behind cached tokens and last pages of any length; one FlashInferPrefill for all steps."""
    torch.manual_seed(0)
    random, queue, size = np.random.default_rng(0), LazyQueue(), sizes(**case)
    package = as_package(monkeypatch, queue)
    prefill = FlashInferPrefill(queue, size, max_num_seqs=6)
    tolerance = {"atol": 2e-2, "rtol": 2e-2} if size.dtype is torch.bfloat16 else {}
    for step in range(8):
        seq_lens = random.integers(1, 70, size=random.integers(1, 7))
        q_lens = np.where(random.random(len(seq_lens)) < 0.3, seq_lens, random.integers(1, seq_lens + 1))
        data = paged(seq_lens.tolist(), size.num_kv_heads, size.head_dim, size.block_size, size.dtype)
        starts = np.concatenate([[0], q_lens.cumsum()]).astype(np.int32)
        q = fused_q(int(starts[-1]), size.num_heads, size.num_kv_heads, size.head_dim, size.dtype)
        planned = prefill.plan(starts, seq_lens, block_ids(data, size.block_size))
        assert len(package.plans) == (step + 1) * len(size.windows), "once per step and window"
        for window in size.windows:
            options = {"sliding_window": window, "softcap": size.softcap}
            out = torch.full((len(q) + 1, *q.shape[1:]), float("nan"), dtype=q.dtype)
            assert planned.attend(q, data.k_cache, data.v_cache, window, out[1:]).data_ptr() == out[1:].data_ptr()
            expected = prefill_attention_reference(
                q, data.k_cache, data.v_cache, data.block_tables, torch.from_numpy(starts), data.seq_lens,
                int(q_lens.max()), size.scale, **options,
            )  # fmt: skip
            torch.testing.assert_close(out[1:], expected, **tolerance)
    rows = q.split(q_lens.tolist())  # the reference itself, against dense attention
    dense = [attention(rows[i], data.keys[i], data.values[i], size.scale, **options) for i in range(len(rows))]
    torch.testing.assert_close(planned.attend(q, data.k_cache, data.v_cache, window), torch.cat(dense), **tolerance)


def test_a_plan_is_not_overwritten_before_the_device_has_copied_it(monkeypatch):
    queue = LazyQueue()
    package = as_package(monkeypatch, queue)
    prefill = FlashInferPrefill(queue, sizes(windows=(0, 5)), max_num_seqs=3)
    expected, arrived, steps = [], [], 7
    for n in range(1, steps + 1):
        lens = np.arange(3) + 8 * n
        prefill.plan(np.array([0, 1, 2, 3 + n]), lens, torch.zeros(3 * n + 2, dtype=torch.int32))
        for wrapper in package.plans[-2:]:
            expected.append([[0, 1, 2, 3 + n], [0, n, 2 * n + 1, 3 * n + 2], [8, 1, 2]])
            arrived.append(wrapper.device_arrays)
        assert queue.num_done >= 6 * (n - NUM_TURNS), "the copies of the step that had this turn before"
    assert queue.num_done < 6 * steps, "the host is ahead"
    queue.catch_up()
    assert [[x.tolist() for x in arrays] for arrays in arrived] == expected


def test_all_wrappers_share_one_workspace_and_the_warm_up_runs_each_window(monkeypatch):
    queue = LazyQueue()
    package = as_package(monkeypatch, queue)
    prefill = FlashInferPrefill(queue, sizes(windows=(0, 5)), max_num_seqs=3)
    ran = []
    wrapper = package.BatchPrefillWithPagedKVCacheWrapper
    run = wrapper.run
    monkeypatch.setattr(wrapper, "run", lambda self, *args, **options: (ran.append(self), run(self, *args, **options)))
    prefill.warm_up()
    assert ran == package.plans and len({one.window_left for one in ran}) == 2
    for _ in range(NUM_TURNS):
        prefill.plan(np.array([0, 1]), np.array([1]), torch.zeros(1, dtype=torch.int32))
    wrappers = set(package.plans)
    assert len(wrappers) == 2 * NUM_TURNS and len({one.workspace.data_ptr() for one in wrappers}) == 1
    workspace = package.plans[0].workspace.numel()
    assert prefill.num_bytes == device_bytes(2) == workspace + 4 * ((8 << 20) + 4 * 32768)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, ""),
        ({"dtype": torch.float16, "head_dim": 256}, ""),
        ({"dtype": torch.float32}, "not in float32"),
        ({"head_dim": 96}, "head sizes of 64, 128, 256, not 96"),
    ],
)
def test_what_its_kernels_do_not_serve(changes, words):
    problem = sizes(**{"dtype": torch.bfloat16, "head_dim": 128, **changes}).problem()
    assert words in problem and bool(words) == bool(problem)


def methods(tree):
    """Name -> parameters of the wrapper in the package's source; of overloads the last, which is the function."""
    names = (isinstance(node, ast.ClassDef) and node.name == "BatchPrefillWithPagedKVCacheWrapper" for node in tree)
    (wrapper,) = itertools.compress(tree, names)
    return {node.name: node.args for node in wrapper.body if isinstance(node, ast.FunctionDef)}


def test_the_stand_in_has_the_signatures_of_the_package(monkeypatch):
    spec = importlib.util.find_spec("flashinfer")
    if spec is None:
        pytest.skip("flashinfer-python is not installed")
    source = Path(spec.submodule_search_locations[0], "prefill.py").read_text(encoding="utf-8")
    real = methods(ast.parse(source).body)
    ours = as_package(monkeypatch, LazyQueue()).BatchPrefillWithPagedKVCacheWrapper
    for name in ("__init__", "plan", "run"):
        parameters = list(inspect.signature(getattr(ours, name)).parameters.values())
        positional = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
        keywords = {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}
        places = [argument.arg for argument in real[name].args]
        assert places[: len(positional)] == positional, name
        assert keywords <= {*places[len(positional) :], *(argument.arg for argument in real[name].kwonlyargs)}, name
