"""Batch files: requests in, answers out, a JSON object per line, in OpenAI's format (guide "Batch API").

in   {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
out  {"id": "batch_req_...", "custom_id": "1", "response": {"status_code", "request_id", "body"}, "error": null}

An answer that was no answer has "response": null and an "error". Answers stand in the order in which they came.
"""

import contextlib
import json
import os
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
MAX_DEPTH = 256  # of a body
ID_PREFIX = "batch_req_"
LINE_START = f'{{"id": "{ID_PREFIX}'  # of an output
FINAL = range(200, 500)  # status codes that asking again would not change ...
NOT_FINAL = frozenset({401, 403, 408, 429})  # ... but for these: with another key, or later


@dataclass(frozen=True)
class BatchRequest:
    """One line of the input; `line` counts from 1."""

    line: int
    custom_id: str
    url: str
    body: dict[str, Any]


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """One by one, so that a file of any size can be read. Raises ConfigError that names the line and the fix."""
    seen: set[str] = set()
    with path.open(encoding="utf-8") as file:
        try:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    request = _request(path, number, text)
                    if request.custom_id in seen:
                        raise ConfigError(f"{path}, line {number}: custom_id {request.custom_id!r} is there twice.")
                    seen.add(request.custom_id)
                    yield request
        except UnicodeDecodeError:
            raise ConfigError(f"{path}: the file is not UTF-8 text.") from None


def _request(path: Path, number: int, text: str) -> BatchRequest:
    def wrong(what: str) -> ConfigError:
        return ConfigError(f"{path}, line {number}: {what}")

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
    if fields["body"].get("stream"):
        raise wrong("body.stream must be left out: a batch has no streams.")
    try:
        json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:  # NaN, half of a surrogate pair
        raise wrong(f"it cannot be sent ({error}).") from None
    if is_nested_deeper(fields["body"], MAX_DEPTH):
        raise wrong(f"body is nested deeper than {MAX_DEPTH} levels.")
    return BatchRequest(number, fields["custom_id"], fields["url"], fields["body"])


def answer(request: BatchRequest, status: int, request_id: str, body: Any) -> dict[str, Any]:
    """A line of the output: what a server said."""
    return _line(request, {"status_code": status, "request_id": request_id, "body": body}, None)


def no_answer(request: BatchRequest, code: str, message: str) -> dict[str, Any]:
    """A line of the output: no server said anything that could be kept."""
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
    """The custom_ids that `path` has a final answer of; whether it is a success.

    Other answers are taken out, as is half of one at the end: their requests are to be asked again. ConfigError where
    a line is none of these: such a file holds something else, and stays as it is.
    """
    path = _target(path)
    if not path.exists():
        return {}
    if not path.is_file():
        raise ConfigError(f"--output: {path} is no regular file; name one.")
    done: dict[str, bool] = {}
    try:  # a new file, whatever else lies there
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
                    raise ConfigError(f"--output: {path}, line {number}: this is no answer; name another file.")
                if line is not None and _is_final(line) and line["custom_id"] not in done:
                    done[line["custom_id"]] = succeeded(line)
                    new.write(text)
        os.replace(kept, path)
    finally:
        kept.unlink(missing_ok=True)
    return done


def _target(path: Path) -> Path:
    """What a link leads to. ConfigError for a link that somebody else made: it would choose what is written over."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_symlink() and path.lstat().st_uid not in (os.geteuid(), 0):
            raise ConfigError(f"--output: {path} is a link that another user made; name a file.")
    return path.resolve()


def _read_answer(text: str) -> dict[str, Any] | None:
    """A whole line of an output; None for everything else."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    known = isinstance(line, dict) and isinstance(line.get("custom_id"), str) and "response" in line
    return line if known and text.endswith("\n") else None


def _is_half(text: str) -> bool:
    """Whether a line was cut while it was written."""
    return not text.endswith("\n") and text.startswith(LINE_START[: len(text)])


def _is_final(line: dict[str, Any]) -> bool:
    """Whether its request need not be asked again."""
    try:
        status = line["response"]["status_code"]
    except (LookupError, TypeError):
        return False
    return status in FINAL and status not in NOT_FINAL
