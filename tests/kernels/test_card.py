"""Cards: what an SM holds, what is read from a device, and the tiles that fit each card."""

import logging
from types import SimpleNamespace

import pytest
import torch

from kernels.attention.choices import RULES, shared_memory, tile_choice
from kernels.card import A10, A100, B200, CARDS, H100, L4, RTX_5090, T4, Card, known_card, read_card
from kernels.dispatch import OutOfResources
from kernels.tile_choice import TileChoice


@pytest.fixture(autouse=True)
def fresh_choices():
    tile_choice.cache_clear()
    read_card.cache_clear()
    yield
    tile_choice.cache_clear()
    read_card.cache_clear()


def test_programs_of_an_sm():
    """A100: 64 K registers and 164 KB of shared memory for the programs of an SM, 1 KB of it taken from each."""
    assert A100.programs(0, 4, 32) == 16, "warps"
    assert A100.programs(0, 8, 255) == 1, "registers"
    assert A100.programs(40 * 1024, 4, 128) == 4, "shared memory and registers"
    assert H100.programs(56 * 1024, 4, 128) == 4 and A100.programs(56 * 1024, 4, 128) == 2
    assert A10.programs(0, 1) == 16 and L4.programs(0, 1) == 24 and T4.programs(0, 1) == 16, "programs"
    assert [card.programs(99 * 1024, 4) for card in (T4, A10, L4, RTX_5090, A100, H100, B200)] == [0, 1, 1, 1, 1, 2, 2]
    assert T4.programs(64 * 1024, 4) == 1, "the driver takes no shared memory before Ampere"


@pytest.mark.parametrize("capability, rows, instruction", [
    (75, 64, "fma"), (80, 64, "mma"), (89, 128, "mma"), (90, 64, "wgmma"), (90, 32, "mma"), (100, 128, "tcgen05"),
    (103, 64, "tcgen05"), (103, 16, "mma"), (120, 128, "mma"), (121, 64, "mma"),
])  # fmt: skip
def test_matrix_instruction(capability, rows, instruction):
    assert Card(capability, 1, 1, 1, 64, 32).matrix_instruction(rows) == instruction


def test_a_card_is_read_from_the_device(monkeypatch):
    """An unlisted capability (8.7, Orin) keeps its own shared memory, and the programs of the next older card."""
    orin = SimpleNamespace(
        major=8, minor=7, multi_processor_count=16, shared_memory_per_block_optin=166912, warp_size=32,
        shared_memory_per_multiprocessor=167936, regs_per_multiprocessor=65536, max_threads_per_multi_processor=1536,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: orin)
    card = read_card(torch.device("cuda"))
    assert (card.capability, card.num_sms, card.shared_memory, card.shared_memory_per_sm) == (87, 16, 166912, 167936)
    assert (card.warps_per_sm, card.registers_per_sm, card.programs_per_sm) == (48, 65536, A10.programs_per_sm)
    assert read_card(torch.device("cpu")).capability == 80


def test_the_nearest_older_card():
    assert known_card(121) is RTX_5090 and known_card(103) is B200 and known_card(89) is L4 and known_card(61) is T4


@pytest.mark.parametrize("card", CARDS.values(), ids=lambda card: str(card.capability))
@pytest.mark.parametrize("use", RULES)
def test_every_tile_fits_its_card(use, card):
    """Every launch has a tile that fits; decode of 16 bits leaves room for two programs."""
    for head_dim in (16, 64, 80, 96, 128, 256):
        for q_bits, kv_bits in ((16, 16), (16, 8), (16, 4), (32, 32)):
            for rows in (1, 16, 17, 64, 65, 8192) if use == "prefill" else (4,):
                choice = tile_choice(use, card, q_bits, kv_bits, head_dim, 4, rows, True)
                needed = shared_memory(choice.tile, 1 << (head_dim - 1).bit_length(), q_bits, card)
                assert needed <= card.shared_memory
                if use == "decode" and q_bits == 16:
                    assert card.programs(needed, choice.tile.num_warps) >= 2


