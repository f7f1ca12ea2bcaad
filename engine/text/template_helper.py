"""The rendering process: `python -m engine.text.template_helper FD CPU_SECONDS`. Its templates are untrusted code.

It reads frames (engine/executor/frames.py) from a socket pair. A frame holds (source, variables) in marshal, which has
integers of any size and lone surrogates. The process answers each frame with a frame: a byte that says how rendering
ended, then a text. The kernel kills the process when a template takes more than CPU_SECONDS of processor time (a timer
whose signal has no handler); a template that needs more than MAX_BYTES of memory fails. Imports no torch and no
tokenizer, only jinja2.
"""

import marshal
import resource
import signal
import socket
import sys

from engine.errors import InvalidRequestError
from engine.executor.frames import FRAME_HEADER, FrameSocket
from engine.text.chat_template import TOO_LARGE, TemplateLimitError, render

MAX_BYTES = 512 << 20  # address space of the process
RENDERED, REFUSED, BEYOND_LIMIT = 0, 1, 2  # the first byte of an answer; a text in UTF-8 follows
MAX_MESSAGE = 500  # characters of an error message: a template chooses its text


def main() -> int:
    sock = socket.socket(fileno=int(sys.argv[-2]))
    seconds = float(sys.argv[-1])
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    for number in (signal.SIGINT, signal.SIGHUP):  # from a terminal; this process ends when its socket closes
        signal.signal(number, signal.SIG_IGN)
    with sock:
        frames = FrameSocket(sock)
        while (answer := _answer_next(frames, seconds)) is not None:
            signal.setitimer(signal.ITIMER_PROF, 0)
            kind, text = answer
            sock.sendall(FRAME_HEADER.pack(1 + len(text)) + bytes([kind]))
            sock.sendall(text)  # a large text is not copied into a frame: memory is limited
    return 0


def _answer_next(frames: FrameSocket, seconds: float) -> tuple[int, bytes] | None:
    """How the next rendering ended, and its text or the reason; None when the renderer has closed its end."""
    request = frames.read_frame()
    if request is None:
        return None
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        source, variables = marshal.loads(request)
        del request  # the template may use its memory
        return RENDERED, render(source, variables).encode("utf-8", "surrogatepass")
    except TemplateLimitError as error:
        return BEYOND_LIMIT, str(error).encode()
    except InvalidRequestError as error:
        return REFUSED, str(error)[:MAX_MESSAGE].encode("utf-8", "surrogatepass")
    except MemoryError:  # reading the request or encoding the answer, not the template itself
        return BEYOND_LIMIT, TOO_LARGE.encode()


if __name__ == "__main__":
    sys.exit(main())
