"""Options and texts of errors that all commands share which call a running server."""

import argparse
import os

import httpx

from engine.errors import ConfigError

DEFAULT_BASE_URL = "http://127.0.0.1:8000"


def add_api_key(parser: argparse.ArgumentParser, dest: str = "api_key") -> None:
    """Add --api-key, whose default is OPENAI_API_KEY, else the first key in PAGESERVE_API_KEY."""
    environment = os.environ.get("OPENAI_API_KEY") or os.environ.get("PAGESERVE_API_KEY", "").split(",")[0]
    parser.add_argument(
        "--api-key",
        dest=dest,
        type=_key,
        default=environment or None,
        metavar="KEY",
        help="API key of that server; default: $OPENAI_API_KEY, $PAGESERVE_API_KEY",
    )


def _key(text: str) -> str:
    """The key without space around it, such as the line end of a file. The error does not repeat the key."""
    text = text.strip()
    if not all("!" <= character <= "~" for character in text):
        raise argparse.ArgumentTypeError(
            "the key (also from OPENAI_API_KEY or PAGESERVE_API_KEY) may hold visible ASCII characters only, no space "
            "and no line end"
        )
    return text


def api_url(base_url: str) -> str:
    """http://host:port -> http://host:port/v1; an address with a path stays as it is. Raises ConfigError."""
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--base-url: {error}.") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"--base-url must look like {DEFAULT_BASE_URL}, not {base_url!r}.")
    return base_url.rstrip("/") + ("" if url.path.strip("/") else "/v1")


def refusal(response: httpx.Response) -> str:
    """The error of a response with another status than 200."""
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200] or response.reason_phrase
    hint = " (Give --api-key KEY or the variable OPENAI_API_KEY.)" if response.status_code == 401 else ""
    return f"the server answered {response.status_code}: {message}{hint}"


def unreachable(base_url: str, error: httpx.HTTPError) -> str:
    """The error of a request without a response."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return f"no server answers at {base_url}; start one with `pageserve serve`, or name another with --base-url."
    return f"the connection to {base_url} failed: {error or type(error).__name__}."
