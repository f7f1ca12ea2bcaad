"""The `pageserve` command: serve, ray, models, chat, generate, run-batch, bench, plan.

Each command imports its modules when it runs, so `pageserve --help` answers at once. A user's mistake ends in one line
on stderr: exit status 2 for a wrong command line, setting or model, 1 for a later failure.
"""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

from engine.command_line import Parser, one_line
from engine.errors import ConfigError, ModelError, PageserveError
from engine.settings import add_flags, load_settings
from server.process.standard_streams import StandardStreams, open_missing_streams

USAGE = """usage: pageserve COMMAND [options]

An OpenAI-compatible LLM inference server.

  serve     start the server: pageserve serve [MODEL] [--port 8000 ...]
  ray       serve replicas on a Ray cluster: pageserve ray [MODEL] [--max-replicas 4 ...]
  models    list the models of a running server, or of a configuration
  chat      talk to a running server in the terminal
  generate  complete prompts offline, without a server
  run-batch answer an OpenAI batch file, resumable, with or without a server
  bench     measure a running server
  plan      show how a model would use memory, and what fits, without loading it

`pageserve COMMAND --help` lists a command's options.
"""
INTERRUPTED = 130
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    open_missing_streams()
    if arguments[:1] != ["serve"]:
        return _run(arguments)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # it waits until the server has its handler
    with StandardStreams():
        return _run(arguments)


def _run(arguments: list[str]) -> int:
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()
        return status
    except (ConfigError, ModelError) as error:
        return _fail(error, 2)
    except (PageserveError, OSError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return INTERRUPTED


def _fail(error: Exception, status: int) -> int:
    if isinstance(error, BrokenPipeError):  # `pageserve generate ... | head`: the reader of stdout has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return status
    print(one_line(error), file=sys.stderr)
    return status


def _dispatch(arguments: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {
        "serve": serve,
        "ray": ray,
        "models": models,
        "chat": chat,
        "generate": generate,
        "run-batch": run_batch,
        "bench": bench,
        "plan": plan,
    }
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    if name == "--version":
        print("pageserve", _version())
        return 0
    if name not in commands:
        raise ConfigError(f"there is no command {name!r}; the commands are {', '.join(commands)}.")
    return commands[name](arguments[1:])


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("pageserve")
    except PackageNotFoundError:
        return "from a source tree that is not installed"


def serve(arguments: list[str]) -> int:
    """Run the server until it has drained after SIGTERM or SIGINT."""
    from engine.config import EngineConfig
    from server.config import ServerConfig, resolve_files
    from server.model_settings import merge_model_flags

    parser = Parser(
        "serve",
        "[MODEL]",
        "Serve a model with the OpenAI API. Each option may also be set in a YAML file (--config) "
        "or as PAGESERVE_NAME in the environment; flags win over the environment, the environment over the file.",
    )
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")
    add_flags(parser, EngineConfig, ServerConfig, repeated=("model",))
    flags = parser.read(arguments)
    merge_model_flags(flags)
    engine_config, server_config = load_settings((EngineConfig, ServerConfig), flags, os.environ)
    server_config = resolve_files(server_config)
    logging.basicConfig(level=server_config.log_level.upper(), format=LOG_FORMAT)

    from server.process import event_loop
    from server.serve import run

    return event_loop.run(run(server_config, engine_config))


def ray(arguments: list[str]) -> int:
    from server.commands.ray import main

    return main(arguments)


def models(arguments: list[str]) -> int:
    from server.commands.models import main

    return main(arguments)


def chat(arguments: list[str]) -> int:
    from server.commands.chat import main

    return main(arguments)


def generate(arguments: list[str]) -> int:
    from server.commands.generate import main

    return main(arguments)


def run_batch(arguments: list[str]) -> int:
    from server.commands.batch import main

    return main(arguments)


def bench(arguments: list[str]) -> int:
    from server.commands.bench import main

    return main(arguments)


def plan(arguments: list[str]) -> int:
    """Run engine.worker.memory_plan in a child process, because it imports torch to see the device."""
    from engine.settings import settings_of
    from server.config import ServerConfig

    environment = {name: value for name, value in os.environ.items() if name != "PAGESERVE_API_KEY"}
    # A file of `pageserve serve` may hold these, too; `models` only where it is empty: a plan is of one model.
    environment["PAGESERVE_PLAN_UNUSED"] = ",".join(settings_of(ServerConfig).keys())
    return subprocess.run([sys.executable, "-m", "engine.worker.memory_plan", *arguments], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
