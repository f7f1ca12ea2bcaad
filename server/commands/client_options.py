"""Options of all commands that call a running server: its address and its API key."""

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
        default=environment or None,
        metavar="KEY",
        help="API key of that server; default: $OPENAI_API_KEY, $PAGESERVE_API_KEY",
    )


def api_url(base_url: str) -> str:
    """http://host:port -> http://host:port/v1; an address with a path stays as it is. Raises ConfigError."""
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--base-url: {error}.") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"--base-url must look like {DEFAULT_BASE_URL}, not {base_url!r}.")
    return base_url.rstrip("/") + ("" if url.path.strip("/") else "/v1")
