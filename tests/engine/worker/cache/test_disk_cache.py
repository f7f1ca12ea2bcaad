"""The disk tier: what was written comes back, after a restart too; what is damaged is a miss."""

import errno
import hashlib
import os
import random
import threading

import pytest

from engine.errors import ConfigError
from engine.models.families import read_model_config
from engine.worker.cache import disk_cache
from engine.worker.cache.disk_cache import DATA_START, FILE_NAME, SLOT_HEADER, BlockFile, DiskCache, block_identity
from tests.engine.models.tiny_models import save_model

IDENTITY = b"m" * 32
BLOCK = 100
SLOT = SLOT_HEADER.size + BLOCK


def digest(number):
    return hashlib.sha256(bytes([number % 256, number // 256])).digest()


def content(number):
    return random.Random(number).randbytes(BLOCK)


@pytest.fixture
def open_file(tmp_path):
    files = []

    def open_(num_slots=4, block_bytes=BLOCK, identity=IDENTITY):
        while files:
            files.pop().close()
        files.append(BlockFile(tmp_path / "cache", DATA_START + num_slots * SLOT, block_bytes, identity))
        return files[0]

    yield open_
    while files:
        files.pop().close()


def test_blocks_outlive_the_server_and_the_oldest_goes_first(open_file):
    file = open_file()
    for number in range(6):
        file.store(digest(number), content(number))
    for restarted in (file, open_file()):
        assert restarted.digests() == [digest(number) for number in (2, 3, 4, 5)]
        assert [restarted.load(digest(number)) for number in (1, 2, 5)] == [None, content(2), content(5)]
    again = open_file()
    again.store(digest(9), content(9))
    assert again.load(digest(2)) is None and again.load(digest(3)) == content(3)


@pytest.mark.parametrize("kind", ["link", "hard link", "named pipe", "folder"])
def test_what_is_no_file_of_ours_is_left_as_it_is(open_file, tmp_path, kind):
    other, path = tmp_path / "other", tmp_path / "cache" / FILE_NAME
    other.write_text("precious")
    path.parent.mkdir()
    if kind == "link":
        path.symlink_to(other)
    elif kind == "hard link":
        os.link(other, path)
    elif kind == "named pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(ConfigError, match=r"disk_cache: .*name another folder"):
        open_file()
    assert other.read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of others")
def test_a_file_of_another_user_is_left_as_it_is(open_file, tmp_path):
    open_file()
    os.chown(tmp_path / "cache" / FILE_NAME, 12345, 12345)
    with pytest.raises(ConfigError, match="not a file of this user's"):
        BlockFile(tmp_path / "cache", DATA_START + 4 * SLOT, BLOCK, IDENTITY)


def test_keys_with_long_rotary_factors_are_those_of_another_model(open_file, tmp_path):
    """max_model_len decides how all keys are rotated: 128 is the length that this model was trained for."""
    save_model("phi3_longrope", tmp_path / "model")
    model = read_model_config(tmp_path / "model")
    found = []
    for max_model_len in (128, 100, 300, 400, 128):
        file = open_file(identity=block_identity(IDENTITY, model, max_model_len, "torch.bfloat16"))
        found.append(file.digests())
        file.store(digest(max_model_len), content(1))
    assert found == [[], [digest(128)], [], [digest(300)], []]
    save_model("phi3", tmp_path / "plain")
    plain = read_model_config(tmp_path / "plain")
    short, long, other = (
        block_identity(IDENTITY, plain, length, dtype)
        for length, dtype in ((128, "torch.bfloat16"), (300, "torch.bfloat16"), (128, "torch.float16"))
    )
    assert short == long != other, "a card without bfloat16 computes in float16, in blocks of the same size"


@pytest.mark.parametrize("position", [0, 31, 40, SLOT_HEADER.size, SLOT - 1])
def test_a_changed_byte_is_a_miss(open_file, tmp_path, position):
    file = open_file()
    for number in range(3):
        file.store(digest(number), content(number))
    with (tmp_path / "cache" / FILE_NAME).open("r+b") as raw:
        raw.seek(DATA_START + SLOT + position)
        byte = raw.read(1)[0]
        raw.seek(-1, os.SEEK_CUR)
        raw.write(bytes([byte ^ 1]))
    restarted = open_file()
    assert restarted.load(digest(1)) is None
    assert restarted.load(digest(0)) == content(0) and restarted.load(digest(2)) == content(2)
    restarted.store(digest(1), content(1))
    assert restarted.load(digest(1)) == content(1), "the slot is of use again"


@pytest.mark.parametrize("length", range(0, DATA_START + 3 * SLOT, 61))
def test_a_file_cut_anywhere_is_read_as_far_as_it_goes(open_file, tmp_path, length):
    file = open_file()
    for number in range(3):
        file.store(digest(number), content(number))
    os.truncate(tmp_path / "cache" / FILE_NAME, length)
    restarted = open_file()
    whole = max(0, length - DATA_START) // SLOT
    assert [restarted.load(digest(number)) for number in range(3)] == [
        content(number) if number < whole else None for number in range(3)
    ]
    restarted.store(digest(7), content(7))
    assert restarted.load(digest(7)) == content(7)


@pytest.mark.parametrize("cut", range(1, SLOT, 13))
def test_a_write_torn_by_a_crash_is_a_miss(open_file, tmp_path, cut):
    """The old block is half overwritten by the new one."""
    file = open_file(num_slots=1)
    file.store(digest(1), content(1))
    path = tmp_path / "cache" / FILE_NAME
    old = path.read_bytes()
    file.store(digest(2), content(2))
    new = path.read_bytes()
    path.write_bytes(new[: DATA_START + cut] + old[DATA_START + cut :])
    restarted = open_file(num_slots=1)
    assert restarted.load(digest(1)) is None and restarted.load(digest(2)) is None


def test_another_model_or_block_size_starts_afresh(open_file):
    open_file().store(digest(1), content(1))
    assert open_file(identity=b"x" * 32).digests() == []
    open_file().store(digest(1), content(1))
    assert open_file(block_bytes=BLOCK + 4).digests() == []


def test_a_smaller_quota_keeps_what_lies_within(tmp_path, open_file):
    file = open_file(num_slots=4)
    for number in range(4):
        file.store(digest(number), content(number))
    before = (tmp_path / "cache" / FILE_NAME).stat().st_size
    assert open_file(num_slots=2).digests() == [digest(0), digest(1)]
    assert (tmp_path / "cache" / FILE_NAME).stat().st_size < before


def test_errors_name_the_setting(tmp_path, open_file):
    open_file()
    with pytest.raises(ConfigError, match=r"disk_cache: .* is in use by another server"):
        BlockFile(tmp_path / "cache", 1 << 20, BLOCK, IDENTITY)
    with pytest.raises(ConfigError, match=r"disk_cache_size: .* do not hold one block"):
        BlockFile(tmp_path / "other", 4000, BLOCK, IDENTITY)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="disk_cache: cannot use"):
        BlockFile(tmp_path / "file", 1 << 20, BLOCK, IDENTITY)
    assert (tmp_path / "cache" / FILE_NAME).stat().st_mode & 0o777 == 0o600


def test_a_full_disk_keeps_nothing_and_breaks_nothing(open_file, monkeypatch, caplog):
    file = open_file()
    cache = DiskCache(file)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_cache.os, "pwrite", full)
    cache.store(digest(1), content(1))
    assert load(cache, [digest(1)]) == []
    monkeypatch.undo()
    cache.store(digest(2), content(2))
    assert wait_load(cache, [digest(2)]) == [content(2)]
    assert "No space left" in caplog.text


def test_a_disk_that_cannot_be_read_starts_empty(open_file, monkeypatch, caplog):
    """A Worker must start all the same, and again after a death."""
    open_file().store(digest(1), content(1))

    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for name in ("pread", "ftruncate"):
        monkeypatch.setattr(disk_cache.os, name, broken)
        file = open_file()
        assert file.digests() == []
    assert "cannot be begun (Input/output error)" in caplog.text
    monkeypatch.undo()
    file.store(digest(2), content(2))
    assert file.load(digest(2)) == content(2)


def test_one_record_that_cannot_be_read_is_a_miss(open_file, monkeypatch):
    file = open_file()
    for number in (1, 2, 3):
        file.store(digest(number), content(number))
    pread = os.pread

    def broken_in_the_middle(fd, count, offset):
        if offset == DATA_START + SLOT:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, count, offset)

    monkeypatch.setattr(disk_cache.os, "pread", broken_in_the_middle)
    assert sorted(open_file().digests()) == sorted([digest(1), digest(3)])


