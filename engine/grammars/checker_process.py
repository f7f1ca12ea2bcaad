"""The checking process: `python -m engine.grammars.checker_process FD CPU_SECONDS`. Its grammars are untrusted input.

The socket pair carries a Vocabulary, then StructuredOutputs; the answer to each is an empty text or the fault. The
kernel kills this process when one check takes more than CPU_SECONDS of processor time (a timer whose signal has no
handler) or more memory than MAX_BYTES; the parent reads its death as an answer, too. Imports no torch.
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
from engine.grammars.unusable_values import TYPES_OF
from engine.structured_output import StructuredOutput, Vocabulary

T = TypeVar("T")

MAX_BYTES = 4 << 30  # address space of the process
LOAD_SECONDS = 60.0  # processor time to load the vocabulary
TRIAL_WALKS, TRIAL_TOKENS = 2, 24
MAX_DRAFT_CHECK = 1 << 15  # longer schemas, in characters, are not validated by their draft: 20 us per character
MAX_MASK_SECONDS = 0.05  # processor time for one mask: a slow mask delays the step of all sequences


def main() -> int:
    sock = socket.socket(fileno=int(sys.argv[-2]))
    seconds = float(sys.argv[-1])
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGINT, signal.SIGHUP):  # from a terminal; this process ends when its socket closes
        signal.signal(number, signal.SIG_IGN)
    os.nice(5)  # running streams have priority
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
    """Compile the output and try a few tokens; returns the fault, or ""."""
    try:
        _try(compiler, output)
    except GrammarError as error:
        return str(error)
    return ""


def _try(compiler: Compiler, output: StructuredOutput) -> None:
    """Compile, then walk at random: some faults show only in later states (dead ends, too many or too slow states)."""
    base = compiler.compile(output)
    if output.kind == "json_schema" and len(output.text) <= MAX_DRAFT_CHECK:
        _check_draft(json.loads(output.text), output.lenient)
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
            raise GrammarError("it is too ambiguous: finding the tokens that may come next takes too long")


def _check_draft(schema: Any, lenient: bool) -> None:
    """Validate a schema by its JSON Schema draft. Some schemas compile but are invalid, such as one with a misplaced
    `type`; its author meant something else.

    Formats are not validated: jsonschema reads patterns as Python's regular expressions, which they need not be. In a
    lenient schema, values that are only of another draft are no fault: llguidance ignores `exclusiveMinimum: true` and
    enforces a list of `items`.
    """
    from jsonschema.validators import Draft202012Validator, validator_for

    draft = validator_for(schema, default=Draft202012Validator)
    for error in draft(draft.META_SCHEMA).iter_errors(schema):
        key = error.path[-1] if error.path else None
        if not lenient or not (key in TYPES_OF or (key == "items" and isinstance(error.instance, list))):
            raise GrammarError(shorten(f"{error.json_path}: {error.message}"))


def _receive(frames: FrameSocket, kind: type[T]) -> T | None:
    body = frames.read_frame()
    return None if body is None else msgspec.msgpack.decode(body, type=kind)


if __name__ == "__main__":
    sys.exit(main())
