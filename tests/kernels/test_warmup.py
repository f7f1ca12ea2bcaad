"""Which kernels are compiled before a model is served, in what order, and under which locks."""

import subprocess
import sys
import threading
from contextlib import ExitStack

import numpy as np
import pytest

from kernels import code_cache, warmup
from kernels.cpu import parallel, simd
from kernels.cpu.parallel import next_item, parallel_kernel
from kernels.processor import may_use_tiles
from kernels.warmup import all_kernels, compile_kernels, needed_kernels


def _double(args):
    """numbers[item] *= 2 for every item."""
    numbers = simd.pointer_i64(args[2])
    item = next_item(args)
    while item < args[1]:
        simd.write(numbers, item, simd.read(numbers, item) * 2)
        item = next_item(args)


def doubles(kernel):
    numbers = np.arange(3)
    kernel(3, numbers.ctypes.data)
    return numbers.tolist() == [0, 2, 4]


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty folder of the cache."""
    monkeypatch.setattr(code_cache, "folder", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def hold(cache):
    """A function that takes the lock of a kernel, as another process that compiles it; the result gives it back."""
    with ExitStack() as locks:

        def take(kernel):
            lock = ExitStack()
            locks.push(lock)
            assert lock.enter_context(code_cache.lock(parallel.Cache(kernel.fn).lock, 0))
            return lock.close

        yield take


class Spy:
    """Stands in for a ParallelKernel: notes when it is compiled."""

    def __init__(self, name, log, busy=False):
        self.name, self.log, self.busy = name, log, busy

    def compile(self, wait=True):
        if self.busy and not wait:
            return False
        self.log.append(self.name)
        return True


def test_kernels_that_another_process_compiles_come_last():
    log = []
    compile_kernels([Spy("first", log, busy=True), Spy("second", log), Spy("third", log)])
    assert log == ["second", "third", "first"]


def test_a_kernel_that_another_process_compiles_is_loaded_once_it_is_done(cache, hold, monkeypatch):
    kernel, same = parallel_kernel("q")(_double), parallel_kernel("q")(_double)
    release = hold(kernel)
    assert not kernel.compile(wait=False) and "address" not in vars(kernel)
    timer = threading.Timer(0.1, release)
    timer.start()
    assert kernel.compile() and doubles(kernel) and kernel.is_on_disk()
    monkeypatch.setattr(parallel.ccallback.CFunc, "_compile_uncached", None)  # the second must come from disk
    assert same.compile(wait=False) and doubles(same)


def test_a_kernel_whose_lock_stays_held_is_compiled_all_the_same(hold, monkeypatch):
    monkeypatch.setattr(parallel, "WAIT_SECONDS", 0.05)
    kernel = parallel_kernel("q")(_double)
    hold(kernel)
    assert doubles(kernel)


def test_no_server_waits_for_a_process_of_the_lowest_priority(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    with code_cache.lock(path, 0) as first, code_cache.lock(path, 0) as second:
        assert first and not second
    monkeypatch.setattr(code_cache, "lets_others_pass", True)
    with code_cache.lock(path, 0) as background, code_cache.lock(path, 0) as server:
        assert background and server


def test_damaged_files_are_written_anew(cache):
    assert doubles(parallel_kernel("q")(_double))
    for content in (b"", b"\0" * 100):
        for path in [*cache.glob("*.nbi"), *cache.glob("*.nbc")]:
            path.write_bytes(content)
        assert doubles(parallel_kernel("q")(_double))
    (data,) = cache.glob("*.nbc")
    assert data.stat().st_size > 1000


def test_a_folder_is_for_one_kind_of_processor(monkeypatch):
    from llvmlite import binding

    digest = code_cache.digest.__wrapped__  # without its cache
    here = digest()
    assert digest() == here == code_cache.digest()
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: binding.FeatureMap(avx2=True))
    other_features = digest()
    monkeypatch.setattr(binding, "get_host_cpu_name", lambda: "another")
    other_name = digest()
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+avx2")
    other_choice = digest()
    monkeypatch.setattr(code_cache, "may_use_tiles", lambda: not may_use_tiles())
    assert len({here, other_features, other_name, other_choice, digest()}) == 5


def test_a_complete_folder_is_used_where_it_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.setattr(code_cache, "SOURCES", tmp_path / "package")
    monkeypatch.setattr(code_cache, "digest", lambda: "digest")
    monkeypatch.setattr(code_cache.Path, "home", lambda: tmp_path / "home")
    monkeypatch.setattr(code_cache.os, "access", lambda path, mode: "package" not in path.parts)
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    assert code_cache.folder() == tmp_path / "home/.cache/pageserve/kernels-digest"
    shipped = tmp_path / "package/__pycache__/kernels-digest"
    code_cache.mark_complete(shipped)
    assert code_cache.folder() == shipped
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "mine"))
    assert code_cache.folder() == tmp_path / "mine/kernels-digest"


@pytest.mark.parametrize("dtype, kv_format, others, words, modules", [
    ("bfloat16", None, False, {"f32", "int8", "fp8", "int4"},
     {"code_linear", "integer_linear", "code_rows", "scales", "w8a8", "lora", "compressed"}),
    ("bfloat16", "int8", True, {"f32", "fp8", "int4"}, set()),
    ("float32", "int4", True, {"bf16", "int8", "fp8"},
     {"code_linear", "integer_linear", "w8a8", "lora", "panels", "compressed", "pairs"}),
])  # fmt: skip
def test_the_choice_leaves_out_other_dtypes_and_formats(dtype, kv_format, others, words, modules):
    kernels = all_kernels()
    chosen = set(needed_kernels(dtype, kv_format, quantized=others, adapters=others, compressed=others))
    if kv_format is not None:
        left_out = {"_attention_bf16", "_attention_f32", "_prefill_bf16", "_prefill_f32", "attention_pairs_bf16"}
    else:
        left_out = set()
    for name, kernel in kernels.items():
        other = words & set(name.split("_")) or kernel.fn.__module__.rsplit(".", 1)[1] in modules or name in left_out
        assert (name in chosen) == (not other), name


def test_a_process_waits_for_another_that_compiles_in_the_background(tmp_path):
    def turn():
        """The answer to the next process."""
        with ExitStack() as held:
            return warmup.wait_for_turn(tmp_path, held)

    answers = []
    with ExitStack() as held:
        assert warmup.wait_for_turn(tmp_path, held)
        waiting = threading.Thread(target=lambda: answers.append(turn()))
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive() and not answers
        code_cache.mark_complete(tmp_path)
    waiting.join(10)
    assert answers == [False]


def test_a_process_in_the_background_ends_with_its_parent_and_imports_nothing_while_it_waits(tmp_path):
    waits = "import sys; from kernels import warmup; assert not {'torch', 'numba'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", waits], check=True, timeout=60)
    with code_cache.lock(tmp_path / "background.lock", 0):
        helper = warmup.Helper("--rest", str(tmp_path))
        assert helper.process.poll() is None
        helper.process.stdin.close()  # as when the parent has ended
        assert helper.process.wait(30) == 0
    assert not list(tmp_path.glob("*.nb?")), "it compiled before its turn"


def test_nothing_runs_in_the_background_once_all_kernels_are_on_disk(cache, monkeypatch):
    started = []
    monkeypatch.setattr(warmup, "Helper", lambda *arguments: started.append(arguments))
    kernel = parallel_kernel("q")(_double)
    monkeypatch.setattr(warmup, "all_kernels", lambda: {"_double": kernel})
    assert warmup.compile_rest() == 1 and started == [("--rest", str(cache))]
    kernel.compile()
    assert warmup.compile_rest() == 0 and len(started) == 1 and code_cache.is_complete(cache)


def test_a_process_in_the_background_ends_by_itself_once_nothing_is_left(tmp_path):
    code_cache.mark_complete(tmp_path)
    assert warmup.Helper("--rest", str(tmp_path)).process.wait(30) == 0
