"""The command-line parser that all `pageserve` commands share."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from engine.errors import ConfigError
from engine.settings import unknown_name


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError, and names the nearest known flag for an unknown flag."""

    def __init__(self, command: str, operands: str, description: str) -> None:
        prog = f"pageserve {command}"
        usage = " ".join(filter(None, [prog, operands, "[options]"]))
        super().__init__(prog=prog, usage=usage, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (`{self.prog} --help` lists the options)")

    def read(self, arguments: Sequence[str]) -> dict[str, Any]:
        """The given options as name -> value. ConfigError for an unknown flag or an unexpected argument, and
        where one flag has several values but MODEL is missing: `--api-key KEY MODEL` would make the model a key."""
        values, unknown = self.parse_known_args(arguments)
        if unknown:
            flags = [part.partition("=")[0] for part in unknown if part.startswith("-")]
            known = [option.lstrip("-").replace("-", "_") for option in self._option_string_actions]
            self.error(unknown_name(flags[0], known, "--{}") if flags else f"unexpected argument {unknown[0]!r}")
        given = vars(values)
        flag = given.pop("ambiguous", None)
        if flag is not None and given.get("positional_model", "") is None and "model" not in given:
            self.error(f"{flag} has several values, the last may be MODEL: write MODEL first, or {flag} before each")
        return given


def one_line(error: Exception) -> str:
    """The line that a command prints to stderr before it exits with this error; lines that the message indents follow
    as they are."""
    return "pageserve: error: " + "\n  ".join(" ".join(part.split()) for part in str(error).split("\n  "))


def merge_positional_model(flags: dict[str, Any]) -> None:
    """Read `pageserve serve MODEL` as `pageserve serve --model MODEL`. ConfigError if both are given and differ."""
    positional = flags.pop("positional_model")
    if positional is None:
        return
    if flags.setdefault("model", positional) != positional:
        raise ConfigError(f"two models are named: {positional} and --model {flags['model']}.")