def test_an_erased_record_is_a_miss_and_its_age_is_not_counted_on(open_file, tmp_path):
    """Flash memory that was erased reads as ones: no age may come after that."""
    open_file(4).store(digest(1), content(1))
    path = tmp_path / "cache" / FILE_NAME
    path.write_bytes(path.read_bytes() + b"\xff" * SLOT)
    file = open_file(4)
    assert file.digests() == [digest(1)]
    file.store(digest(2), content(2))
    assert file.load(digest(2)) == content(2)


def load(cache, digests):
    done, found = threading.Event(), []
    cache.load(digests, lambda contents: (found.extend(contents), done.set()))
    assert done.wait(5)
    return found


def wait_load(cache, digests):
    """Reads go before writes: ask until the write is through."""
    for _ in range(1000):
        if found := load(cache, digests):
            return found
    raise AssertionError("never written")


def test_a_chain_is_read_up_to_the_first_gap(open_file):
    cache = DiskCache(open_file())
    for number in (1, 2, 4):
        cache.store(digest(number), content(number))
    wait_load(cache, [digest(4)])
    assert load(cache, [digest(number) for number in (1, 2, 3, 4)]) == [content(1), content(2)]


def test_writes_beyond_the_queue_are_dropped(open_file, monkeypatch):
    file = open_file(num_slots=1000)
    gate = threading.Event()
    store = file.store
    monkeypatch.setattr(file, "store", lambda *block: (gate.wait(5), store(*block)))
    cache = DiskCache(file)
    for number in range(500):
        cache.store(digest(number), content(number))
    gate.set()
    wait_load(cache, [digest(disk_cache.MAX_QUEUED_WRITES - 1)])
    assert len(file.digests()) <= disk_cache.MAX_QUEUED_WRITES + 1


def test_a_flush_keeps_few_blocks_in_memory_and_drops_none(open_file, monkeypatch):
    file = open_file(num_slots=1000)
    asked, written, most = 0, [], 0

    def store(block_digest, block):
        nonlocal most
        most = max(most, asked - len(written))
        written.append(block_digest)

    monkeypatch.setattr(file, "store", store)
    cache = DiskCache(file)
    for asked in range(1, 501):
        cache.store(digest(asked), content(asked), must=True)
    cache.flush()
    assert written == [digest(number) for number in range(1, 501)]
    assert most <= disk_cache.MAX_QUEUED_WRITES + 1


def test_the_thread_outlives_a_task_that_fails(open_file, caplog):
    cache = DiskCache(open_file())
    cache.store(digest(1), content(1))
    cache.load([digest(1)], lambda contents: 1 / 0)
    assert wait_load(cache, [digest(1)]) == [content(1)]
    assert "a task of the disk cache failed" in caplog.text
