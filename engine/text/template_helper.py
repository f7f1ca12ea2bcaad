"""The rendering process: `python -m engine.text.template_helper FD CPU_SECONDS`. It runs chat templates of unknown
people.

Over a socket pair it gets (source, variables) after (source, variables), and answers each with a byte that says what
became of it and a text. The kernel ends it when one takes more than CPU_SECONDS of processor time (a timer whose signal
has no handler); beyond MAX_BYTES of memory a template fails. No torch, no tokenizer: jinja2 alone.
"""

import marshal
import resource
import signal
import socket
import struct
import sys
from io import BufferedReader

from engine.errors import InvalidRequestError
from engine.text.chat_template import TOO_LARGE, TemplateLimitError, render

MAX_BYTES = 512 << 20  # of address space
REQUEST_HEADER = struct.Struct("<Q")  # bytes that follow: marshal, which has integers of any size and lone surrogates
ANSWER_HEADER = struct.Struct("<BQ")  # one of those below, and the bytes of UTF-8 that follow
RENDERED, REFUSED, BEYOND_LIMIT = 0, 1, 2
MAX_MESSAGE = 500  # characters of an error, which may hold anything that a template writes


def main() -> int:
    sock = socket.socket(fileno=int(sys.argv[-2]))
    seconds = float(sys.argv[-1])
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal's; the end of the socket is the sign to go
        signal.signal(number, signal.SIG_IGN)
    with sock, sock.makefile("rb") as reader:
        while True:
            header = reader.read(REQUEST_HEADER.size)
            if len(header) < REQUEST_HEADER.size:
                return 0
            signal.setitimer(signal.ITIMER_PROF, seconds)
            kind, text = _answer(reader, *REQUEST_HEADER.unpack(header))
            signal.setitimer(signal.ITIMER_PROF, 0)
            sock.sendall(ANSWER_HEADER.pack(kind, len(text)))
            sock.sendall(text)


def _answer(reader: BufferedReader, length: int) -> tuple[int, bytes]:
    try:
        source, variables = marshal.loads(reader.read(length))
        return RENDERED, render(source, variables).encode("utf-8", "surrogatepass")
    except TemplateLimitError as error:
        return BEYOND_LIMIT, str(error).encode()
    except InvalidRequestError as error:
        return REFUSED, str(error)[:MAX_MESSAGE].encode("utf-8", "surrogatepass")
    except MemoryError:  # not of the template itself: of what goes in or comes out
        return BEYOND_LIMIT, TOO_LARGE.encode()


if __name__ == "__main__":
    sys.exit(main())
