"""CallBody: the inside of one call while it grows, and CallStyle: how one is written, read and forced."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from server.protocol.tools import FunctionDefinition

Written = dict[str, Any] | str  # arguments of an earlier call: an object, or the text of what is none
Schemas = Mapping[str, dict[str, Any]]  # name of a function -> JSON schema of its arguments


class NotACallError(ValueError):
    """No continuation makes a call of it."""


class SchemaError(ValueError):
    """A function's schema cannot be obeyed. `path`: of what is wrong, below its parameters."""

    def __init__(self, function: str, path: str, text: str) -> None:
        super().__init__(text)
        self.function, self.path = function, path


class CallBody(Protocol):
    """`feed` it all of its text so far, each time with more at the end."""

    @property
    def taken(self) -> int:
        """Up to where the text is in `pieces` that were given out."""

    def feed(self, text: str) -> int | None:
        """Where the call ends, None while it goes on. Raises NotACallError."""

    def start(self) -> str | None:
        """The name, once it and the beginning of the arguments are there; to be called before `pieces`."""

    def pieces(self) -> str:
        """What the text adds to the arguments, as JSON."""

    def whole(self) -> tuple[str, str] | None:
        """Name and arguments of a call that has ended; None where it lacks one of them."""


class CallStyle(Protocol):
    """What a call looks like between its markers."""

    @property
    def markers(self) -> Sequence[str]:
        """Those inside a call, which may be special tokens."""

    @property
    def bare_strings(self) -> bool:
        """Whether strings stand as they are, without quotes: not as JSON."""

    @property
    def ends(self) -> Sequence[str]:
        """What ends an argument that is bare text."""

    @property
    def arguments_are(self) -> str:
        """What a model is told of how to write the arguments."""

    def write(self, name: str, arguments: Written) -> str: ...

    def body(self, schemas: Schemas, marked: bool) -> CallBody:
        """`marked`: a marker stands before it, so that a name alone is a call, too."""

    def rules(self, label: str, function: FunctionDefinition, marker: Callable[[str], str]) -> list[str]:
        """Lark rules, all with names that end in `label`, of a call: `call_{label}` and what it needs. `marker` is how
        Lark writes a marker. Raises SchemaError."""


def held_back(text: str, marker: str) -> int:
    """How many characters at the end of `text` may become `marker`: its longest suffix that begins one."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
