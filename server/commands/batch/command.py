"""The command line of `pageserve run-batch`."""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from engine.command_line import Parser
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.settings import add_flags, load_settings, settings_of
from server.commands.batch.files import keep_final, read_requests
from server.commands.batch.run import Batch, local, remote
from server.commands.client_options import add_api_key, api_url
from server.config import ServerConfig, resolve_files
from server.model_settings import merge_model_flags

DEFAULT_CONCURRENCY = 128


def main(arguments: Sequence[str]) -> int:
    """Run the batch. Exit status: 0 if every request succeeded, 1 if some failed, 2 if the batch cannot be run."""
    options = _parser().read(arguments)
    source, target = Path(options["input"]), Path(options["output"])
    if options["concurrency"] < 1:
        raise ConfigError("--concurrency must be at least 1.")
    if source.resolve() == target.resolve():
        raise ConfigError("--output must be another file than --input.")
    _check_opens(source, "rb", "--input: cannot read")
    client = _client(options)
    total = sum(1 for _ in read_requests(source))
    done = keep_final(target)
    answered = [done[request.custom_id] for request in read_requests(source) if request.custom_id in done]
    num_done, num_failed = len(answered), answered.count(False)
    print(f"{_counted(total, 'request')}, {num_done} already answered", file=sys.stderr)
    if num_done < total:
        _check_opens(target, "ab", "--output: cannot write")  # before a model is loaded
        try:
            num_failed += asyncio.run(_run(client, source, target, done, options["concurrency"]))
        except KeyboardInterrupt:
            print("interrupted: run the same command again to continue", file=sys.stderr)
            raise
    print(f"{_counted(total - num_failed, 'answer')} and {_counted(num_failed, 'error')} in {target}", file=sys.stderr)
    return 1 if num_failed else 0


def _check_opens(path: Path, mode: str, failure: str) -> None:
    try:
        path.open(mode).close()
    except OSError as error:
        raise ConfigError(f"{failure} {path}: {error.strerror}.") from None


async def _run(
    client: AbstractAsyncContextManager[httpx.AsyncClient],
    source: Path,
    target: Path,
    done: dict[str, bool],
    concurrency: int,
) -> int:
    """Send the requests that are not in `done`; returns the number of failed requests."""
    requests = [request.custom_id not in done for request in read_requests(source)]
    async with client as http:
        with (
            target.open("a", encoding="utf-8") as output,
            tqdm(total=len(requests), initial=requests.count(False), unit="req", disable=None) as bar,
        ):
            batch = Batch(http, (r for r in read_requests(source) if r.custom_id not in done), output, bar)
            await batch.run(min(concurrency, requests.count(True)))
            return batch.num_failed


def _client(options: dict[str, Any]) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    concurrency = options["concurrency"]
    if options["base_url"] is not None:
        _refuse_settings(options)
    merge_model_flags(options)
    if options["base_url"] is None:
        engine_config, server_config = load_settings((EngineConfig, ServerConfig), options, os.environ)
        return local(engine_config, resolve_files(server_config))
    return remote(api_url(options["base_url"]), options["client_key"], concurrency)


def _refuse_settings(options: dict[str, Any]) -> None:
    """Raise ConfigError for an option of a model that is loaded here: the server has its own."""
    settings = settings_of(EngineConfig) | settings_of(ServerConfig)
    flags = {"config": "--config"} | {name: setting.flag for name, setting in settings.items()}
    if given := next((flag for name, flag in flags.items() if name in options), None):
        raise ConfigError(f"{given} has no effect with --base-url: leave it out.")


def _counted(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _parser() -> Parser:
    parser = Parser(
        "run-batch",
        "-i FILE -o FILE",
        "Answer an OpenAI batch file (one request per line). A second run with the same files sends only the requests "
        "without an answer. Without --base-url the models are loaded in this process, with the options below.",
    )
    parser.add_argument("-i", "--input", required=True, metavar="FILE", help="JSONL: custom_id, method, url, body")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="JSONL: custom_id, response, error")
    parser.add_argument("--base-url", metavar="URL", help="server to use in place of a model loaded here")
    add_api_key(parser, "client_key")
    parser.add_argument(
        "--concurrency",
        type=int,
        default=DEFAULT_CONCURRENCY,
        metavar="INT",
        help=f"concurrent requests (default: {DEFAULT_CONCURRENCY})",
    )
    names, template = "names of the model that requests may use", "Jinja chat template; default: the model's"
    awake = "most of several models that are awake together"
    absent = argparse.SUPPRESS
    parser.add_argument("--served-model-name", nargs="+", metavar="NAME", default=absent, help=names)
    parser.add_argument("--chat-template", metavar="TEXT", default=absent, help=template)
    parser.add_argument("--max-loaded", metavar="INT", default=absent, help=awake)
    parser.set_defaults(positional_model=None)
    add_flags(parser, EngineConfig, repeated=("model",))
    return parser
