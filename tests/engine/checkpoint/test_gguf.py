"""The GGUF header: values as written; each kind of damage is one ModelError that names the file and the field."""

import struct
import tracemalloc
from pathlib import Path

import pytest

from engine.checkpoint.gguf import read_gguf
from engine.errors import ModelError
from tests.engine.checkpoint.gguf_bytes import gguf, key, tensor_entry, text, write

HUGE = 1 << 60
ARCHITECTURE = key("general.architecture", 8, text("llama"))


def test_reads_every_kind_of_value(tmp_path: Path) -> None:
    keys = [
        ARCHITECTURE,
        key("a", 6, struct.pack("<f", 0.5)),
        key("b", 7, b"\1"),
        key("c", 9, struct.pack("<IQ3i", 5, 3, 1, -2, 3)),
        key("d", 9, struct.pack("<IQ", 8, 2) + text("x") + text("é")),
    ]
    entries = [tensor_entry("t", [4, 2], 0, 0), tensor_entry("q", [64, 3], 2, 32)]
    path = write(tmp_path, gguf(*entries, keys=keys, data=struct.pack("<8f", *range(8)) + bytes(108)))
    header = read_gguf(path)
    assert header.metadata == {"general.architecture": "llama", "a": 0.5, "b": True, "c": [1, -2, 3], "d": ["x", "é"]}
    assert header.floats("t") == list(range(8))
    assert (header.tensors["q"].shape, header.tensors["q"].kind.name) == ((3, 64), "Q4_0")
    assert header.tensors["q"].num_bytes == 3 * 2 * 18
    assert read_gguf(write(tmp_path, gguf(version=2))).metadata == {}


DAMAGE = {
    "empty": (b"", "cannot read"),
    "magic": (gguf(magic=b"GGML"), "magic"),
    "big endian": (gguf(version=3 << 24), "version"),
    "cut": (gguf(keys=[ARCHITECTURE])[:60], "general.architecture"),
    "tensor count": (gguf(num_tensors=HUGE), "tensor_count is"),
    "key count": (gguf(num_keys=HUGE), "metadata_kv_count is"),
    "string": (gguf(keys=[key("name", 8, struct.pack("<Q", HUGE))]), "length of name"),
    "key length": (gguf(keys=[struct.pack("<Q", HUGE) + bytes(40)]), "length of metadata key 0"),
    "array": (gguf(keys=[key("list", 9, struct.pack("<IQ", 0, HUGE))]), "length of list"),
    "array of strings": (gguf(keys=[key("list", 9, struct.pack("<IQ", 8, 1 << 21))]), "length of list"),
    "nested": (gguf(keys=[key("list", 9, struct.pack("<IQIQ", 9, 1, 9, 1))]), "array type of list"),
    "value type": (gguf(keys=[key("name", 99, bytes(8))]), "type of name"),
    "utf-8": (gguf(keys=[key("name", 8, struct.pack("<Q", 1) + b"\xff")]), "name is not UTF-8"),
    "twice": (gguf(keys=[ARCHITECTURE, ARCHITECTURE]), "occurs twice"),
    "alignment": (gguf(keys=[key("general.alignment", 4, struct.pack("<I", 0))]), "general.alignment"),
    "axes": (gguf(tensor_entry("t", [1] * 5, 0, 0)), "n_dimensions"),
    "sizes": (gguf(tensor_entry("t", [HUGE, HUGE], 0, 0)), "tensor 't': dimensions"),
    "no size": (gguf(tensor_entry("t", [0], 0, 0), data=bytes(32)), "tensor 't': dimensions"),
    "type": (gguf(tensor_entry("t", [256], 16, 0)), "tensor 't': type IQ2_XXS is not served"),
    "unknown type": (gguf(tensor_entry("t", [256], 200, 0)), "tensor 't': type number 200"),
    "block": (gguf(tensor_entry("t", [100], 12, 0)), "no whole blocks"),
    "offset": (gguf(tensor_entry("t", [8], 0, HUGE), data=bytes(32)), "tensor 't': offset"),
    "unaligned": (gguf(tensor_entry("t", [1], 0, 4), data=bytes(32)), "not aligned"),
    "truncated": (gguf(tensor_entry("t", [8], 0, 0), data=bytes(31)), "ends the tensor at byte"),
    "overlap": (
        gguf(tensor_entry("a", [16], 0, 0), tensor_entry("b", [8], 0, 32), data=bytes(64)), "overlaps tensor 'a'"
    ),
    "same name": (gguf(tensor_entry("a", [8], 0, 0), tensor_entry("a", [8], 0, 32), data=bytes(64)), "occurs twice"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_one_line_and_takes_no_memory(tmp_path: Path, kind: str) -> None:
    content, field = DAMAGE[kind]
    path = write(tmp_path, content)
    tracemalloc.start()
    with pytest.raises(ModelError) as caught:
        read_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    message = str(caught.value)
    assert field in message and "model.gguf" in message and "\n" not in message
    assert peak < 1 << 20
