"""Batch files: requests in, answers out, one JSON object per line, in OpenAI's format (guide "Batch API").

in   {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
out  {"id": "batch_req_...", "custom_id": "1", "response": {"status_code", "request_id", "body"}, "error": null}

A request without a usable answer has "response": null and an "error". Answers are in the order of their arrival.
"""

import contextlib
import json
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from server.protocol.grammars.response_format import is_nested_deeper

FIELDS = {"custom_id": str, "method": str, "url": str, "body": dict}
MAX_DEPTH = 256  # nesting levels of a body
URL = re.compile(r"[!-~]{1,1024}")
ID_PREFIX = "batch_req_"
LINE_START = f'{{"id": "{ID_PREFIX}'  # start of every line of an output file
FINAL = range(200, 500)  # status codes that a second attempt would not change,
NOT_FINAL = frozenset({401, 403, 408, 429})  # except these: another key, or a later attempt, may succeed


@dataclass(frozen=True)
class BatchRequest:
    """One line of the input; `line` counts from 1."""

    line: int
    custom_id: str
    url: str
    body: dict[str, Any]


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """Yield the requests one by one: the file may have any size. ConfigError names the line and the fault."""
    seen: set[str] = set()
    with path.open(encoding="utf-8") as file:
        try:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    request = _request(path, number, text)
                    if request.custom_id in seen:
                        raise ConfigError(f"{path}, line {number}: custom_id {request.custom_id!r} occurs twice.")
                    seen.add(request.custom_id)
                    yield request
        except UnicodeDecodeError:
            raise ConfigError(f"{path}: the file is not UTF-8 text.") from None


def _request(path: Path, number: int, text: str) -> BatchRequest:
    def wrong(fault: str) -> ConfigError:
        return ConfigError(f"{path}, line {number}: {fault}")

    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise wrong(f"not JSON ({error}).") from None
    if not isinstance(fields, dict):
        raise wrong("a request must be an object with custom_id, method, url and body.")
    for name, kind in FIELDS.items():
        if not isinstance(fields.get(name), kind):
            raise wrong(f"{name} must be {'an object' if kind is dict else 'a string'}.")
    if fields["method"] != "POST":
        raise wrong(f"method must be POST, not {fields['method']!r}.")
    if not fields["url"].startswith("/v1/"):
        raise wrong(f"url must be a path such as /v1/chat/completions, not {fields['url']!r}.")
    if not URL.fullmatch(fields["url"]):
        raise wrong("url must be a path of at most 1024 visible ASCII characters, such as /v1/chat/completions.")
    if fields["body"].get("stream"):
        raise wrong("body.stream must be left out: a batch has no streams.")
    try:
        json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:  # NaN, a lone surrogate
        raise wrong(f"the request cannot be sent as JSON ({error}).") from None
    if is_nested_deeper(fields["body"], MAX_DEPTH):
        raise wrong(f"body is nested deeper than {MAX_DEPTH} levels.")
    return BatchRequest(number, fields["custom_id"], fields["url"], fields["body"])


def answer(request: BatchRequest, status: int, request_id: str, body: Any) -> dict[str, Any]:
    """A line of the output for a response of the server."""
    return _line(request, {"status_code": status, "request_id": request_id, "body": body}, None)


def no_answer(request: BatchRequest, code: str, message: str) -> dict[str, Any]:
    """A line of the output for a request without a usable response."""
    return _line(request, None, {"code": code, "message": message})


def _line(request: BatchRequest, response: Any, error: Any) -> dict[str, Any]:
    return {
        "id": f"{ID_PREFIX}{uuid.uuid4().hex}",
        "custom_id": request.custom_id,
        "response": response,
        "error": error,
    }


def succeeded(line: dict[str, Any]) -> bool:
    return line["response"] is not None and line["response"]["status_code"] == 200


def keep_final(path: Path) -> dict[str, bool]:
    """custom_id -> success, for all final answers in the output file `path`.

    Other answers, and an incomplete line at the end, are removed from the file: their requests will be sent again.
    ConfigError if a line is no answer at all: then the file is something else and stays unchanged.
    """
    path = _target(path)
    if not path.exists():
        return {}
    if not path.is_file():
        raise ConfigError(f"--output: {path} is not a regular file; name one.")
    done: dict[str, bool] = {}
    try:  # mkstemp never opens an existing file or link
        descriptor, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".kept", dir=path.parent)
    except OSError as error:
        raise ConfigError(f"--output: cannot write beside {path}: {error.strerror}.") from None
    kept = Path(name)
    try:
        with path.open(encoding="utf-8", errors="replace") as old, open(descriptor, "w", encoding="utf-8") as new:
            shutil.copymode(path, kept)
            for number, text in enumerate(old, start=1):
                line = _read_answer(text)
                if line is None and not text.isspace() and not _is_half(text):
                    raise ConfigError(f"--output: {path}, line {number}: not an answer of a batch; name another file.")
                if line is not None and _is_final(line) and line["custom_id"] not in done:
                    done[line["custom_id"]] = succeeded(line)
                    new.write(text)
        os.replace(kept, path)
    finally:
        kept.unlink(missing_ok=True)
    return done


def _target(path: Path) -> Path:
    """The target of a link. ConfigError for a link of another user, who would choose which file is overwritten."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_symlink() and path.lstat().st_uid not in (os.geteuid(), 0):
            raise ConfigError(f"--output: {path} is a link that another user made; name a file.")
    return path.resolve()


def _read_answer(text: str) -> dict[str, Any] | None:
    """The JSON object of a complete line of an output file; None for any other text."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    known = isinstance(line, dict) and isinstance(line.get("custom_id"), str) and "response" in line
    return line if known and text.endswith("\n") else None


def _is_half(text: str) -> bool:
    """True for a line that was cut off while it was written."""
    return not text.endswith("\n") and text.startswith(LINE_START[: len(text)])


def _is_final(line: dict[str, Any]) -> bool:
    """True if the request need not be sent again."""
    try:
        status = line["response"]["status_code"]
    except (LookupError, TypeError):
        return False
    return status in FINAL and status not in NOT_FINAL
