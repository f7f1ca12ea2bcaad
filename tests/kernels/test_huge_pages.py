"""Memory in huge pages: where tensors lie, when it is freed, and what happens where the kernel gives none."""

import gc

import pytest
import torch

from kernels import huge_pages
from kernels.cpu.elementwise.activations import Gate
from kernels.dispatch import cpu_kernels
from kernels.linear.packed import PackedGatedLinear, PackedLinear
from kernels.quantized.weight import QuantizedWeight
from tests.mappings import asks_for_huge_pages, mapping_of

needs_huge_pages = pytest.mark.skipif(not huge_pages.page_bytes(), reason="this kernel gives no huge pages")
MIB = 1 << 20


def test_tensors_of_one_mapping_do_not_overlap():
    arena = huge_pages.Arena()
    shapes = [
        ((3, 5), torch.float32),
        ((0, 7), torch.int8),
        ((1,), torch.uint8),
        ((), torch.int64),
        ((65,), torch.bfloat16),
    ]
    tensors = [arena.empty(shape, dtype) for shape, dtype in shapes * 40]
    for i, x in enumerate(tensors):
        assert x.is_contiguous() and x.data_ptr() % huge_pages.ALIGNMENT == 0
        x.fill_(i % 100)
    for i, (x, (shape, dtype)) in enumerate(zip(tensors, shapes * 40, strict=True)):
        assert x.shape == shape and x.dtype == dtype and torch.all(x == i % 100)


@needs_huge_pages
def test_memory_lies_in_huge_pages_and_is_freed_with_its_last_tensor():
    arena = huge_pages.Arena()
    first, second, large = (arena.empty((size,), torch.uint8) for size in (MIB, MIB, 40 * MIB))
    for x in (first, second, large):
        assert asks_for_huge_pages(x)
    assert second.data_ptr() == first.data_ptr() + MIB, "small tensors share a mapping"
    assert first.data_ptr() % huge_pages.page_bytes() == large.data_ptr() % huge_pages.page_bytes() == 0
    places = [x.data_ptr() for x in (first, large)]
    sizes = [mapping_of(place)[1] - mapping_of(place)[0] for place in places]
    del first, large
    gc.collect()
    left = mapping_of(places[0])
    assert left is not None, "the second tensor keeps the mapping"
    del second, x
    gc.collect()
    for place, size in zip(places, sizes, strict=True):  # neighbouring mappings are listed as one
        after = mapping_of(place)
        assert after is None or after[1] - after[0] < size


@needs_huge_pages
def test_a_mapping_that_was_freed_is_not_used_again():
    arena = huge_pages.Arena()
    arena.empty((MIB,), torch.uint8)
    gc.collect()
    x = arena.empty((MIB,), torch.uint8)
    assert x.fill_(7).sum() == 7 * MIB and asks_for_huge_pages(x)


@needs_huge_pages
def test_a_full_mapping_is_followed_by_another():
    arena = huge_pages.Arena()
    tensors = [arena.empty((30 * MIB,), torch.uint8) for _ in range(5)]
    assert len({x.untyped_storage().data_ptr() for x in tensors}) == 3
    assert all(asks_for_huge_pages(x) for x in tensors)


def settings(folder, enabled="always [madvise] never", size="2097152"):
    (folder / "enabled").write_text(enabled + "\n")
    (folder / "hpage_pmd_size").write_text(size + "\n")
    return folder


@pytest.fixture
def page_bytes_of(monkeypatch):
    def read(folder):
        monkeypatch.setattr(huge_pages, "SETTINGS", folder)
        return huge_pages.page_bytes.__wrapped__()

    return read


def test_the_kernel_says_if_it_gives_huge_pages(page_bytes_of, tmp_path):
    assert page_bytes_of(settings(tmp_path)) == 2 * MIB
    assert page_bytes_of(settings(tmp_path, "[always] madvise never")) == 2 * MIB
    assert page_bytes_of(settings(tmp_path, size=str(32 * MIB))) == 32 * MIB
    assert page_bytes_of(settings(tmp_path, "always madvise [never]")) == 0
    assert page_bytes_of(settings(tmp_path, size=str(512 * MIB))) == 0, "a page of Arm's for a tensor of some MiB"
    assert page_bytes_of(settings(tmp_path, size="")) == 0
    assert page_bytes_of(tmp_path / "missing") == 0


@pytest.mark.parametrize("reason", ["no huge pages", "no memory"])
def test_elsewhere_memory_is_torchs(reason, monkeypatch):
    if reason == "no huge pages":
        monkeypatch.setattr(huge_pages, "page_bytes", lambda: 0)
    else:
        monkeypatch.setattr(huge_pages, "page_bytes", lambda: 2 * MIB)
        monkeypatch.setattr(huge_pages.mmap, "mmap", refuse)
    x = huge_pages.Arena().empty((3, 4), torch.float32)
    assert x.shape == (3, 4) and x.untyped_storage().nbytes() == 48


def refuse(*args, **kwargs):
    raise OSError("Cannot allocate memory")


def test_a_copy_is_dense():
    x = torch.arange(24).view(4, 6).t()
    copy = huge_pages.copy(x)
    assert copy.is_contiguous() and copy.equal(x) and copy.data_ptr() != x.data_ptr()


def weights_of_layers():
    """The tensors that linear layers of all kinds read."""
    cpu = cpu_kernels()
    weight = torch.randn(128, 64)
    half = weight.bfloat16()
    few = PackedLinear(half, compresses=True)
    yield from (few.panels, few.compressed.codes, PackedLinear(weight).floats.panels)
    yield PackedGatedLinear(half, None, "silu", compresses=True).compressed.codes
    codes = QuantizedWeight(weight.mul(20).char(), torch.rand(128, 4).half(), 16, offsets=torch.rand(128, 4).half())
    packed = cpu.code_linear.PackedCodes(codes)
    yield from (packed.codes, packed.scales, packed.offsets)
    experts = half.expand(3, -1, -1)
    layer = cpu.experts.PackedExperts(experts, experts[:, :64], None, None, Gate("silu"), False, compresses=True)
    for matrices in (layer.gate_up, layer.down):
        yield from (matrices.panels, matrices.compressed.codes)


@needs_huge_pages
@pytest.mark.skipif(
    cpu_kernels() is None or not cpu_kernels().features.HAS_BF16_DOT, reason="without these kernels torch packs weights"
)
def test_weights_lie_in_huge_pages():
    for i, x in enumerate(weights_of_layers()):
        assert asks_for_huge_pages(x), i
