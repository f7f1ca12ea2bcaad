"""The checking process: `python -m engine.grammars.checker_process FD CPU_SECONDS`. It compiles grammars of unknown
people.

Over a socket pair it gets a Vocabulary, then one StructuredOutput after the other, and answers each with an empty text
or with what is wrong. The kernel ends it when one takes more than CPU_SECONDS of processor time (a timer whose signal
has no handler) or more memory than MAX_BYTES, wherever it is: that, too, is an answer. No torch here.
"""

import json
import os
import random
import resource
import signal
import socket
import sys
import time
from typing import Any, TypeVar

import msgspec
import numpy as np

from engine.executor.frames import FrameSocket
from engine.executor.step import encode_frame
from engine.grammars.compiler import Compiler, GrammarError, Words, fill_mask, shorten
from engine.structured_output import StructuredOutput, Vocabulary

T = TypeVar("T")

MAX_BYTES = 4 << 30  # of address space
LOAD_SECONDS = 60.0  # of processor time, to load the vocabulary
TRIAL_WALKS, TRIAL_TOKENS = 2, 24
MAX_DRAFT_CHECK = 1 << 15  # characters of a schema that is held against its draft, which takes 20 us for each
MAX_MASK_SECONDS = 0.05  # of processor time: what a step of everybody could be held up by


def main() -> int:
    sock = socket.socket(fileno=int(sys.argv[-2]))
    seconds = float(sys.argv[-1])
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal's; the end of the socket is the sign to go
        signal.signal(number, signal.SIG_IGN)
    os.nice(5)  # streams come first
    with sock:
        frames = FrameSocket(sock)
        vocabulary = _receive(frames, Vocabulary)
        if vocabulary is None:
            return 0
        signal.setitimer(signal.ITIMER_PROF, LOAD_SECONDS)
        try:
            compiler = Compiler(vocabulary)
        except Exception as error:
            sock.sendall(encode_frame(shorten(f"{error}") or type(error).__name__))
            return 1
        sock.sendall(encode_frame(""))
        while (output := _receive(frames, StructuredOutput)) is not None:
            signal.setitimer(signal.ITIMER_PROF, seconds)
            verdict = find_fault(compiler, output)
            signal.setitimer(signal.ITIMER_PROF, 0)
            sock.sendall(encode_frame(verdict))
    return 0


def find_fault(compiler: Compiler, output: StructuredOutput) -> str:
    """What is wrong with it, or "": it is compiled, and a few tokens are tried."""
    try:
        _try(compiler, output)
    except GrammarError as error:
        return str(error)
    return ""


def _try(compiler: Compiler, output: StructuredOutput) -> None:
    """Random walks find what only shows on the way: dead ends, states that are too many or too slow."""
    base = compiler.compile(output)
    if output.kind == "json_schema" and len(output.text) <= MAX_DRAFT_CHECK:
        _check_draft(json.loads(output.text))
    words: Words = np.zeros(compiler.num_words, np.int32)
    rng = random.Random(0)
    for _ in range(TRIAL_WALKS):
        matcher = base.deep_copy()
        seconds: list[float] = []
        for _ in range(TRIAL_TOKENS):
            start = time.thread_time()
            fill_mask(matcher, words)
            seconds.append(time.thread_time() - start)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            if not matcher.consume_token(int(rng.choice(allowed))) or matcher.is_stopped():
                break
        if sorted(seconds)[len(seconds) // 2] > MAX_MASK_SECONDS:
            raise GrammarError("it is too ambiguous: to find the tokens that may come next takes too long")


def _check_draft(schema: Any) -> None:
    """What compiles may still be no schema in the eyes of its draft: a misplaced type says that something is meant."""
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for

    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError as error:
        raise GrammarError(shorten(f"{error.json_path}: {error.message}")) from None


def _receive(frames: FrameSocket, kind: type[T]) -> T | None:
    body = frames.read_frame()
    return None if body is None else msgspec.msgpack.decode(body, type=kind)


if __name__ == "__main__":
    sys.exit(main())
