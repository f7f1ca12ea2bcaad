"""`pageserve chat`: a conversation in the terminal with any OpenAI-compatible server. It starts no server."""

import argparse
import contextlib
import json
import os
import sys
import termios
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from engine.command_line import Parser
from engine.errors import ConfigError, PageserveError
from engine.text.unicode import is_text
from server.commands.client_options import DEFAULT_BASE_URL, add_api_key, api_url

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer."
TIMEOUT = httpx.Timeout(10.0, read=300.0)  # seconds; a queued request may be silent for a while


class ChatError(PageserveError):
    """The server cannot be reached, refused the request, or broke off."""


class ChatClient:
    """One conversation: `ask` sends all turns so far and keeps the answer as the next one."""

    def __init__(self, http: httpx.Client, model: str, system: str | None, sampling: dict[str, Any]) -> None:
        self._http, self._model, self._sampling = http, model, sampling
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._opening)

    def reset(self) -> None:
        self.messages = list(self._opening)

    def ask(self, text: str) -> Iterator[str]:
        """Pieces of the answer as they arrive. A question without any answer is forgotten, a broken-off answer kept."""
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
                    raise ChatError(_error_message(response))
                yield from _contents(_lines(response.iter_bytes()))
        except httpx.HTTPError as error:
            raise ChatError(_unreachable(str(self._http.base_url), error)) from error


def _lines(chunks: Iterator[bytes]) -> Iterator[str]:
    """Lines as SSE means them. httpx's iter_lines also splits at U+2028 and its like, which may stand inside a text."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.decode(errors="replace").rstrip("\r") for line in lines)


def _contents(lines: Iterator[str]) -> Iterator[str]:
    """Text of each chunk of an SSE chat stream; ChatError where it reports one, holds what is none, or lacks [DONE]."""
    for line in lines:
        if not line.startswith("data:"):
            continue  # comments keep the connection alive
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        yield from _texts(data)
    raise ChatError("the server closed the stream before the answer was complete.")


def _texts(data: str) -> list[str]:
    try:
        chunk = json.loads(data)
        if chunk.get("error"):
            raise ChatError(str(chunk["error"]["message"]))
        deltas = [choice["delta"] for choice in chunk.get("choices", [])]
        return [str(delta["content"]) for delta in deltas if delta.get("content")]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ChatError(f"the server sent what is no chunk of a chat: {data[:200]}") from None


def _error_message(response: httpx.Response) -> str:
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200] or response.reason_phrase
    hint = " (Give --api-key KEY or the variable OPENAI_API_KEY.)" if response.status_code == 401 else ""
    return f"the server answered {response.status_code}: {message}{hint}"


def _unreachable(base_url: str, error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return f"no server answers at {base_url}; start one with `pageserve serve`, or name another with --base-url."
    return f"the connection to {base_url} failed: {error or type(error).__name__}."


def main(arguments: Sequence[str]) -> int:
    """A single answer where a message is given (or piped in), else a prompt until /exit."""
    options = _parser().read(arguments)
    names: list[str] = ["temperature", "top_p", "max_tokens", "seed"]
    sampling = {name: options[name] for name in names if name in options}
    headers = {"Authorization": f"Bearer {options['api_key']}"} if options["api_key"] else {}
    with httpx.Client(base_url=api_url(options["base_url"]), headers=headers, timeout=TIMEOUT) as http:
        client = ChatClient(http, options["model"] or _first_model(http), options["system"], sampling)
        message = " ".join(options["message"]) or (None if sys.stdin.isatty() else _read_stdin())
        if not is_text(message or "") or not is_text(options["system"] or ""):
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
    parser.add_argument("message", nargs="*", metavar="MESSAGE", help="ask this, or all that is piped in, and leave")
    base_url = os.environ.get("OPENAI_BASE_URL") or DEFAULT_BASE_URL
    parser.add_argument(
        "--base-url", default=base_url, metavar="URL", help="default: $OPENAI_BASE_URL, else port 8000 here"
    )
    add_api_key(parser)
    parser.add_argument("--model", metavar="NAME", help="default: the first that the server lists")
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    for name, number in (("temperature", float), ("top-p", float), ("max-tokens", int), ("seed", int)):
        parser.add_argument(f"--{name}", type=number, default=argparse.SUPPRESS, help="default: the server's")
    return parser


def _first_model(http: httpx.Client) -> str:
    try:
        response = http.get("models")
    except httpx.HTTPError as error:
        raise ChatError(_unreachable(str(http.base_url), error)) from error
    if response.status_code != 200:
        raise ChatError(_error_message(response))
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
    """Keep the terminal from writing typed text into an answer. The next prompt shows it; Ctrl-C still stops."""
    try:
        terminal = sys.stdin.fileno()
        if os.tcgetpgrp(terminal) != os.getpgrp():  # changing the terminal would stop a job in the background
            raise OSError
        before = termios.tcgetattr(terminal)
    except (OSError, termios.error):  # stdin is no terminal, or not ours
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
    import readline  # line editing and recall in input()

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
        elif line:
            _answer_or_explain(client, line)


def _answer_or_explain(client: ChatClient, line: str) -> None:
    """In a conversation neither an error nor Ctrl-C ends the program."""
    try:
        _print_answer(client, line)
    except ChatError as error:
        print(f"\n{error}", file=sys.stderr)
    except KeyboardInterrupt:
        print(" [stopped]")
