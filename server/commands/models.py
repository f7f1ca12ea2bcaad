"""`pageserve models`: the models of a running server with their states, or the models that settings name."""

import os
from typing import Any

import httpx

from engine.command_line import Parser
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineError
from engine.settings import load_settings, shown
from server.commands.client_options import DEFAULT_BASE_URL, add_api_key, api_url, refusal, unreachable
from server.config import ServerConfig
from server.model_settings import ModelSettings, merge_model_flags, model_settings

TIMEOUT_SECONDS = 10.0


def main(arguments: list[str]) -> int:
    """List the models. Returns the exit status; raises ConfigError, and EngineError if no server answers."""
    parser = Parser(
        "models",
        "[--base-url URL | --config FILE | --model NAME=DIR_OR_ID ...]",
        "List the models of a running server and their states; with settings of `pageserve serve` (--config, --model), "
        "the models that they name.",
    )
    parser.add_argument("--base-url", metavar="URL", help=f"of the server; default: {DEFAULT_BASE_URL}")
    add_api_key(parser)
    parser.add_argument("--config", metavar="FILE", help="YAML file of `pageserve serve`")
    parser.add_argument(
        "--model", action="append", default=[], metavar="NAME=DIR_OR_ID", help="as of `pageserve serve`"
    )
    options = parser.read(arguments)
    if options["config"] or options["model"]:
        if options["base_url"]:
            raise ConfigError("--base-url asks a running server: leave --config and --model out.")
        flags = {"config": options["config"], "model": options["model"], "positional_model": None}
        merge_model_flags(flags)
        engine, server = load_settings((EngineConfig, ServerConfig), flags, os.environ)
        rows = [_configured(model) for model in model_settings(engine, server)]
        _print(("name", "model", "settings of its own"), rows)
    else:
        rows = _ask(options["base_url"] or DEFAULT_BASE_URL, options["api_key"])
        _print(("name", "state", "context", "model"), rows)
    return 0


def _ask(base_url: str, key: str | None) -> list[tuple[str, ...]]:
    """A row for each model that the server lists. Raises EngineError."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    url = api_url(base_url)
    try:
        answer = httpx.get(f"{url}/models", headers=headers, timeout=TIMEOUT_SECONDS)
    except httpx.HTTPError as error:
        raise EngineError(unreachable(url, error)) from None
    if answer.status_code != 200:
        raise EngineError(refusal(answer))
    try:
        return [_running(model) for model in answer.json()["data"] or ()]  # some servers without a model send null
    except (ValueError, LookupError, TypeError, AttributeError):
        raise EngineError(f"{url} does not list models as an OpenAI server does.") from None


def _running(model: dict[str, Any]) -> tuple[str, ...]:
    """The cells of a card. Only its id is sure: an adapter of vLLM has null as max_model_len."""
    values = model["id"], *(model.get(name) for name in ("state", "max_model_len", "root"))
    return tuple("" if value is None else str(value) for value in values)


def _configured(model: ModelSettings) -> tuple[str, ...]:
    own = {name: value for name, value in shown(model.engine).items() if name != "model"}
    return ", ".join(model.names), model.engine.model, " ".join(f"{name}={value}" for name, value in own.items())


def _print(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
