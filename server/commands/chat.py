"""`pageserve chat`: a conversation in the terminal with any running OpenAI-compatible server."""

import argparse
import contextlib
import json
import math
import os
import sys
import termios
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from engine.command_line import Parser
from engine.errors import ConfigError, PageserveError
from engine.text.unicode import is_valid_unicode
from server.commands.client_options import DEFAULT_BASE_URL, add_api_key, api_url, refusal, unreachable

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer."
TIMEOUT = httpx.Timeout(10.0, read=300.0)  # seconds; a queued request gets no bytes for a while


class ChatError(PageserveError):
    """The server cannot be reached, refused the request, or closed the stream early."""


class ChatClient:
    """One conversation: `ask` sends all turns so far and adds the answer as the next turn."""

    def __init__(self, http: httpx.Client, model: str, system: str | None, sampling: dict[str, Any]) -> None:
        self._http, self._model, self._sampling = http, model, sampling
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._opening)

    def reset(self) -> None:
        self.messages = list(self._opening)

    def ask(self, text: str) -> Iterator[str]:
        """Yield the answer in pieces as they arrive. An incomplete answer stays in the conversation; a question
        without any answer is removed."""
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            for piece in self._stream():
                pieces.append(piece)
                yield piece
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()

    def _stream(self) -> Iterator[str]:
        body = {"model": self._model, "messages": self.messages, "stream": True, **self._sampling}
        try:
            with self._http.stream("POST", "chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise ChatError(refusal(response))
                yield from _contents(_lines(response.iter_bytes()))
        except httpx.HTTPError as error:
            raise ChatError(unreachable(str(self._http.base_url), error)) from error


def _lines(chunks: Iterator[bytes]) -> Iterator[str]:
    """Yield the lines of an SSE stream. httpx's iter_lines would also split at U+2028, which may occur in a text."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.decode(errors="replace").rstrip("\r") for line in lines)


def _contents(lines: Iterator[str]) -> Iterator[str]:
    """Yield the text of each chunk of an SSE chat stream. ChatError if the stream reports an error, holds an event that
    is no chunk, ends without [DONE], or holds no text."""
    has_text, thinks, end = False, False, "no finish_reason"
    for line in lines:
        if not line.startswith("data:"):
            continue  # comments keep the connection alive
        data = line.removeprefix("data:").strip()
        if data == "[DONE]" and not has_text:
            where = "ended in its reasoning" if thinks else "has no text"
            raise ChatError(f"the answer {where} ({end}){'; raise --max-tokens.' if end == 'length' else '.'}")
        if data == "[DONE]":
            return
        for choice in _choices(data):
            delta, end = choice["delta"], choice.get("finish_reason") or end
            thinks = thinks or bool(delta.get("reasoning_content") or delta.get("reasoning"))
            if delta.get("content"):
                has_text = True
                yield str(delta["content"])
    raise ChatError("the server closed the stream before the answer was complete.")


def _choices(data: str) -> list[dict[str, Any]]:
    """The choices of a chunk, each with a delta."""
    try:
        chunk = json.loads(data)
        if chunk.get("error"):
            raise ChatError(str(chunk["error"]["message"]))
        return [choice | {"delta": dict(choice["delta"])} for choice in chunk.get("choices", [])]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ChatError(f"the server sent an event that is no chat chunk: {data[:200]}") from None


def main(arguments: Sequence[str]) -> int:
    """Answer one message if one is given (or piped in), else read messages until /exit."""
    options = _parser().read(arguments)
    names: list[str] = ["temperature", "top_p", "max_tokens", "seed"]
    sampling = {name: options[name] for name in names if name in options}
    headers = {"Authorization": f"Bearer {options['api_key']}"} if options["api_key"] else {}
    with httpx.Client(base_url=api_url(options["base_url"]), headers=headers, timeout=TIMEOUT) as http:
        client = ChatClient(http, options["model"] or _first_model(http), options["system"], sampling)
        message = " ".join(options["message"]) or (None if sys.stdin.isatty() else _read_stdin())
        if not is_valid_unicode(message or "") or not is_valid_unicode(options["system"] or ""):
            raise ConfigError("the message is not UTF-8 text.")
        if message is not None:
            if not message:
                raise ConfigError("there is no message on stdin.")
            _print_answer(client, message)
            return 0
        return _converse(client)


def _read_stdin() -> str:
    try:
        return sys.stdin.read().strip()
    except UnicodeDecodeError:
        raise ConfigError("stdin is not UTF-8 text.") from None


def _parser() -> Parser:
    parser = Parser("chat", "[MESSAGE]", "Talk to a running OpenAI-compatible server. " + HELP)
    parser.add_argument(
        "message", nargs="*", metavar="MESSAGE", help="send it and exit (default: stdin, if it is piped)"
    )
    base_url = os.environ.get("OPENAI_BASE_URL") or DEFAULT_BASE_URL
    parser.add_argument(
        "--base-url", default=base_url, metavar="URL", help=f"default: $OPENAI_BASE_URL, else {DEFAULT_BASE_URL}"
    )
    add_api_key(parser)
    parser.add_argument("--model", metavar="NAME", help="default: the first model that the server lists")
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    for name, number in (("temperature", _finite), ("top-p", _finite), ("max-tokens", int), ("seed", int)):
        parser.add_argument(f"--{name}", type=number, default=argparse.SUPPRESS, help="default: the server's")
    return parser


def _finite(text: str) -> float:
    with contextlib.suppress(ValueError):
        if math.isfinite(value := float(text)):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")  # JSON has no others


def _first_model(http: httpx.Client) -> str:
    try:
        response = http.get("models")
    except httpx.HTTPError as error:
        raise ChatError(unreachable(str(http.base_url), error)) from error
    if response.status_code != 200:
        raise ChatError(refusal(response))
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ChatError(
            f"{http.base_url} does not list models as an OpenAI server does; name one with --model."
        ) from None


def _print_answer(client: ChatClient, message: str) -> None:
    with _no_echo():
        for piece in client.ask(message):
            print(piece, end="", flush=True)
        print()


@contextlib.contextmanager
def _no_echo() -> Iterator[None]:
    """Switch the terminal's echo off while an answer is printed. The next prompt shows the typed text; Ctrl-C works."""
    try:
        terminal = sys.stdin.fileno()
        if os.tcgetpgrp(terminal) != os.getpgrp():  # a background job that changes the terminal would be stopped
            raise OSError
        before = termios.tcgetattr(terminal)
    except (OSError, termios.error):  # stdin is no terminal, or belongs to another process group
        yield
        return
    quiet = [*before]
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _converse(client: ChatClient) -> int:
    import readline  # gives input() line editing and history

    readline.set_auto_history(True)
    print(HELP)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            continue
        if line in ("/exit", "/quit"):
            return 0
        if line == "/reset":
            client.reset()
        elif line.startswith("/"):
            print(HELP)
        elif not is_valid_unicode(line):  # the C locale turns bytes that are no UTF-8 into lone surrogates
            print("the message is not UTF-8 text; it was not sent.", file=sys.stderr)
        elif line:
            _answer_or_explain(client, line)


def _answer_or_explain(client: ChatClient, line: str) -> None:
    """Print an answer or its error. Neither an error nor Ctrl-C ends the conversation."""
    try:
        _print_answer(client, line)
    except ChatError as error:
        print(f"\n{error}", file=sys.stderr)
    except KeyboardInterrupt:
        print(" [stopped]")
