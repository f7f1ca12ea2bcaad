"""CountedStream: SSE bytes of a replica, cut where a token count stands, so that the ingress knows what it passed on.

A replica that is asked to (COUNT_TOKENS in server/output/sse.py) writes a comment with the number of tokens so far
after the events of each output. The ingress takes the comments out. It holds back events that no count follows yet, so
the client has at any time exactly the tokens of the last count.
"""

import json
import re

from server.errors import ApiError, error_body
from server.output.message_output import error_event
from server.output.sse import KEEP_ALIVE

COUNT = re.compile(rb"(?<=\n\n): tokens (\d+)\n\n")
SEQUENCE_NUMBER = re.compile(rb'"sequence_number":(\d+)')


class CountedStream:
    """Bytes of one answer go in as they come, and come out as they may be sent."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._held = b""
        self._last = b""  # the last bytes that were passed on

    def feed(self, data: bytes) -> bytes:
        """The bytes to pass on now, now that `data` has come."""
        held = self._held + data if self._held else data
        counts = list(COUNT.finditer(held))
        if not counts:
            passed, self._held = _keep_alives(held)
            return passed
        last = counts[-1]
        self.num_tokens = int(last[1])
        self._last = COUNT.sub(b"", held[: last.end()])
        passed, self._held = _keep_alives(held[last.end() :])
        return self._last + passed

    def end(self) -> bytes:
        """The rest, once the answer has ended in order: usage, [DONE]."""
        held, self._held = self._held, b""
        return held

    def restart(self) -> None:
        """Another replica answers from the start. Only before a token was passed on."""
        self._held = b""

    def failure(self, path: str) -> bytes:
        """The event that ends the stream of a replica that died, in the form of the API at `path`."""
        error = replica_died(self.num_tokens)
        if path == "/v1/messages":
            return error_event(error)
        if path == "/v1/responses":
            numbers = SEQUENCE_NUMBER.findall(self._last)
            number = int(numbers[-1]) + 1 if numbers else 0
            fields = {"type": "error", "sequence_number": number, "code": error.code, "message": str(error)}
            return b"event: error\ndata: " + json.dumps(fields | {"param": None}).encode() + b"\n\n"
        return b"data: " + error_body(error) + b"\n\n"


def replica_died(num_tokens: int) -> ApiError:
    """The error of a stream that can be resumed: the client has `num_tokens` tokens."""
    return ApiError(
        500,
        f"The replica that sent this stream died after {num_tokens} tokens. To resume, send the prompt and the text so "
        "far (in a chat: the text as the last message, with continue_final_message), with max_tokens reduced by "
        f"{num_tokens}.",
        type="server_error",
        code="replica_died",
    )


def _keep_alives(held: bytes) -> tuple[bytes, bytes]:
    """(keep-alive comments, the rest): a comment is passed on at once, also while events wait for their count."""
    if held and held.endswith(KEEP_ALIVE):
        cut = held.removesuffix(KEEP_ALIVE)
        if not cut or cut.endswith(b"\n\n"):
            return KEEP_ALIVE, cut
    return b"", held