def test_a_small_card_takes_smaller_tiles_and_a_large_card_the_present_ones():
    def prefill(card, head_dim=128, extras=False):
        tile = tile_choice("prefill", card, 16, 16, head_dim, 4, 8192, extras).tile
        return tile.block_m, tile.block_n, tile.num_stages

    assert prefill(A100) == (128, 64, 7) and prefill(A10) == prefill(L4) == prefill(RTX_5090) == (128, 64, 5)
    assert prefill(H100) == (128, 64, 5) and prefill(B200) == (128, 128, 5) and prefill(T4) == (32, 16, 2)
    assert prefill(A100, 256) == (64, 32, 5) and prefill(A10, 256) == prefill(RTX_5090, 256) == (64, 16, 5)


def test_the_overlapping_tile_is_for_plain_floats_and_long_chunks_on_hopper():
    def overlaps(card=H100, kv_bits=16, rows=8192, extras=False, use="prefill"):
        return tile_choice(use, card, 16, kv_bits, 128, 4, rows, extras).tile.overlaps

    assert overlaps() and not overlaps(rows=64) and not overlaps(extras=True) and not overlaps(use="invariant")
    assert not overlaps(card=A100) and not overlaps(card=B200) and not overlaps(kv_bits=8)
    tma = [tile_choice("prefill", H100, 16, 16, dim, 4, 8192, False, 128).tile.tma for dim in (128, 96, 100)]
    assert tma == [True, True, False], "a row of 100 numbers of 16 bits is no multiple of 16 bytes"
    choice = tile_choice("prefill", H100, 16, 8, 128, 4, 8192, False)
    with pytest.raises(OutOfResources):
        choice.launch(lambda tile: fail_unless(tile.overlaps))


def fail_unless(condition):
    if not condition:
        raise OutOfResources(1, 0, "shared memory")


def test_no_tile_is_an_error_that_names_the_card():
    with pytest.raises(ValueError, match="head sizes of up to 512, not 1024"):
        tile_choice("decode", A100, 16, 16, 1024, 1, 1, False)
    with pytest.raises(ValueError, match=r"head size 512 and 8 heads .* 64 KB .* capability 7.5"):
        tile_choice("decode", T4, 16, 16, 512, 8, 8, False)
    with pytest.raises(ValueError, match=r"head size 256 and 96 heads .* 64 KB .* capability 7.5"):
        tile_choice("prefill", T4, 16, 16, 256, 96, 8192, True)


class Kernel:
    """Launches only tiles of at most `limit`, like a card that has no room for more."""

    def __init__(self, limit):
        self.limit, self.started = limit, []

    def __call__(self, tile):
        if tile > self.limit:
            raise OutOfResources(tile, self.limit, "shared memory")
        self.started.append(tile)


def test_a_refused_tile_is_dropped_for_good_and_logged_once(caplog):
    kernel, choice = Kernel(limit=32), TileChoice("decode attention", [128, 64, 32, 16])
    with caplog.at_level(logging.WARNING):
        choice.launch(kernel)
        choice.launch(kernel)
    assert kernel.started == [32, 32] and choice.tile == 32
    assert [record.getMessage().count("no room for") for record in caplog.records] == [1, 1], "128 and 64, once each"
    assert "decode attention: the GPU has no room for 64" in caplog.text and "using 32" in caplog.text


def test_the_last_tile_raises():
    with pytest.raises(OutOfResources):
        TileChoice("decode attention", [128, 64]).launch(Kernel(limit=32))


def test_no_tile_is_dropped_during_capture(monkeypatch):
    """The steps before the graph used the larger tile: the capture fails, and the runner computes without a graph."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    choice = TileChoice("decode attention", [128, 64])
    with pytest.raises(OutOfResources):
        choice.launch(Kernel(limit=64))
    assert choice.tile == 128


def test_other_errors_pass():
    def fails(tile):
        raise RuntimeError("an illegal memory access")

    choice = TileChoice("decode attention", [128, 64])
    with pytest.raises(RuntimeError, match="illegal"):
        choice.launch(fails)
    assert choice.tile == 128
