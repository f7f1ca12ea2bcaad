"""What stream_options add to the chunks of a stream: usage so far, obfuscation."""

from engine.outputs import RequestOutput
from server.intake.generation import Generation
from server.obfuscation import Encode, with_obfuscation
from server.output.sse import encode_json
from server.protocol.generation import GenerationRequest

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
