"""Stream options: fields that a client may ask for in every chunk, the usage so far and obfuscation."""

import random
from collections.abc import Callable
from typing import Any

from engine.outputs import RequestOutput
from server.http.body import encode_json

FRAME_BYTES = 64  # the size of every obfuscated frame is a multiple of this
Encode = Callable[[int, RequestOutput], bytes]
Usage = Callable[[], dict[str, Any]]

NO_USAGE = b',"usage":null'


def with_stream_options(encode: Encode, running_usage: Usage | None, obfuscates: bool) -> Encode:
    """`encode` with more fields in each frame; `encode` itself where the client asks for none.

    `running_usage` takes the place of `usage: null`: the usage of the whole request so far. `obfuscates` adds a field
    `obfuscation` of random characters to each frame with text; named events have text where their name ends in .delta.
    """
    if running_usage is None and not obfuscates:
        return encode

    def encode_with_options(prompt_index: int, output: RequestOutput) -> bytes:
        frames = encode(prompt_index, output).split(b"\n\n")[:-1]
        usage = b',"usage":' + encode_json(running_usage()) if running_usage is not None and frames else b""
        extended = []
        for frame in frames:
            fields = frame.removesuffix(b"}")
            if usage:
                fields = fields.removesuffix(NO_USAGE) + usage
            extended.append(_obfuscated(fields) if obfuscates and _has_text(frame) else fields + b"}\n\n")
        return b"".join(extended)

    return encode_with_options


def _has_text(frame: bytes) -> bool:
    return not frame.startswith(b"event: ") or frame.partition(b"\n")[0].endswith(b".delta")


def _obfuscated(fields: bytes) -> bytes:
    """The frame of `fields`, an object without its closing brace, padded to a multiple of FRAME_BYTES."""
    start, end = fields + b',"obfuscation":"', b'"}\n\n'
    num_missing = -(len(start) + len(end)) % FRAME_BYTES
    padding = f"{random.getrandbits(4 * FRAME_BYTES):0{FRAME_BYTES}x}"[:num_missing]
    return start + padding.encode() + end
