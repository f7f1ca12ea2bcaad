"""What stream_options add to the chunks of a stream: usage so far, obfuscation."""

import random
from collections.abc import Callable

from engine.outputs import RequestOutput
from server.http.body import encode_json
from server.intake.generation import Generation
from server.protocol.generation_request import GenerationRequest

FRAME_BYTES = 64  # the size of every frame is a multiple of it
Encode = Callable[[int, RequestOutput], bytes]

NO_USAGE = b',"usage":null}'


def with_stream_options(encode: Encode, request: GenerationRequest, generation: Generation) -> Encode:
    """`encode`, with what the request asks for in every chunk."""
    if request.includes_running_usage:
        encode = with_running_usage(encode, generation)
    return with_obfuscation(encode) if request.include_obfuscation else encode


def with_running_usage(encode: Encode, generation: Generation) -> Encode:
    """`encode`, where each chunk has the usage of the whole request so far in place of null."""

    def encode_counted(prompt_index: int, output: RequestOutput) -> bytes:
        frames = encode(prompt_index, output).split(b"\n\n")[:-1]
        end = b',"usage":' + encode_json(generation.usage()) + b"}\n\n" if frames else b""
        return b"".join(frame.removesuffix(NO_USAGE) + end for frame in frames)

    return encode_counted


def with_obfuscation(encode: Encode) -> Encode:
    """`encode`, with random characters in the field `obfuscation` of each frame; of named events, of each delta."""

    def encode_padded(prompt_index: int, output: RequestOutput) -> bytes:
        frames = encode(prompt_index, output).split(b"\n\n")[:-1]
        return b"".join(_pad(frame) if _has_text(frame) else frame + b"\n\n" for frame in frames)

    return encode_padded


def _has_text(frame: bytes) -> bool:
    return not frame.startswith(b"event: ") or frame.partition(b"\n")[0].endswith(b".delta")


def _pad(frame: bytes) -> bytes:
    start, end = frame[:-1] + b',"obfuscation":"', b'"}\n\n'
    num_missing = -(len(start) + len(end)) % FRAME_BYTES
    padding = f"{random.getrandbits(4 * FRAME_BYTES):0{FRAME_BYTES}x}"[:num_missing]
    return start + padding.encode() + end
