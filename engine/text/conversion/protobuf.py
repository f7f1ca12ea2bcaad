"""A reader of the protocol-buffer wire format, enough for sentencepiece's model files."""

import struct
from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field number and value of each field of a message: an int, or bytes (texts, messages, floats). ValueError for
    bytes that are no message."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, position = _varint(data, position)
            yield number, value
            continue
        size = {FIXED64: 8, FIXED32: 4}.get(kind, -1)
        if kind == BYTES:
            size, position = _varint(data, position)
        if size < 0 or number == 0 or position + size > len(data):
            raise ValueError("not a protocol-buffer message")
        yield number, data[position : position + size]
        position += size


def as_float(value: int | bytes) -> float:
    """The float that a field of four bytes holds. ValueError for another field."""
    if not isinstance(value, bytes) or len(value) != 4:
        raise ValueError("not a float")
    number: float = struct.unpack("<f", value)[0]
    return number


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """A number in 7-bit groups, least significant first -> the number, and the position behind it."""
    value, shift = 0, 0
    while shift < 70 and position < len(data):
        byte = data[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
    raise ValueError("not a protocol-buffer message")
